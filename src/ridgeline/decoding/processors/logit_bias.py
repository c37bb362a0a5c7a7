"""Adds the request's bias to the logits of the tokens it names."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import cells


class LogitBias:
    order: ClassVar[int] = 10
    in_step: ClassVar[bool] = False

    def uses(self, row: SampleRow) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        edits = (
            (i, tuple(row.params.logit_bias), np.array(tuple(row.params.logit_bias.values()), dtype=np.float64))
            for i, row in enumerate(rows)
            if self.uses(row)
        )
        rows_E, ids_E, biases_E = cells(edits, logits_RV)
        logits_RV[rows_E, ids_E] += biases_E
        return logits_RV
