"""compressed-tensors, as LLM Compressor writes it: integers or floats of 2 to 8 bits, described group by group.

A layer X with N outputs and K inputs is one of these, `weight_scale` [N, G] unless it says otherwise:

    pack-quantized    X.weight_packed int32 [N, K bits / 32], the low bits first, each integer plus 2^(bits-1), and
                      X.weight_shape int64 [2]; zero points X.weight_zero_point int32 [N bits / 32, G] are packed alike
    int-quantized     X.weight int8 [N, K];        scales also [1], [N], [N, 1]; zero points int8
    float-quantized   X.weight float8 [N, K];      scales as above, or one for each block of outputs and inputs
    nvfp4, mxfp4      X.weight_packed uint8 [N, K / 2]; NVFP4's weight_global_scale divides its float8 scales
    mxfp8             X.weight float8 [N, K];      scales are exponents for groups of 32 inputs

and together the tensor [N, K] called `X.weight`: w = (q - z) * s. Which group of the settings describes a layer, its
name decides (packing/schemes.py), and what is stored must be what that says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import StoredFormat, StoredMatrix, from_e8m0
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.bits import unpacked, unpacked_lanes
from ridgeline.weights.packing.fp4 import packed_fp4
from ridgeline.weights.packing.parts import Groups, Wanted, checked, input_order, matrix_entry, order_name, scale_type
from ridgeline.weights.packing.scaled import E4M3, E8M0, INT8, ScaledBytes, same_scales
from ridgeline.weights.packing.schemes import WeightScheme, read_schemes

# Tensors of a layer about its inputs, which are rounded as --quantize-inputs says.
UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    schemes, entries = read_schemes(settings), checkpoint.entries
    layers = {
        name.rpartition(".")[0]: name
        for name, entry in entries.items()
        if name.endswith(".weight_packed") or (name.endswith(".weight") and entry.dtype in (*INT8, *E4M3))
    }
    return [_packed(checkpoint, layer, name, schemes.of(layer)) for layer, name in layers.items()]


def _packed(checkpoint: Checkpoint, layer: str, numbers: str, scheme: WeightScheme) -> PackedTensor:
    name, scales, entries = f"{layer}.weight", f"{layer}.weight_scale", checkpoint.entries
    unused = [part for part in (f"{layer}.{suffix}" for suffix in UNUSED) if part in entries]
    points = "" if scheme.symmetric else f"{layer}.weight_zero_point"
    match scheme.type, scheme.num_bits, entries[numbers].dtype:
        case "int", _, "I32":
            return _of_words(checkpoint, layer, scheme, unused)
        case "int", 8, "I8":
            way = ScaledBytes("int8", INT8, scheme.blocks)
            return way.packed(checkpoint, name, numbers, scales, points, unused)
        case "float", 8, "F8_E4M3":
            is_mx = scales in entries and entries[scales].dtype in E8M0
            way = ScaledBytes("fp8", E4M3, scheme.blocks)
            if is_mx:
                way = ScaledBytes("MXFP8", E4M3, scheme.blocks, E8M0, from_e8m0)
            return way.packed(checkpoint, name, numbers, scales, unused=unused)
        case "float", 4, "U8":
            overall = f"{layer}.weight_global_scale" if scheme.group_size == 16 else ""
            return packed_fp4(checkpoint, name, numbers, scales, overall, divides=True, unused=unused)
        case _:
            raise ModelLoadError(
                f"{entries[numbers].file}: {numbers} is {entries[numbers].dtype}; quantization_config says that it has "
                f"{scheme.num_bits} bits of type {scheme.type}"
            )


def _of_words(checkpoint: Checkpoint, layer: str, scheme: WeightScheme, unused: Sequence[str]) -> PackedTensor:
    """Check that the parts of a layer of packed integers fit together, and return them as one tensor."""
    packed, scales, shape, zeros, g_idx = (
        f"{layer}.weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
    )
    entries, bits = checkpoint.entries, scheme.num_bits
    what = f"pack-quantized {bits} bits"
    checked(entries, {packed: (("I32",), matrix_entry(entries, packed).shape), shape: (("I64", "I32"), (2,))}, what)
    num_outputs, num_inputs = map(int, checkpoint.tensor(shape))
    if num_outputs != entries[packed].shape[0] or num_inputs < 1:
        found = f"{shape} is {[num_outputs, num_inputs]}, and {packed} {list(entries[packed].shape)}"
        raise ModelLoadError(f"{entries[packed].file}: {found}; they do not fit together")
    groups, scale_shape = Groups(num_inputs, scheme.blocks.columns), scheme.blocks.shape((num_outputs, num_inputs))
    in_lanes = entries[packed].shape[1] != -(-num_inputs * bits // 32)

    def words_of(count: int) -> int:
        return -(-count // (32 // bits)) if in_lanes else -(-count * bits // 32)

    actual = entries[scales].shape if scales in entries else scale_shape
    wanted: Wanted = {
        packed: (("I32",), (num_outputs, words_of(num_inputs))),
        scales: (FLOATS, same_scales(actual, scale_shape)),
    }
    if not scheme.symmetric:
        plain = zeros in entries and entries[zeros].dtype == "I8"
        rows = num_outputs if plain else words_of(num_outputs)
        wanted = {**wanted, zeros: (INT8 if plain else ("I32",), (rows, groups.count))}
    if g_idx in entries:
        wanted = {**wanted, g_idx: (("I32", "I64"), (num_inputs,))}
    checked(entries, wanted, f"{what} of {shape} {[num_outputs, num_inputs]}")
    where = f"{entries[packed].file}: {g_idx}"
    order = input_order(where, checkpoint.tensor(g_idx), groups) if g_idx in entries else None
    is_wide, whole = bits > 4, groups.count == 1 and bits > 4 and scheme.symmetric
    form = StoredFormat(
        "uniform",
        8 if is_wide else 4,
        0 if whole else groups.described,
        "fixed" if scheme.symmetric else "points",
        "float32" if whole else scale_type(checkpoint, scales),
        order=order_name(order),
    )
    reader = _Words(scheme, groups, form, (num_outputs, num_inputs), in_lanes, order)
    return PackedTensor(f"{layer}.weight", (num_outputs, num_inputs), (*wanted, shape, *unused), form, reader)


@dataclass(frozen=True, slots=True)
class _Words:
    """Make stored matrices of packed integers. `in_lanes`: no integer is in two words."""

    scheme: WeightScheme
    groups: Groups
    form: StoredFormat
    shape: tuple[int, int]
    in_lanes: bool
    order: npt.NDArray[np.int32] | None

    def __call__(self, parts: Sequence[Array], rows: slice) -> StoredMatrix:
        bits, points = self.scheme.num_bits, None
        unpack = unpacked_lanes if self.in_lanes else unpacked
        codes = unpack(parts[0][rows], bits)[:, : self.shape[1]]
        scales = self.scheme.blocks.of_rows(float32(parts[1]), self.shape, rows)
        if self.scheme.symmetric:  # fewer bits around the zero of 4 or 8
            codes = codes + np.uint8(self.form.fixed_zero - (1 << (bits - 1)))
        elif parts[2].dtype == np.int8:
            points = parts[2][rows].view(np.uint8) + np.uint8(1 << (bits - 1))
        else:
            points = unpack(parts[2].T, bits)[:, : self.shape[0]].T[rows]
        if self.order is not None:
            codes = codes[:, self.order]
        if self.form.group:
            scales, points = self.groups.spread(scales), None if points is None else self.groups.spread(points)
        return StoredMatrix(self.form, codes, scales, points, order=self.order)
