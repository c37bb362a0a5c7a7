"""4-bit floats: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, to which groups of numbers are rounded by a scale."""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.dtypes import Float32s
from ridgeline.quant.stored import LEVELS, Bytes, StoredFormat, StoredMatrix, times_outer

LARGEST = 6


def nearest(values: Float32s) -> Bytes:
    """Return the codes of the nearest numbers, ties to the even code; beyond the largest, that of the largest."""
    size = np.minimum(np.abs(values), LARGEST)
    above = np.where(size < 4, np.rint(size) + 2, np.rint(size / 2) + 4)
    index = np.where(size < 2, np.rint(size * 2), above)
    return index.astype(np.uint8) | np.signbit(values).astype(np.uint8) << np.uint8(3)


def grouped(weight_NK: Float32s, size: int) -> Float32s:
    """Return [N, G, size], zeros behind the last input."""
    num_outputs, num_inputs = weight_NK.shape
    return np.pad(weight_NK, ((0, 0), (0, -num_inputs % size))).reshape(num_outputs, -1, size)


def rounded(
    weight_NK: Float32s, form: StoredFormat, candidates: Sequence[Float32s], outer_N1: Float32s | None = None
) -> StoredMatrix:
    """Round groups by the first of some scales [N, G] or, where its squared error is smaller, by a later one.

    A scale of 0 makes zeros; all count as `times_outer` has them.
    """
    w_NGS = grouped(weight_NK, form.group)
    codes, scales = np.zeros(w_NGS.shape, dtype=np.uint8), candidates[0]
    least = np.full(scales.shape, np.inf, dtype=np.float32)
    for number, tried_NG in enumerate(candidates):
        by = (tried_NG if outer_N1 is None else times_outer(tried_NG, outer_N1))[:, :, None]
        tried = nearest(w_NGS / np.where(by == 0, np.inf, by).astype(np.float32))
        error = np.square(LEVELS["e2m1"][tried] * by - w_NGS).sum(axis=2)
        better = (error < least) | (number == 0)  # also where errors are too large to compare
        codes, least = np.where(better[:, :, None], tried, codes), np.where(better, error, least)
        scales = np.where(better, tried_NG, scales)
    return StoredMatrix(form, codes.reshape(len(codes), -1)[:, : weight_NK.shape[1]], scales, outer=outer_N1)
