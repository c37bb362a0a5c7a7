"""One row of the lecture's numbers: what a text says, what is right, and how that follows from inputs."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

from ridgeline.explain.exploration import Provenance

Status = Literal["=", "≈", "✗", "+", "lit"]
STATUSES: Mapping[Status, str] = {
    "=": "equal",
    "≈": "rounded, or right under the stated condition",
    "✗": "a slip: the right value stands beside it",
    "+": "the text asks, this answers",
    "lit": "a claim from the literature, beside what was measured here if it was",
}
Values = Mapping[str, float]
Input = float | str | tuple[float, ...]
_SPEC = re.compile(r"(\d*)([a-zA-Z%]*)")
_UNITS = {
    "": (1, ""),
    "ms": (1e-3, " ms"),
    "s": (1, " s"),
    "min": (60, " min"),
    "h": (3600, " h"),
    "B": (1, " B"),
    "MB": (1e6, " MB"),
    "GB": (1e9, " GB"),
    "G": (1e9, " × 10⁹"),
    "%": (0.01, " %"),
    "x": (1, "×"),
}


class _Shown(float):
    """A number whose format is digits after the point and a unit: `{time_s:2ms}`."""

    def __format__(self, spec: str) -> str:
        match = _SPEC.fullmatch(spec)
        assert match, f"{spec!r} is not digits and a unit"
        scale, unit = _UNITS[match[2]]
        return f"{self / scale:,.{int(match[1] or 0)}f}{unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """A row: `compute` returns values in plain units, named with them; its inputs are its defaults, but for `given`.

    `right` is a sentence with places for values. `claims` are numbers of the text, by the value that they are about.
    """

    id: str
    texts: str
    says: str
    status: Status
    right: str
    provenance: Provenance
    claims: Values
    compute: Callable[..., Values]
    given: dict[str, Input]

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The inputs, in plain units."""
        parameters = inspect.signature(self.compute).parameters
        return {name: parameter.default for name, parameter in parameters.items()} | self.given

    @property
    def derivation(self) -> str:
        """How the values follow: the first line of what `compute` says of itself."""
        return (self.compute.__doc__ or "").partition("\n")[0].removesuffix(".")

    def values(self, **changed: Input) -> Values:
        """Return what is computed, for other inputs where some are given, and the inputs that the sentence names."""
        inputs, named = {**self.inputs, **changed}, {name for _, name, *_ in Formatter().parse(self.right)}
        numbers = {name: each for name, each in inputs.items() if name in named and isinstance(each, (int, float))}
        return {**numbers, **self.compute(**inputs)}

    def sentence(self, **changed: Input) -> str:
        """Return what is right, with the values filled in."""
        return self.right.format_map({name: _Shown(value) for name, value in self.values(**changed).items()})

    def cells(self) -> Sequence[str]:
        """Return the cells of the table of all rows."""
        return self.id, self.texts, self.says, self.status, self.sentence(), self.provenance

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as plain data."""
        names = ("id", "texts", "says", "claims", "status", "inputs", "provenance", "derivation")
        return {name: getattr(self, name) for name in names} | {"right": self.sentence(), "values": self.values()}
