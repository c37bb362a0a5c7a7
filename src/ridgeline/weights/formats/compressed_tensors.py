"""compressed-tensors, as LLM Compressor writes it: integers or floats of 2 to 8 bits. pack-quantized, int-quantized,
nvfp4, mxfp4 and float-quantized are written too.

A layer X with N outputs and K inputs is one of these, `weight_scale` [N, G] unless it says otherwise:

    pack-quantized    X.weight_packed int32 [N, K bits / 32], the low bits first, each integer plus 2^(bits-1), and
                      X.weight_shape int64 [2]; zero points X.weight_zero_point int32 [N bits / 32, G] are packed alike
    int-quantized     X.weight int8 [N, K];        scales also [1], [N], [N, 1]; zero points int8
    float-quantized   X.weight float8 [N, K];      scales as above, or one for each block of outputs and inputs
    nvfp4, mxfp4      X.weight_packed uint8 [N, K / 2]; NVFP4's weight_global_scale divides its float8 scales
    mxfp8             X.weight float8 [N, K];      scales are exponents for groups of 32 inputs

and together the tensor [N, K] called `X.weight`: w = (q - z) * s. Which group of the settings describes a layer, its
name decides, and what is stored must be what that says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ridgeline.core.dtypes import FLOAT8_E4M3, Array, float32, to_dtype
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import Bytes, StoredFormat, StoredMatrix, from_e8m0, to_e8m0
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.bits import unpacked, unpacked_columns, unpacked_lanes
from ridgeline.weights.packing.fp4 import NVFP4, packed_fp4
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, input_order, matrix_entry, scale_type
from ridgeline.weights.packing.scaled import E4M3, E8M0, INT8, Blocks, ScaledBytes, present, same_scales
from ridgeline.weights.packing.targets import pattern

# Tensors of a layer about its inputs, which are rounded as --quantize-inputs says.
UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# Formats that others write and that are not read, with what they are.
REFUSED = {
    "marlin-24": "2:4 sparse matrices arranged for a GPU", "sparse-24-bitmask": "sparse matrices",
    "sparse-bitmask": "sparse matrices", "mxfp6-pack-quantized": "6-bit floats",
}  # fmt: skip
PACKED = "pack-quantized"
BOTH_INTEGERS = "int-quantized"  # weights, and inputs where they are used
FORMATS = (
    PACKED, BOTH_INTEGERS, "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
BY_CLASS, BY_PATTERN, BY_NAME = 1, 2, 3


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the weights of some layers are stored: one of the `config_groups`."""

    targets: tuple[str, ...]
    type: Literal["int", "float"]
    num_bits: int
    symmetric: bool
    blocks: Blocks  # which of them share a scale


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    schemes, entries = _read_schemes(settings), checkpoint.entries
    layers = {
        name.rpartition(".")[0]: name
        for name, entry in entries.items()
        if name.endswith(".weight_packed") or (name.endswith(".weight") and entry.dtype in (*INT8, *E4M3))
    }
    return [_packed(checkpoint, layer, name, schemes.of(layer)) for layer, name in layers.items()]


def _packed(checkpoint: Checkpoint, layer: str, numbers: str, scheme: _Scheme) -> PackedTensor:
    name, scales, entries = f"{layer}.weight", f"{layer}.weight_scale", checkpoint.entries
    unused = [f"{layer}.{suffix}" for suffix in UNUSED]
    points = "" if scheme.symmetric else f"{layer}.weight_zero_point"
    match scheme.type, scheme.num_bits, entries[numbers].dtype:
        case "int", _, "I32":
            return _of_words(checkpoint, layer, scheme, unused)
        case "int", 8, "I8":
            way = ScaledBytes("int8", INT8, scheme.blocks)
            return way.packed(checkpoint, name, numbers, scales, points, unused)
        case "float", 8, "F8_E4M3":
            way = ScaledBytes("fp8", E4M3, scheme.blocks)
            if scales in entries and entries[scales].dtype in E8M0:
                way = ScaledBytes("MXFP8", E4M3, scheme.blocks, E8M0, from_e8m0)
            return way.packed(checkpoint, name, numbers, scales, unused=unused)
        case "float", 4, "U8":
            overall = f"{layer}.weight_global_scale" if scheme.blocks.columns == NVFP4.group else ""
            return packed_fp4(checkpoint, name, numbers, scales, overall, divides=True, unused=unused)
        case _:
            told = f"quantization_config says that it has {scheme.num_bits} bits of type {scheme.type}"
            raise ModelLoadError(f"{entries[numbers].file}: {numbers} is {entries[numbers].dtype}; {told}")


def _of_words(checkpoint: Checkpoint, layer: str, scheme: _Scheme, unused: Sequence[str]) -> PackedTensor:
    """Check that the parts of a layer of packed integers fit together, and return them as one tensor."""
    suffixes = ("packed", "scale", "shape", "zero_point", "g_idx")
    packed, scales, shape, zeros, g_idx = (f"{layer}.weight_{suffix}" for suffix in suffixes)
    entries, bits = checkpoint.entries, scheme.num_bits
    what = f"pack-quantized {bits} bits"
    checked(entries, {packed: (("I32",), matrix_entry(entries, packed).shape), shape: (("I64", "I32"), (2,))}, what)
    num_outputs, num_inputs = map(int, checkpoint.tensor(shape))
    if num_outputs != entries[packed].shape[0] or num_inputs < 1:
        found = f"{shape} is {[num_outputs, num_inputs]}, and {packed} {list(entries[packed].shape)}"
        raise ModelLoadError(f"{entries[packed].file}: {found}; they do not fit together")
    matrix_shape, groups = (num_outputs, num_inputs), Groups(num_inputs, scheme.blocks.columns)
    scale_shape = scheme.blocks.shape(matrix_shape)
    in_lanes = entries[packed].shape[1] != -(-num_inputs * bits // 32)

    def words_of(count: int) -> int:
        return -(-count // (32 // bits)) if in_lanes else -(-count * bits // 32)

    actual = entries[scales].shape if scales in entries else scale_shape
    wanted: Wanted = {
        packed: (("I32",), (num_outputs, words_of(num_inputs))),
        scales: (FLOATS, same_scales(actual, scale_shape)),
    }
    plain = zeros in entries and entries[zeros].dtype == "I8"
    if not scheme.symmetric:
        rows = num_outputs if plain else words_of(num_outputs)
        wanted[zeros] = INT8 if plain else ("I32",), (rows, groups.count)
    if g_idx in entries:
        wanted[g_idx] = ("I32", "I64"), (num_inputs,)
    checked(entries, wanted, f"{what} of {shape} {[num_outputs, num_inputs]}")
    where = f"{entries[packed].file}: {g_idx}"
    order = input_order(where, checkpoint.tensor(g_idx), groups) if g_idx in entries else None
    whole, zero = groups.count == 1 and bits > 4 and scheme.symmetric, "fixed" if scheme.symmetric else "points"
    integers = Integers.of(groups, bits, zero, scale_type(checkpoint, scales), order, whole=whole)

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        unpack, points = unpacked_lanes if in_lanes else unpacked, None
        codes = unpack(parts[0][rows], bits)[:, :num_inputs]
        if plain and not scheme.symmetric:
            points = parts[2][rows].view(np.uint8) + np.uint8(1 << (bits - 1))
        elif not scheme.symmetric and in_lanes:
            points = unpacked_lanes(parts[2].T, bits)[:, :num_outputs].T[rows]
        elif not scheme.symmetric:
            points = unpacked_columns(parts[2].T, bits, rows, num_outputs).T
        return integers.matrix(codes, scheme.blocks.of_rows(parts[1], matrix_shape, rows), points)

    names = (*wanted, shape, *present(checkpoint, unused))
    return PackedTensor(f"{layer}.weight", matrix_shape, names, integers.form, matrix)


@dataclass(frozen=True, slots=True)
class _Schemes:
    """The schemes of a model and the layers that have none."""

    schemes: Sequence[_Scheme]
    ignore: Sequence[str]

    def of(self, layer: str) -> _Scheme:
        """Return the scheme of a quantized layer: that which names it, then by pattern, then by class.

        Raises ConfigError where there is none.
        """
        if any(_fit(target, layer) > BY_CLASS for target in self.ignore):
            raise ConfigError(f"quantization_config: ignore names {layer!r}, and its weight is quantized")
        fits = [max((_fit(target, layer) for target in scheme.targets), default=0) for scheme in self.schemes]
        if not any(fits):
            what = f"no group of config_groups names {layer!r}, and its weight is quantized"
            raise ConfigError(f"quantization_config: {what}")
        return self.schemes[fits.index(max(fits))]


def _fit(target: str, layer: str) -> int:
    """Tell how a target names a layer: BY_NAME, BY_PATTERN or BY_CLASS, as Linear and its like do; 0: it does not."""
    if target.startswith("re:") and pattern(target.removeprefix("re:")).match(layer):
        return BY_PATTERN
    return BY_NAME if target == layer else BY_CLASS if target.isidentifier() and target[:1].isupper() else 0


def _read_schemes(settings: ConfigReader) -> _Schemes:
    """Raises ConfigError for what is not supported, with its name."""
    settings.ignore("kv_cache_scheme", "global_compression_ratio", "version", "moe_sparsity_config")
    settings.expect("quantization_status", "compressed")
    settings.expect("transform_config", {}, None)
    sparsity = settings.section("sparsity_config")
    if sparsity is not None and sparsity.all_keys():
        sparsity.expect("format", "dense")
    _check_format(settings.text("format", "dense"))
    groups = settings.section("config_groups")
    if groups is None:
        raise ConfigError("quantization_config: config_groups is missing")
    ignore = settings.texts("ignore") if settings.has("ignore") else ()
    settings.ignore("ignore")
    schemes = [_read_scheme(group) for name in groups.all_keys() if (group := groups.section(name)) is not None]
    return _Schemes([scheme for scheme in schemes if scheme is not None], ignore)


def _check_format(name: str) -> None:
    if name not in FORMATS:
        what = f": {REFUSED[name]}" if name in REFUSED else ""
        known = ", ".join(FORMATS)
        raise ConfigError(f"quantization_config: format={name!r} is not supported{what}; supported: {known}")


def _read_scheme(group: ConfigReader) -> _Scheme | None:
    group.ignore("input_activations", "output_activations")  # inputs are rounded as --quantize-inputs says
    _check_format(group.text("format", "dense"))
    weights, targets = group.section("weights"), group.texts("targets")
    group.finish()
    if weights is None:
        return None
    weights.ignore("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")  # the tensors say it
    weights.expect("dynamic", False)
    kind: Mapping[str, Literal["int", "float"]] = {"int": "int", "float": "float"}
    type_, num_bits = weights.choice("type", kind, "int"), weights.integer("num_bits", 8)
    group_size = weights.optional_integer("group_size", low=-1, high=1 << 20) or 0
    default = "group" if group_size > 0 else "channel" if group_size else "tensor"
    strategy = weights.choice("strategy", {name: name for name in STRATEGIES}, default)
    block = weights.integers("block_structure", low=1)
    symmetric = weights.flag("symmetric", True)
    weights.finish()
    if num_bits not in (range(2, 9) if type_ == "int" else (4, 8)):
        raise ConfigError(f"quantization_config: num_bits={num_bits} of type {type_} is not supported")
    if (strategy in ("group", "tensor_group") and group_size < 1) or (strategy == "block" and len(block) != 2):
        asked = f"strategy={strategy!r} with group_size={group_size} and block_structure={list(block)}"
        known = "a group has a group_size, a block [rows, columns]"
        raise ConfigError(f"quantization_config: {asked} is not supported; {known}")
    shared = {"tensor": (), "channel": (1,), "block": block}.get(strategy, (1, group_size))
    return _Scheme(targets, type_, num_bits, symmetric, Blocks(*shared))


def packed_tensors(layer: str, stored: StoredMatrix, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return the tensors of a layer.

    `dtype` holds the scales of integers exactly, or they would mean other weights.
    """
    bits = stored.format.bits
    if stored.format.code == "e2m1":
        codes = {f"{layer}.weight_packed": stored.codes[:, ::2] | stored.codes[:, 1::2] << np.uint8(4)}
        if stored.outer is None:
            return codes | {f"{layer}.weight_scale": to_e8m0(stored.scales)}
        scales, divisor = to_dtype(stored.scales, FLOAT8_E4M3), -stored.outer[0]
        return codes | {f"{layer}.weight_scale": scales, f"{layer}.weight_global_scale": divisor}
    scales = to_dtype(stored.scales, dtype)
    if stored.format.code == "e4m3":
        return {f"{layer}.weight": stored.codes.view(FLOAT8_E4M3), f"{layer}.weight_scale": scales}
    assert np.array_equal(float32(scales), stored.scales), f"{dtype} does not hold the scales of {layer}"
    if _written(stored.format) == BOTH_INTEGERS:
        return {f"{layer}.weight": (stored.codes ^ np.uint8(128)).view(np.int8), f"{layer}.weight_scale": scales}
    tensors: dict[str, Array] = {
        f"{layer}.weight_packed": _words(stored.codes, bits),
        f"{layer}.weight_scale": scales,
        f"{layer}.weight_shape": np.array(stored.codes.shape, dtype=np.int64),
    }
    if stored.points is not None:
        tensors[f"{layer}.weight_zero_point"] = np.ascontiguousarray(_words(stored.points.T, bits).T)
    return tensors


def _words(codes: Bytes, bits: int) -> Array:
    """Return codes [R, C] as int32 words, the first in the low bits; a row ends in a word of its own."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    lanes = padded.reshape(len(codes), -1, per_word).astype(np.uint32)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(lanes << shifts, axis=-1).view(np.int32)


def quantization_config(
    form: StoredFormat, ignored: Sequence[str], others: Mapping[StoredFormat, Sequence[str]]
) -> dict[str, object]:
    """Return config.json's quantization_config of a model of which all linear layers but `ignored` are so stored.

    `others` are the layers that are stored in other formats.
    """
    groups = [_group(each, targets) for each, targets in {form: ["Linear"], **others}.items()]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if others else _written(form),
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _written(form: StoredFormat) -> str:
    """Return the format's name. Integers of 8 bits are packed where they have groups: vLLM runs no such on CPUs."""
    if form.code == "e4m3":
        return "float-quantized"
    integers = BOTH_INTEGERS if form.bits == 8 and not form.group else PACKED
    return {"e8m0": "mxfp4-pack-quantized", "e4m3": "nvfp4-pack-quantized"}.get(form.scale, integers)


def _group(form: StoredFormat, targets: Sequence[str]) -> dict[str, object]:
    written = _written(form)
    weights: dict[str, object] = {
        "num_bits": form.bits,
        "type": "int" if form.code == "uniform" else "float",
        "symmetric": form.zero == "fixed",
        "strategy": "tensor_group" if form.scale == "e4m3" else "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    by_token = {"num_bits": 8, "type": weights["type"], "symmetric": True, "strategy": "token", "dynamic": True}
    inputs: dict[str, object] = {
        "input_activations": by_token if written in (BOTH_INTEGERS, "float-quantized") else None,
        "output_activations": None,
    }
    return {"targets": list(targets), "weights": weights, **inputs, "format": written}
