"""Seconds per instruction of a tape -> OpTimings: which ops of the program they are, and what these hold in memory."""

from collections.abc import Iterator, Mapping, Sequence

from ridgeline.backends.native.compile import Part
from ridgeline.backends.native.settings import FOUR_BITS, KV_KINDS, KvKind, MatrixFormat, MatrixFormats, NativeSettings
from ridgeline.cost.efficiency import InputKind, OpTiming
from ridgeline.cost.roofline import bytes_per_weight
from ridgeline.program.op import Op, Program
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.program.ops.experts import expert_matrices
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.program.passes.fuse import Group
from ridgeline.program.pricing import ElementBytes
from ridgeline.quant.kv import entry_bytes

ROW_BYTES = 4  # activations between kernels are float32, and so are norms and biases
KV_PRODUCTS: Mapping[KvKind, InputKind] = {
    "f32": "f32",
    "bf16": "bf16",
    "int8": "int16",
    "fp8": "bf16",
    "int4": "int16",
}
KV_DTYPES = {kind: dtype for dtype, kind in KV_KINDS.items()}


class TapeTimings:
    """Knows what each part of a tape computes, worked out once: a timed step should cost no more than its clocks."""

    def __init__(self, program: Program, settings: NativeSettings, parts: Sequence[Part]) -> None:
        formats = MatrixFormats(settings, program)
        plain = ElementBytes(weight=ROW_BYTES, activation=ROW_BYTES, kv=ROW_BYTES)
        sample, end = OpTiming("sample", "sample", (), 0.0, plain, "f32"), parts[-1].end
        timings = [(_timing(program, formats, group), begin, end) for group, begin, end in parts]
        self._pieces = [*timings, (sample, end, end + 1)]

    def of(self, instruction_s: Sequence[float]) -> Iterator[OpTiming]:
        """Yield timings in order of execution, the sampling last, none of which is made before it is asked for."""
        for piece, begin, end in self._pieces:
            yield piece._replace(seconds=sum(instruction_s[begin:end]))


def _timing(program: Program, formats: MatrixFormats, group: Group) -> OpTiming:
    inputs: InputKind = "f32"
    weight = float(ROW_BYTES)
    matrices = [op.weights[0] for op in group.ops if op.kind in MATRIX_OPS]
    for op in group.ops:
        if op.kind in MATRIX_OPS:
            form = formats.of(*matrices)
            inputs, weight = _products(form), _weight_bytes(program, op.weights[0], form)
        elif op.kind == "experts":
            inputs, weight = _expert_formats(program, op, formats)
        elif op.kind == "embed":
            weight = _table_bytes(program, op, formats)
        elif op.kind == "attention":
            inputs = KV_PRODUCTS[formats.settings.kv]
        elif op.kind == "latent_attention":
            inputs, weight = KV_PRODUCTS[formats.settings.kv], _latent_bytes(program, op, formats)
    element = ElementBytes(weight=weight, activation=ROW_BYTES, kv=entry_bytes(program, KV_DTYPES[formats.settings.kv]))
    return OpTiming(group.label, group.kind, tuple(op.label for op in group.ops), 0.0, element, inputs)


def _products(form: MatrixFormat) -> InputKind:
    return "int4" if form.inputs == "int8" and form.kind in FOUR_BITS else form.inputs


def _table_bytes(program: Program, op: Op, formats: MatrixFormats) -> float:
    """Return the bytes of an entry of an embedding: as the head that shares it, or as it is stored."""
    heads = [other for other in program.ops if other.kind == "lm_head" and other.weights[0] == op.weights[0]]
    form = formats.of(op.weights[0]) if heads else formats.settings.table(op.weights[0])
    if form is not None:
        return _weight_bytes(program, op.weights[0], form)
    return 2.0 if formats.settings.dtype == "bfloat16" else 4.0


def _expert_formats(program: Program, op: Op, formats: MatrixFormats) -> tuple[InputKind, float]:
    """Return what gate and up multiply, and the mean bytes of an entry of the three matrices, equally large."""
    forms = [(names, formats.of(*names)) for names in expert_matrices(op)]
    each = [_weight_bytes(program, name, form) for names, form in forms for name in names]
    return _products(forms[0][1]), sum(each) / len(each)


def _latent_bytes(program: Program, op: Op, formats: MatrixFormats) -> float:
    """Return the bytes of an entry of W_k and W_v as the absorbed form reads them."""
    sizes = LatentSizes.of_op(program, op)
    keys = sizes.nope_dim / (sizes.nope_dim + sizes.value_dim)
    values = _weight_bytes(program, op.weights[0], formats.of(op.weights[0]))
    return keys * _weight_bytes(program, op.weights[0], formats.settings.plain) + (1 - keys) * values


def _weight_bytes(program: Program, name: str, form: MatrixFormat) -> float:
    """Return the bytes of an entry of a matrix."""
    return bytes_per_weight(form.kind, program.weights[name][-1], form.group, zero_points=form.zero_points)
