"""Mixture of experts: how many experts a batch reads, and what that leaves of the saving."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Exploration, Figure, Series
from ridgeline.program.ops.experts import distinct_experts


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of experts, whose choices are uniform: an upper bound, real routers prefer some."""

    experts: Annotated[int, Meta(ge=1, le=4096, description="Experts of a layer.")] = 8
    top_k: Annotated[int, Meta(ge=1, le=4096, description="Experts of a token.")] = 2
    batch: Annotated[int, Meta(ge=1, le=1 << 20, description="Tokens of a step.")] = 8


def explore(inputs: Inputs) -> Exploration:
    """Count the distinct experts of a step."""
    if inputs.top_k > inputs.experts:
        raise ConfigError(f"moe: a token goes to {inputs.top_k} of {inputs.experts} experts: at most as many")

    def read(batch: int) -> float:
        return distinct_experts(inputs.experts, inputs.top_k, batch)

    here = read(inputs.batch)
    rows = inputs.batch * inputs.top_k / here
    figures = (
        Figure("read", here, "experts", "E · (1 - (1 - k/E)ᵀ)", "counted"),
        Figure("share", here / inputs.experts, "share", f"of {inputs.experts}", "counted"),
        Figure("rows", rows, "tokens", "of each expert that is read: its intensity", "counted"),
    )
    sentence = f"{inputs.batch:,} tokens read {here:.2f} of {inputs.experts} experts, each for {rows:.1f} tokens."
    series = Series("experts", "tokens", "experts", [(1 << i, read(1 << i)) for i in range(11)])
    return Exploration("moe", msgspec.structs.asdict(inputs), sentence, figures, (series,))
