"""Claims of whole techniques, beside what was measured here, or that nothing was."""

from ridgeline.explain.lectures.row import Values, row
from ridgeline.explain.limits import H100, limit


@row(
    "ten-x",
    "A-A",
    "four techniques make inference 10 times as fast",
    "=",
    "batching 13B from 1 to {batch:0} alone allows {batching:1x}, a limit; what each technique gives on this machine: "
    "not measured",
    "datasheet",
)
def ten_x(batch: int = 32, weight_bytes: float = 26e9, sequence_bytes: float = 838_860_800, card: str = H100) -> Values:
    """Divide the tokens per second of a batch by those of one sequence."""
    one, many = (
        limit(card, flops=count * weight_bytes, weight_bytes=weight_bytes, kv_bytes=count * sequence_bytes).seconds
        / count
        for count in (1, batch)
    )
    return {"batch": batch, "batching": one / many}


@row(
    "claims",
    "B C D E",
    "24× by PagedAttention, 5 to 20× by batching, 10 to 100× by all five, 2 to 4× by speculation, 2× by "
    "FlashAttention-2, "
    "13 % and 60 s against 28 min of other engines, 90 % and 100× of cost, 15B pruned to 8B, 8B to 4B at 95 %, within "
    "80 % "
    "of the roofline",
    "lit",
    "the last was measured here: decode of 0.6B in bf16 at batch 1 reads at {low:0%} to {high:0%} of the memory "
    "bandwidth, "
    "the gap to the roofline is at most {gap:0%} (two cores of an AMD EPYC); all others: not measured",
    "measured",
    low=0.8,
)
def claims(low: float = 0.93, high: float = 0.99) -> Values:
    """Take the shares of the bandwidth from the README's table of speed."""
    return {"low": low, "high": high, "gap": 1 - low}
