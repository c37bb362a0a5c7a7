"""Show what a larger batch gains: weights are read once for all, the KV cache of each sequence is not."""

from ridgeline.explain.exploration import Figure, Found, Mark, Series
from ridgeline.explain.limits import bandwidth, decode, kv_bytes, room


def explore(
    parameters: float = 13e9,
    layers: int = 40,
    kv_heads: int = 40,
    head_dim: int = 128,
    batch: int = 32,
    context: int = 1024,
    card: str = "h100-sxm",
) -> Found:
    """Weigh decode steps of growing batches."""
    weights = 2 * parameters
    sequence = kv_bytes(context, layers, kv_heads, head_dim)

    def step_s(batch: int) -> float:
        return decode(card, parameters, batch, sequence).seconds

    here, fits = step_s(batch), room(card, parameters, sequence)
    read = f"({weights:.4g} + {batch} · {sequence:.4g} B) ÷ bandwidth"
    most = bandwidth(card) / sequence
    figures = (
        Figure("tpot", here, "s", f"max(arithmetic, {read})", "datasheet"),
        Figure("throughput", batch / here, "tokens/s", f"{batch} ÷ TPOT", "datasheet"),
        Figure("gain", batch / here * step_s(1), "×", "against batch 1", "datasheet"),
        Figure("fits", fits, "sequences", "(memory - weights) ÷ KV bytes of a sequence", "datasheet"),
        Figure("limit", most, "tokens/s", "bandwidth ÷ KV bytes of a sequence", "datasheet"),
    )
    room_for = "unknown how many fit" if fits is None else f"{fits:,} sequences fit"
    sentence = f"{batch / here:,.0f} tokens/s at {here * 1e3:.2f} ms a token for each user; {room_for}."
    points = [(1 << i, (1 << i) / step_s(1 << i)) for i in range(11)]
    full: list[Mark] = [("x", fits, "memory is full")] if fits else []
    series = Series("batch", "sequences", "tokens/s", points, (*full, ("y", most, "no batch passes this")))
    return sentence, figures, (series,)
