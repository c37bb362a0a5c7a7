"""Write stored matrices as compressed-tensors does, for transformers, vLLM and this project's own reader.

Format pack-quantized: of a layer X with N outputs and K inputs `X.weight_packed` int32 [N, K bits / 32], integers plus
2^(bits-1) with the low bits first, `X.weight_scale` [N, G], `X.weight_shape`, and `X.weight_zero_point` packed alike
along the outputs. The inverse of `weights/formats/compressed_tensors.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.core.dtypes import Array, float32, to_dtype
from ridgeline.quant.stored import Bytes, StoredFormat, StoredMatrix
from ridgeline.weights.packing.bits import unpacked

FORMAT = "pack-quantized"


def packed_tensors(layer: str, stored: StoredMatrix, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return the tensors of a layer. `dtype` holds every scale exactly, or they would mean other weights."""
    bits = stored.format.bits
    scales = to_dtype(stored.scales, dtype)
    assert np.array_equal(float32(scales), stored.scales), f"{dtype} does not hold the scales of {layer}"
    tensors: dict[str, Array] = {
        f"{layer}.weight_packed": words(stored.codes, bits),
        f"{layer}.weight_scale": scales,
        f"{layer}.weight_shape": np.array(stored.codes.shape, dtype=np.int64),
    }
    if stored.points is not None:
        tensors[f"{layer}.weight_zero_point"] = np.ascontiguousarray(words(stored.points.T, bits).T)
    return tensors


def read_packed(tensors: Mapping[str, Array], layer: str, form: StoredFormat) -> StoredMatrix:
    """Return what `packed_tensors` was given."""
    num_outputs, num_inputs = map(int, tensors[f"{layer}.weight_shape"])
    codes = unpacked(tensors[f"{layer}.weight_packed"], form.bits)[:, :num_inputs]
    points = tensors.get(f"{layer}.weight_zero_point")
    if points is not None:
        points = unpacked(np.ascontiguousarray(points.T), form.bits)[:, :num_outputs].T
    return StoredMatrix(form, codes, float32(tensors[f"{layer}.weight_scale"]), points)


def words(codes: Bytes, bits: int) -> Array:
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
    groups = [_group(form, ["Linear"]), *(_group(other, layers) for other, layers in others.items())]
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _group(form: StoredFormat, targets: Sequence[str]) -> dict[str, object]:
    weights: dict[str, object] = {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": form.zero == "fixed",
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    inputs: dict[str, object] = {"input_activations": None, "output_activations": None}
    return {"targets": list(targets), "weights": weights, **inputs, "format": FORMAT}
