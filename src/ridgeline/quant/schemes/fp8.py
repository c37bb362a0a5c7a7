"""FP8: 8-bit floats (E4M3), one float32 scale per output, whose largest magnitude becomes 448, the largest there is."""

import numpy as np

from ridgeline.core.dtypes import FLOAT8_E4M3, Float32s
from ridgeline.quant.schemes import only
from ridgeline.quant.stored import StoredFormat, StoredMatrix

LARGEST = np.float32(448)
stored_format = only("fp8", StoredFormat("e4m3", 8, 0, scale="float32"))


def quantize(weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
    """Round each row to nearest."""
    return quantize_by(weight_NK, form, np.abs(weight_NK).max(axis=1, keepdims=True) / LARGEST)


def quantize_by(weight_NK: Float32s, form: StoredFormat, scale_N1: Float32s) -> StoredMatrix:
    """Round rows to nearest by these scales; what is too large for one becomes the largest."""
    scale_N1 = np.where(scale_N1 < np.finfo(np.float32).tiny, np.float32(0), scale_N1)  # kernels take it for zero
    steps = weight_NK / np.where(scale_N1 == 0, np.float32(np.inf), scale_N1)
    codes = np.clip(steps, -LARGEST, LARGEST).astype(FLOAT8_E4M3).view(np.uint8)
    return StoredMatrix(form, codes, scale_N1)
