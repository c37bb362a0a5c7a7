"""State-space and linear-attention mixers. Weights that are fused on disk are split when they are loaded.

A mixer has one recurrent state: a part for each convolution, and last the part of its recurrence.
"""

from ridgeline.program.lower.builder import Builder
from ridgeline.program.op import RecurrentState
from ridgeline.program.ops.dense import ActivationAttrs, SplitHeadsAttrs
from ridgeline.program.ops.recurrent import CausalConvAttrs, GatedNormAttrs, RecurrentAttrs, RetentionAttrs, SsdAttrs
from ridgeline.spec.spec import Activation, GatedDeltaNet, LightningAttention, Mamba, Mamba2


def lower_mamba(b: Builder, prefix: str, mixer: Mamba, x: str) -> str:
    inner, size = mixer.inner_size, mixer.state_size
    state = b.state(RecurrentState(((inner, mixer.conv_taps - 1), (inner, size)), (inner, 2 * inner + size)))
    z = b.linear(f"{prefix}.z", x, inner, mixer.bias)
    x = b.linear(f"{prefix}.x", x, inner, mixer.bias)
    x = _conv(b, f"{prefix}.conv", CausalConvAttrs(state, 0, mixer.activation), x, mixer.conv_taps, mixer.conv_bias)
    inputs: list[str] = []
    for name, width in (("dt_low", mixer.dt_rank), ("b", size), ("c", size)):
        y = b.linear(f"{prefix}.{name}", x, width, False)
        inputs.append(y if mixer.inner_norm is None else b.norm(f"{prefix}.{name}_norm", mixer.inner_norm, y))
    low, key, query = inputs
    dt = b.linear(f"{prefix}.dt", low, inner, True)
    weights = (b.weight(f"{prefix}.A_log", inner, size), b.weight(f"{prefix}.D", inner))
    (y,) = b.emit("selective_scan", f"{prefix}.scan", (x, dt, key, query), weights, RecurrentAttrs(state, 1))
    (y,) = b.emit("gated_activation", f"{prefix}.gate", (z, y), (), ActivationAttrs(mixer.activation))
    return b.linear(f"{prefix}.out", y, b.spec.hidden_size, mixer.bias)


def lower_mamba2(b: Builder, prefix: str, mixer: Mamba2, x: str) -> str:
    heads, groups, size, taps = mixer.num_heads, mixer.num_groups, mixer.state_size, mixer.conv_taps
    inner = heads * mixer.head_dim
    parts = ((inner, taps - 1), (groups * size, taps - 1), (groups * size, taps - 1), (heads, mixer.head_dim, size))
    state = b.state(RecurrentState(parts, (inner, groups * size, groups * size, inner + heads + groups * size)))
    z = b.linear(f"{prefix}.z", x, inner, mixer.bias)
    channels: list[str] = []
    for part, (name, width, count) in enumerate((("x", inner, heads), ("b", size, groups), ("c", size, groups))):
        width = width if count == heads else width * groups
        y = b.linear(f"{prefix}.{name}", x, width, mixer.bias)
        attrs = CausalConvAttrs(state, part, mixer.activation)
        y = _conv(b, f"{prefix}.conv_{name}", attrs, y, taps, mixer.conv_bias)
        channels.append(_heads(b, y, count))
    dt = b.linear(f"{prefix}.dt", x, heads, mixer.bias)
    weights = tuple(b.weight(f"{prefix}.{name}", heads) for name in ("A_log", "D", "dt_bias"))
    attrs = SsdAttrs(state, 3, *mixer.dt_limits)
    (y,) = b.emit("ssd", f"{prefix}.scan", (channels[0], dt, *channels[1:]), weights, attrs)
    norm = GatedNormAttrs(mixer.norm_eps, inner // groups, norm_before_gate=False)
    (y,) = b.emit("gated_norm", f"{prefix}.norm", (y, z), (b.weight(f"{prefix}.norm.weight", inner),), norm)
    return b.linear(f"{prefix}.out", y, b.spec.hidden_size, mixer.bias)


def lower_gated_delta_net(b: Builder, prefix: str, mixer: GatedDeltaNet, x: str) -> str:
    keys, heads, taps = mixer.num_key_heads, mixer.num_value_heads, mixer.conv_taps
    sizes = {"q": (keys, mixer.key_dim), "k": (keys, mixer.key_dim), "v": (heads, mixer.value_dim)}
    convs = tuple((count * size, taps - 1) for count, size in sizes.values())
    k, v = keys * mixer.key_dim, heads * mixer.value_dim
    state = b.state(RecurrentState((*convs, (heads, mixer.key_dim, mixer.value_dim)), (k, k, v, k + v + 2 * heads)))
    channels: list[str] = []
    for part, (name, (count, size)) in enumerate(sizes.items()):
        y = b.linear(f"{prefix}.{name}", x, count * size, False)
        y = _conv(b, f"{prefix}.conv_{name}", CausalConvAttrs(state, part, mixer.activation), y, taps, False)
        channels.append(_heads(b, y, count))
    decay, beta, z = (
        b.linear(f"{prefix}.{name}", x, width, False)
        for name, width in (("a", heads), ("b", heads), ("z", heads * mixer.value_dim))
    )
    weights = tuple(b.weight(f"{prefix}.{name}", heads) for name in ("A_log", "dt_bias"))
    (y,) = b.emit("delta_rule", f"{prefix}.rule", (*channels, decay, beta), weights, RecurrentAttrs(state, 3))
    norm = GatedNormAttrs(mixer.norm_eps, mixer.value_dim, norm_before_gate=True)
    (y,) = b.emit("gated_norm", f"{prefix}.norm", (y, z), (b.weight(f"{prefix}.norm.weight", mixer.value_dim),), norm)
    return b.linear(f"{prefix}.out", y, b.spec.hidden_size, False)


def lower_lightning_attention(b: Builder, prefix: str, mixer: LightningAttention, x: str) -> str:
    heads, dim = mixer.num_heads, mixer.head_dim
    state = b.state(RecurrentState(((heads, dim, dim),), (2 * heads * dim,)))
    qkv = tuple(_heads(b, _activated(b, f"{prefix}.{name}", x, heads * dim, mixer.activation), heads) for name in "qkv")
    (y,) = b.emit("retention", f"{prefix}.retention", qkv, (), RetentionAttrs(state, 0, mixer.rates))
    y = b.norm(f"{prefix}.norm", mixer.norm, y)
    gate = b.linear(f"{prefix}.gate", x, heads * dim, False)
    (y,) = b.emit("gated_activation", f"{prefix}.gated", (gate, y), (), ActivationAttrs("sigmoid"))
    return b.linear(f"{prefix}.out", y, b.spec.hidden_size, False)


def _activated(b: Builder, prefix: str, x: str, width: int, activation: Activation) -> str:
    x = b.linear(prefix, x, width, False)
    return b.emit("activation", f"{prefix}.act", (x,), (), ActivationAttrs(activation))[0]


def _heads(b: Builder, x: str, count: int) -> str:
    return b.emit("split_heads", f"{x}.heads", (x,), (), SplitHeadsAttrs(count))[0]


def _conv(b: Builder, prefix: str, attrs: CausalConvAttrs, x: str, taps: int, bias: bool) -> str:
    width = b.width(x)
    weights = b.weights(prefix, (width, taps), (width,) if bias else None)
    return b.emit("causal_conv", prefix, (x,), weights, attrs)[0]
