"""For every option of a table a value that is allowed and is not its default, and how a command line writes it."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args, get_origin

from ridgeline.core.options import Row, table


def away(row: Row) -> object:
    """Derived from the declaration alone, so that a new option is covered without an edit here."""
    option, default = row.option, row.default
    if row.type is bool:
        return not default
    if get_origin(row.type) is Literal:
        return next(value for value in reversed(get_args(row.type)) if value != default)
    if row.type is int:
        if option.choices:
            return next(choice for choice in option.choices if choice != default)
        return max(1, option.low or 0) if default is None else default + 1
    if row.type is float:
        low, high = option.above if option.low is None else option.low, option.high
        if high is None:
            return default + 1.5
        return high if (low + high) / 2 == default else (low + high) / 2
    if row.type is str:
        return {"isa": "portable", "slo": "ttft=1", "draft_quantize": "none"}.get(row.name, "x")
    if get_origin(row.type) is Mapping:
        return {1: 1.5} if get_args(row.type)[0] is int else {"tuned": "folder"}
    return (3,) if get_args(row.type) == (int,) else ("x y",)


def values(owner: type) -> dict[tuple[str | None, str], object]:
    """By (part, field)."""
    return {(row.part, row.field): away(row) for row in table(owner)}


def typed(row: Row, value: object) -> Sequence[str]:
    """The words of a command line that give the option this value."""
    if row.type is bool:
        return [row.flag if value else f"--no-{row.flag.removeprefix('--')}"]
    if isinstance(value, Mapping):
        return [word for key, item in value.items() for word in (row.flag, f"{key}={item}")]
    items = value if isinstance(value, tuple) else (value,)
    return [word for item in items for word in (row.flag, str(item))]
