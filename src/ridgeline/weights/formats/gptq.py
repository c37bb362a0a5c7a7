"""GPTQ, as AutoGPTQ and GPTQModel write it: integers of 2, 3, 4 or 8 bits, packed in 32-bit words along the inputs.

For a layer X with N outputs and K inputs, in groups of g inputs, low bits first:

    X.qweight int32 [K bits / 32, N]    X.scales [K / g, N]    X.qzeros int32 [K / g, N bits / 32]    X.g_idx int32 [K]

are together the tensor [N, K] called `X.weight`: w[o, k] = (q[k, o] - z[g_idx[k], o]) * s[g_idx[k], o]. The first
version of the format stores z - 1, the second z; of a symmetric model z is 2^(bits-1), and what is stored tells the
version, whatever the settings say. `g_idx` is k / g, or with `desc_act` the groups of inputs in the order of their
importance. https://arxiv.org/abs/2210.17323
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.dtypes import Array
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import StoredMatrix
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor, without_effect
from ridgeline.weights.packing.bits import unpacked, unpacked_columns
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, input_order, matrix_entry, scale_type
from ridgeline.weights.packing.targets import pattern

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class _Settings:
    bits: int
    group: int  # inputs that share a scale; 0: all
    symmetric: bool
    stores_less: bool  # zeros are stored as z - 1


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*without_effect("gptq"))
    settings.expect("pack_dtype", "int32", None)
    settings.expect("is_marlin_format", False)
    settings.expect("rotation", None)  # inputs would be turned as well, at run time
    rules = settings.section("dynamic")
    versions = {"gptq": True, "gptq_v2": False}
    stores_less = settings.choice(settings.spelling("checkpoint_format", "format"), versions, "gptq")
    settings.ignore("checkpoint_format", "format")
    default = _read(settings, _Settings(0, 0, True, stores_less))
    layers = [name.removesuffix(".qweight") for name in checkpoint.entries if name.endswith(".qweight")]
    return [_packed(layer, checkpoint, _of_layer(layer, rules, default)) for layer in layers]


def _read(reader: ConfigReader, default: _Settings) -> _Settings:
    bits = reader.integer("bits", default.bits or None)
    group = reader.integer("group_size", default.group or -1, low=-1)
    if bits not in BITS or group == 0:
        known = "GPTQ has 2, 3, 4 or 8 bits, and groups of inputs, or -1 for one group"
        raise ConfigError(f"quantization_config: bits={bits} with group_size={group} is not supported; {known}")
    return replace(default, bits=bits, group=max(group, 0), symmetric=reader.flag("sym", default.symmetric))


def _of_layer(layer: str, rules: ConfigReader | None, default: _Settings) -> _Settings:
    """Return the settings of a layer: those of the first rule of `dynamic` whose pattern begins its name."""
    for text in rules.all_keys() if rules is not None else ():
        if pattern(text.removeprefix("+:").removeprefix("-:")).match(layer):
            rule = rules.section(text) if rules is not None else None
            if rule is None or text.startswith("-:"):
                raise ConfigError(f"quantization_config: dynamic: {text!r} says that {layer} is plain; it is quantized")
            rule.ignore(*without_effect("gptq"))
            settings = _read(rule, default)
            rule.finish()
            return settings
    return default


def _packed(layer: str, checkpoint: Checkpoint, settings: _Settings) -> PackedTensor:
    """Check that the parts of a layer fit together, and return them as one tensor."""
    qweight, qzeros, scales, g_idx = (f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    (num_words, num_outputs), bits = matrix_entry(checkpoint.entries, qweight).shape, settings.bits
    groups = Groups(num_words * 32 // bits, settings.group)
    wanted: Wanted = {
        qweight: (("I32",), (groups.num_inputs * bits // 32, num_outputs)),
        qzeros: (("I32",), (groups.count, -(-num_outputs * bits // 32))),
        scales: (FLOATS, (groups.count, num_outputs)),
    }
    if g_idx in checkpoint.entries:
        wanted[g_idx] = ("I32",), (groups.num_inputs,)
    checked(checkpoint.entries, wanted, f"GPTQ of {bits} bits in groups of {groups.stored} inputs")
    where = f"{checkpoint.entries[qweight].file}: {layer}"
    order = input_order(f"{where}.g_idx", checkpoint.tensor(g_idx), groups) if g_idx in wanted else None
    zero = "fixed" if settings.symmetric else "points"
    integers, middle = Integers.of(groups, bits, zero, scale_type(checkpoint, scales), order), 1 << (bits - 1)

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        zeros, points = unpacked_columns(parts[1], bits, rows, num_outputs), None
        if not settings.symmetric:
            points = (zeros + np.uint8(settings.stores_less) & np.uint8(2 * middle - 1)).T
        elif (first := parts[1].flat[0] & 2 * middle - 1) not in (middle - 1, middle) or (zeros != first).any():
            raise ModelLoadError(f"{where}.qzeros differ, but quantization_config says sym=true")
        words = parts[0][:, rows]
        packed = words.view(np.uint32) if bits == 4 and order is None else unpacked(words.T, bits)
        return integers.matrix(packed, parts[2][:, rows].T, points)

    return PackedTensor(f"{layer}.weight", (num_outputs, groups.num_inputs), tuple(wanted), integers.form, matrix)
