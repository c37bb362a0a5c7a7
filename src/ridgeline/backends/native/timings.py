"""Seconds per instruction of a tape -> OpTimings: which of the program's ops they are, and what those hold in memory.

Called by the executable when a step is profiled.
"""

from collections.abc import Mapping, Sequence

from ridgeline.backends.native.compile import Part, ReferencePart
from ridgeline.backends.native.settings import InputKind, KvKind, MatrixFormat, NativeSettings
from ridgeline.cost.roofline import OpTiming, bytes_per_weight
from ridgeline.program.op import Op, Program
from ridgeline.program.opset import ElementBytes
from ridgeline.program.passes.fuse import MATRIX_OPS, Group

ROW_BYTES = 4  # activations between kernels are float32, and so are norms and biases
SCALE_BYTES = 4  # of each token's and head's int8 keys, and values
KV_PRODUCTS: Mapping[KvKind, InputKind] = {"f32": "f32", "bf16": "bf16", "int8": "int16"}


def op_timings(
    program: Program,
    settings: NativeSettings,
    parts: Sequence[Part],
    instruction_s: Sequence[float],
    fallback_s: Mapping[str, float],
) -> list[OpTiming]:
    """Timings in the order of execution. `fallback_s` has the ops of the reference backend by label.

    The instruction after those of the parts is the drawing of tokens.
    """
    pieces: list[tuple[Group, float]] = []
    end = 0
    for part in parts:
        if isinstance(part, ReferencePart):
            pieces.append((Group(part.op.kind, part.op.label, (part.op,)), fallback_s[part.op.label]))
            continue
        end = part.end
        for group, seconds in zip(part.groups, instruction_s[part.begin : part.end], strict=True):
            if pieces and pieces[-1][0] is group:  # a group of several instructions
                pieces[-1] = (group, pieces[-1][1] + seconds)
            else:
                pieces.append((group, seconds))
    timings = [_timing(program, settings, group, seconds) for group, seconds in pieces]
    plain = ElementBytes(weight=ROW_BYTES, activation=ROW_BYTES, kv=ROW_BYTES)
    return [*timings, OpTiming("draw", "draw", (), instruction_s[end], plain, "f32")]


def _timing(program: Program, settings: NativeSettings, group: Group, seconds: float) -> OpTiming:
    inputs: InputKind = "f32"
    weight = float(ROW_BYTES)
    tables = {op.weights[0] for op in program.ops if op.kind == "embed"}
    for op in group.ops:
        if op.kind in MATRIX_OPS:
            form = settings.head if op.kind == "lm_head" or op.weights[0] in tables else settings.matrices
            inputs, weight = form.inputs, _weight_bytes(program, op, form)
        elif op.kind == "embed":
            weight = _table_bytes(program, op, settings)
        elif op.kind == "attention":
            inputs = KV_PRODUCTS[settings.kv]
    element = ElementBytes(weight=weight, activation=ROW_BYTES, kv=_kv_bytes(program, settings))
    return OpTiming(group.label, group.kind, tuple(op.label for op in group.ops), seconds, element, inputs)


def _table_bytes(program: Program, op: Op, settings: NativeSettings) -> float:
    """Of an entry of a token or position table: as the head that shares it, or as it is stored."""
    shared = any(other.kind == "lm_head" and other.weights[0] == op.weights[0] for other in program.ops)
    form = settings.head if shared else settings.embeddings
    if form is not None:
        return _weight_bytes(program, op, form)
    return 2.0 if settings.dtype == "bfloat16" else 4.0


def _weight_bytes(program: Program, op: Op, form: MatrixFormat) -> float:
    num_inputs = program.weights[op.weights[0]][1]
    return bytes_per_weight(form.kind, num_inputs, form.group, zero_points=form.zero_points)


def _kv_bytes(program: Program, settings: NativeSettings) -> float:
    """Of an entry of keys or values."""
    if settings.kv == "int8":
        return 1.0 + SCALE_BYTES / program.states[0].head_dim
    return 2.0 if settings.kv == "bf16" else 4.0
