"""Bytes of the KV cache: what every token of every sequence keeps in every layer."""

from typing import Annotated, Literal

from msgspec import Meta

from ridgeline.explain.exploration import Figure, Found, Series
from ridgeline.explain.limits import kv_bytes, memory


def explore(
    layers: Annotated[int, Meta(ge=1, le=1000, description="Layers with a KV cache.")] = 80,
    kv_heads: Annotated[int, Meta(ge=1, le=1024, description="KV heads of a layer.")] = 8,
    head_dim: Annotated[int, Meta(ge=1, le=1024, description="Entries of a head.")] = 128,
    context: Annotated[int, Meta(ge=1, le=1 << 24, description="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, Meta(ge=1, le=1 << 20, description="Sequences.")] = 1,
    element_bytes: Annotated[Literal[1, 2, 4], Meta(description="4 float32, 2 bf16, 1 int8 with its scales.")] = 2,
    card: Annotated[str, Meta(description="A datasheet, NAME or NAME:COUNT.")] = "h100-sxm",
) -> Found:
    """Multiply what a token keeps by the tokens."""

    def size(tokens: float) -> float:
        return kv_bytes(tokens, layers, kv_heads, head_dim, element_bytes)

    whole, room = size(batch * context), memory(card)
    share = None if room == float("inf") else whole / room
    entries = f"2 · {layers} · {kv_heads} · {head_dim} · {element_bytes}"
    figures = (
        Figure("per_token", size(1), "B", f"{entries} and scales", "counted"),
        Figure("per_sequence", size(context), "B", f"{context:,} tokens", "counted"),
        Figure("all", whole, "B", f"{batch:,} sequences", "counted"),
        Figure("share", share, "share", "of the card's memory", "datasheet"),
    )
    beside = "the owner chooses the memory" if share is None else f"{share:.1%} of the card's memory"
    sentence = f"{batch:,} × {context:,} tokens keep {whole / 1e9:,.4g} GB: {beside}."
    series = Series("growth", "tokens", "B", [(tokens, size(tokens)) for tokens in (2.0**i for i in range(8, 21))])
    return sentence, figures, (series,)
