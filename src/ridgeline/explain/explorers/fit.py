"""Does it fit, and how fast at most: a dense model, a batch and a card.

Weights and cache against the memory, TTFT of linear layers and attention, TPOT, tokens per second.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from ridgeline.explain.exploration import Exploration, Figure
from ridgeline.explain.limits import kv_bytes, limit, memory
from ridgeline.program.ops.attention import visible_keys


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model in bf16 and what it is asked."""

    parameters: Annotated[float, Meta(ge=1e6, le=1e13, description="Parameters of the model.")] = 13e9
    layers: Annotated[int, Meta(ge=1, le=1000, description="Layers.")] = 40
    heads: Annotated[int, Meta(ge=1, le=1024, description="Query heads.")] = 40
    kv_heads: Annotated[int, Meta(ge=1, le=1024, description="KV heads.")] = 40
    head_dim: Annotated[int, Meta(ge=1, le=1024, description="Entries of a head.")] = 128
    batch: Annotated[int, Meta(ge=1, le=1 << 20, description="Sequences.")] = 32
    context: Annotated[int, Meta(ge=1, le=1 << 24, description="Tokens of each, all of them prompt for TTFT.")] = 2048
    card: Annotated[str, Meta(description="A datasheet, NAME or NAME:COUNT.")] = "h100-sxm"


def explore(inputs: Inputs) -> Exploration:
    """Weigh weights and cache, and price a prompt and a decode step."""
    weights, room = 2 * inputs.parameters, memory(inputs.card)
    sequence = kv_bytes(inputs.context, inputs.layers, inputs.kv_heads, inputs.head_dim)
    pairs, _ = visible_keys(inputs.context, inputs.context, None)
    linear = limit(inputs.card, flops=weights * inputs.context, weight_bytes=weights).seconds
    attention = limit(inputs.card, flops=4 * pairs * inputs.head_dim * inputs.heads * inputs.layers).seconds
    cache = inputs.batch * sequence
    tpot = limit(inputs.card, flops=weights * inputs.batch, weight_bytes=weights, kv_bytes=cache).seconds
    most = None if room == float("inf") else max(0, int((room - weights) / sequence))
    prompt = f"{linear * 1e3:.1f} ms linear + {attention * 1e3:.1f} ms attention"
    figures = (
        Figure("weights", weights, "B", f"{inputs.parameters:.4g} · 2 bytes", "counted"),
        Figure("cache", cache, "B", f"{inputs.batch} · {sequence:.4g} B", "counted"),
        Figure("all", weights + cache, "B", "weights + cache, no workspace", "counted"),
        Figure("most", most, "sequences", "(memory - weights) ÷ KV bytes of a sequence", "datasheet"),
        Figure("ttft", linear + attention, "s", prompt, "datasheet"),
        Figure("tpot", tpot, "s", "max(arithmetic, (weights + cache) ÷ bandwidth)", "datasheet"),
        Figure("throughput", inputs.batch / tpot, "tokens/s", f"{inputs.batch} ÷ TPOT", "datasheet"),
    )
    verdict = "unknown whether it fits" if most is None else "it fits" if inputs.batch <= most else "it does not fit"
    sentence = (
        f"{(weights + cache) / 1e9:,.2f} GB: {verdict}; TTFT {(linear + attention) * 1e3:,.1f} ms, TPOT "
        f"{tpot * 1e3:,.2f} ms at best."
    )
    return Exploration("fit", msgspec.structs.asdict(inputs), sentence, figures)
