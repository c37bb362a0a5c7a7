"""Bound what a hostile tokenizer.json makes the Rust library do: texts without end, for which it ends the process, and
panics.
"""

import base64
import math
import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

MAX_GROWTH = 256  # times a text's length, by stages that put texts in place of others


def growth_of(stage: object) -> int:
    """Return by how much a stage, with those within it, may lengthen a text. Raises ValueError for a broken table."""
    if isinstance(stage, list):
        return math.prod(map(growth_of, cast("list[object]", stage)))
    if not isinstance(stage, dict):
        return 1
    parts = cast("dict[str, object]", stage)
    growth = math.prod(map(growth_of, parts.values()))
    for name in ("content", "prepend", "single", "pair", "ids"):  # of Replace, Prepend and TemplateProcessing
        if isinstance(part := parts.get(name), (str, list)):
            growth *= max(1, len(cast("str | list[object]", part)))
    if isinstance(table := parts.get("precompiled_charsmap"), str):
        data = base64.b64decode(table, validate=True)
        end = struct.calcsize("<I") + struct.unpack_from("<I", data)[0]
        if end > len(data):
            raise ValueError("the index of a table of characters ends behind it")
        growth *= max(1, max(map(len, data[end:].split(b"\0"))) // 4)
    return growth


class PanicError(Exception):
    """Says that the Rust library panicked, of which its own exception is none that Python code expects."""


@contextmanager
def no_panic() -> Generator[None]:
    """Make PanicError of a panic, and of no other exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError(str(error)) from None
