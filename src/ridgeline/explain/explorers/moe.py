"""Mixture of experts: how many experts a batch reads, and what that leaves of the saving."""

from typing import Annotated

from msgspec import Meta

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.program.ops.experts import distinct_experts


def explore(
    experts: Annotated[int, Meta(ge=1, le=4096, description="Experts of a layer.")] = 8,
    top_k: Annotated[int, Meta(ge=1, le=4096, description="Experts of a token.")] = 2,
    batch: Annotated[int, Meta(ge=1, le=1 << 20, description="Tokens of a step.")] = 8,
) -> Found:
    """Count the distinct experts of a step."""
    if top_k > experts:
        raise ConfigError(f"moe: a token goes to {top_k} of {experts} experts: at most as many")

    def read(batch: int) -> float:
        return distinct_experts(experts, top_k, batch)

    here = read(batch)
    rows = batch * top_k / here
    figures = (
        Figure("read", here, "experts", "E · (1 - (1 - k/E)ᵀ)", "counted"),
        Figure("share", here / experts, "share", f"of {experts}", "counted"),
        Figure("rows", rows, "tokens", "of each expert that is read: its intensity", "counted"),
    )
    sentence = f"{batch:,} tokens read {here:.2f} of {experts} experts, each for {rows:.1f} tokens."
    series = Series("experts", "tokens", "experts", [(1 << i, read(1 << i)) for i in range(11)])
    return sentence, figures, (series,)
