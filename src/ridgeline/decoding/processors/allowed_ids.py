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
                others_V = ~np.isin(np.arange(logits_RV.shape[1]), row.params.allowed_token_ids)
                logits_RV[i, :][xp.asarray(others_V, device=place)] = -math.inf
        return logits_RV
