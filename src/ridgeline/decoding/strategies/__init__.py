"""The strategies: one file per kind of decoding, file name == kind, each with a `build` function."""

import pkgutil
from importlib import import_module
from typing import cast

from ridgeline.decoding.strategy import Strategy
from ridgeline.spec.spec import DecoderSpec


def kinds() -> tuple[str, ...]:
    """Return the names of all strategies: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def build_strategy(kind: str, spec: DecoderSpec) -> Strategy:
    """Build the strategy `kind`, one of `kinds()`, for a model."""
    return cast("Strategy", import_module(f"{__name__}.{kind}").build(spec))
