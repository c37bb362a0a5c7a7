"""Excludes the tokens that the row's strategy forbids."""

import math
from collections.abc import Sequence

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import cells


class BannedIds:
    order = 15
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        return bool(row.banned_ids)

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        edits = ((i, row.banned_ids, -math.inf) for i, row in enumerate(rows) if self.uses(row))
        rows_E, ids_E, values_E = cells(edits, logits_RV)
        logits_RV[rows_E, ids_E] = values_E
        return logits_RV
