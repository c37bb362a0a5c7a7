"""Say what makes an engine slow, which option to change, and what that would gain."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from ridgeline.explain.diagnosis import Diagnosis

SELF_TEST_S, PATIENCE_S = 10.0, 130.0  # with a server, which may explain something else first
SEQUENCES, TOKENS = 16, 64  # at once; of each prompt and output


def doctor(
    journal: Annotated[Path | None, typer.Argument(help="A file of --journal.")] = None,
    url: Annotated[str | None, typer.Option(help="A server's address instead: its last steps.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="Key that the server wants.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model instead, which runs for ten seconds first.")
    ] = None,
    request: Annotated[
        list[int] | None, typer.Option(help="Follow a sequence instead, by its number; may be given several times.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", metavar="OUT")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine the journal of an engine: the machine, then batching, KV memory and precision.

    Gains are counterfactual: the same requests, simulated with the change. Exit code 1 where something is to be fixed.
    """
    from ridgeline.core.errors import ConfigError
    from ridgeline.explain.diagnosis import doctor as diagnose
    from ridgeline.explain.lives import life
    from ridgeline.explain.tracing import trace as traced

    if sum(each is not None for each in (journal, url, model)) != 1:
        raise ConfigError("give one of these: a file of --journal, the --url of a server, or a --model to try")
    if request and trace:
        raise ConfigError("--trace has all sequences of a journal: give it or --request")
    if url is not None and (request or trace):
        raise ConfigError("--request and --trace are of a journal; a server's pages show its requests")
    with _tried(model) if model is not None else nullcontext(journal) as path:
        if path is not None and trace is not None:
            _write(trace, traced(path))
            return
        if path is not None and request:
            lives = [life(path, number) for number in request]
            plain = msgspec.json.encode(lives if len(lives) > 1 else lives[0])
            typer.echo(plain if json else "\n".join(lived["sentence"] for lived in lives))
            return
        found = _of_server(str(url), api_key) if path is None else diagnose(path)
    if json:
        typer.echo(msgspec.json.encode(found.as_json()))
    else:
        typer.echo(found.sentence)
        for area, severity, sentence, evidence, flag, *gain in found.lines():
            says = f" {sentence}: {evidence} → {flag}: {' '.join(gain)}" if sentence else ""
            typer.echo(f"{area:11} {severity:4}{says}")
    if any(each.severity == "FIX" for each in found.findings):
        raise typer.Exit(1)


def _of_server(url: str, api_key: str | None) -> "Diagnosis":
    """Ask a server. Raises ConfigError where it does not tell."""
    from ridgeline.bench.client import fetched
    from ridgeline.explain.diagnosis import Diagnosis

    said = fetched(f"{url.rstrip('/')}/explain/doctor", dict[str, Any], api_key, PATIENCE_S)
    return msgspec.convert(said["found"], Diagnosis)


@contextmanager
def _tried(model: str) -> Generator[Path]:
    """Run a model for some seconds as it is served by default, and give the journal. Raises ConfigError."""
    from ridgeline.bench.offline import BenchEngine
    from ridgeline.bench.workloads.fixed import Fixed
    from ridgeline.core.config import EngineConfig

    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        bench, end_s = BenchEngine(EngineConfig.of(model, journal=str(path)).served()), time.monotonic() + SELF_TEST_S
        info = bench.engine.info
        tokens = min(TOKENS, info.max_model_len // 2)
        workload = Fixed(num_requests=SEQUENCES, input_tokens=tokens, output_tokens=tokens, vocab_size=info.vocab_size)
        while time.monotonic() < end_s:
            bench.run(bench.requests(workload.requests(), temperature=0))
        bench.engine.loop.close()
        yield path


def _write(out: Path, found: Mapping[str, Any]) -> None:
    """Write a trace. Raises ConfigError where that cannot be."""
    from ridgeline.core.errors import ConfigError
    from ridgeline.core.files import write_whole
    from ridgeline.core.words import counted

    if not out.parent.is_dir():
        raise ConfigError(f"{out} cannot be written: there is no folder {out.parent}")
    try:
        write_whole(out, msgspec.json.encode(found))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    typer.echo(f"{counted(len(found['traceEvents']), 'event')} in {out}: open it at https://ui.perfetto.dev")
