"""4-bit floats: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, to which groups of numbers are rounded by a scale."""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.dtypes import Float32s
from ridgeline.quant.stored import LEVELS, Bytes

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


def codes_and_choice(w_NGS: Float32s, scales: Sequence[Float32s]) -> tuple[Bytes, Bytes]:
    """Round groups by the first of some scales [N, G] or, where its squared error is smaller, by a later one.

    Return codes [N, G * S] and which scale each group took. A scale of 0 makes zeros.
    """
    codes, choice = np.zeros(w_NGS.shape, dtype=np.uint8), np.zeros(w_NGS.shape[:2], dtype=np.uint8)
    least = np.full(w_NGS.shape[:2], np.inf, dtype=np.float32)
    for number, scale_NG in enumerate(scales):
        by = scale_NG[:, :, None]
        tried = nearest(w_NGS / np.where(by == 0, np.float32(np.inf), by))
        error = np.square(LEVELS["e2m1"][tried] * by - w_NGS).sum(axis=2)
        better = (error < least) | (number == 0)  # also where errors are too large to compare
        codes, least = np.where(better[:, :, None], tried, codes), np.where(better, error, least)
        choice = np.where(better, np.uint8(number), choice)
    return codes.reshape(len(codes), -1), choice
