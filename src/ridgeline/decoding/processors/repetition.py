"""Apply the repetition penalty over prompt and output (Keskar et al., "CTRL", arXiv:1909.05858)."""

from collections.abc import Sequence

from array_api_compat import array_namespace

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.cells import cells


class Repetition:
    order = 30
    in_step = False

    def uses(self, row: SampleRow) -> bool:
        return row.params.repetition_penalty != 1.0

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        used = ((i, row, row.params.repetition_penalty) for i, row in enumerate(rows) if self.uses(row))
        edits = ((i, ids, penalty) for i, row, penalty in used for ids in (row.prompt_ids, row.output_ids))
        rows_E, ids_E, penalties_E = cells(edits, logits_RV)
        seen_E = logits_RV[rows_E, ids_E]
        # A token seen twice is written twice with the same value, so nothing needs to be made unique.
        punished_E = array_namespace(logits_RV).where(seen_E > 0, seen_E / penalties_E, seen_E * penalties_E)
        logits_RV[rows_E, ids_E] = punished_E
        return logits_RV
