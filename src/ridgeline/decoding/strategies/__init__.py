"""The strategies: one file per kind of decoding, file name == kind, each with a `build` function."""

import pkgutil
from importlib import import_module
from typing import cast

from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.decoding.strategy import Strategy
from ridgeline.spec.spec import DecoderSpec


def kinds() -> tuple[str, ...]:
    """Return the names of all strategies: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def build_strategy(kind: str, spec: DecoderSpec, config: EngineConfig, clock: Clock) -> Strategy:
    """Build the strategy `kind`, one of `kinds()`, for a model and what was asked for."""
    return cast("Strategy", import_module(f"{__name__}.{kind}").build(spec, config, clock))


def choose_strategy(spec: DecoderSpec, config: EngineConfig, clock: Clock, *, embeds: bool) -> Strategy:
    """Build the strategy that a model and its use ask for.

    Raises ConfigError where drafts are asked for that the model cannot verify.
    """
    kind = "embed" if embeds else "diffusion" if spec.diffusion is not None else "autoregressive"
    if config.speculation.proposers():
        if kind != "autoregressive":
            what = "embeds text" if embeds else "fills in masks"
            asked = config.speculation.speculate
            raise ConfigError(f"speculate={asked}: this model {what}, so there is nothing to draft; leave it off")
        kind = "speculative"
    return build_strategy(kind, spec, config, clock)
