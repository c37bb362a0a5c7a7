"""Write the journal of an engine as a trace for ui.perfetto.dev."""

from pathlib import Path
from typing import Annotated

import typer


def trace(
    journal: Annotated[Path, typer.Argument(help="A file of --journal.")],
    out: Annotated[Path, typer.Argument(help="The file to write, in Chrome's JSON.")],
    last: Annotated[float | None, typer.Option(help="Take the last seconds alone.", min=0.0)] = None,
) -> None:
    """Write a journal as a trace: steps with their limits, counters, and a track for each request."""
    import msgspec

    from ridgeline.core.errors import ConfigError
    from ridgeline.explain.tracing import trace as traced

    found = traced(journal, last)
    try:
        out.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    typer.echo(f"{len(found['traceEvents']):,} events in {out}: open it at https://ui.perfetto.dev")
