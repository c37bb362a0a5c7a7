"""torchao, as transformers saves it in safetensors: int4 with zeros that are floats, int8 in groups or rows, float8.

A matrix `X.weight` [N, K] is `X._weight_qdata` and other parts, and the file's metadata says under its name which type
of torchao's they are. Int4Tensor: int8 [N, K / 2], two's complement, the earlier in the low half, `scale` and
`zero_point` [K / g, N]: w = q * scale + zero_point; what kernels add, zero_point - 8 * scale, is rounded to float16.
IntxUnpackedToInt8Tensor: int8 [N, K] of fewer bits, both [N, K / g]: w = (q - zero_point) * scale. Int8Tensor and
Float8Tensor: a scale for each output or for blocks.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import StoredMatrix, nibbles
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint, metadata_of
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, matrix_entry, scale_type
from ridgeline.weights.packing.scaled import E4M3, INT8, Blocks, ScaledBytes

QDATA = "_weight_qdata"
BITS = {f"int{bits}": bits for bits in range(2, 9)}
TYPES = ("Int4Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor", "Float8Tensor")
WITHOUT_EFFECT = ("quant_type", "quant_type_kwargs", "modules_to_not_convert", "include_input_output_embeddings",
                  "untie_embedding_weights")  # fmt: skip


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*WITHOUT_EFFECT)  # the tensors say it
    said = {file: metadata_of(file) for file in {entry.file for entry in checkpoint.entries.values()}}
    found: list[PackedTensor] = []
    for name in [name for name in checkpoint.entries if name.endswith(QDATA)]:
        layer, file = name.removesuffix(f".{QDATA}"), checkpoint.entries[name].file
        try:
            about: dict[str, Any] = json.loads(said[file][f"{layer}.weight"])
            kind, block = str(about["_type"]), [int(each) for each in about["_data"]["block_size"]]
            bits = BITS[about["_data"]["target_dtype"]["_data"]] if kind == "IntxUnpackedToInt8Tensor" else 4
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"{file}: its metadata does not say what {layer}.weight is: {error!s:.200}") from error
        if kind not in TYPES or f"{layer}._weight_act_pre_scale" in checkpoint.entries:
            raise ConfigError(f"{file}: {layer}.weight is torchao's {kind:.100}; supported: {', '.join(TYPES)}")
        if len(block) != 2 or min(block) < 1:
            raise ModelLoadError(f"{file}: {layer}.weight has blocks of {block}; it must be a matrix")
        found.append(_packed(layer, checkpoint, kind, block, bits))
    return found


def _packed(layer: str, checkpoint: Checkpoint, kind: str, block: Sequence[int], bits: int) -> PackedTensor:
    entries = checkpoint.entries
    qdata, scale, zero = (f"{layer}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
    num_outputs, num_inputs = matrix_entry(entries, qdata).shape
    name, packed = f"{layer}.weight", kind == "Int4Tensor"
    if kind in ("Int8Tensor", "Float8Tensor"):
        if zero in entries and np.any(checkpoint.tensor(zero)):
            raise ConfigError(f"{entries[zero].file}: {layer}.weight has zero points, which torchao's {kind} has not")
        size = Blocks(*(each if each < most else 0 for each, most in zip(block, (num_outputs, num_inputs))))
        way = ScaledBytes(f"torchao's {kind}", INT8 if kind == "Int8Tensor" else E4M3, size)
        return way.packed(checkpoint, name, qdata, scale, unused=[zero, f"{layer}._weight_act_quant_scale"])
    groups = Groups(num_inputs * (2 if packed else 1), block[1])
    count = (groups.count, num_outputs) if packed else (num_outputs, groups.count)
    wanted: Wanted = {qdata: (INT8, (num_outputs, num_inputs)), scale: (FLOATS, count), zero: ((*FLOATS, *INT8), count)}
    checked(entries, wanted, f"torchao's {kind} in blocks of {block}")
    if block[0] != 1:
        raise ModelLoadError(
            f"{entries[qdata].file}: {layer}.weight has blocks of {block}; an output must have its own"
        )
    half = 1 << (bits - 1)
    zeros = float32(checkpoint.tensor(zero))
    if not packed and not np.isin(zeros, np.arange(-half, half)).all():
        raise ModelLoadError(f"{entries[zero].file}: {zero} has zero points that are no integers of {bits} bits")
    is_symmetric = not zeros.any()
    integers = Integers.of(
        groups, bits, "fixed" if is_symmetric else "minima" if packed else "points", scale_type(checkpoint, scale)
    )

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        data = parts[0][rows].view(np.uint8)
        codes = (nibbles(data) if packed else data) + np.uint8(half) & np.uint8(2 * half - 1)
        scales, zeros = (float32(part.T[rows] if packed else part[rows]) for part in parts[1:3])
        if is_symmetric:
            return integers.matrix(codes, scales)
        if not packed:
            return integers.matrix(codes, scales, (zeros + half).astype(np.uint8))
        with np.errstate(all="ignore"):
            return integers.matrix(codes, scales, minima_NG=zeros - scales * np.float32(half))

    return PackedTensor(name, (num_outputs, groups.num_inputs), (qdata, scale, zero), integers.form, matrix)
