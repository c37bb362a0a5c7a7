"""Write docs/numbers.md: what texts on inference say, beside what is right.

Usage: python tools/numbers_page.py [--write]. Without --write it prints the page; a test holds docs/numbers.md to it.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from ridgeline.explain.exploration import Provenance
from ridgeline.explain.lectures import HEAD, rows
from ridgeline.explain.lectures.row import STATUSES, Row
from ridgeline.explain.limits import H100, bandwidth, memory, peak

PAGE = Path(__file__).parents[1] / "docs" / "numbers.md"
TEXTS: Mapping[str, str] = {
    "A": "a practice sheet: 7 questions, 3 tasks, 9 cards",
    "B": "an interactive module",
    "C": "a book's chapter",
    "D": "the lesson on inference of Stanford's CS336, by section",
    "E": "lecture notes",
}
PROVENANCES: Mapping[Provenance, str] = {
    "measured": "on a machine that is named",
    "calibrated": "the limit, with an efficiency that was fitted on this machine",
    "prior": "the limit, with an efficiency of this class of machine",
    "datasheet": "follows from the peaks and the bandwidth that a maker names: a limit",
    "counted": "follows from the inputs alone: bytes, FLOPs, tokens, probabilities",
}


def page() -> str:
    """Return `docs/numbers.md`: what the texts, the marks and the words for provenance are, and all rows as a table."""
    slips = sum(row.status == "✗" for row in rows())
    cells = ([cell.replace("|", "\\|") for cell in row.cells()] for row in rows())
    return f"""# Numbers

<!-- written by: python tools/numbers_page.py --write -->

Texts on inference are full of numbers. Here are {len(rows())} of them, computed again from their inputs by the op \
table that prices the engine's own steps; {slips} are slips, with the right value beside them. \
`ridgeline explain lecture ID` prints one with its inputs.

Unless a row says otherwise a card is NVIDIA's H100 SXM: {peak(H100) / 1e12:.0f} × 10¹² FLOP/s in bf16, \
{bandwidth(H100) / 1e12:.2f} × 10¹² B/s, {memory(H100) / 1e9:.0f} × 10⁹ B; weights and cache are bf16. \
A time is a limit: no step on that card can be faster.

Texts: {_listed(f"{letter} {what}" for letter, what in TEXTS.items())}.

Marks: {_listed(f"`{mark}` {what}" for mark, what in STATUSES.items())}.

From: {_listed(f"*{word}* {what}" for word, what in PROVENANCES.items())}.

| {" | ".join(HEAD)} |
|---|---|---|---|---|---|
{_lines(f"| {' | '.join(each)} |" for each in cells)}

## Where each comes from

{_lines(f"- **{row.id}** {row.derivation}. Inputs: {_inputs(row)}." for row in rows())}
"""


def _listed(items: Iterable[str]) -> str:
    return " · ".join(items)


def _lines(items: Iterable[str]) -> str:
    return "\n".join(items)


def _inputs(row: Row) -> str:
    plain = (
        (name, f"{value:,.12g}" if isinstance(value, int | float) else value) for name, value in row.inputs.items()
    )
    return ", ".join(f"{name} {value}" for name, value in plain)


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
