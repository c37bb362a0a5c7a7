"""Run a file of requests offline, as OpenAI's batches have them."""

import asyncio
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ridgeline.cli._options import default_model, with_options
from ridgeline.cli._tables import counting
from ridgeline.core.collector import long_lived_imports
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, EngineError, RequestError
from ridgeline.server.settings import ServerSettings

if TYPE_CHECKING:
    from ridgeline.server.batch.journal import Journal
    from ridgeline.server.batch.lines import Result, Work
    from ridgeline.server.service import RequestNote

SOME_FAILED_EXIT = 1
LOOK_S = 0.5  # between two looks whether the engine lives
IN_FLIGHT = 2  # lines for each sequence that runs: those that wait are tokenized
MAX_TOLD = 5


@with_options(after=["input", "output"], default=default_model)
def batch(
    config: EngineConfig,
    input: Annotated[
        str | None, typer.Argument(metavar="IN", help="JSON lines with custom_id, method, url and body.")
    ] = None,
    output: Annotated[
        str | None, typer.Argument(metavar="OUT", help="JSON lines of results; those of an earlier run stay.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Chat template: a Jinja file, or a name. Default: the model's own."),
    ] = None,
    max_line_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a line in bytes.")] = 2 * 2**20,
) -> None:
    """Run a file of requests offline: ridgeline batch MODEL in.jsonl out.jsonl

    Requests are those of OpenAI's batches, for the endpoints of `ridgeline serve`. Run it again after it was stopped or
    killed: it does what OUT lacks. Exit codes: 0, 1 where a request failed, else those of other commands.
    """
    from ridgeline.server.batch.journal import Journal
    from ridgeline.server.batch.lines import Work

    if input is None or output is None:
        raise ConfigError("give a file of requests and one for their results: ridgeline batch MODEL IN OUT")
    settings = ServerSettings(chat_template=chat_template, max_body_bytes=max_line_bytes, engine_process=False)
    try:
        work = Work.read(Path(input), max_line_bytes, options=_deciding(config, chat_template))
        if work.duplicates:
            raise RequestError(f"{input}: {'; '.join(each.message for each in work.duplicates[:MAX_TOLD])}")
        with closing(Journal(Path(output))) as journal:
            if not work.skip(journal.keys):
                raise ConfigError(f"{output} has results of other requests than {input}: give another, or delete it")
            if changed := work.changed(journal.keys, journal.asked):
                lines = f"line {changed[0]}" + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
                what = f"ran with another body, or with other options: {lines} of {input}"
                raise ConfigError(f"{output} has results that {what}; give another file, or delete it")
            counts = _Counts(work.num_left + len(journal.keys), journal.num_ok, len(journal.keys) - journal.num_ok)
            if work.num_left:
                asyncio.run(_run(config, settings, work, journal, counts))
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: {error.strerror}; run it again to go on") from error
    typer.echo(f"{counts.num_ok} succeeded, {counts.num_failed} failed: {output}")
    raise SystemExit(SOME_FAILED_EXIT if counts.num_failed else 0)


def _deciding(config: EngineConfig, chat_template: str | None) -> str:
    """Return what decides results beside the lines: not how fast they come."""
    from ridgeline.text.chat import read_template

    template = None if chat_template is None else read_template(chat_template).encode()
    return repr((config.model, config.quantize, config.cache.kv_dtype, config.seed, config.adapters, template))


@dataclass
class _Counts:
    """Counts what is done, and how many tokens that took since the start."""

    total: int
    num_ok: int
    num_failed: int
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    begun_s: float = field(default_factory=time.monotonic)

    def add(self, result: "Result", note: "RequestNote") -> str:
        """Count a result; return the speeds so far."""
        self.num_ok += result.is_ok
        self.num_failed += not result.is_ok
        self.num_prompt_tokens += note.prompt_tokens
        self.num_output_tokens += note.completion_tokens
        taken_s = time.monotonic() - self.begun_s
        return f"{self.num_prompt_tokens / taken_s:.0f} tokens/s in, {self.num_output_tokens / taken_s:.0f} out"


async def _run(
    config: EngineConfig, settings: ServerSettings, work: "Work", journal: "Journal", counts: _Counts
) -> None:
    """Do what is left, with a bar. Raises EngineError where the engine dies, and OSError."""
    with long_lived_imports():
        from ridgeline.engine.thread_engine import ThreadEngine
        from ridgeline.server.app import create_app
        from ridgeline.server.batch.run import run_lines
        from ridgeline.server.clients import Client
    engine = ThreadEngine(config)
    app = create_app(engine, engine.tokenizer, settings)
    num_at_once = IN_FLIGHT * engine.info().max_num_seqs
    with counting(Console(stderr=True), "requests") as show:

        def report(result: "Result", note: "RequestNote") -> None:
            speeds = counts.add(result, note)
            show(counts.num_ok + counts.num_failed, counts.total, speeds)

        async with app.router.lifespan_context(app):
            counts.begun_s = time.monotonic()
            lines = run_lines(app, work, Client(), asyncio.Semaphore(num_at_once), num_at_once, journal.add, report)
            running = asyncio.ensure_future(lines)
            try:
                while not (await asyncio.wait([running], timeout=LOOK_S))[0]:
                    if (why := engine.watch(settings.step_timeout_s)) is not None:
                        engine.give_up()
                        raise EngineError(f"{why}; what is written stays, and running it again goes on")
                await running
            finally:
                running.cancel()
