"""Softmax attention over keys and values in the cache."""

from ridgeline.program.lower.builder import Builder
from ridgeline.program.op import KvState
from ridgeline.program.ops.attention import AttentionAttrs, KvWriteAttrs, RopeAttrs
from ridgeline.program.ops.dense import ActivationAttrs, SplitHeadsAttrs
from ridgeline.spec.spec import GroupedQueryAttention


def lower_attention(b: Builder, at: str, mixer: GroupedQueryAttention, x: str) -> str:
    heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    q = _heads(b, f"{at}.q", mixer, heads, b.linear(f"{at}.q", x, heads * dim, mixer.qkv_bias))
    k = _heads(b, f"{at}.k", mixer, kv_heads, b.linear(f"{at}.k", x, kv_heads * dim, mixer.qkv_bias))
    v = b.linear(f"{at}.v", x, kv_heads * dim, mixer.qkv_bias)
    (v,) = b.emit("split_heads", f"{at}.v.heads", (v,), (), SplitHeadsAttrs(kv_heads))
    state = b.state(KvState(kv_heads, dim, mixer.window))
    b.emit("kv_write", f"{at}.kv_write", (k, v), (), KvWriteAttrs(state))
    attrs = AttentionAttrs(state, mixer.scale, mixer.window, mixer.softcap, mixer.alibi)
    (o,) = b.emit("attention", f"{at}.attention", (q, k, v), (), attrs)
    if mixer.output_gate:
        gate = b.linear(f"{at}.gate", x, heads * dim, mixer.qkv_bias)
        (o,) = b.emit("gated_activation", f"{at}.gated", (gate, o), (), ActivationAttrs("sigmoid"))
    return b.linear(f"{at}.o", o, b.spec.hidden_size, mixer.out_bias)


def _heads(b: Builder, at: str, mixer: GroupedQueryAttention, num_heads: int, x: str) -> str:
    """Queries or keys by head: normalised and rotated where the mixer says so."""
    (x,) = b.emit("split_heads", f"{at}.heads", (x,), (), SplitHeadsAttrs(num_heads))
    if mixer.qk_norm:
        x = b.norm(f"{at}_norm", mixer.qk_norm, x)
    if mixer.rope:
        cos, sin = b.rope_angles(mixer.rope)
        (x,) = b.emit("rope", f"{at}.rope", (x, cos, sin), (), RopeAttrs(mixer.rope.interleaved))
    return x
