"""The op table has for each kind of op its signature, shape rule, FLOPs and bytes."""

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from ridgeline.program import ops
from ridgeline.program.op import Program
from ridgeline.program.pricing import OpRow

AREAS: Mapping[str, Mapping[str, OpRow]] = {
    module.name: import_module(f"{ops.__name__}.{module.name}").ROWS for module in pkgutil.iter_modules(ops.__path__)
}
OPSET: Mapping[str, OpRow] = {kind: row for rows in AREAS.values() for kind, row in rows.items()}
assert len(OPSET) == sum(map(len, AREAS.values())), "two files of ops/ declare the same kind"


def float32_weights(program: Program) -> frozenset[str]:
    """Return the weights that stay float32 in every model: small vectors in whose rounding it would drift."""
    return frozenset(name for op in program.ops if OPSET[op.kind].float32_weights for name in op.weights)
