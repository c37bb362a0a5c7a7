"""Does it fit, and how fast at most: a dense model, a batch and a card.

Weights and cache against the memory, TTFT of linear layers and attention, TPOT, tokens per second.
"""

from ridgeline.explain.exploration import Figure, Found
from ridgeline.explain.limits import decode, kv_bytes, limit, room
from ridgeline.program.ops.attention import visible_keys


def explore(
    parameters: float = 13e9,
    layers: int = 40,
    heads: int = 40,
    kv_heads: int = 40,
    head_dim: int = 128,
    batch: int = 32,
    context: int = 2048,
    card: str = "h100-sxm",
) -> Found:
    """Weigh weights and cache, and price a prompt and a decode step."""
    weights = 2 * parameters
    sequence = kv_bytes(context, layers, kv_heads, head_dim)
    pairs, _ = visible_keys(context, context, None)
    linear = limit(card, flops=weights * context, weight_bytes=weights).seconds
    attention = limit(card, flops=4 * pairs * head_dim * heads * layers).seconds
    cache, most = batch * sequence, room(card, parameters, sequence)
    tpot = decode(card, parameters, batch, sequence).seconds
    prompt = f"{linear * 1e3:.1f} ms linear + {attention * 1e3:.1f} ms attention"
    figures = (
        Figure("weights", weights, "B", f"{parameters:.4g} · 2 bytes", "counted"),
        Figure("cache", cache, "B", f"{batch} · {sequence:.4g} B", "counted"),
        Figure("all", weights + cache, "B", "weights + cache, no workspace", "counted"),
        Figure("most", most, "sequences", "(memory - weights) ÷ KV bytes of a sequence", "datasheet"),
        Figure("ttft", linear + attention, "s", prompt, "datasheet"),
        Figure("tpot", tpot, "s", "max(arithmetic, (weights + cache) ÷ bandwidth)", "datasheet"),
        Figure("throughput", batch / tpot, "tokens/s", f"{batch} ÷ TPOT", "datasheet"),
    )
    verdict = "unknown whether it fits" if most is None else "it fits" if batch <= most else "it does not fit"
    sentence = (
        f"{(weights + cache) / 1e9:,.2f} GB: {verdict}; TTFT {(linear + attention) * 1e3:,.1f} ms, TPOT "
        f"{tpot * 1e3:,.2f} ms at best."
    )
    return sentence, figures, ()
