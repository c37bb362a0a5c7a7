"""How a native executable is built. Chosen by `engine/build.py` before the model is; no torch."""

from dataclasses import dataclass
from typing import Literal

from ridgeline.program.op import Op, Program
from ridgeline.program.ops.experts import routers

LAYOUT_VERSION = 2  # of packed weights; raised when their bytes change, so that packs on disk are built again

KvKind = Literal["f32", "bf16", "int8"]
MatrixKind = Literal["f32", "bf16", "int8", "int4"]
InputKind = Literal["f32", "bf16", "int16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """How a linear layer's weights are stored and in what its inputs are computed; see native/kernels/types.h.

    `group` is the inputs per scale of int4, with `zero_points` or symmetric.
    """

    kind: MatrixKind
    inputs: InputKind
    group: int = 0
    zero_points: bool = False


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

    @property
    def plain(self) -> MatrixFormat:
        """Of weights that quantization leaves alone."""
        kind = "bf16" if self.dtype == "bfloat16" else "f32"
        return MatrixFormat(kind=kind, inputs=kind)


def format_of(settings: NativeSettings, program: Program, op: Op) -> MatrixFormat:
    """How the matrices of a linear, an lm_head or experts are stored; a router's are as the model has them."""
    tables = {other.weights[0] for other in program.ops if other.kind == "embed"}
    if op.kind == "lm_head" or op.weights[0] in tables:
        return settings.head
    if op.weights[0] in routers(program):
        return settings.plain
    return settings.matrices
