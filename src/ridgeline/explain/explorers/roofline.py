"""Arithmetic intensity of a matrix product, and what share of a card's peak it can reach."""

from ridgeline.core.words import counted
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import bandwidth, linear_intensity, peak, ridge


def explore(tokens: int = 1, rows: int = 4096, columns: int = 11008, card: str = "h100-sxm") -> Found:
    """Find the product's place on the roofline."""

    def reached(tokens: int) -> float:
        return min(peak(card), linear_intensity(tokens, rows, columns) * bandwidth(card))

    intensity = linear_intensity(tokens, rows, columns)
    known = peak(card) < float("inf")
    corner = ridge(card) if known else None
    speed = reached(tokens)
    share = speed / peak(card) if known else None
    figures = (
        Figure("intensity", intensity, "FLOP/B", "2·T·I·O ÷ 2·(I·O + T·I + T·O)", "counted"),
        Figure("ridge", corner, "FLOP/B", "peak ÷ bandwidth", "datasheet"),
        Figure("speed", speed, "FLOP/s", "min(peak, intensity · bandwidth)", "datasheet"),
        Figure("share", share, "share", "speed ÷ peak", "datasheet"),
    )
    bound = "bound by memory or, unknown, by arithmetic" if corner is None else "memory-bound"
    if corner is not None and intensity >= corner:
        bound = "compute-bound"
    reach = "an unknown share" if share is None else f"at most {share:.2%}"
    series = Series("roofline", "tokens", "FLOP/s", [(float(1 << i), reached(1 << i)) for i in range(15)])
    sentence = (
        f"{counted(tokens, 'token')} at once: {bound}; {intensity:,.4g} FLOPs per byte reach {reach} of the peak."
    )
    return sentence, figures, (series,)
