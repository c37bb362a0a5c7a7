"""Hold what an explorer finds: figures with their formula and provenance, series to draw, and one sentence."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

from ridgeline.core.errors import ConfigError

Provenance = Literal["measured", "calibrated", "prior", "datasheet", "counted"]
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Mark = tuple[Literal["x", "y"], float, str]
_SCALED = ("B", "B/s", "FLOP", "FLOP/s")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in a plain unit (s, B, FLOP/s, tokens, share, ×), None where it is unknown."""

    name: str
    value: float | None
    unit: str
    formula: str
    provenance: Provenance

    @property
    def text(self) -> str:
        """The number as one reads it."""
        value = self.value
        if value is None:
            return "unknown"
        if self.unit == "s" and value < 1:
            return f"{value * 1e3:,.4g} ms"
        if self.unit == "share":
            return f"{value * 100:.4g} %"
        if self.unit in _SCALED:
            for scale, prefix in _PREFIXES:
                if abs(value) >= scale:
                    return f"{value / scale:,.4g} {prefix}{self.unit}"
        digits = f"{value:,.0f}" if value == int(value) or abs(value) >= 1e4 else f"{value:,.4g}"
        unit = self.unit.removesuffix("s") if digits == "1" and self.unit != "s" else self.unit
        return f"{digits}{unit}" if unit == "×" else f"{digits} {unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Series:
    """Holds the points of a curve, and `marks` on it: an axis, where, and what is there."""

    name: str
    x: str
    y: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Holds rows of cells: a label, what stands in each, and of what kind each is, a digit, or "." where nothing is."""

    name: str
    rows: Sequence[tuple[str, Sequence[str], str]]

    @property
    def lines(self) -> Sequence[str]:
        """The rows as text."""
        label = max(len(name) for name, _, _ in self.rows)
        width = max((len(cell) for _, cells, _ in self.rows for cell in cells), default=1)
        return [f"{name:{label}}  " + " ".join(f"{cell:>{width}}" for cell in cells) for name, cells, _ in self.rows]


Found = tuple[str, Sequence[Figure], Sequence[Series | Grid]]
"""What an explorer finds: a sentence, figures, and curves and cells to draw."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """Holds what one set of inputs gives. In a notebook it shows itself as a table."""

    name: str
    inputs: Mapping[str, object]
    sentence: str
    figures: Sequence[Figure]
    series: Sequence[Series] = ()
    grids: Sequence[Grid] = ()

    def __getitem__(self, name: str) -> float | None:
        """Return the value of a figure. Raises KeyError where there is none of that name."""
        return {figure.name: figure.value for figure in self.figures}[name]

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def to_pandas(self) -> Any:
        """Return the figures as a pandas.DataFrame. Raises ConfigError without pandas."""
        return frame([asdict(figure) for figure in self.figures])

    def _repr_html_(self) -> str:
        rows = [(figure.name, figure.text, figure.formula, figure.provenance) for figure in self.figures]
        return html_table(self.sentence, ("", "value", "from", "provenance"), rows)


def frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a pandas.DataFrame. Raises ConfigError without pandas."""
    try:
        pandas = import_module("pandas")
    except ModuleNotFoundError:
        raise ConfigError("pandas is not installed; add it with pip install pandas, or use as_json()") from None
    return pandas.DataFrame.from_records(list(records))


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML; all texts are escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{line(head, 'th')}{body}</table>"
