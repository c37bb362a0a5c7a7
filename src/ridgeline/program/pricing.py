"""Cost of an op in a step: the sizes that a cost rule sees, and the FLOPs and bytes that it returns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ridgeline.program.op import Attrs, Shape

WeightShape = tuple[int, ...]
InferRule = Callable[[Any, Sequence[Shape], Sequence[WeightShape]], tuple[Shape, ...]]
"""(attributes of the row's class, shapes of the inputs, of the weights) -> shapes of the outputs."""

INDEX_BYTES = 8  # token ids, positions and row numbers are int64
FLOAT32_BYTES = 4  # rope angles and logits are float32 whatever the activations are


@dataclass(frozen=True, slots=True)
class Load:
    """Counts the work of a step: (tokens, KV length after the step) of each span, and the rows that need logits."""

    spans: tuple[tuple[int, int], ...]
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.spans)

    @classmethod
    def decode(cls, batch: int, context: int) -> "Load":
        """Return one token for each of `batch` sequences whose KV length is `context` tokens after the step."""
        return cls(spans=((1, context),) * batch, num_rows=batch)


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of weights, activations and KV entries; those of quantized weights may be fractional."""

    weight: float = 2
    activation: float = 2
    kv: float = 2


@dataclass(frozen=True, slots=True)
class OpCost:
    """FLOPs, and the bytes that are moved between memory and the cores, each operand counted once.

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

    def __mul__(self, factor: float) -> "OpCost":
        return OpCost(*(part * factor for part in astuple(self)))


@dataclass(frozen=True, slots=True)
class Operands:
    """An op's sizes as they are in one step: shapes of inputs, outputs and weights.

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
    """One row of the table; a comment above it has the signature in words.

    Outputs are as wide as activations, or float32; weights are as wide as the model's, or float32 in every model.
    """

    attrs: type[Attrs]
    num_inputs: int
    num_weights: tuple[int, ...]
    infer: InferRule
    cost: Callable[[Operands], OpCost]
    float32_outputs: bool = False
    float32_weights: bool = False


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)


def activation_bytes(x: Operands) -> float:
    shapes, widths = (*x.inputs, *x.outputs), (*x.input_bytes, *x.output_bytes)
    return sum(width * elements(shape) for shape, width in zip(shapes, widths))


def weight_bytes(x: Operands) -> float:
    return x.element.weight * sum(elements(s) for s in x.weights)


def pointwise(flops_per_output: float) -> Callable[[Operands], OpCost]:
    def cost(x: Operands) -> OpCost:
        flops = flops_per_output * sum(elements(s) for s in x.outputs)
        return OpCost(flops=flops, weight_bytes=weight_bytes(x), activation_bytes=activation_bytes(x))

    return cost


def free(x: Operands) -> OpCost:
    return OpCost()
