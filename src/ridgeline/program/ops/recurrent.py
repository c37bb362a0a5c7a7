"""State-space and linear-attention layers: ops that fold each token into a state of fixed size.

Legend: C channels · W taps of a convolution · I inner channels · H heads · G groups · N state size · K key size ·
P, V value size. Every op but `gated_norm` starts each span from part `part` of recurrent state `state` and leaves there
what the sequence's next span starts from: the state after its tokens, or, where they are drafts that may be taken back,
the state before them and behind it a log of the inputs that it depends on. The next span first applies those of the
tokens that were accepted. They compute in float32 whatever the activations are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Attrs, Shape, dims_of
from ridgeline.program.pricing import (
    FLOAT32_BYTES,
    OpCost,
    Operands,
    OpRow,
    WeightShape,
    activation_bytes,
    elements,
    pointwise,
    weight_bytes,
)
from ridgeline.spec.spec import Activation


@dataclass(frozen=True, slots=True)
class RecurrentAttrs(Attrs):
    """The op keeps part `part` of recurrent state number `state`."""

    state: int
    part: int


@dataclass(frozen=True, slots=True)
class CausalConvAttrs(RecurrentAttrs):
    """`activation`, where there is one, is applied to what the convolution gives."""

    activation: Activation | None


@dataclass(frozen=True, slots=True)
class SsdAttrs(RecurrentAttrs):
    """The step size softplus(dt + dt_bias) is clamped to [dt_min, dt_max]."""

    dt_min: float
    dt_max: float


@dataclass(frozen=True, slots=True)
class RetentionAttrs(RecurrentAttrs):
    """At every token the state of head h shrinks to exp(-rates[h]) of itself."""

    rates: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GatedNormAttrs(Attrs):
    """RMSNorm over runs of `group` entries, of x before it is multiplied by silu(z), or of the product."""

    eps: float
    group: int
    norm_before_gate: bool


def _recurrence(state: Callable[[Operands], int], flops_per_entry: float) -> Callable[[Operands], OpCost]:
    """Return the cost of an op with `state(x)` entries of state, `flops_per_entry` for each of them at every token.

    The state is read once for each span that continues a sequence, and written once for every span.
    """

    def cost(x: Operands) -> OpCost:
        num_entries = state(x)
        continued = sum(kv_length > num_tokens for num_tokens, kv_length in x.load.spans)
        return OpCost(
            flops=flops_per_entry * num_entries * x.load.num_tokens,
            weight_bytes=weight_bytes(x),
            kv_read_bytes=FLOAT32_BYTES * num_entries * continued,
            kv_write_bytes=FLOAT32_BYTES * num_entries * len(x.load.spans),
            activation_bytes=activation_bytes(x),
        )

    return cost


def _conv_cost(x: Operands) -> OpCost:
    """Count a multiply-add for each tap, of which one is the token itself; the activation after it."""
    assert isinstance(x.attrs, CausalConvAttrs)
    once = 2 if x.attrs.activation is None else 10
    return _taps_cost(x) + OpCost(flops=once * elements(x.outputs[0]))


_taps_cost = _recurrence(lambda x: x.weights[0][0] * (x.weights[0][1] - 1), 2)
_scan_cost = _recurrence(lambda x: elements(x.weights[0]), 10)
_ssd_cost = _recurrence(lambda x: elements(x.inputs[0][1:]) * x.inputs[2][-1], 5)
_delta_cost, _retention_cost = (_recurrence(lambda x: x.inputs[1][-1] * elements(x.inputs[2][1:]), n) for n in (7, 5))


def _conv_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    channels, taps = weights[0]
    if inputs[0][-1] != channels or any(bias != (channels,) for bias in weights[1:]) or taps < 2:
        raise ConfigError(f"convolution weights {weights} over rows of {inputs[0][-1]}; it needs two taps or more")
    return (inputs[0],)


def _scan_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    tokens, channels = inputs[0]
    size = inputs[2][-1]
    if list(inputs[1:]) != [inputs[0], (tokens, size), (tokens, size)] or list(weights) != [
        (channels, size),
        (channels,),
    ]:
        raise ConfigError(f"selective scan of {inputs} with weights {weights}")
    return (inputs[0],)


def _ssd_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (heads, size), (groups, _) = dims_of(inputs[0]), dims_of(inputs[2])
    if (
        inputs[1] != inputs[0][:2]
        or inputs[2] != inputs[3]
        or heads % groups
        or any(weight != (heads,) for weight in weights)
    ):
        raise ConfigError(f"state-space duality of {inputs} with weights {weights}")
    return ((inputs[0][0], heads * size),)


def _delta_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    heads, size = dims_of(inputs[2])
    per_head = inputs[2][:2]
    if (
        inputs[0] != inputs[1]
        or heads % dims_of(inputs[0])[0]
        or list(inputs[3:]) != [per_head, per_head]
        or any(weight != (heads,) for weight in weights)
    ):
        raise ConfigError(f"delta rule of {inputs} with weights {weights}")
    return ((inputs[0][0], heads * size),)


def _retention_shape(
    attrs: RetentionAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]
) -> tuple[Shape, ...]:
    heads, size = dims_of(inputs[2])
    if inputs[0] != inputs[1] or inputs[0][1] != heads or len(attrs.rates) != heads:
        raise ConfigError(f"retention of {inputs} with {len(attrs.rates)} decay rates")
    return ((inputs[0][0], heads * size),)


def _gated_norm_shape(
    attrs: GatedNormAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]
) -> tuple[Shape, ...]:
    (width,) = dims_of(inputs[0])
    if inputs[0] != inputs[1] or width % attrs.group or weights[0] not in ((width,), (attrs.group,)):
        raise ConfigError(f"gated norm of {inputs} with weight {weights[0]} in groups of {attrs.group}")
    return (inputs[0],)


ROWS: Mapping[str, OpRow] = {
    # x [T,C], w [C,W], b [C]? -> act(each channel over its last W tokens) [T,C]; keeps [C,W-1]
    "causal_conv": OpRow(CausalConvAttrs, 1, (1, 2), _conv_shape, _conv_cost),
    # x, dt [T,I], B, C [T,N], A_log [I,N], D [I] -> [T,I]; keeps [I,N]
    "selective_scan": OpRow(RecurrentAttrs, 4, (2,), _scan_shape, _scan_cost, float32_weights=True),
    # x [T,H,P], dt [T,H], B, C [T,G,N], A_log, D, dt_bias [H] -> [T,H*P]; keeps [H,P,N]
    "ssd": OpRow(SsdAttrs, 4, (3,), _ssd_shape, _ssd_cost, float32_weights=True),
    # q, k [T,Hk,K], v [T,H,V], a, b [T,H], A_log, dt_bias [H] -> [T,H*V]; keeps [H,K,V]
    "delta_rule": OpRow(RecurrentAttrs, 5, (2,), _delta_shape, _delta_cost, float32_weights=True),
    # q, k [T,H,K], v [T,H,V] -> [T,H*V]; keeps [H,K,V]
    "retention": OpRow(RetentionAttrs, 3, (0,), _retention_shape, _retention_cost),
    # x, z [T,W], w [W], or [group] for all groups -> x by norm and silu(z) [T,W]
    "gated_norm": OpRow(GatedNormAttrs, 2, (1,), _gated_norm_shape, pointwise(13)),
}
