"""List the models at hand: bundled, fetched, and in the hub's cache."""

from dataclasses import asdict
from typing import Annotated

import typer


def models(json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False) -> None:
    """List the models at hand, with their size, what they can do and their context.

    Every command takes these names as MODEL; `ridgeline pull` fetches more.
    """
    from ridgeline.weights.catalog import list_models
    from ridgeline.weights.fetch import PUBLISHED

    entries = list_models()
    if json:
        import msgspec

        rows = [asdict(entry) | {"path": str(entry.path)} for entry in entries]
        typer.echo(msgspec.json.encode(rows).decode())
        return
    from ridgeline.cli._tables import new_table, plain_console

    console = plain_console()
    table = new_table(console, ("model", "where", "size", "can do", "context"), left=2)
    table.columns[3].justify, table.columns[3].no_wrap = "left", False
    for entry in entries:
        size = f"{entry.num_bytes / 1e9:.1f} GB" if entry.num_bytes >= 1e9 else f"{entry.num_bytes / 1e6:.0f} MB"
        context = "" if entry.context is None else f"{entry.context:,}"
        table.add_row(entry.name, entry.origin, size, entry.problem or ", ".join(entry.uses), context)
    console.print(table)
    if missing := set(PUBLISHED) - {entry.name for entry in entries}:
        typer.echo(f"Not here yet: {', '.join(sorted(missing))}; fetch with: ridgeline pull {min(missing)}")
