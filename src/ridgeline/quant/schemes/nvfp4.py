"""NVFP4: 4-bit floats (E2M1) in groups of 16 that share an 8-bit float (E4M3), and a float32 for each output.

A group's largest number becomes 6 or, where that loses less, 4.
"""

import numpy as np

from ridgeline.core.dtypes import FLOAT8_E4M3, Float32s
from ridgeline.quant.e2m1 import LARGEST, grouped, rounded
from ridgeline.quant.schemes import only
from ridgeline.quant.stored import StoredFormat, StoredMatrix, times_outer

GROUP = 16
LARGEST_SCALE = np.float32(448)
LARGEST_WEIGHT = LARGEST_SCALE * np.float32(LARGEST)  # with nothing outside
stored_format = only("nvfp4", StoredFormat("e2m1", 4, GROUP, scale="e4m3"))


def quantize(weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
    """Round with scales whose largest of an output is the largest that there is."""
    return quantize_by(weight_NK, form, np.abs(weight_NK).max(axis=1, keepdims=True) / LARGEST_WEIGHT)


def quantize_by(weight_NK: Float32s, form: StoredFormat, outer_N1: Float32s) -> StoredMatrix:
    """Round a matrix whose scales are multiplied by `outer_N1` or, where that is negative, divided."""
    unit_N1 = times_outer(np.ones_like(outer_N1), outer_N1)
    divisor = np.where(unit_N1 == 0, np.float32(np.inf), unit_N1)
    largest = np.abs(grouped(weight_NK, GROUP)).max(axis=2)
    scales = (np.minimum(largest / divisor / np.float32(most), LARGEST_SCALE) for most in (LARGEST, 4))
    candidates = [scale.astype(FLOAT8_E4M3).astype(np.float32) for scale in scales]
    return rounded(weight_NK, form, candidates, outer_N1)
