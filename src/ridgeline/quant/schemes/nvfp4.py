"""NVFP4: 4-bit floats (E2M1) in groups of 16 that share an 8-bit float (E4M3), and a float32 for each output.

A group's largest number becomes 6 or, where that loses less, 4.
"""

import numpy as np

from ridgeline.core.dtypes import FLOAT8_E4M3, Float32s
from ridgeline.core.errors import ConfigError
from ridgeline.quant.e2m1 import LARGEST, codes_and_choice, grouped
from ridgeline.quant.stored import StoredFormat, StoredMatrix

GROUP = 16
LARGEST_SCALE = np.float32(448)


def stored_format(group_size: int | None, zero_points: bool) -> StoredFormat:
    """Return the format; it has no options."""
    if zero_points or group_size not in (None, GROUP):
        raise ConfigError("nvfp4 has groups of 16 and no zero points; leave quantize_group_size and zero_points out")
    return StoredFormat("e2m1", 4, GROUP, scale="e4m3")


def quantize(weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
    """Round with scales whose largest of an output is the largest that there is."""
    return rounded(weight_NK, form, np.abs(weight_NK).max(axis=1, keepdims=True))


def rounded(weight_NK: Float32s, form: StoredFormat, largest_N1: Float32s) -> StoredMatrix:
    """Round a matrix whose outputs share scales up to what holds `largest_N1`."""
    w_NGS = grouped(weight_NK, GROUP)
    outer_N1 = largest_N1 / (LARGEST_SCALE * LARGEST)
    divisor = np.where(outer_N1 == 0, np.float32(np.inf), outer_N1)
    largest = np.abs(w_NGS).max(axis=2)
    scales = [
        np.minimum(largest / divisor / np.float32(most), LARGEST_SCALE).astype(FLOAT8_E4M3).astype(np.float32)
        for most in (LARGEST, 4)
    ]
    codes, choice = codes_and_choice(w_NGS, [scale * outer_N1 for scale in scales])
    return StoredMatrix(
        form, codes[:, : weight_NK.shape[1]], np.where(choice == 0, scales[0], scales[1]), outer=outer_N1
    )
