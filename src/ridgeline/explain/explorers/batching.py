"""Show what a larger batch gains: weights are read once for all, the KV cache of each sequence is not."""

from typing import Annotated

from msgspec import Meta

from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import bandwidth, kv_bytes, limit, memory


def explore(
    parameters: Annotated[float, Meta(ge=1e6, le=1e13, description="Parameters of the model.")] = 13e9,
    layers: Annotated[int, Meta(ge=1, le=1000, description="Layers with a KV cache.")] = 40,
    kv_heads: Annotated[int, Meta(ge=1, le=1024, description="KV heads of a layer.")] = 40,
    head_dim: Annotated[int, Meta(ge=1, le=1024, description="Entries of a head.")] = 128,
    batch: Annotated[int, Meta(ge=1, le=1 << 20, description="Sequences in a step.")] = 32,
    context: Annotated[int, Meta(ge=1, le=1 << 24, description="Tokens of each.")] = 1024,
    card: Annotated[str, Meta(description="A datasheet, NAME or NAME:COUNT.")] = "h100-sxm",
) -> Found:
    """Weigh decode steps of growing batches."""
    weights = 2 * parameters
    sequence = kv_bytes(context, layers, kv_heads, head_dim)

    def step_s(batch: int) -> float:
        return limit(card, flops=weights * batch, weight_bytes=weights, kv_bytes=batch * sequence).seconds

    here, room = step_s(batch), memory(card)
    fits = None if room == float("inf") else max(0, int((room - weights) / sequence))
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
    series = Series("batch", "sequences", "tokens/s", [(1 << i, (1 << i) / step_s(1 << i)) for i in range(11)])
    return sentence, figures, (series,)
