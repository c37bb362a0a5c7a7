"""Recompute the numbers of lectures and texts on inference: each row from its inputs, slips with the right value.

What the texts say is in rows.toml, by chapter; a chapter's file computes what is right. `docs/numbers.md` is `page()`.
"""

import tomllib
from collections.abc import Mapping, Sequence
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
        cells = [(row.id, row.texts, row.says, row.status, row.sentence(), row.provenance) for row in self.rows]
        return html_table(f"{len(cells)} numbers, {slips} slips", HEAD, cells)


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


def legend() -> str:
    """Say in Markdown what the texts, the marks and the words for provenance are."""
    lines = [
        f"Unless a row says otherwise a card is NVIDIA's H100 SXM: {peak(H100) / 1e12:.0f} × 10¹² FLOP/s in bf16, "
        f"{bandwidth(H100) / 1e12:.2f} × 10¹² B/s, {memory(H100) / 1e9:.0f} × 10⁹ B; weights and cache are bf16. "
        "A time is a limit: no step on that card can be faster.",
        "",
        "Texts: " + " · ".join(f"{letter} {what}" for letter, what in TEXTS.items()) + ".",
        "",
        "Marks: " + " · ".join(f"`{mark}` {what}" for mark, what in STATUSES.items()) + ".",
        "",
        "From: " + " · ".join(f"*{word}* {PROVENANCES[word]}" for word in PROVENANCES) + ".",
    ]
    return "\n".join(lines)


def table() -> str:
    """Return all rows as a table in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|---|---|---|---|"]
    for row in rows():
        cells = (row.id, row.texts, row.says, row.status, row.sentence(), row.provenance)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """Return `docs/numbers.md`."""
    slips = sum(row.status == "✗" for row in rows())
    derived = [f"- **{row.id}** {row.derivation}. {_inputs(row)}" for row in rows()]
    return "\n".join(
        [
            "# Numbers",
            "",
            "<!-- written by: ridgeline explain lecture --page > docs/numbers.md -->",
            "",
            f"Texts on inference are full of numbers. Here are {len(rows())} of them, computed again from their "
            "inputs by the op table that prices the engine's own steps; "
            f"{slips} are slips, with the right value beside them. "
            "`ridgeline explain lecture ID` prints one with its inputs.",
            "",
            legend(),
            "",
            table(),
            "",
            "## Where each comes from",
            "",
            *derived,
            "",
        ]
    )


def _inputs(row: Row) -> str:
    given = ", ".join(f"{name} {_plain(value)}" for name, value in row.inputs.items())
    return f"Inputs: {given}."


def _plain(value: object) -> str:
    return f"{value:,.12g}" if isinstance(value, int | float) else str(value)
