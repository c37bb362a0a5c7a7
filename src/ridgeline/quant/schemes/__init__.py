"""Schemes of weight quantization: one file each, named as the scheme, which holds the functions of `Scheme`."""

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from ridgeline.core.config import scheme_names
from ridgeline.core.dtypes import Float32s
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredFormat, StoredMatrix


class Scheme(Protocol):
    """Describes the functions of a file of `schemes/`."""

    def stored_format(self, group_size: int | None, zero_points: bool) -> StoredFormat:
        """Return how the scheme stores matrices; `group_size` None: the scheme's own choice.

        Raises ConfigError for a group size or zero points that the scheme does not have.
        """
        ...

    def quantize(self, weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
        """Round each row of a matrix to nearest. Scales of what is no number, or too large, are none either."""
        ...


def only(name: str, form: StoredFormat) -> Callable[[int | None, bool], StoredFormat]:
    """Return the `stored_format` of a scheme that has no options."""

    def stored_format(group_size: int | None, zero_points: bool) -> StoredFormat:
        if zero_points or group_size not in (None, form.group):
            has = f"groups of {form.group} and no zero points; leave these options out"
            if not form.group:
                has = "one scale per output: group size and zero points are options of int4"
            raise ConfigError(f"{name} has {has}")
        return form

    return stored_format


def scheme(name: str) -> Scheme:
    """Look up a scheme by name. Raises ConfigError where there is none."""
    if name not in scheme_names():
        raise ConfigError(f"{name!r} is no quantization scheme; there are {', '.join(scheme_names())}")
    return cast("Scheme", importlib.import_module(f"{__name__}.{name}"))
