"""HQQ, as its HQQLinear is saved: integers of 2, 3, 4 or 8 bits in groups of inputs, with scales and zeros of floats.

A matrix [N, K] in groups of g has R = N K / g rows of g codes: `X.W_q` packs several rows in one, 8 / bits in a byte,
of 3 bits ten in an int32, the first R / that many in the high bits. `X.scale` and `X.zero` [R, 1] are floats,
`X.nbits`, `X.group_size`, `X.shape` and `X.axis` numbers: together the tensor `X.weight`, w = (q - zero) * scale. What
kernels add, -zero * scale, is rounded to float16. 4 and 8 bits are written too. https://mobiusml.github.io/hqq_blog/
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

PER_ITEM: Mapping[int, int] = {8: 1, 4: 2, 3: 10, 2: 4}  # codes in one item of W_q, by their bits
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
        return [int(each) for each in checkpoint.tensor(name).reshape(-1)] if few else []

    bits, group, shape, axis = (numbers(key) for key in NUMBERS)
    known = len(bits) == len(shape) - 1 == 1 and bits[0] in PER_ITEM and min(shape) > 0 and axis == [1]
    if not known or any(numbers(flag) not in ([], [value]) for flag, value in FLAGS.items()):
        found = f"nbits {bits}, shape {shape}, axis {axis}"
        what = "HQQ of 2, 3, 4 or 8 bits along axis 1, with scales and zeros that are not quantized themselves"
        raise ModelLoadError(f"{file}: {layer} has {found}; only {what} is read: quantize the model again")
    groups, per_item = Groups(shape[1], group[0] if group and group[0] > 0 else 0), PER_ITEM[bits[0]]
    num_rows = shape[0] * groups.count
    step = -(-num_rows // per_item)
    wanted: Wanted = {
        f"{layer}.W_q": (("I32",) if bits[0] == 3 else ("U8",), (step, groups.stored)),
        f"{layer}.scale": (FLOATS, (num_rows, 1)),
        f"{layer}.zero": (FLOATS, (num_rows, 1)),
    }
    if shape[1] % groups.stored or (bits[0] != 3 and num_rows % per_item):
        raise ModelLoadError(f"{file}: HQQ's groups of {groups.stored} do not make {layer} of {shape}")
    names = checked(entries, wanted, f"HQQ's {bits[0]} bits of {shape} in groups of {groups.stored}")
    scale = scale_type(checkpoint, names[1])
    integers = Integers.of(groups, bits[0], "minima", scale)

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        first, end, by = rows.indices(shape[0])
        at = np.arange(first * groups.count, max(first, end) * groups.count)
        shifts = (bits[0] * (per_item - 1 - at // step)).astype(parts[0].dtype)[:, None]
        codes = (parts[0][at % step] >> shifts & ((1 << bits[0]) - 1)).astype(np.uint8)
        scales, zeros = (float32(part[at]).reshape(-1, groups.count)[::by] for part in parts[1:3])
        with np.errstate(all="ignore"):
            minima = -zeros * scales
            minima = minima.astype(np.float16) if scale == "float16" else minima
        return integers.matrix(codes.reshape(-1, shape[1])[::by], scales, minima_NG=minima)

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
