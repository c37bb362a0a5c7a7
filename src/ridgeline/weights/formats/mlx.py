"""MLX, as mlx-lm writes it: integers of 2 to 8 bits in groups, with a scale and a bias; embeddings too.

For a layer X with N outputs and K inputs in groups of g: `X.weight` uint32 [N, K bits / 32], low bits first, `X.scales`
and `X.biases` [N, K / g] are together the tensor [N, K] called `X.weight`: w = q * scale + bias. config.json's
`quantization` has the bits and the group, and maybe others for single layers, or false.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.bits import unpacked
from ridgeline.weights.packing.parts import Groups, checked, matrix_entry, scale_type

BITS = (2, 3, 4, 5, 6, 8)
WITHOUT_EFFECT = ("quant_method", "linear_class", "quantize_input", "quantize_output")


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*WITHOUT_EFFECT)
    default = _read(settings, (0, 0))
    found: list[PackedTensor] = []
    for name in [name for name in checkpoint.entries if name.endswith(".scales")]:
        layer = name.removesuffix(".scales")
        found.append(_packed(layer, checkpoint, *_of_layer(layer, settings, default)))
    settings.ignore(*(key for key in settings.all_keys() if "." in key))  # layers that are plain
    return found


def _read(reader: ConfigReader, default: tuple[int, int]) -> tuple[int, int]:
    reader.expect("mode", "affine", None)
    bits, group = reader.integer("bits", default[0] or None), reader.integer("group_size", default[1] or None)
    if bits not in BITS:
        raise ConfigError(f"quantization: bits={bits} is not supported; MLX has {', '.join(map(str, BITS))}")
    return bits, group


def _of_layer(layer: str, settings: ConfigReader, default: tuple[int, int]) -> tuple[int, int]:
    if not settings.has(layer):
        return default
    own = settings.section(layer)
    assert own is not None
    values = _read(own, default)
    own.finish()
    return values


def _packed(layer: str, checkpoint: Checkpoint, bits: int, group: int) -> PackedTensor:
    weight, scales, biases = (f"{layer}.{part}" for part in ("weight", "scales", "biases"))
    num_outputs, num_words = matrix_entry(checkpoint.entries, scales).shape[0], 0
    if weight in checkpoint.entries:
        num_outputs, num_words = matrix_entry(checkpoint.entries, weight).shape
    groups = Groups(num_words * 32 // bits, group)
    shape = (num_outputs, groups.count)
    wanted = {scales: (FLOATS, shape), weight: (("U32",), (num_outputs, num_words)), biases: (FLOATS, shape)}
    checked(checkpoint.entries, wanted, f"MLX's {bits} bits in groups of {group}")
    scale = scale_type(checkpoint, scales, biases)
    form = StoredFormat("uniform", 4 if bits <= 4 else 8, groups.described, "minima", scale)
    reader = _Reader(bits, groups, form)
    return PackedTensor(weight, (num_outputs, groups.num_inputs), (weight, scales, biases), form, reader)


@dataclass(frozen=True, slots=True)
class _Reader:
    bits: int
    groups: Groups
    form: StoredFormat

    def __call__(self, parts: Sequence[Array], rows: slice) -> StoredMatrix:
        scales, biases = (self.groups.spread(float32(part[rows])) for part in parts[1:])
        return StoredMatrix(self.form, unpacked(parts[0][rows], self.bits), scales, minima=biases)
