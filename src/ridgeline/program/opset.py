"""The op table: for each kind of op its signature, shape rule, FLOPs and bytes.

One row per kind. `infer` gives the output shapes; `cost` prices the op for a step. The plain-torch meaning of
each kind lives in `backends/reference/ops.py`, and a contract test holds the two tables together. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import (
    ActivationAttrs,
    AttentionAttrs,
    Attrs,
    Dim,
    EmbedAttrs,
    KvWriteAttrs,
    NormAttrs,
    Plain,
    RopeAnglesAttrs,
    Shape,
    SoftcapAttrs,
    SplitHeadsAttrs,
)

WeightShape = tuple[int, ...]
InferRule = Callable[[Attrs, Sequence[Shape], Sequence[WeightShape]], tuple[Shape, ...]]

INDEX_BYTES = 8  # token ids, positions and row numbers are int64
FLOAT32_BYTES = 4  # rope angles and logits are float32 whatever the activations are


@dataclass(frozen=True, slots=True)
class Load:
    """What a step has to compute: (tokens, KV length after the step) of each span, and the rows that need logits."""

    spans: tuple[tuple[int, int], ...]
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.spans)

    @classmethod
    def decode(cls, batch: int, context: int) -> "Load":
        """One token for each of `batch` sequences whose KV length is `context` tokens after the step."""
        return cls(spans=((1, context),) * batch, num_rows=batch)


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of weights, activations and KV entries. Quantized weights may be fractional."""

    weight: float = 2
    activation: float = 2
    kv: float = 2


@dataclass(frozen=True, slots=True)
class OpCost:
    """FLOPs and bytes moved between memory and the cores, each operand counted once.

    A multiply-add is two FLOPs; exp and tanh, in activations and soft caps, stand for several by convention.
    """

    flops: float = 0
    weight_bytes: float = 0
    kv_read_bytes: float = 0
    kv_write_bytes: float = 0
    activation_bytes: float = 0

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    def __add__(self, other: "OpCost") -> "OpCost":
        return OpCost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
            self.activation_bytes + other.activation_bytes,
        )


@dataclass(frozen=True, slots=True)
class Operands:
    """An op's concrete sizes in one step: shapes of inputs, outputs and weights.

    `input_bytes` and `output_bytes` are per element of each operand; 0 where it does not cross memory.
    """

    attrs: Attrs
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    weights: tuple[WeightShape, ...]
    input_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    load: Load
    element: ElementBytes


@dataclass(frozen=True, slots=True)
class OpRow:
    """One row of the table. `summary` is its signature in words; outputs are as wide as activations, or float32."""

    attrs: type[Attrs]
    num_inputs: int
    num_weights: tuple[int, ...]
    summary: str
    infer: InferRule
    cost: Callable[[Operands], OpCost]
    float32_outputs: bool = False


def elements(shape: Sequence[int]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def _activations(x: Operands) -> float:
    shapes, widths = (*x.inputs, *x.outputs), (*x.input_bytes, *x.output_bytes)
    return sum(width * elements(shape) for shape, width in zip(shapes, widths))


def _all_weights(x: Operands) -> float:
    return x.element.weight * sum(elements(s) for s in x.weights)


def _pointwise(flops_per_output: float) -> Callable[[Operands], OpCost]:
    def cost(x: Operands) -> OpCost:
        flops = flops_per_output * sum(elements(s) for s in x.outputs)
        return OpCost(flops=flops, weight_bytes=_all_weights(x), activation_bytes=_activations(x))

    return cost


def _embed_cost(x: Operands) -> OpCost:
    """A table look-up reads only the rows it needs."""
    assert isinstance(x.attrs, EmbedAttrs)
    (out,) = map(elements, x.outputs)
    return OpCost(
        flops=0 if x.attrs.scale == 1.0 else out,
        weight_bytes=x.element.weight * out,
        activation_bytes=_activations(x),
    )


def _select_rows_cost(x: Operands) -> OpCost:
    """Rows that are not selected are not read."""
    moved = (x.input_bytes[0] + x.output_bytes[0]) * elements(x.outputs[0])
    return OpCost(activation_bytes=x.input_bytes[1] * elements(x.inputs[1]) + moved)


def _rope_angles_cost(x: Operands) -> OpCost:
    """One product and two functions for each pair of outputs."""
    return OpCost(flops=1.5 * sum(elements(s) for s in x.outputs), activation_bytes=_activations(x))


def _rope_cost(x: Operands) -> OpCost:
    """Two products and a sum for each rotated entry; the entries beyond pass through."""
    (tokens, num_heads, _), angles, _ = x.inputs
    return OpCost(flops=3 * tokens * num_heads * 2 * angles[1], activation_bytes=_activations(x))


def _matmul_cost(x: Operands) -> OpCost:
    """2 MNK, a bias being where the sums start; without rows the weights stay unread."""
    rows, (out_features, in_features) = x.inputs[0][0], x.weights[0]
    if not rows:
        return OpCost()
    return OpCost(2 * rows * out_features * in_features, _all_weights(x), activation_bytes=_activations(x))


def _kv_write_cost(x: Operands) -> OpCost:
    written = x.element.kv * sum(elements(s) for s in x.inputs)
    return OpCost(kv_write_bytes=written, activation_bytes=_activations(x))


def visible_keys(num_tokens: int, kv_length: int, window: int | None) -> tuple[int, int]:
    """(query-key pairs, distinct keys read) for the last `num_tokens` positions of a causal sequence of `kv_length`."""
    start = kv_length - num_tokens
    if window is None or kv_length <= window:
        return num_tokens * start + num_tokens * (num_tokens + 1) // 2, kv_length
    growing = max(0, window - start)  # tokens whose window still reaches position 0
    growing = min(growing, num_tokens)
    pairs = growing * start + growing * (growing + 1) // 2 + (num_tokens - growing) * window
    return pairs, min(kv_length, window + num_tokens - 1)


def _attention_cost(x: Operands) -> OpCost:
    """Keys and values come from the cache, not from the operands that name them."""
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
    return OpCost(flops=flops, kv_read_bytes=kv_read, activation_bytes=query_bytes)


def _free(x: Operands) -> OpCost:
    return OpCost()


def _same(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    return (inputs[0],)


def _same_pair(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    if inputs[0] != inputs[1]:
        raise ConfigError(f"operands differ in shape: {inputs[0]} and {inputs[1]}")
    return (inputs[0],)


def _norm_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    for weight in weights:
        if weight != (inputs[0][-1],):
            raise ConfigError(f"norm weight of shape {weight} over rows of {inputs[0][-1]}")
    return (inputs[0],)


def _rows_of_table(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    return ((*inputs[0], weights[0][1]),)


def _linear_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    out_features, in_features = weights[0]
    if inputs[0][-1] != in_features:
        raise ConfigError(f"linear weight [{out_features}, {in_features}] over rows of {inputs[0][-1]}")
    return ((*inputs[0][:-1], out_features),)


def _split_heads(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    assert isinstance(attrs, SplitHeadsAttrs)
    tokens, width = inputs[0]
    assert isinstance(width, int)
    return ((tokens, attrs.num_heads, width // attrs.num_heads),)


def _angles(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    assert isinstance(attrs, RopeAnglesAttrs)
    shape: Shape = (*inputs[0], len(attrs.frequencies))
    return (shape, shape)


def _attention_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    tokens, num_heads, head_dim = inputs[0]
    assert isinstance(num_heads, int)
    assert isinstance(head_dim, int)
    return ((tokens, num_heads * head_dim),)


def _selected_rows(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    rows: Dim = inputs[1][0]
    return ((rows, *inputs[0][1:]),)


def _nothing(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    return ()


OPSET: dict[str, OpRow] = {
    "embed": OpRow(EmbedAttrs, 1, (1,), "ids [T], table [V,H] -> scale * rows [T,H]", _rows_of_table, _embed_cost),
    "rmsnorm": OpRow(NormAttrs, 1, (1,), "x [..,H], w [H] -> [..,H]", _norm_shape, _pointwise(4)),
    "layernorm": OpRow(NormAttrs, 1, (2,), "x [..,H], w [H], b [H] -> [..,H]", _norm_shape, _pointwise(7)),
    "linear": OpRow(Plain, 1, (1, 2), "x [T,I], w [O,I], b [O]? -> [T,O]", _linear_shape, _matmul_cost),
    "split_heads": OpRow(SplitHeadsAttrs, 1, (0,), "x [T,N*D] -> [T,N,D], a view", _split_heads, _free),
    "rope_angles": OpRow(
        RopeAnglesAttrs, 1, (0,), "positions [T] -> cos, sin [T,D/2] fp32", _angles, _rope_angles_cost, True
    ),
    "rope": OpRow(Plain, 3, (0,), "x [T,N,D], cos, sin -> rotated [T,N,D]", _same, _rope_cost),
    "kv_write": OpRow(KvWriteAttrs, 2, (0,), "k, v [T,K,D] -> the cache", _nothing, _kv_write_cost),
    "attention": OpRow(
        AttentionAttrs,
        3,
        (0,),
        "q [T,N,D], and k, v as written, over the cache -> [T,N*D]",
        _attention_shape,
        _attention_cost,
    ),
    "add": OpRow(Plain, 2, (0,), "x, y -> x + y", _same_pair, _pointwise(1)),
    "activation": OpRow(ActivationAttrs, 1, (0,), "x -> act(x)", _same, _pointwise(8)),
    "gated_activation": OpRow(ActivationAttrs, 2, (0,), "gate, up -> act(gate) * up", _same_pair, _pointwise(9)),
    "select_rows": OpRow(Plain, 2, (0,), "x [T,H], rows [R] -> [R,H]", _selected_rows, _select_rows_cost),
    "lm_head": OpRow(Plain, 1, (1, 2), "x [R,H], w [V,H], b [V]? -> fp32 [R,V]", _linear_shape, _matmul_cost, True),
    "softcap": OpRow(SoftcapAttrs, 1, (0,), "x -> c * tanh(x / c)", _same, _pointwise(8), True),
}
