"""Recompute the numbers of lectures on inference."""

import json as json_format
from typing import Annotated

import typer

from ridgeline.core.errors import ConfigError

explain = typer.Typer(no_args_is_help=True, help=__doc__)


@explain.callback()
def _explain() -> None:
    """Say what inference costs at least, and why."""


@explain.command()
def lecture(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="One row, with its inputs. Default: all.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a row, or a list of all.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Print docs/numbers.md.")] = False,
) -> None:
    """Print numbers that texts on inference name, recomputed from their inputs; ✗ marks a slip."""
    from ridgeline.explain import lecture as numbers
    from ridgeline.explain.lecture.row import STATUSES

    if page:
        if id is not None or json:
            raise ConfigError("--page prints the whole page: leave out the row and --json")
        typer.echo(numbers.page(), nl=False)
        return
    rows = numbers.rows() if id is None else [numbers.find(id)]
    if json:
        plain = [row.as_json() for row in rows]
        typer.echo(json_format.dumps(plain if id is None else plain[0], ensure_ascii=False))
        return
    for row in rows:
        typer.echo(f"{row.status:3} {row.id:16} {row.texts:8} {row.says}\n{'':29}{row.sentence()} [{row.provenance}]")
        if id is not None:
            inputs = ", ".join(f"{name} = {value}" for name, value in row.inputs.items())
            typer.echo(f"{'':29}{row.derivation}; inputs: {inputs}")
    typer.echo("\n" + " · ".join(f"{mark} {what}" for mark, what in STATUSES.items()))
