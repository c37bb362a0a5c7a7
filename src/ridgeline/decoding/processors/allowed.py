"""Excludes the tokens that the row's grammar does not allow."""

import math
from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, device

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow


class Allowed:
    order = 5
    in_step = True

    def uses(self, row: SampleRow) -> bool:
        return row.allowed is not None

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        xp, place = array_namespace(logits_RV), device(logits_RV)
        for i, row in enumerate(rows):
            if row.allowed is not None:
                bits = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")[: logits_RV.shape[1]]
                allowed_V = xp.asarray(bits.astype(np.bool_), device=place)
                logits_RV[i, : len(bits)][~allowed_V] = -math.inf
                logits_RV[i, len(bits) :] = -math.inf
        return logits_RV
