"""Excludes all tokens but those that the request allows."""

import math
from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, device

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow


class AllowedIds:
    order = 7
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        return bool(row.params.allowed_token_ids)

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        xp, place = array_namespace(logits_RV), device(logits_RV)
        for i, row in enumerate(rows):
            if self.uses(row):
                ids_A = xp.asarray(np.array(row.params.allowed_token_ids), device=place)
                allowed_A = xp.take(logits_RV[i, :], ids_A)
                logits_RV[i, :] = -math.inf
                logits_RV[i, ids_A] = allowed_A
        return logits_RV
