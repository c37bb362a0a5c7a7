"""MXFP4: 4-bit floats (E2M1) in groups of 32 that share a power of two. OCP Microscaling Formats 1.0.

The standard's power lets the largest of a group saturate; the next one is taken where that loses less.
"""

import numpy as np

from ridgeline.core.dtypes import Float32s
from ridgeline.quant.e2m1 import grouped, rounded
from ridgeline.quant.schemes import only
from ridgeline.quant.stored import E8M0_BIAS, StoredFormat, StoredMatrix

GROUP = 32
LARGEST_EXPONENT = 2  # of E2M1
stored_format = only("mxfp4", StoredFormat("e2m1", 4, GROUP, scale="e8m0"))


def quantize(weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
    """Round every group by the better of two powers of two."""
    largest = np.abs(grouped(weight_NK, GROUP)).max(axis=2)
    exponent = np.frexp(largest)[1] - 1 - LARGEST_EXPONENT
    powers = (np.ldexp(np.float32(1), np.clip(e, -E8M0_BIAS, E8M0_BIAS)) for e in (exponent, exponent + 1))
    candidates = [np.where(np.isfinite(largest), power, np.float32(np.nan)) for power in powers]
    return rounded(weight_NK, form, candidates)
