"""Lower softmax attention over keys and values in the cache."""

from typing import Literal

from ridgeline.program.lower.builder import Builder, LayerKv
from ridgeline.program.op import KvState
from ridgeline.program.ops.attention import AttentionAttrs, CacheWriteAttrs, RopeAttrs
from ridgeline.program.ops.dense import ActivationAttrs, NormAttrs, SplitHeadsAttrs
from ridgeline.spec.spec import GroupedQueryAttention


def lower_attention(b: Builder, prefix: str, mixer: GroupedQueryAttention, x: str) -> str:
    """Lower attention; `prefix` is layers.<number>.attn."""
    q = _heads(b, prefix, "q", mixer, x)
    if mixer.kv_from is None:
        b.layer_kv[prefix] = _keys_and_values(b, prefix, mixer, x)
    state, k, v = b.layer_kv[prefix if mixer.kv_from is None else f"layers.{mixer.kv_from}.attn"]
    attrs = AttentionAttrs(state, mixer.scale, mixer.window, mixer.softcap, mixer.alibi)
    sinks = (b.weight(f"{prefix}.sinks", mixer.num_heads),) if mixer.sinks else ()
    (o,) = b.emit("attention", f"{prefix}.attention", (q, k, v), sinks, attrs)
    if mixer.output_gate:
        gate = b.linear(f"{prefix}.gate", x, mixer.num_heads * mixer.head_dim, mixer.qkv_bias)
        (o,) = b.emit("gated_activation", f"{prefix}.gated", (gate, o), (), ActivationAttrs("sigmoid"))
    return b.linear(f"{prefix}.o", o, b.spec.hidden_size, mixer.out_bias)


def _keys_and_values(b: Builder, prefix: str, mixer: GroupedQueryAttention, x: str) -> LayerKv:
    """Compute keys and values and write them to the layer's own state."""
    k = _heads(b, prefix, "k", mixer, x)
    v = b.linear(f"{prefix}.v", x, mixer.num_kv_heads * mixer.head_dim, mixer.qkv_bias)
    (v,) = b.emit("split_heads", f"{prefix}.v.heads", (v,), (), SplitHeadsAttrs(mixer.num_kv_heads))
    state = b.state(KvState(mixer.num_kv_heads, mixer.head_dim, mixer.window))
    b.emit("kv_write", f"{prefix}.kv_write", (k, v), (), CacheWriteAttrs(state))
    return LayerKv(state, k, v)


def _heads(b: Builder, prefix: str, which: Literal["q", "k"], mixer: GroupedQueryAttention, x: str) -> str:
    """Return the queries or keys of `x` by head: normalised and rotated where the mixer says so."""
    label, norm = f"{prefix}.{which}", mixer.qk_norm
    num_heads = mixer.num_heads if which == "q" else mixer.num_kv_heads
    x = b.linear(label, x, num_heads * mixer.head_dim, mixer.qkv_bias)
    if norm and mixer.qk_norm_over == "row":
        x = b.norm(f"{label}_norm", norm, x)
    (x,) = b.emit("split_heads", f"{label}.heads", (x,), (), SplitHeadsAttrs(num_heads))
    if norm and mixer.qk_norm_over == "head":
        x = b.norm(f"{label}_norm", norm, x)
    if mixer.rope:
        cos, sin = b.rope_angles(mixer.rope)
        (x,) = b.emit("rope", f"{label}.rope", (x, cos, sin), (), RopeAttrs(mixer.rope.interleaved))
    if norm and mixer.qk_norm_over == "rotated head":
        # Nothing but the product follows, so the keys' weight goes to the queries: layers that share keys may differ.
        weights = [b.weight(f"{prefix}.{letter}_norm.weight", mixer.head_dim) for letter in "qk" if which == "q"]
        (x,) = b.emit("rmsnorm", f"{label}_norm", (x,), tuple(weights), NormAttrs(norm.eps))
    return x
