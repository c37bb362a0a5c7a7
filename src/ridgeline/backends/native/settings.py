"""How a native executable is built: formats of weights, inputs, keys and values. Chosen by `backend.py`; no torch."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ridgeline.backends.host import DtypeName
from ridgeline.core.config import EngineConfig, QuantizeConfig
from ridgeline.core.errors import ConfigError
from ridgeline.program.op import Program
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.program.ops.experts import expert_matrices, routers
from ridgeline.quant import StoredFormat, chosen_format, prequantized_matrices, scheme
from ridgeline.quant.inputs import chosen_inputs, input_group, why_decoded

if TYPE_CHECKING:
    from ridgeline.cost.roofline import WeightKind

FOUR_BITS = ("int4", "int4_minima", "int4_super_minima", "mxfp4", "nvfp4", "nf4", "fp4")  # kinds of matrices
KvKind = Literal["f32", "bf16", "int8", "fp8", "int4"]
InputKind = Literal["f32", "bf16", "int16", "int8"]
KV_KINDS: Mapping[str, KvKind] = {"float32": "f32", "bfloat16": "bf16", "int8": "int8", "fp8": "fp8", "int4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """How a linear layer's weights are stored and in what its inputs are computed; see native/kernels/types.h.

    `group` is the inputs per scale; 0 of floats and int8, whose outputs have one. `zero_points`: of int4.
    `stored`: the integers are the checkpoint's own; others are rounded by `scheme`, or the one named as the kind.
    `order`: the name of the checkpoint's order of the inputs, where it has one; the last `outliers` of them are of
    int16, beside int8.
    """

    kind: "WeightKind"
    inputs: InputKind
    group: int = 0
    zero_points: bool = False
    stored: bool = False
    scheme: str = ""
    order: str = ""
    outliers: int = 0

    @property
    def scheme_name(self) -> str:
        """The scheme that rounds matrices to this format."""
        return self.scheme or self.kind

    @property
    def input_group(self) -> int:
        """Consecutive inputs that share a scale; of floats, which have none, those whose weights do."""
        return input_group(self.group, self.inputs) if self.inputs in ("int16", "int8") else self.group

    @property
    def stored_format(self) -> StoredFormat:
        """The format that the scheme makes."""
        return scheme(self.scheme_name).stored_format(self.group or None, self.zero_points)


Variants = Mapping[str, Mapping[str, str]]
"""The kernels' variant of each choice, by the name of the kind of matrices that they compute."""


def kind_name(form: MatrixFormat) -> str:
    """Name what the choice of kernels depends on: "bf16", "int4.g128/int8", with zero points "int4.g128.z/int8"."""
    if form.kind in ("f32", "bf16"):
        return form.kind
    group = f".g{form.group}" if form.group and form.kind != "int8" else ""
    return f"{form.kind}{group}{'.z' if form.zero_points else ''}/{form.inputs}"


def matrix_format(
    form: StoredFormat, inputs: InputKind, dtype: DtypeName = "bfloat16", *, stored: bool = False, scheme: str = ""
) -> MatrixFormat | None:
    """Return the format in which native matrices hold what `form` stores exactly; None where there is none.

    8-bit floats are multiplied by inputs of `dtype`.
    """
    if why_decoded(form):
        return None
    kind: WeightKind
    if form.code == "e2m1":
        kind = "mxfp4" if form.scale == "e8m0" else "nvfp4"
    elif form.code in ("nf4", "fp4"):
        kind = form.code
    elif form.code == "e4m3":
        kind, inputs = form.code, _plain(dtype).inputs
    elif form.scale == "product":
        kind = "int4_super_minima" if form.bits == 4 else "int8_super" if form.zero == "fixed" else "int8_super_minima"
    elif form.bits == 8:
        kind = "int8_minima" if form.zero == "minima" else "int8_groups" if form.group else "int8"
    else:
        kind = "int4_minima" if form.zero == "minima" else "int4"
    points, other = form.zero == "points", "" if scheme == kind else scheme
    made = MatrixFormat(kind=kind, inputs=inputs, group=form.group, zero_points=points, stored=stored, scheme=other)
    return replace(made, order=form.order, outliers=form.outliers if inputs == "int8" else 0)


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
    prequantized: Mapping[str, MatrixFormat] = field(default_factory=dict[str, MatrixFormat])  # as the file has them
    variants: Variants = field(default_factory=dict[str, Mapping[str, str]])  # of a kind that is not there: the level's

    def table(self, weight: str) -> MatrixFormat | None:
        """Return the format of an embedding that no head shares."""
        return self.prequantized.get(weight, self.embeddings)

    @property
    def multiplies_bf16_in_float32(self) -> bool:
        """Tell whether attention, like the products of bfloat16 weights, multiplies bfloat16 in float32."""
        return self.variants.get("bf16", {}).get("product") == "float32"

    @property
    def plain(self) -> MatrixFormat:
        """Return the format of weights that quantization leaves alone."""
        return _plain(self.dtype)


def _plain(dtype: DtypeName) -> MatrixFormat:
    kind = "bf16" if dtype == "bfloat16" else "f32"
    return MatrixFormat(kind=kind, inputs=kind)


def settings_of(
    config: EngineConfig,
    level: str,
    num_threads: int,
    dtype: DtypeName,
    kv: KvKind,
    prequantized: Mapping[str, MatrixFormat],
) -> NativeSettings:
    """Return the settings that `config` asks for; `prequantized` are the formats of single weights."""
    assert dtype != "float16"
    plain, quantized = _plain(dtype), _quantized_format(config.quantize, dtype)
    outer = quantized if config.quantize.embeddings else None
    return NativeSettings(
        level=level,
        num_threads=num_threads,
        dtype=dtype,
        matrices=quantized or plain,
        head=outer or plain,
        embeddings=outer,
        kv=kv,
        deterministic=config.backend.deterministic,
        prequantized=prequantized,
    )


def _quantized_format(quantize: QuantizeConfig, dtype: DtypeName) -> MatrixFormat | None:
    """Raise ConfigError for a scheme whose matrices this backend cannot hold."""
    if quantize.scheme is None:
        return None
    form = chosen_format(quantize)
    matrices = matrix_format(form, chosen_inputs(quantize.inputs), dtype, scheme=quantize.scheme)
    if matrices is None:
        raise ConfigError(f"quantize={quantize.scheme}: the native backend has no matrices of {form}")
    return matrices


class MatrixFormats:
    """How the matrices of a program's linears, lm_head and experts are stored; a router's are as the model has them."""

    def __init__(self, settings: NativeSettings, program: Program) -> None:
        self.settings, self._routers = settings, routers(program)
        self._outer = {op.weights[0] for op in program.ops if op.kind in ("embed", "lm_head")}

    def alike(self, *weights: str) -> bool:
        """Tell whether these are stored alike, so that they can be one matrix."""
        return len({self.of(name) for name in weights}) <= 1

    def of(self, *weights: str) -> MatrixFormat:
        """Return the format of one matrix: as the file has it where that is the same for all of several weights."""
        if weights[0] in self._routers:
            return self.settings.plain
        default = self.settings.head if weights[0] in self._outer else self.settings.matrices
        formats = {self.settings.prequantized.get(name, default) for name in weights}
        return formats.pop() if len(formats) == 1 else default


def matrix_bytes(settings: NativeSettings, program: Program) -> Mapping[MatrixFormat, int]:
    """Return the bytes of the matrices of each format that a step multiplies by, scales and orders not counted."""
    formats, total = MatrixFormats(settings, program), Counter[MatrixFormat]()
    for op in program.ops:
        if op.kind in MATRIX_OPS:
            groups = [op.weights[:1]]
        elif op.kind == "experts":
            groups = expert_matrices(op)
        else:
            groups = [op.weights[:1]] if op.kind == "latent_attention" else []
        for names in groups:
            form = replace(formats.of(*names), order="", outliers=0)
            bits = {"f32": 32, "bf16": 16}.get(form.kind) or (4 if form.kind in FOUR_BITS else 8)
            total[form] += sum(math.prod(program.weights[name]) for name in names) * bits // 8
    return total


def prequantized_formats(
    forms: Mapping[str, StoredFormat], program: Program, inputs: InputKind, dtype: DtypeName
) -> Mapping[str, MatrixFormat]:
    """Return the weights that native matrices hold as a checkpoint stores them, of those that it stores in `forms`."""
    found = prequantized_matrices(forms, program)
    formats = {name: matrix_format(form, inputs, dtype, stored=True) for name, form in found.items()}
    return {name: form for name, form in formats.items() if form is not None}
