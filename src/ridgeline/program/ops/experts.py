"""Ops that choose experts for each token, and run them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Attrs, Op, Plain, Program, Shape, dims_of
from ridgeline.program.pricing import OpCost, Operands, OpRow, WeightShape, activation_bytes, elements, weight_bytes
from ridgeline.spec.spec import Activation, ClampedSwiGlu, Routing


@dataclass(frozen=True, slots=True)
class RouteAttrs(Attrs):
    routing: Routing


@dataclass(frozen=True, slots=True)
class ExpertsAttrs(Attrs):
    """An expert is down(act(gate) * up), or down(f(gate, up)) of a function of both."""

    activation: Activation | ClampedSwiGlu


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return how many experts `num_tokens` tokens go to, on average, if choices are uniform and independent."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def routers(program: Program) -> frozenset[str]:
    """Return the matrices that make the logits of routes. They are small, and what they decide is all or nothing."""
    logits = {op.inputs[0] for op in program.ops if op.kind == "route"}
    return frozenset(op.weights[0] for op in program.ops if op.kind == "linear" and op.outputs[0] in logits)


def expert_matrices(op: Op) -> tuple[Sequence[str], Sequence[str]]:
    """Return the weights of experts that are computed as one matrix: gate and up, and down."""
    return op.weights[:2], op.weights[2:3]


def _route_shape(attrs: RouteAttrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (num_experts,) = dims_of(inputs[0])
    attrs.routing.check(num_experts)
    if any(weight != (num_experts,) for weight in weights):
        raise ConfigError(f"selection bias of shape {weights[0]} for {num_experts} experts")
    return ((inputs[0][0], attrs.routing.top_k),) * 2


def _route_cost(x: Operands) -> OpCost:
    """Count a function of every logit; finding the best few is not counted."""
    return OpCost(8 * elements(x.inputs[0]), weight_bytes(x), activation_bytes=activation_bytes(x))


def _experts_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (width,), (ids, weights_of_ids) = dims_of(inputs[0]), inputs[1:]
    num_experts, size = weights[0][:2]
    expected: list[WeightShape] = [(num_experts, size, width), (num_experts, size, width), (num_experts, width, size)]
    expected += [(num_experts, size), (num_experts, size), (num_experts, width)]
    if list(weights) != expected[: len(weights)]:
        raise ConfigError(f"experts of shapes {list(weights)} over rows of {width}")
    if ids != weights_of_ids:
        raise ConfigError(f"operands differ in shape: {ids} and {weights_of_ids}")
    return (inputs[0],)


def _experts_cost(x: Operands) -> OpCost:
    """Count one expert for every routed row; an expert that no token goes to stays unread."""
    num_tokens, top_k = x.inputs[1]
    num_experts, size, width = x.weights[0]
    flops_per_row = 6 * width * size + 9 * size + 2 * width
    read = weight_bytes(x) * distinct_experts(num_experts, top_k, num_tokens) / num_experts
    return OpCost(num_tokens * top_k * flops_per_row, read, activation_bytes=activation_bytes(x))


def _gate_rows_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    if inputs[1] != (inputs[0][0], 1):
        raise ConfigError(f"a row's gate is one number, not {inputs[1][1:]}")
    return (inputs[0],)


def _gate_rows_cost(x: Operands) -> OpCost:
    return OpCost(elements(x.inputs[0]) + 8 * elements(x.inputs[1]), activation_bytes=activation_bytes(x))


ROWS: Mapping[str, OpRow] = {
    # logits [T,E], selection bias [E]? -> expert ids int32, weights fp32 [T,k]
    "route": OpRow(RouteAttrs, 1, (0, 1), _route_shape, _route_cost, float32_outputs=True, float32_weights=True),
    # x [T,H], ids, weights [T,k], gate, up [E,F,H], down [E,H,F], biases? -> [T,H]
    "experts": OpRow(ExpertsAttrs, 3, (3, 6), _experts_shape, _experts_cost),
    # x [T,H], g [T,1] -> sigmoid(g) * x
    "gate_rows": OpRow(Plain, 2, (0,), _gate_rows_shape, _gate_rows_cost),
}
