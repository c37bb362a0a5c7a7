"""Apply OpenAI's presence and frequency penalties, over the output alone."""

from collections.abc import Iterator, Sequence

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import Values, cells


class PresenceFrequency:
    order = 40
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        penalized = row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0
        return penalized and len(row.output_ids) > 0

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        rows_E, ids_E, penalties_E = cells(self._edits(rows), logits_RV)
        logits_RV[rows_E, ids_E] -= penalties_E
        return logits_RV

    def _edits(self, rows: Sequence[SampleRow]) -> Iterator[tuple[int, Sequence[int], Values]]:
        for i, row in enumerate(rows):
            if self.uses(row):
                token_ids, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
                penalties = row.params.frequency_penalty * counts.astype(np.float64) + row.params.presence_penalty
                yield i, token_ids.tolist(), penalties
