"""Runs a program op by op: finds the meanings of all kinds in `meanings/`. Called by every executor of this backend."""

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module

import torch

from ridgeline.backends.reference import meanings
from ridgeline.backends.reference.memory import Meaning, StepMemory
from ridgeline.program.op import Op, Program


def _table() -> Mapping[str, Meaning]:
    table: dict[str, Meaning] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(meanings.__path__)):
        table.update(import_module(f"{meanings.__name__}.{name}").MEANINGS)
    return table


MEANINGS: Mapping[str, Meaning] = _table()


def interpret(
    program: Program, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], memory: StepMemory
) -> dict[str, torch.Tensor]:
    """Runs the program's ops in order and returns the values still alive: those that no op consumes."""
    values = dict(inputs)
    for _ in interpret_each(program, weights, values, memory):
        pass
    return values


def interpret_each(
    program: Program, weights: Mapping[str, torch.Tensor], values: dict[str, torch.Tensor], memory: StepMemory
) -> Iterator[Op]:
    """`interpret` on `values`, which start as the inputs; yields each op once it is computed."""
    last_use = {name: index for index, op in enumerate(program.ops) for name in op.inputs}
    for index, op in enumerate(program.ops):
        outputs = MEANINGS[op.kind](
            op.attrs, [values[name] for name in op.inputs], [weights[name] for name in op.weights], memory
        )
        values.update(zip(op.outputs, outputs, strict=True))
        for name in set(op.inputs):
            if last_use[name] == index:
                del values[name]
        yield op
