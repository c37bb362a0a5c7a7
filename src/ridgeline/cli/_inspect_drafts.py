"""Print from which acceptance drafts pay: rows by proposer, format and batch, a column for each length of drafts."""

from itertools import groupby

import msgspec
import typer

from ridgeline.cli._tables import new_table, plain_console
from ridgeline.explain.rounds import DRAFTS, break_even

LIKELY = 0.8  # an acceptance for which the best number of drafts is named


def print_break_even(model: str, hardware: str, context: int | None, *, json: bool, **options: object) -> None:
    """Price rounds of what `options` of the engine draft with, and print them. Raises as `break_even`."""
    says, rounds = break_even(model, hardware, context, **options)
    if json:
        typer.echo(msgspec.json.encode({"priced": says, "rounds": rounds}))
        return
    console = plain_console()
    columns = ("drafts by", "weights", "batch", *(f"k = {drafts}" for drafts in DRAFTS), f"best at α = {LIKELY}")
    table = new_table(console, columns, title="Drafts of k tokens pay from this acceptance α on (by kα + 1)")
    for (proposers, weights, batch), members in groupby(rounds, lambda one: (one.proposers, one.weights, one.batch)):
        group = list(members)
        cells = ["never" if r.acceptance is None else f"{r.acceptance:.2f} ({r.textbook:.2f})" for r in group]
        best = max(group, key=lambda one: one.speedup(LIKELY))
        gain = best.speedup(LIKELY)
        cells += [""] * (len(DRAFTS) - len(group)) + [f"k = {best.drafts}: {gain:.2f}×" if gain > 1 else "none"]
        table.add_row(proposers, weights, str(batch), *cells)
    console.print(says, table, sep="\n")
