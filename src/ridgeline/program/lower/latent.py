"""Lower multi-head latent attention over compressed latents in the cache."""

from ridgeline.program.lower.builder import Builder
from ridgeline.program.op import LatentState
from ridgeline.program.ops.attention import CacheWriteAttrs, RopeAttrs
from ridgeline.program.ops.dense import SliceAttrs, SplitHeadsAttrs
from ridgeline.program.ops.latent import LatentAttentionAttrs
from ridgeline.spec.spec import LatentAttention


def lower_latent_attention(b: Builder, prefix: str, mixer: LatentAttention, x: str) -> str:
    heads, nope, rope, rank = mixer.num_heads, mixer.nope_dim, mixer.rope_dim, mixer.kv_rank
    angles = b.rope_angles(mixer.rope)
    compressed = x
    if mixer.q_rank is not None:
        compressed = b.linear(f"{prefix}.q_down", x, mixer.q_rank, mixer.bias)
        compressed = b.norm(f"{prefix}.q_norm", mixer.norm, compressed)
    q = b.linear(f"{prefix}.q", compressed, heads * (nope + rope), bias=False)
    (q,) = b.emit("split_heads", f"{prefix}.q.heads", (q,), (), SplitHeadsAttrs(heads))
    (q,) = b.emit("rope", f"{prefix}.q.rope", (q, *angles), (), RopeAttrs(mixer.rope.interleaved, offset=nope))
    kv = b.linear(f"{prefix}.kv_down", x, rank + rope, mixer.bias)
    (latent,) = b.emit("slice", f"{prefix}.latent", (kv,), (), SliceAttrs(0, rank))
    latent = b.norm(f"{prefix}.kv_norm", mixer.norm, latent)
    (k,) = b.emit("slice", f"{prefix}.k", (kv,), (), SliceAttrs(rank, rope))
    (k,) = b.emit("split_heads", f"{prefix}.k.heads", (k,), (), SplitHeadsAttrs(1))
    (k,) = b.emit("rope", f"{prefix}.k.rope", (k, *angles), (), RopeAttrs(mixer.rope.interleaved))
    state = b.state(LatentState(rank, rope))
    b.emit("latent_write", f"{prefix}.latent_write", (latent, k), (), CacheWriteAttrs(state))
    up = b.weight(f"{prefix}.kv_up.weight", heads * (nope + mixer.value_dim), rank)
    attrs = LatentAttentionAttrs(state, mixer.scale)
    (o,) = b.emit("latent_attention", f"{prefix}.attention", (q, latent, k), (up,), attrs)
    return b.linear(f"{prefix}.o", o, b.spec.hidden_size, mixer.bias)
