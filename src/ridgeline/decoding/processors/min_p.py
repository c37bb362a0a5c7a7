"""Keeps tokens at least `min_p` times as likely as the likeliest (Nguyen et al., arXiv:2407.01082)."""

import math
from collections.abc import Sequence

from array_api_compat import array_namespace, device

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow


class MinP:
    order = 70
    in_step = True

    def uses(self, row: SampleRow) -> bool:
        return row.params.min_p > 0.0

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        # p >= min_p * p_max in logits: no softmax, and min_p = 1 keeps exactly the ties of the maximum.
        margins = [math.log(row.params.min_p) if self.uses(row) else -math.inf for row in rows]
        xp = array_namespace(logits_RV)
        margin_R1 = xp.asarray(margins, dtype=xp.float32, device=device(logits_RV))[:, None]
        floor_R1 = xp.max(logits_RV, axis=-1, keepdims=True) + margin_R1
        logits_RV[logits_RV < floor_R1] = -math.inf
        return logits_RV
