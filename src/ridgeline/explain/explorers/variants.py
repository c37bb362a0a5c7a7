"""Kinds of attention by what they keep of a token: all heads, groups, one head, a latent, a window."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ridgeline.core.errors import ConfigError
from ridgeline.explain.exploration import Exploration, Figure
from ridgeline.program.op import KvState, LatentState


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one layer, in bf16."""

    heads: Annotated[int, Meta(ge=1, le=1024, description="Query heads.")] = 64
    head_dim: Annotated[int, Meta(ge=1, le=1024, description="Entries of a head.")] = 128
    kv_heads: Annotated[int, Meta(ge=1, le=1024, description="KV heads of grouped-query attention.")] = 8
    latent_dim: Annotated[int, Meta(ge=1, le=1 << 16, description="Entries of a latent.")] = 512
    rope_dim: Annotated[int, Meta(ge=0, le=1024, description="Entries of its rotated key.")] = 64
    context: Annotated[int, Meta(ge=1, le=1 << 24, description="Tokens of a sequence.")] = 32768
    window: Annotated[int, Meta(ge=1, le=1 << 24, description="Window of sliding attention.")] = 4096


def explore(inputs: Inputs) -> Exploration:
    """Ask each kind of state what a token takes."""
    if inputs.kv_heads > inputs.heads:
        raise ConfigError(f"variants: {inputs.kv_heads} KV heads for {inputs.heads} query heads: at most as many")

    def token_bytes(kv_heads: int) -> int:
        return KvState(kv_heads, inputs.head_dim, None).bytes_per_token(2)

    latent = LatentState(inputs.latent_dim, inputs.rope_dim).bytes_per_token(2)
    full, cached = token_bytes(inputs.heads), min(inputs.window, inputs.context)
    figures = (
        Figure("mha", full, "B", f"2 · {inputs.heads} · {inputs.head_dim} · 2 bytes", "counted"),
        Figure("gqa", token_bytes(inputs.kv_heads), "B", f"{inputs.kv_heads} KV heads", "counted"),
        Figure("mqa", token_bytes(1), "B", "one KV head", "counted"),
        Figure("mla", latent, "B", f"({inputs.latent_dim} + {inputs.rope_dim}) · 2 bytes", "counted"),
        Figure(
            "sliding_share", cached / inputs.context, "share", f"{cached:,} of {inputs.context:,} tokens", "counted"
        ),
    )
    sentence = (
        f"Against one key per query head, GQA keeps {full / token_bytes(inputs.kv_heads):.4g}×, MQA "
        f"{full / token_bytes(1):.4g}× and MLA {full / latent:.3g}× less of a token."
    )
    return Exploration("variants", msgspec.structs.asdict(inputs), sentence, figures)
