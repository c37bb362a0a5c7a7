"""Run a program op by op with the functions of `ops/`. Called by every executor of this backend."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from torch import Tensor

from ridgeline.backends.reference import ops
from ridgeline.backends.reference.memory import ReferenceOp, StepMemory
from ridgeline.program.op import Op, Program
from ridgeline.program.opset import AREAS
from ridgeline.program.passes.liveness import liveness

REFERENCE_OPS: Mapping[str, ReferenceOp] = {
    kind: getattr(import_module(f"{ops.__name__}.{area}"), kind) for area, rows in AREAS.items() for kind in rows
}


def interpret(
    program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], memory: StepMemory
) -> dict[str, Tensor]:
    """Run the program's ops in order and return what is left: the result, the taps, and inputs that no op reads."""
    values = dict(inputs)
    for _ in interpret_each(program, weights, values, memory):
        pass
    return values


def interpret_each(
    program: Program, weights: Mapping[str, Tensor], values: dict[str, Tensor], memory: StepMemory
) -> Iterator[Op]:
    """Run `interpret` on `values`, which start as the inputs; yield each op once it is computed, beside its inputs."""
    lives = liveness([(op,) for op in program.ops], program.result, *program.taps)
    for op, ends in zip(program.ops, lives.ends, strict=True):
        compute(op, weights, values, memory)
        yield op
        for name in ends:
            del values[name]


def compute(op: Op, weights: Mapping[str, Tensor], values: dict[str, Tensor], memory: StepMemory) -> None:
    """Compute an op of what it reads among `values`, and put what it makes beside it."""
    inputs, own = [values[name] for name in op.inputs], [weights[name] for name in op.weights]
    values.update(zip(op.outputs, REFERENCE_OPS[op.kind](op.attrs, inputs, own, memory), strict=True))
