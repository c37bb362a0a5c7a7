"""HQQ, as its HQQLinear is saved: integers of 1 to 6 or 8 bits in groups, with scales and zeros of floats.

A matrix [N, K] in groups of g is cut along axis 1 into rows of g codes, whose scales and zeros are [N K / g, 1], or
along axis 0 into g rows of N K / g codes, whose scales and zeros are [1, N K / g]: every g-th part of the outputs has
its own for each input. `X.W_q` packs several rows in one, 8 / bits in a byte, of 3 bits ten in an int32, the first
R / that many in the high bits. `X.nbits`, `X.group_size`, `X.shape` and `X.axis` are numbers: together the tensor
`X.weight`, w = (q - zero) * scale. What kernels add, -zero * scale, is rounded to float16. 4 and 8 bits along axis 1
are written too. https://mobiusml.github.io/hqq_blog/
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.parts import Groups, Integers, Wanted, checked, scale_type

PER_ITEM: Mapping[int, int] = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # codes in one item of W_q, by their bits
NUMBERS = ("nbits", "group_size", "shape", "axis")
FLAGS = {"view_as_float": 0, "quant_scale": 0, "quant_zero": 0, "channel_wise": 1}  # as they have to be
UNUSED = ("packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
          "optimize", "round_zero")  # fmt: skip


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore("quant_config", "skip_modules")  # the tensors say it
    names = [name for name in checkpoint.entries if name.endswith(".W_q")]
    return [_packed(name.removesuffix(".W_q"), checkpoint) for name in names]


def _packed(layer: str, checkpoint: Checkpoint) -> PackedTensor:
    entries, file = checkpoint.entries, checkpoint.entries[f"{layer}.W_q"].file

    def numbers(key: str) -> list[int]:
        """Return the few numbers of a tensor, none where it is missing or has more."""
        name = f"{layer}.{key}"
        few = name in entries and math.prod(entries[name].shape) <= 2
        found = checkpoint.tensor(name).reshape(-1).astype(np.float64) if few else np.zeros(0)
        return [int(each) for each in np.nan_to_num(np.ceil(found))]  # 1.58 bits are in 2

    bits, group, shape, axis = (numbers(key) for key in NUMBERS)
    known = len(bits) == len(shape) - 1 == 1 and bits[0] in PER_ITEM and min(shape) > 0 and axis in ([0], [1])
    if not known or any(numbers(flag) not in ([], [value]) for flag, value in FLAGS.items()):
        found = f"nbits {bits}, shape {shape}, axis {axis}"
        what = "HQQ of 1 to 6 or 8 bits, with scales and zeros that are not quantized themselves,"
        raise ModelLoadError(f"{file}: {layer} has {found}; only {what} is read: quantize the model again")
    size, per_item = (group[0] if group and group[0] > 0 else shape[1]), PER_ITEM[bits[0]]
    along_inputs = axis == [1]
    groups, num_groups = Groups(shape[1], size if along_inputs else 1), shape[0] * shape[1] // size
    num_rows, num_columns = (num_groups, size) if along_inputs else (size, num_groups)
    packed = ("I32",) if bits[0] == 3 else ("U8",), (-(-num_rows // per_item), num_columns)
    shared = FLOATS, (num_groups, 1) if along_inputs else (1, num_groups)
    wanted: Wanted = {f"{layer}.W_q": packed, f"{layer}.scale": shared, f"{layer}.zero": shared}
    if shape[axis[0]] % size or (bits[0] != 3 and num_rows % per_item):
        raise ModelLoadError(f"{file}: HQQ's groups of {size} do not make {layer} of {shape}")
    names = checked(entries, wanted, f"HQQ's {bits[0]} bits of {shape} in groups of {size}")
    integers = Integers.of(groups, bits[0], "minima", scale_type(checkpoint, names[1]))

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        """Read rows of codes, several of which make an output along axis 1; along axis 0 outputs share scales."""
        width = size if along_inputs else shape[1]
        packed, each = parts[0].reshape(-1, width), shape[1] // width
        outputs = np.arange(*rows.indices(shape[0]))
        at = (outputs[:, None] * each + np.arange(each)).reshape(-1)
        shifts = (bits[0] * (per_item - 1 - at // len(packed))).astype(packed.dtype)[:, None]
        codes = (packed[at % len(packed)] >> shifts & ((1 << bits[0]) - 1)).astype(np.uint8).reshape(-1, shape[1])
        at = outputs % (num_groups // groups.count)
        scales, zeros = (float32(part.reshape(-1, groups.count)[at]) for part in parts[1:3])
        with np.errstate(all="ignore"):
            return integers.matrix(codes, scales, minima_NG=-zeros * scales)

    unused = [f"{layer}.{key}" for key in (*NUMBERS, *FLAGS, *UNUSED) if f"{layer}.{key}" in entries]
    return PackedTensor(f"{layer}.weight", (shape[0], shape[1]), (*names, *unused), integers.form, matrix)


def packed_tensors(layer: str, stored: StoredMatrix, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return the tensors of a layer of 4 or 8 bits with minima, none of whose scales is zero; no part has `dtype`."""
    bits, group = stored.format.bits, stored.format.group
    codes = stored.codes.reshape(-1, group)
    half = len(codes) // 2
    assert stored.minima is not None
    facts = {
        "W_q": codes if bits == 8 else codes[:half] << np.uint8(4) | codes[half:],
        "scale": stored.scales.astype(np.float16).reshape(-1, 1),
        "zero": (-stored.minima / stored.scales).astype(np.float32).reshape(-1, 1),
        "shape": np.array(stored.codes.shape, np.int64),
        **{key: np.array(value, np.int32) for key, value in {"nbits": bits, "group_size": group, "axis": 1}.items()},
        **{key: np.array(value, np.uint8) for key, value in FLAGS.items()},
        **{key: np.array(1, np.uint8) for key in ("encoded_state_dict", "stores_quant_config", "optimize")},
        **{key: np.array(0, np.uint8) for key in ("offload_meta", "round_zero")},
        "packing": np.frombuffer(f"{bits}bit_u8".encode(), np.uint8),
        "unpack_view_dtype": np.frombuffer(b"torch.uint8", np.uint8),
        "compute_dtype": np.frombuffer(b"torch.float32", np.uint8),
    }
    return {f"{layer}.{key}": value for key, value in facts.items()}


def quantization_config(form: StoredFormat, ignored: Sequence[str], others: Mapping[Any, Any]) -> dict[str, object]:
    """Return config.json's quantization_config of a model of which all linear layers but `ignored` are so stored."""
    assert not others, "a model of HQQ has one format"
    weights = {"nbits": form.bits, "group_size": form.group, "axis": 1, "channel_wise": True, "optimize": True}
    weights |= {"round_zero": False, "view_as_float": False}
    config = {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": config | {"offload_meta": False}, "skip_modules": list(ignored)}
