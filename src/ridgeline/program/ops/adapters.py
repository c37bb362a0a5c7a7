"""Low-rank adapters on linear layers, each token with its own (LoRA, arXiv 2106.09685)."""

from collections.abc import Mapping, Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Attrs, Plain, Shape
from ridgeline.program.pricing import OpCost, Operands, OpRow, WeightShape, activation_bytes, weight_bytes


def _lora_shape(attrs: Attrs, inputs: Sequence[Shape], weights: Sequence[WeightShape]) -> tuple[Shape, ...]:
    (_, num_inputs), (_, num_outputs) = inputs[0], inputs[1]
    (count, rank, wide), (same_count, same_rank, tall) = weights
    if (wide, tall, count, rank) != (num_inputs, num_outputs, same_count, same_rank):
        raise ConfigError(f"adapters of shapes {weights[0]} and {weights[1]} on a layer [{num_outputs}, {num_inputs}]")
    return (inputs[1],)


def _lora_cost(x: Operands) -> OpCost:
    """Count as if every token had an adapter and every adapter a token."""
    tokens, (_, rank, num_inputs), (_, _, num_outputs) = x.inputs[0][0], *x.weights
    flops = tokens * (2 * rank * (num_inputs + num_outputs) + num_outputs)
    return OpCost(flops=flops, weight_bytes=weight_bytes(x), activation_bytes=activation_bytes(x))


ROWS: Mapping[str, OpRow] = {
    # x [T,I], y [T,O], adapters [T], a [A,r,I], b [A,r,O] -> y + (x a^T) b of adapter n - 1, y where n is 0
    "lora": OpRow(Plain, 3, (2,), _lora_shape, _lora_cost)
}
