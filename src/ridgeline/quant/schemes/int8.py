"""8 bits, symmetric, one float32 scale per output: w ~ (v - 128) * s, with v from 1 to 255."""

import numpy as np

from ridgeline.core.dtypes import Float32s
from ridgeline.quant.schemes import only
from ridgeline.quant.stored import StoredFormat, StoredMatrix

LARGEST = 127
stored_format = only("int8", StoredFormat("uniform", 8, 0, scale="float32"))


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
