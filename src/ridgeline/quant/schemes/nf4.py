"""NF4: quantiles of a normal distribution in blocks of 64 that share their largest magnitude, as in bitsandbytes."""

import numpy as np

from ridgeline.core.dtypes import Float32s
from ridgeline.quant.e2m1 import grouped
from ridgeline.quant.schemes import only
from ridgeline.quant.stored import LEVELS, StoredFormat, StoredMatrix

GROUP = 64
BETWEEN = (LEVELS["nf4"][1:] + LEVELS["nf4"][:-1]) / 2  # from here on the next level is nearer
stored_format = only("nf4", StoredFormat("nf4", 4, GROUP, scale="float32"))


def quantize(weight_NK: Float32s, form: StoredFormat) -> StoredMatrix:
    """Round every group by its largest magnitude."""
    w_NGS = grouped(weight_NK, GROUP)
    scales = np.abs(w_NGS).max(axis=2)
    scales[scales < np.finfo(np.float32).tiny] = 0  # kernels take what is below the normal floats for zero
    by = 1 / np.where(scales == 0, np.float32(np.inf), scales)
    w_NGS = w_NGS * by[:, :, None]
    codes = np.zeros(w_NGS.shape, dtype=np.uint8)
    for bound in BETWEEN:  # several times faster than a search
        codes += w_NGS > bound
    return StoredMatrix(form, codes.reshape(len(codes), -1)[:, : weight_NK.shape[1]], scales)
