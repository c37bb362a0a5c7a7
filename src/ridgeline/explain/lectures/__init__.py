"""Recompute the numbers of lectures and texts on inference: each row from its inputs, slips with the right value.

What the texts say is in rows.toml, by chapter; a chapter's file computes what is right. `docs/numbers.md` is `page()`.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import PROVENANCES, frame, html_table
from ridgeline.explain.lectures.row import STATUSES, Row
from ridgeline.explain.limits import H100, bandwidth, memory, peak

HEAD = ("row", "text", "it says", "", "right", "from")
TEXTS: Mapping[str, str] = {
    "A": "a practice sheet: 7 questions, 3 tasks, 9 cards",
    "B": "an interactive module",
    "C": "a book's chapter",
    "D": "the lesson on inference of Stanford's CS336, by section",
    "E": "lecture notes",
}


@dataclass(frozen=True, slots=True)
class Lecture:
    """Rows, in the order in which they are written. In a notebook it shows itself as a table."""

    rows: Sequence[Row]

    def __getitem__(self, id: str) -> Row:
        """Return the row of an id. Raises ConfigError where there is none."""
        return find(id)

    def as_json(self) -> Sequence[Mapping[str, Any]]:
        """Return all rows as plain data."""
        return [row.as_json() for row in self.rows]

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a record for each row. Raises ConfigError without pandas."""
        return frame(self.as_json())

    def _repr_html_(self) -> str:
        slips = sum(row.status == "✗" for row in self.rows)
        return html_table(f"{len(self.rows)} numbers, {slips} slips", HEAD, [row.cells() for row in self.rows])


def lecture() -> Lecture:
    """Return the numbers that texts on inference name, each recomputed from its inputs."""
    return Lecture(rows())


@cache
def rows() -> Sequence[Row]:
    """Return all rows, chapter by chapter, in the order in which they are written."""
    chapters = tomllib.loads((resources.files(__name__) / "rows.toml").read_text(encoding="utf-8"))
    return [_row(chapter, id, text) for chapter, texts in chapters.items() for id, text in texts.items()]


def _row(chapter: str, id: str, text: dict[str, Any]) -> Row:
    compute = getattr(import_module(f"{__name__}.{chapter}"), text.pop("compute", id.replace("-", "_")))
    return Row(id=id, compute=compute, claims=text.pop("claims", {}), given=text.pop("inputs", {}), **text)


def find(id: str) -> Row:
    """Return the row of an id. Raises ConfigError where there is none."""
    by_id = {row.id: row for row in rows()}
    if id not in by_id:
        near = [name for name in by_id if id[:4] and id[:4] in name]
        hint = f"did you mean {', '.join(near[:4])}?" if near else "ridgeline explain lecture lists them"
        raise ConfigError(f"there is no row {id[:40]!r}: {hint}")
    return by_id[id]


def page() -> str:
    """Return `docs/numbers.md`: what the texts, the marks and the words for provenance are, and all rows as a table."""
    slips = sum(row.status == "✗" for row in rows())
    cells = ([cell.replace("|", "\\|") for cell in row.cells()] for row in rows())
    return f"""# Numbers

<!-- written by: ridgeline explain lecture --page > docs/numbers.md -->

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
