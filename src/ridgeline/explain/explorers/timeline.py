"""Time to the first token and between tokens: the passes of one request.

Prefill computes the prompt and makes the first token; every further token is a decode step that reads all weights.
"""

from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import decode, kv_bytes, limit

SHOWN = 32  # passes of the curve


def explore(
    prompt: int = 12,
    output: int = 16,
    parameters: float = 13e9,
    layers: int = 40,
    kv_heads: int = 40,
    head_dim: int = 128,
    card: str = "h100-sxm",
) -> Found:
    """Sum the passes of the request."""
    weight_bytes = 2 * parameters
    prefill = limit(card, flops=weight_bytes * prompt, weight_bytes=weight_bytes)
    caches = [kv_bytes(prompt + made, layers, kv_heads, head_dim) for made in range(1, output)]
    passes = [decode(card, parameters, 1, kv).seconds for kv in caches]
    total = prefill.seconds + sum(passes)
    step = f"(weights {weight_bytes:.4g} B + KV) ÷ bandwidth"
    figures = (
        Figure("ttft", prefill.seconds, "s", f"max(2 · parameters · {prompt} ÷ peak, {step})", "datasheet"),
        Figure("passes", 1 + len(passes), "", f"1 + ({output} - 1)", "counted"),
        Figure("tpot", sum(passes) / len(passes) if passes else None, "s", step, "datasheet"),
        Figure("total", total, "s", f"TTFT + {len(passes)} × TPOT", "datasheet"),
    )
    sentence = (
        f"1 + {len(passes)} passes take at least {total * 1e3:,.0f} ms; prefill is bound by {prefill.bound}, and "
        f"{sum(passes) / total:.0%} of the time is decode."
    )
    every = len(passes) // SHOWN + 1
    points = [(0, prefill.seconds), *((i + 1.0, s) for i, s in enumerate(passes) if i % every == 0)]
    return sentence, figures, (Series("passes", "pass", "s", points),)
