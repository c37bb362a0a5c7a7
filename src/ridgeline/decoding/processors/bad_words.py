"""Excludes the last token of each bad word whose other tokens the output ends with."""

import math
from collections.abc import Sequence

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import cells


class BadWords:
    order = 17
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        return bool(row.params.bad_word_ids)

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        edits = ((i, _ends(row), -math.inf) for i, row in enumerate(rows) if self.uses(row))
        rows_E, ids_E, values_E = cells(edits, logits_RV)
        logits_RV[rows_E, ids_E] = values_E
        return logits_RV


def _ends(row: SampleRow) -> list[int]:
    """Return the tokens that would complete a bad word."""
    found: list[int] = []
    for *before, last in row.params.bad_word_ids:
        if before == list(row.output_ids[len(row.output_ids) - len(before) :] if before else ()):
            found.append(last)
    return found
