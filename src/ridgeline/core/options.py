"""One table of options: an option is a field of a dataclass, declared with its default, help, range and names.

    max_num_seqs: int = option(64, "Maximum number of sequences that run at once.", low=1)

`check` refuses a value that the declaration does not allow; `table` lists the options, and from it come the keywords of
`LLM`, the options of every command and the sampling fields of the HTTP API.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin

from ridgeline.core.errors import ConfigError

_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Describe an option: `help` is for users; where nothing being given has a meaning it ends in "Default: …".

    A number is from `low` to `high`, greater than `above`, or one of `choices`. `name` is its keyword in Python where
    that is not the field's, `flag` its name on the command line where that does not follow, `short` one letter. `aka`
    are names that other engines give it.
    """

    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[int, ...] = ()
    name: str | None = None
    flag: str | None = None
    short: str | None = None
    metavar: str | None = None
    aka: str = ""

    @property
    def range(self) -> str:
        """Say what a number may be; empty without bounds."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        low, high = (None if bound is None else _digits(bound) for bound in (self.low, self.high))
        if self.above is not None:
            return f"greater than {_digits(self.above)}" + ("" if high is None else f" and at most {high}")
        if low is not None and high is not None:
            return f"between {low} and {high}"
        return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""

    def allows(self, value: float) -> bool:
        """Tell whether a number is in range."""
        return (
            (not self.choices or value in self.choices)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def option(default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **description: Any) -> Any:
    """Declare a field that is an option; `description` are the other fields of Option."""
    return field(default=default, default_factory=factory, metadata={"option": Option(help=help, **description)})


@dataclass(frozen=True, slots=True)
class Row:
    """One option is the `field` of a dataclass, or of the dataclass in its field `part`. Help shows it in `panel`."""

    part: str | None
    field: str
    name: str
    flag: str
    type: Any  # the field's, less None
    optional: bool  # whether None was in it
    default: Any  # the field's
    panel: str
    option: Option

    def problem(self, value: object) -> str | None:
        """Tell what is wrong with a value, to follow the option's name in a sentence; None if nothing is."""
        if value is None and self.optional:
            return None
        if get_origin(self.type) is Literal:
            allowed = get_args(self.type)
            return None if value in allowed else f"must be one of {', '.join(allowed)}, got {value!r}"
        if self.type not in _NAMES:  # of containers the owner checks the items
            return None
        accepted = (int, float) if self.type is float else self.type
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            return f"must be {_NAMES[self.type]}, got {value!r}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, got {value!r}"
        if isinstance(value, (int, float)) and not self.option.allows(value):
            return f"must be {self.option.range}, got {value!r}"
        return None


@cache
def table(owner: type) -> tuple[Row, ...]:
    """List the options of a dataclass and of the dataclasses in its fields, in the order of their declaration.

    A dataclass's PANEL is the title under which help shows them, its PREFIX stands before their names.
    """
    return tuple(_rows(owner, None))


def check(instance: Any, error: Callable[[str, str], Exception] = lambda name, message: ConfigError(message)) -> None:
    """Raise `error(name, message)` for the first field with a value that its own declaration does not allow."""
    for row in table(type(instance)):
        if row.part is None and (problem := row.problem(getattr(instance, row.field))) is not None:
            raise error(row.name, f"{row.name} {problem}")


def suggestion(name: str, rows: Iterable[Row]) -> Row | None:
    """Find the option that was meant by `name`: what another engine calls so, else one that is spelled almost so."""
    rows = tuple(rows)
    name = name.lstrip("-").replace("-", "_").casefold()
    if known := next((row for row in rows if name in row.option.aka.split()), None):
        return known
    by_name = {row.name: row for row in rows} | {row.flag.lstrip("-").replace("-", "_"): row for row in rows}
    close = get_close_matches(name.removeprefix("no_"), by_name, n=1)
    return by_name[close[0]] if close else None


def _rows(owner: type, part: str | None) -> Sequence[Row]:
    found: list[Row] = []
    for item in fields(owner):
        kind, optional = _without_none(item.type)
        option = item.metadata.get("option")
        if is_dataclass(kind):
            found += _rows(cast("type", kind), item.name)
        elif option is not None:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            name = option.name or getattr(owner, "PREFIX", "") + item.name
            unsaid = "s" if get_origin(kind) in (tuple, Sequence) else "_s"  # a flag is given for each, and in seconds
            flag = option.flag or "--" + name.removesuffix(unsaid).replace("_", "-")
            panel = getattr(owner, "PANEL", "")
            found.append(Row(part, item.name, name, flag, kind, optional, default, panel, option))
    return found


def _without_none(declared: Any) -> tuple[Any, bool]:
    """Return a type less None, and whether None was in it."""
    if get_origin(declared) is Literal or NoneType not in get_args(declared):
        return declared, False
    (first, *others) = [kind for kind in get_args(declared) if kind is not NoneType]
    for kind in others:
        first = first | kind
    return first, True


def _digits(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
