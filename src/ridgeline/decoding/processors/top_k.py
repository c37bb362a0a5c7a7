"""Keeps the k largest logits."""

import math
from collections.abc import Sequence

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.largest import largest


class TopK:
    order = 50
    in_step = True

    def uses(self, row: SampleRow) -> bool:
        return row.params.top_k > 0

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        for i, row in enumerate(rows):
            if 0 < row.params.top_k < logits_RV.shape[1]:
                values_K, columns_K = largest(logits_RV[i, :], row.params.top_k)
                logits_RV[i, :] = -math.inf
                logits_RV[i, columns_K] = values_K
        return logits_RV
