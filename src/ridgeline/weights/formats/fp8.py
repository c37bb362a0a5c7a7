"""FP8 as DeepSeek-V3 is published: E4M3 numbers, and one float scale for every block of rows and columns.

`X` [O, I] float8 and `X_scale_inv` [O / rows, I / columns], rounded up, are together the tensor [O, I] called `X`: each
number times its block's scale.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint, TensorEntry
from ridgeline.weights.formats import PackedTensor

SCALES = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16")


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.expect("fmt", "e4m3")
    settings.expect("activation_scheme", "dynamic")  # a static one has scales of its own
    settings.expect("scale_fmt", "ue8m0", None)  # scales that are powers of two
    settings.ignore("modules_to_not_convert")  # the types of the tensors say it too
    block = settings.integers("weight_block_size", low=1)
    if len(block) != 2:
        raise ConfigError(
            f"quantization_config: weight_block_size={list(block)} is not supported; fp8 weights have one scale for "
            "every block of [rows, columns]"
        )
    return [
        _packed(name, checkpoint.entries, block[0], block[1])
        for name, entry in checkpoint.entries.items()
        if entry.dtype == "F8_E4M3"
    ]


def _packed(name: str, entries: Mapping[str, TensorEntry], rows: int, columns: int) -> PackedTensor:
    numbers, scales = entries[name], entries.get(name + SCALES)
    if scales is None:
        raise ModelLoadError(f"{numbers.file}: {name} has no {name + SCALES} beside it; download the model again")
    expected = tuple(-(-size // block) for size, block in zip(numbers.shape, (rows, columns)))
    if len(numbers.shape) != 2 or scales.shape != expected or scales.dtype not in SCALE_DTYPES:
        raise ModelLoadError(
            f"{numbers.file}: {name} is {list(numbers.shape)} and {name + SCALES} is {scales.dtype} "
            f"{list(scales.shape)}; blocks of {rows} x {columns} need a matrix and {' or '.join(SCALE_DTYPES)} scales"
        )
    form = StoredFormat("e4m3", 8, columns, scale="float32")
    return PackedTensor(name, numbers.shape, (name, name + SCALES), form, partial(_matrix, rows, form))


def _matrix(block_rows: int, form: StoredFormat, parts: Sequence[Array], rows: slice) -> StoredMatrix:
    numbers_OI, scales = parts
    block_of_row = np.arange(len(numbers_OI))[rows] // block_rows
    return StoredMatrix(form, numbers_OI[rows].view(np.uint8), float32(scales)[block_of_row])
