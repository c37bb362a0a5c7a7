"""Limits of chat templates: the budget of one render, and checks before an operation runs.

Used by `sandbox` only. Everything here raises RefusedError. Must not import anything of ridgeline.
"""

import itertools
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jinja2
from jinja2.runtime import Undefined

MAX_VALUE_BYTES = 8 * 2**20
MAX_ITEMS = 100_000
MAX_RENDER_BYTES = 64 * 2**20
MAX_RENDER_S = 1.0
MAX_INT_BITS = 4096
MAX_ARGUMENT = 4096
MAX_FORMAT_CHARS = 4096

_PADDING = ("center", "ljust", "rjust", "zfill")
_TEXT_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()).union(_PADDING),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_READS_ALL = frozenset({"dictsort", "groupby", "join", "list", "max", "min", "sort", "sum", "unique"})
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class RefusedError(jinja2.TemplateError):
    """Raised when a template does something that chat templates are not allowed to do."""


class Budget:
    """Remaining budget of one render: bytes of values made, and CPU seconds of its thread."""

    __slots__ = ("_deadline_s", "_left_bytes")

    def __init__(self) -> None:
        self._left_bytes = MAX_RENDER_BYTES
        self._deadline_s = time.thread_time() + MAX_RENDER_S

    def spend(self, value: object) -> None:
        self._left_bytes -= size_bytes(value)
        if self._left_bytes < 0:
            raise RefusedError(f"makes more than {MAX_RENDER_BYTES} bytes of values")
        if time.thread_time() > self._deadline_s:
            raise RefusedError(f"takes more than {MAX_RENDER_S:g} s")


def size_bytes(value: object, *, printable: bool = False) -> int:
    """Return about how many bytes `value` takes with all that it holds; shared parts count each time they occur.

    Refuses more than MAX_VALUE_BYTES and, if `printable`, anything that is not plain data.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, bytes)):
            total += item.__sizeof__()
        elif isinstance(item, (list, tuple)):
            total += 56 + 8 * len(cast("list[object]", item))
            stack.extend(cast("list[object]", item))
        elif isinstance(item, dict):
            total += 64 + 100 * len(cast("dict[object, object]", item))
            stack.extend(cast("dict[object, object]", item).keys())
            stack.extend(cast("dict[object, object]", item).values())
        else:
            total += 32
            if printable and not (item is None or isinstance(item, (int, float, Undefined))):
                raise RefusedError(f"prints a {type(item).__name__}, which is not text")
        limit(total)
    return total


def limit(num_bytes: int) -> None:
    """Refuse a value that is, or is about to be, too large."""
    if num_bytes > MAX_VALUE_BYTES:
        raise RefusedError(f"makes a value of more than {MAX_VALUE_BYTES} bytes")


def measure_operator(operator: str, left: Any, right: Any) -> None:
    """Check an arithmetic operator before it runs."""
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                limit(_num_bytes(sequence) * times)
    if operator == "%" and isinstance(left, str):
        measure_format(left, "%", right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else max(left.bit_length(), right.bit_length())
        if bits > MAX_INT_BITS:
            raise RefusedError(f"computes with a number of more than {MAX_INT_BITS} bits")


def measure_format(text: str, sign: str, values: object) -> None:
    """Check `text % values` or `text.format(values)`: no wide fields, no named `%` ones (a name can hide a width)."""
    wide = r"%\(|%[^a-zA-Z%]*(?:\d{4}|\*)" if sign == "%" else r":[^{}]*(?:\d{4}|\{)"
    if len(text) > MAX_FORMAT_CHARS or re.search(wide, text):
        raise RefusedError("formats with a text that is too long, or has named or too wide fields")
    limit(text.count(sign) * (1000 + size_bytes(values, printable=True)))


def measure_method(method: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Check a builtin type's method before it runs, refuse those templates do not need; return the arguments to use."""
    owner, name = method.__self__, method.__name__
    if name not in next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), ()):
        raise RefusedError(f"calls {type(owner).__name__}.{name}, which chat templates cannot")
    if not isinstance(owner, str):
        return args
    if name == "join" and args:
        items = _items(args[0])
        limit(size_bytes(items) + _num_bytes(owner) * len(items))
        return (items,)
    if name == "replace" and len(args) >= 2:
        _measure_replace(owner, args[0], args[1])
    if name in _PADDING and args and args[0] > MAX_ARGUMENT:
        raise RefusedError(f"pads a text to more than {MAX_ARGUMENT} characters")
    if name in {"split", "rsplit"}:
        _measure_split(owner, *args, **named)
    if name == "splitlines":
        _limit_items(1 + sum(map(owner.count, _LINE_ENDS)))
    return args


def measure_filter(name: str, value: Any, values: list[Any]) -> Any:
    """Check the filter `name` with the arguments `values` before it runs; return the value to apply it to."""
    if name not in {"d", "default"} and any(isinstance(v, int) and abs(v) > MAX_ARGUMENT for v in values):
        raise RefusedError(f"gives the filter {name} a number above {MAX_ARGUMENT}")
    if name in _READS_ALL:
        if isinstance(value, str):
            _limit_items(len(value))
        elif not isinstance(value, Mapping):
            value = _items(value)
    if name == "join":
        separator_bytes = max((size_bytes(v) for v in values), default=0)
        limit(size_bytes(value, printable=True) + separator_bytes * len(value))
    if name == "string":
        size_bytes(value, printable=True)
    if name == "replace" and len(values) >= 2:
        _measure_replace(str(value), values[0], values[1])
    if name == "indent":
        width = max((len(v) if isinstance(v, str) else int(v) for v in values), default=4)
        limit(len(str(value)) + (str(value).count("\n") + 1) * width)
    return value


def _num_bytes(sequence: Any) -> int:
    """Return the bytes that each copy of a sequence adds: for a text its characters, not the object around them."""
    if isinstance(sequence, str):
        return len(sequence) * (1 if sequence.isascii() else 4)
    return size_bytes(sequence)


def _items(values: Iterable[Any]) -> list[Any]:
    items = list(itertools.islice(values, MAX_ITEMS + 1))
    _limit_items(len(items))
    return items


def _limit_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise RefusedError(f"makes a list of more than {MAX_ITEMS} items")


def _measure_replace(text: str, old: object, new: object) -> None:
    limit(_num_bytes(text) + text.count(str(old)) * _num_bytes(str(new)))


def _measure_split(text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    if len(text) > MAX_ITEMS and not 0 <= maxsplit < MAX_ITEMS:
        _limit_items(1 + text.count(sep) if sep else len(text.split(None, MAX_ITEMS + 1)))
