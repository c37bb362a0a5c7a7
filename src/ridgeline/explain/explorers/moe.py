"""Mixture of experts: how many experts a batch reads, and what that leaves of the saving."""

from ridgeline.core.errors import ConfigError
from ridgeline.core.words import counted
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.program.ops.experts import distinct_experts


def explore(experts: int = 8, top_k: int = 2, batch: int = 8) -> Found:
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
    sentence = (
        f"{counted(batch, 'token')} at once: {here:.2f} of {experts} experts are read, each for {rows:.1f} tokens."
    )
    series = Series("experts", "tokens", "experts", [(1 << i, read(1 << i)) for i in range(11)])
    return sentence, figures, (series,)
