"""Say what makes an engine slow, which option to change, and what that would gain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(
    journal: Annotated[Path, typer.Argument(help="A file of --journal.")],
    request: Annotated[
        list[int] | None, typer.Option(help="Follow a sequence instead, by its number; may be given several times.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", metavar="OUT")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine the journal of an engine: the machine, then batching, KV memory and precision.

    Gains are counterfactual: the same requests, simulated with the change. Exit code 1 where something is to be fixed.
    """
    import msgspec

    from ridgeline.engine.recording import read_recording
    from ridgeline.explain.diagnosis import doctor as diagnose
    from ridgeline.explain.lives import life
    from ridgeline.explain.tracing import trace as traced

    if trace is not None:
        _write(trace, traced(journal))
        return
    if request:
        recording = read_recording(journal)
        lives = [life(recording, number) for number in request]
        plain = msgspec.json.encode(lives if len(lives) > 1 else lives[0])
        typer.echo(plain if json else "\n".join(lived["sentence"] for lived in lives))
        return
    found = diagnose(journal)
    if json:
        typer.echo(msgspec.json.encode(found.as_json()))
    else:
        typer.echo(found.sentence)
        for area, severity, sentence, evidence, flag, *gain in found.lines():
            says = f" {sentence}: {evidence} → {flag}: {' '.join(gain)}" if sentence else ""
            typer.echo(f"{area:11} {severity:4}{says}")
    if any(each.severity == "FIX" for each in found.findings):
        raise typer.Exit(1)


def _write(out: Path, found: Mapping[str, Any]) -> None:
    """Write a trace. Raises ConfigError where that cannot be."""
    import msgspec

    from ridgeline.core.errors import ConfigError

    try:
        out.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    typer.echo(f"{len(found['traceEvents']):,} events in {out}: open it at https://ui.perfetto.dev")
