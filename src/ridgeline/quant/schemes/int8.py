"""8 bits, symmetric, one float32 scale per output: w ~ (v - 128) * s, with v from 1 to 255."""

import numpy as np

from ridgeline.core.dtypes import Float32s
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredFormat, StoredMatrix

LARGEST = 127


def stored_format(group_size: int | None, zero_points: bool) -> StoredFormat:
    """Return the only format that the scheme has."""
    if zero_points or group_size is not None:
        raise ConfigError("int8 has one scale per output: group size and zero points are options of int4")
    return StoredFormat("uniform", 8, 0, scale="float32")


def quantize(weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
    """Round each row to nearest; its largest magnitude becomes 127 steps."""
    low, high = weight_NK.min(axis=1, keepdims=True), weight_NK.max(axis=1, keepdims=True)
    scale = np.maximum(high, -low)
    scale /= LARGEST
    # Below the normal floats a scale has no precision left, and kernels take it for zero: so is the row.
    scale[scale < np.finfo(np.float32).tiny] = 0
    steps = weight_NK / np.where(scale > 0, scale, np.float32(np.inf))
    np.rint(steps, out=steps)
    steps += form.fixed_zero
    return StoredMatrix(form, steps.astype(np.uint8), scale)
