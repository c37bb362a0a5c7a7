"""Adds the request's bias to the logits of the tokens it names."""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import cells


class LogitBias:
    order = 10
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        used = ((i, row.params.logit_bias) for i, row in enumerate(rows) if self.uses(row))
        edits = ((i, tuple(bias), np.array(tuple(bias.values()), dtype=np.float64)) for i, bias in used)
        rows_E, ids_E, biases_E = cells(edits, logits_RV)
        logits_RV[rows_E, ids_E] += biases_E
        return logits_RV
