"""Ops that attend over keys and values in the cache, and those of rotary positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Attrs, Shape, dims_of
from ridgeline.program.pricing import OpCost, Operands, OpRow, WeightShape, activation_bytes, elements, weight_bytes
from ridgeline.spec.rope import frequencies
from ridgeline.spec.spec import Rope


@dataclass(frozen=True, slots=True)
class RopeAnglesAttrs(Attrs):
    """Angular frequencies in radians per position; cos and sin are multiplied by the factor.

    `rope` is what they were computed from for the program's context length; see `passes/context.py`.
    """

    frequencies: tuple[float, ...] = field(repr=False)
    scale: float = 1.0
    rope: Rope | None = field(default=None, repr=False)

    @classmethod
    def of_rope(cls, rope: Rope, context_length: int) -> "RopeAnglesAttrs":
        """Return the angles of `rope` in contexts of up to `context_length` tokens.

        Raises ConfigError for parameters that describe no frequencies.
        """
        table, scale = frequencies(rope, context_length)
        return cls(tuple(table.astype(np.float64).tolist()), scale, rope)


@dataclass(frozen=True, slots=True)
class RopeAttrs(Attrs):
    """The entries of a head that are rotated: 2 * len(cos) from `offset` on, as two halves or as interleaved pairs."""

    interleaved: bool = False
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CacheWriteAttrs(Attrs):
    """Keys and values, or latents and rotated keys, go to state number `state`."""

    state: int


@dataclass(frozen=True, slots=True)
class AttentionAttrs(Attrs):
    """Queries attend to KV state number `state`; window, softcap and slopes as in GroupedQueryAttention."""

    state: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


def _rope_angles_cost(x: Operands) -> OpCost:
    """Count one product and two functions for each pair of outputs."""
    return OpCost(flops=1.5 * sum(elements(s) for s in x.outputs), activation_bytes=activation_bytes(x))


def _rope_cost(x: Operands) -> OpCost:
    """Count two products and a sum for each rotated entry; the entries beyond pass through."""
    (tokens, num_heads, _), angles, _ = x.inputs
    return OpCost(flops=3 * tokens * num_heads * 2 * angles[1], activation_bytes=activation_bytes(x))


def cache_write_cost(x: Operands) -> OpCost:
    """Count what is written to the cache, in its own width."""
    written = x.element.kv * sum(elements(s) for s in x.inputs)
    return OpCost(kv_write_bytes=written, activation_bytes=activation_bytes(x))


def visible_keys(num_tokens: int, kv_length: int, window: int | None) -> tuple[int, int]:
    """Return (query-key pairs, distinct keys read) of the last `num_tokens` of `kv_length` causal positions."""
    start = kv_length - num_tokens
    if window is None or kv_length <= window:
        return num_tokens * start + num_tokens * (num_tokens + 1) // 2, kv_length
    growing = max(0, window - start)  # tokens whose window still reaches position 0
    growing = min(growing, num_tokens)
    pairs = growing * start + growing * (growing + 1) // 2 + (num_tokens - growing) * window
    return pairs, min(kv_length, window + num_tokens - 1)


def _attention_cost(x: Operands) -> OpCost:
    """Count keys and values as read from the cache, not from the operands that name them."""
    attrs = x.attrs
    assert isinstance(attrs, AttentionAttrs)
    _, num_heads, head_dim = x.inputs[0]
    num_kv_heads = x.inputs[1][1]
    flops = kv_read = 0.0
    for num_tokens, kv_length in x.load.spans:
        pairs, keys = visible_keys(num_tokens, kv_length, attrs.window)
        flops += num_heads * pairs * (4 * head_dim + 5)  # two dot products, scale and softmax
        kv_read += 2 * keys * num_kv_heads * head_dim * x.element.kv
    query_bytes = x.input_bytes[0] * elements(x.inputs[0]) + x.output_bytes[0] * elements(x.outputs[0])
    return OpCost(flops, weight_bytes(x), kv_read, activation_bytes=query_bytes)


def _angles(attrs: RopeAnglesAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    shape: Shape = (*inputs[0], len(attrs.frequencies))
    return (shape, shape)


def _rope_shape(attrs: RopeAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (_, head_dim), (pairs,) = map(dims_of, inputs[:2])
    if attrs.offset + 2 * pairs > head_dim:
        raise ConfigError(f"heads of {head_dim} entries cannot turn {2 * pairs} from entry {attrs.offset} on")
    return (inputs[0],)


def _attention_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    num_heads, head_dim = dims_of(inputs[0])
    if any(weight != (num_heads,) for weight in weights):
        raise ConfigError(f"sinks of shape {weights[0]} for {num_heads} query heads")
    return ((inputs[0][0], num_heads * head_dim),)


def nothing(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    return ()


ROWS: Mapping[str, OpRow] = {
    # positions [T] -> cos, sin [T,D/2] fp32
    "rope_angles": OpRow(RopeAnglesAttrs, 1, (0,), _angles, _rope_angles_cost, True),
    # x [T,N,D], cos, sin -> rotated [T,N,D]
    "rope": OpRow(RopeAttrs, 3, (0,), _rope_shape, _rope_cost),
    # k, v [T,K,D] -> the cache
    "kv_write": OpRow(CacheWriteAttrs, 2, (0,), nothing, cache_write_cost),
    # q [T,N,D], and k, v as written, over the cache, sinks [N]? -> [T,N*D]
    "attention": OpRow(AttentionAttrs, 3, (0, 1), _attention_shape, _attention_cost),
}
