"""Add LoRA adapters to some linear layers of a Program."""

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.program.op import ADAPTERS, Op, Program


def adapter_weights(weight: str) -> tuple[str, str]:
    """Return the names of the adapters' two factors on the linear weight of that name."""
    prefix = weight.removesuffix(".weight")
    return f"{prefix}.lora_a", f"{prefix}.lora_b"


def adapted(program: Program, ranks: Mapping[str, int], num_adapters: int) -> Program:
    """Return `program` with an op `lora` behind every linear whose weight is in `ranks`.

    Its factors are weights [num_adapters, rank, inputs] and [num_adapters, rank, outputs] of the program.
    """
    ops: list[Op] = []
    shapes, weights = dict(program.shapes), dict(program.weights)
    for op in program.ops:
        rank = ranks.get(op.weights[0]) if op.kind == "linear" else None
        if rank is None:
            ops.append(op)
            continue
        (out,) = op.outputs
        base = f"{out}.base"
        factors = adapter_weights(op.weights[0])
        num_outputs, num_inputs = program.weights[op.weights[0]]
        weights[factors[0]] = (num_adapters, rank, num_inputs)
        weights[factors[1]] = (num_adapters, rank, num_outputs)
        shapes[base] = shapes[out]
        ops.append(replace(op, outputs=(base,)))
        ops.append(Op("lora", f"{op.label}.lora", (op.inputs[0], base, ADAPTERS), (out,), factors))
    return replace(program, ops=tuple(ops), shapes=shapes, weights=weights)
