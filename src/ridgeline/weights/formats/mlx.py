"""MLX, as mlx-lm writes it: integers of 2 to 8 bits in groups, with a scale and a bias; embeddings too.

For a layer X with N outputs and K inputs in groups of g: `X.weight` uint32 [N, K bits / 32], low bits first, `X.scales`
and `X.biases` [N, K / g] are together the tensor [N, K] called `X.weight`: w = q * scale + bias. Those of experts are
stacks [E, ..]. config.json's `quantization` has the bits and the group, and maybe others for single layers, or false.
In its other modes words hold floats, and `X.scales` are uint8: exponents of mxfp4 and mxfp8, bits of 8-bit floats of
nvfp4. Convolutions of recurrent layers are [channels, taps, 1], and norms of models with gated delta nets have the 1
that others add.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.core.dtypes import FLOAT8_E4M3, Array, contiguous, float32
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredFormat, StoredMatrix, from_e8m0, nibbles
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import ChangedTensor, PackedTensor, without_effect
from ridgeline.weights.packing.bits import unpacked
from ridgeline.weights.packing.fp4 import MXFP4, NVFP4, nvfp4_matrix
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, matrix_entry, scale_type

BITS = (2, 3, 4, 5, 6, 8)
AFFINE = "affine"
FLOAT_MODES: Mapping[str, StoredFormat] = {
    "mxfp4": MXFP4,
    "mxfp8": StoredFormat("e4m3", 8, 32, scale="float32"),
    "nvfp4": NVFP4,
}
Settings = tuple[str, int, int]  # mode, bits, group
OF_A_LAYER = (AFFINE, 4, 64)  # what its own settings leave out, whatever those of the model are
CONVOLUTION = ".conv1d.weight"
WITH_ONE = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")  # norms beside a delta net
DIMS = (2, 3)  # a matrix, or the stack of those of all experts


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor | ChangedTensor]:
    settings.ignore(*without_effect("mlx"))
    default = _read(settings, (AFFINE, 0, 0))
    found: list[PackedTensor | ChangedTensor] = []
    has_delta = any(name.endswith(f".linear_attn{CONVOLUTION}") for name in checkpoint.entries)
    for name, entry in checkpoint.entries.items():
        if name.endswith(CONVOLUTION) and len(entry.shape) == 3:
            channels, taps, one = entry.shape
            found.append(ChangedTensor(name, (channels, one, taps), lambda stored: stored.swapaxes(1, 2)))
        elif has_delta and name.endswith(WITH_ONE):
            found.append(ChangedTensor(name, entry.shape, lambda stored: float32(stored) - np.float32(1)))
    for name in [name for name in checkpoint.entries if name.endswith(".scales")]:
        layer = name.removesuffix(".scales")
        mode, bits, group = settings.within(layer, lambda own: _read(own, OF_A_LAYER), default)
        floats = FLOAT_MODES.get(mode)
        found.append(_floats(layer, checkpoint, floats) if floats else _packed(layer, checkpoint, bits, group))
    settings.ignore(*(key for key in settings.all_keys() if "." in key))  # layers that are plain
    return found


def _read(reader: ConfigReader, default: Settings) -> Settings:
    mode = reader.choice("mode", {name: name for name in (AFFINE, *FLOAT_MODES)}, default[0])
    bits, group = reader.integer("bits", default[1] or None), reader.integer("group_size", default[2] or None)
    floats = FLOAT_MODES.get(mode)
    if bits not in BITS or (floats and (bits, group) != (floats.bits, floats.group)):
        known = f"{floats.bits} in groups of {floats.group}" if floats else ", ".join(map(str, BITS))
        raise ConfigError(f"quantization: bits={bits} in groups of {group} is not supported; MLX's {mode} has {known}")
    return mode, bits, group


def _floats(layer: str, checkpoint: Checkpoint, form: StoredFormat) -> PackedTensor:
    weight, scales, entries = f"{layer}.weight", f"{layer}.scales", checkpoint.entries
    *rows, num_words = matrix_entry(entries, weight, DIMS).shape
    num_inputs = num_words * 32 // form.bits
    wanted: Wanted = {weight: (("U32",), (*rows, num_words))}
    wanted[scales] = ("U8",), (*rows, form.num_groups(num_inputs))
    checked(entries, wanted, f"MLX's {form}")

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        data = contiguous(parts[0][rows]).view(np.uint8)
        codes = data if form.bits == 8 else nibbles(data)
        if form.scale != "e4m3":
            return StoredMatrix(form, codes, from_e8m0(parts[1][rows]))
        return nvfp4_matrix(f"{entries[scales].file}: {scales}", codes, parts[1][rows].view(FLOAT8_E4M3), 1)

    return PackedTensor(weight, (*rows, num_inputs), (*wanted,), form, matrix)


def _packed(layer: str, checkpoint: Checkpoint, bits: int, group: int) -> PackedTensor:
    weight, scales, biases = (f"{layer}.{part}" for part in ("weight", "scales", "biases"))
    *rows, num_words = matrix_entry(checkpoint.entries, weight if weight in checkpoint.entries else scales, DIMS).shape
    groups = Groups(num_words * 32 // bits, group)
    shape = (*rows, groups.count)
    words = ("U32",), (*rows, num_words)
    wanted: Wanted = {scales: (FLOATS, shape), weight: words, biases: (FLOATS, shape)}
    checked(checkpoint.entries, wanted, f"MLX's {bits} bits in groups of {group}")
    integers = Integers.of(groups, bits, "minima", scale_type(checkpoint, scales, biases))

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        return integers.matrix(unpacked(parts[0][rows], bits), parts[1][rows], minima_NG=parts[2][rows])

    shape = (*rows, groups.num_inputs)
    return PackedTensor(weight, shape, (weight, scales, biases), integers.form, matrix)
