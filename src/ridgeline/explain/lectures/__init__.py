"""Recompute the numbers of lectures and texts on inference: each row from its inputs, slips with the right value.

What the texts say is in rows.toml, by chapter; a chapter's file computes what is right. They are docs/numbers.md.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import frame, html_table
from ridgeline.explain.lectures.row import Row

HEAD = ("row", "text", "it says", "", "right", "from")


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
