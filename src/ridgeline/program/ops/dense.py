"""Ops of every model: look-ups, norms, matrix products and what is done to each entry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Attrs, Plain, Shape, dims_of
from ridgeline.program.pricing import (
    OpCost,
    Operands,
    OpRow,
    WeightShape,
    activation_bytes,
    elements,
    free,
    pointwise,
    weight_bytes,
)
from ridgeline.spec.spec import Activation

NORMS = ("rmsnorm", "layernorm")  # kinds that normalise rows or heads
MATRIX_OPS = ("linear", "lm_head")  # kinds that multiply by a matrix, their first weight


@dataclass(frozen=True, slots=True)
class EmbedAttrs(Attrs):
    """`scale` is rounded to the dtype of the table before it multiplies.

    With a `vocab_size` a token's id is that of its row plus its type times this, and `of_types` looks up the type.
    """

    scale: float
    vocab_size: int = 0
    of_types: bool = False


@dataclass(frozen=True, slots=True)
class NormAttrs(Attrs):
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class AddRowAttrs(Attrs):
    """Row `row` of a table is added to every token."""

    row: int


@dataclass(frozen=True, slots=True)
class SplitHeadsAttrs(Attrs):
    """Selects [T, heads * head_dim] seen as [T, heads, head_dim]."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class ActivationAttrs(Attrs):
    function: Activation


@dataclass(frozen=True, slots=True)
class SoftcapAttrs(Attrs):
    cap: float


@dataclass(frozen=True, slots=True)
class SliceAttrs(Attrs):
    """Selects columns [offset, offset + size)."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ScaleAttrs(Attrs):
    factor: float


def _embed_cost(x: Operands) -> OpCost:
    """Count only the rows that a look-up in a table needs."""
    assert isinstance(x.attrs, EmbedAttrs)
    (out,) = map(elements, x.outputs)
    return OpCost(
        flops=0 if x.attrs.scale == 1.0 else out,
        weight_bytes=x.element.weight * out,
        activation_bytes=activation_bytes(x),
    )


def _add_row_cost(x: Operands) -> OpCost:
    """Count one row of the table as read."""
    row_bytes = x.element.weight * x.weights[0][1]
    return OpCost(flops=elements(x.outputs[0]), weight_bytes=row_bytes, activation_bytes=activation_bytes(x))


def _select_rows_cost(x: Operands) -> OpCost:
    """Count only the selected rows as read."""
    moved = (x.input_bytes[0] + x.output_bytes[0]) * elements(x.outputs[0])
    return OpCost(activation_bytes=x.input_bytes[1] * elements(x.inputs[1]) + moved)


def _matmul_cost(x: Operands) -> OpCost:
    """Count 2 MNK, a bias being where the sums start; without rows the weights stay unread."""
    rows, (out_features, in_features) = x.inputs[0][0], x.weights[0]
    if not rows:
        return OpCost()
    return OpCost(2 * rows * out_features * in_features, weight_bytes(x), activation_bytes=activation_bytes(x))


def _same(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    return (inputs[0],)


def _same_pair(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    if inputs[0] != inputs[1]:
        raise ConfigError(f"operands differ in shape: {inputs[0]} and {inputs[1]}")
    return (inputs[0],)


def _norm_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    """Accept a weight shared by all heads, or one for each head: [N, D] over [T, N, D]."""
    rows = inputs[0]
    for weight in weights:
        if weight not in (rows[-1:], rows[1:]):
            raise ConfigError(f"norm weight of shape {weight} over rows of {rows[-1]}")
    return (rows,)


def _same_width(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    if weights[0][1] != inputs[0][-1]:
        raise ConfigError(f"a table of rows of {weights[0][1]} over rows of {inputs[0][-1]}")
    return (inputs[0],)


def _linear_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    out_features, in_features = weights[0]
    if inputs[0][-1] != in_features:
        raise ConfigError(f"linear weight [{out_features}, {in_features}] over rows of {inputs[0][-1]}")
    return ((*inputs[0][:-1], out_features),)


def _split_heads(attrs: SplitHeadsAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (width,) = dims_of(inputs[0])
    return ((inputs[0][0], attrs.num_heads, width // attrs.num_heads),)


def _columns(attrs: SliceAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (width,) = dims_of(inputs[0])
    if not 0 <= attrs.offset < attrs.offset + attrs.size <= width:
        raise ConfigError(f"columns {attrs.offset} to {attrs.offset + attrs.size} of rows of {width}")
    return ((inputs[0][0], attrs.size),)


def _side_by_side(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (rows, width), (other_rows, other_width) = inputs
    if rows != other_rows or not isinstance(width, int) or not isinstance(other_width, int):
        raise ConfigError(f"operands differ in rows: {inputs[0]} and {inputs[1]}")
    return ((rows, width + other_width),)


ROWS: Mapping[str, OpRow] = {
    # ids [T], table [V,H] -> scale * rows [T,H]
    "embed": OpRow(EmbedAttrs, 1, (1,), lambda _, inputs, weights: ((*inputs[0], weights[0][1]),), _embed_cost),
    # x [..,H], product of weights [H] -> [..,H]
    "rmsnorm": OpRow(NormAttrs, 1, (0, 1, 2), _norm_shape, pointwise(4)),
    # x [..,H], w [H], b [H]? -> [..,H]
    "layernorm": OpRow(NormAttrs, 1, (1, 2), _norm_shape, pointwise(7)),
    # x [T,I], w [O,I], b [O]? -> [T,O]
    "linear": OpRow(Plain, 1, (1, 2), _linear_shape, _matmul_cost),
    # x [T,N*D] -> [T,N,D], a view
    "split_heads": OpRow(SplitHeadsAttrs, 1, (0,), _split_heads, free),
    # x [T,W] -> some of its columns [T,S], a view
    "slice": OpRow(SliceAttrs, 1, (0,), _columns, free),
    # x -> c * x
    "scale": OpRow(ScaleAttrs, 1, (0,), _same, pointwise(1)),
    # x [T,H], table [N,H] -> x + table[row]
    "add_row": OpRow(AddRowAttrs, 1, (1,), _same_width, _add_row_cost),
    # x [T,W], y [T,U] -> side by side [T,W+U]
    "concat": OpRow(Plain, 2, (0,), _side_by_side, pointwise(0)),
    # x, y -> x + y
    "add": OpRow(Plain, 2, (0,), _same_pair, pointwise(1)),
    # x -> act(x)
    "activation": OpRow(ActivationAttrs, 1, (0,), _same, pointwise(8)),
    # gate, up -> act(gate) * up
    "gated_activation": OpRow(ActivationAttrs, 2, (0,), _same_pair, pointwise(9)),
    # x [T,H], rows [R] -> [R,H]
    "select_rows": OpRow(Plain, 2, (0,), lambda _, inputs, __: ((*inputs[1], *inputs[0][1:]),), _select_rows_cost),
    # x [R,H], w [V,H], b [V]? -> fp32 [R,V]
    "lm_head": OpRow(Plain, 1, (1, 2), _linear_shape, _matmul_cost, True),
    # x -> c * tanh(x / c)
    "softcap": OpRow(SoftcapAttrs, 1, (0,), _same, pointwise(8), True),
}
