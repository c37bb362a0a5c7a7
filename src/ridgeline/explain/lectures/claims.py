"""Claims of whole techniques, beside what was measured here, or that nothing was."""

from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100, limit


def ten_x(batch: int = 32, weight_bytes: float = 26e9, sequence_bytes: float = 838_860_800, card: str = H100) -> Values:
    """Divide the tokens per second of a batch by those of one sequence."""
    one, many = (
        limit(card, flops=count * weight_bytes, weight_bytes=weight_bytes, kv_bytes=count * sequence_bytes).seconds
        / count
        for count in (1, batch)
    )
    return {"batch": batch, "batching": one / many}


def claims(low: float = 0.93, high: float = 0.99) -> Values:
    """Take the shares of the bandwidth from the README's table of speed."""
    return {"low": low, "high": high, "gap": 1 - low}
