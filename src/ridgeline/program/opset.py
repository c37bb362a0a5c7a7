"""The op table has for each kind of op its signature, shape rule, FLOPs and bytes.

Put together from the files of `ops/`. `infer` gives the output shapes; `cost` prices the op for a step. A contract test
holds the rows and their reference functions in torch together. No torch.
"""

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from ridgeline.program import ops
from ridgeline.program.op import Program
from ridgeline.program.pricing import OpRow


def _table() -> Mapping[str, OpRow]:
    rows: dict[str, OpRow] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(ops.__path__)):
        added: Mapping[str, OpRow] = import_module(f"{ops.__name__}.{name}").ROWS
        assert not rows.keys() & added.keys(), f"ops/{name}.py declares a kind that another file has"
        rows.update(added)
    return rows


OPSET: Mapping[str, OpRow] = _table()


def float32_weights(program: Program) -> frozenset[str]:
    """Return the weights that stay float32 in every model: small vectors in whose rounding it would drift."""
    return frozenset(name for op in program.ops if OPSET[op.kind].float32_weights for name in op.weights)
