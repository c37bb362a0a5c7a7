"""Suppresses end-of-sequence and stop tokens while the output is shorter than `min_tokens`."""

import math
from collections.abc import Sequence

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import cells


class MinTokens:
    order = 20
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        return row.num_output < row.params.min_tokens

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        used = ((i, row) for i, row in enumerate(rows) if self.uses(row))
        edits = ((i, (*row.stop_ids, *row.params.stop_token_ids), -math.inf) for i, row in used)
        rows_E, ids_E, values_E = cells(edits, logits_RV)
        logits_RV[rows_E, ids_E] = values_E
        return logits_RV
