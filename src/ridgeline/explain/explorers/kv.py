"""Bytes of the KV cache: what every token of every sequence keeps in every layer."""

from typing import Literal

from ridgeline.core.words import counted
from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import kv_bytes, memory


def explore(
    layers: int = 80,
    kv_heads: int = 8,
    head_dim: int = 128,
    context: int = 4096,
    batch: int = 1,
    element_bytes: Literal[1, 2, 4] = 2,
    card: str = "h100-sxm",
) -> Found:
    """Multiply what a token keeps by the tokens."""

    def size(tokens: float) -> float:
        return kv_bytes(tokens, layers, kv_heads, head_dim, element_bytes)

    whole, room = size(batch * context), memory(card)
    share = None if room == float("inf") else whole / room
    entries = f"2 · {layers} · {kv_heads} · {head_dim} · {element_bytes}"
    figures = (
        Figure("per_token", size(1), "B", f"{entries} and scales", "counted"),
        Figure("per_sequence", size(context), "B", counted(context, "token"), "counted"),
        Figure("all", whole, "B", counted(batch, "sequence"), "counted"),
        Figure("share", share, "share", "of the card's memory", "datasheet"),
    )
    beside = "the owner chooses the memory" if share is None else f"{share:.1%} of the card's memory"
    sentence = f"{batch:,} × {counted(context, 'token')} keep {whole / 1e9:,.4g} GB: {beside}."
    series = Series("growth", "tokens", "B", [(tokens, size(tokens)) for tokens in (2.0**i for i in range(8, 21))])
    return sentence, figures, (series,)
