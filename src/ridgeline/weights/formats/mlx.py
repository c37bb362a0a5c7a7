"""MLX, as mlx-lm writes it: integers of 2 to 8 bits in groups, with a scale and a bias; embeddings too.

For a layer X with N outputs and K inputs in groups of g: `X.weight` uint32 [N, K bits / 32], low bits first, `X.scales`
and `X.biases` [N, K / g] are together the tensor [N, K] called `X.weight`: w = q * scale + bias. config.json's
`quantization` has the bits and the group, and maybe others for single layers, or false.
"""

from collections.abc import Sequence

from ridgeline.core.dtypes import Array
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredMatrix
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor, without_effect
from ridgeline.weights.packing.bits import unpacked
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, matrix_entry, scale_type

BITS = (2, 3, 4, 5, 6, 8)


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*without_effect("mlx"))
    default = _read(settings, (0, 0))
    found: list[PackedTensor] = []
    for name in [name for name in checkpoint.entries if name.endswith(".scales")]:
        layer = name.removesuffix(".scales")
        bits, group = settings.within(layer, lambda own: _read(own, default), default)
        found.append(_packed(layer, checkpoint, bits, group))
    settings.ignore(*(key for key in settings.all_keys() if "." in key))  # layers that are plain
    return found


def _read(reader: ConfigReader, default: tuple[int, int]) -> tuple[int, int]:
    reader.expect("mode", "affine", None)
    bits, group = reader.integer("bits", default[0] or None), reader.integer("group_size", default[1] or None)
    if bits not in BITS:
        raise ConfigError(f"quantization: bits={bits} is not supported; MLX has {', '.join(map(str, BITS))}")
    return bits, group


def _packed(layer: str, checkpoint: Checkpoint, bits: int, group: int) -> PackedTensor:
    weight, scales, biases = (f"{layer}.{part}" for part in ("weight", "scales", "biases"))
    num_outputs, num_words = matrix_entry(checkpoint.entries, scales).shape[0], 0
    if weight in checkpoint.entries:
        num_outputs, num_words = matrix_entry(checkpoint.entries, weight).shape
    groups = Groups(num_words * 32 // bits, group)
    shape = (num_outputs, groups.count)
    words = ("U32",), (num_outputs, num_words)
    wanted: Wanted = {scales: (FLOATS, shape), weight: words, biases: (FLOATS, shape)}
    checked(checkpoint.entries, wanted, f"MLX's {bits} bits in groups of {group}")
    integers = Integers.of(groups, bits, "minima", scale_type(checkpoint, scales, biases))

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        return integers.matrix(unpacked(parts[0][rows], bits), parts[1][rows], minima_NG=parts[2][rows])

    shape = (num_outputs, groups.num_inputs)
    return PackedTensor(weight, shape, (weight, scales, biases), integers.form, matrix)
