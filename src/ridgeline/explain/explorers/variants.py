"""Kinds of attention by what they keep of a token: all heads, groups, one head, a latent, a window."""

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Figure, Found
from ridgeline.program.op import KvState, LatentState


def explore(
    heads: int = 64,
    head_dim: int = 128,
    kv_heads: int = 8,
    latent_dim: int = 512,
    rope_dim: int = 64,
    context: int = 32768,
    window: int = 4096,
    sliding_layers: int = 6,
) -> Found:
    """Ask each kind of state what a token takes."""
    if kv_heads > heads:
        raise ConfigError(f"variants: {kv_heads} KV heads for {heads} query heads: at most as many")

    def token_bytes(kv_heads: int) -> int:
        return KvState(kv_heads, head_dim, None).bytes_per_token(2)

    latent = LatentState(latent_dim, rope_dim).bytes_per_token(2)
    full, cached = token_bytes(heads), min(window, context)
    mixed = (context + sliding_layers * cached) / ((1 + sliding_layers) * context)
    figures = (
        Figure("mha", full, "B", f"2 · {heads} · {head_dim} · 2 bytes", "counted"),
        Figure("gqa", token_bytes(kv_heads), "B", f"{kv_heads} KV heads", "counted"),
        Figure("mqa", token_bytes(1), "B", "one KV head", "counted"),
        Figure("mla", latent, "B", f"({latent_dim} + {rope_dim}) · 2 bytes", "counted"),
        Figure(
            "shared_layers", token_bytes(kv_heads) / 2, "B", "GQA, two layers with the same keys and values", "counted"
        ),
        Figure("mixed_share", mixed, "share", f"one global layer to {sliding_layers} sliding ones", "counted"),
        Figure("sliding_share", cached / context, "share", f"{cached:,} of {context:,} tokens", "counted"),
    )
    sentence = (
        f"Against one key per query head, GQA keeps {full / token_bytes(kv_heads):.4g}×, MQA "
        f"{full / token_bytes(1):.4g}× and MLA {full / latent:.3g}× less of a token."
    )
    return sentence, figures, ()
