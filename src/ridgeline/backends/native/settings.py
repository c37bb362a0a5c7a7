"""How a native executable is built. Chosen by `engine/build.py` before the model is; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.program.op import Program
from ridgeline.program.ops.experts import routers

LAYOUT_VERSION = 5  # of packed weights; raised when their bytes change, so that packs on disk are built again

KvKind = Literal["f32", "bf16", "int8"]
MatrixKind = Literal["f32", "bf16", "int8", "int4", "int8_groups", "int4_minima"]
InputKind = Literal["f32", "bf16", "int16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """How a linear layer's weights are stored and in what its inputs are computed; see native/kernels/types.h.

    `group` is the inputs per scale of int8_groups and int4_minima, and of int4 with `zero_points` or symmetric.
    `stored`: the integers are the model file's own, and no others are rounded.
    """

    kind: MatrixKind
    inputs: InputKind
    group: int = 0
    zero_points: bool = False
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """`level` is the ISA level. `head` formats the output projection, and a tied embedding with it.

    With `deterministic` a request's results are bitwise the same in any batch, at any chunking and after a prefix hit.
    """

    level: str
    num_threads: int
    dtype: Literal["float32", "bfloat16"]  # of the model: what is not quantized, and what the reference ops compute in
    matrices: MatrixFormat
    head: MatrixFormat
    kv: KvKind
    deterministic: bool = False
    embeddings: MatrixFormat | None = None  # of a table that no head shares; None: plain rows of `dtype`
    kept: Mapping[str, MatrixFormat] = field(default_factory=dict[str, MatrixFormat])  # weights as the file has them

    def table(self, weight: str) -> MatrixFormat | None:
        """Of a token table that no head shares."""
        return self.kept.get(weight, self.embeddings)

    @property
    def plain(self) -> MatrixFormat:
        """Of weights that quantization leaves alone."""
        kind = "bf16" if self.dtype == "bfloat16" else "f32"
        return MatrixFormat(kind=kind, inputs=kind)


def format_of(settings: NativeSettings, program: Program, *weights: str) -> MatrixFormat:
    """How the matrices of linears, an lm_head or experts are stored; a router's are as the model has them.

    Several weights are one matrix, kept as the file has it only where that is the same for all of them.
    """
    if weights[0] in routers(program):
        return settings.plain
    outer = {op.weights[0] for op in program.ops if op.kind in ("embed", "lm_head")}
    default = settings.head if weights[0] in outer else settings.matrices
    kept = {settings.kept.get(name, default) for name in weights}
    return kept.pop() if len(kept) == 1 else default
