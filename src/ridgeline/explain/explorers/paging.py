"""Memory that no token fills: worst-case reservations against blocks."""

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Figure, Found, Series


def explore(mean: float = 400, reserved: int = 2048, block: int = 16) -> Found:
    """Compare a reservation with blocks, of which the last is half empty."""
    if mean > reserved:
        raise ConfigError(f"paging: a mean of {mean:g} tokens is more than the {reserved} reserved")
    whole = 1 - mean / reserved

    def paged(block: int) -> float:
        return (block - 1) / 2 / (mean + (block - 1) / 2)

    gain = (1 - paged(block)) / (1 - whole)
    figures = (
        Figure("reserved_waste", whole, "share", f"1 - {mean:g} ÷ {reserved}", "counted"),
        Figure("paged_waste", paged(block), "share", "half a block of each sequence", "counted"),
        Figure("more_sequences", gain, "×", "in the same memory", "counted"),
    )
    sentence = f"Blocks waste {paged(block):.1%} instead of {whole:.1%}: {gain:.2f}× the sequences."
    series = Series("blocks", "tokens of a block", "share", [(1 << i, paged(1 << i)) for i in range(9)])
    return sentence, figures, (series,)
