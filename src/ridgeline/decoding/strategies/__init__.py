"""The strategies: one file per kind of decoding, file name == kind, each with a `build` function."""

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import cast

from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.decoding.drafters import Companion
from ridgeline.decoding.strategy import Strategy
from ridgeline.spec.recurrent import RecurrentMixer
from ridgeline.spec.spec import DecoderSpec


def kinds() -> tuple[str, ...]:
    """Return the names of all strategies: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def build_strategy(kind: str, spec: DecoderSpec, config: EngineConfig, clock: Clock) -> Strategy:
    """Build the strategy `kind`, one of `kinds()`, for a model and what was asked for."""
    return cast("Strategy", import_module(f"{__name__}.{kind}").build(spec, config, clock))


def choose_strategy(
    spec: DecoderSpec,
    config: EngineConfig,
    clock: Clock,
    *,
    embeds: bool,
    without_rollback: Sequence[str],
    companion: Companion | None = None,
    goes_on: bool = False,
) -> Strategy:
    """Build the strategy that a model and its use ask for; `without_rollback`: its kinds of memory that have none.

    `goes_on`: steps may have several rounds.

    `companion` is the model of a drafter that is asked for. Drafts are verified also with speculation off, for requests
    that bring a prediction, but by models whose states need a log for that; with auto a model that cannot verify any
    has none. Raises ConfigError where drafts are asked for that the model cannot verify.
    """
    kind = "embed" if embeds else "diffusion" if spec.diffusion is not None else "speculative"
    if kind == "speculative" and without_rollback:
        kind = "autoregressive"
    if config.speculation.speculate not in (None, "off", "auto") and kind != "speculative":
        why = f"{' and '.join(without_rollback)} states have no log to take drafts back"
        if kind != "autoregressive":
            why = f"this model {'embeds text' if embeds else 'fills in masks'}, so there is nothing to draft"
        raise ConfigError(f"speculate={config.speculation.speculate}: {why}; leave it off")
    if kind == "speculative":
        from ridgeline.decoding.strategies import speculative  # it needs this package first

        logged = any(isinstance(layer.mixer, RecurrentMixer) for layer in spec.layers)
        return speculative.build(spec, config, clock, companion, logged=logged, goes_on=goes_on)
    return build_strategy(kind, spec, config, clock)
