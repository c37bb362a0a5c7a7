"""Claims of whole techniques, beside what was measured here, or that nothing was."""

from ridgeline.explain.lectures.batching import table_13b
from ridgeline.explain.lectures.row import Values
from ridgeline.explain.limits import H100


def ten_x(batch: int = 32, weight_bytes: float = 26e9, sequence_bytes: float = 838_860_800, card: str = H100) -> Values:
    """Divide the tokens per second of a batch by those of one sequence."""
    sizes = weight_bytes, sequence_bytes, card
    one, many = (table_13b(count, *sizes)["tokens_per_s"] for count in (1, batch))
    return {"batching": many / one}


def claims(low: float = 0.86, high: float = 0.97) -> Values:
    """Take the shares of the bandwidth from the README's table of speed."""
    return {"low": low, "high": high, "gap": 1 - low}
