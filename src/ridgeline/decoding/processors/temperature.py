"""Divides by the temperature; 1 is the model's own distribution."""

from collections.abc import Sequence

from array_api_compat import array_namespace, device

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow


class Temperature:
    order = 60
    in_step = True

    def uses(self, row: SampleRow) -> bool:
        return row.params.temperature != 1.0 and not row.params.greedy

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        divisors = [row.params.temperature if self.uses(row) else 1.0 for row in rows]
        xp = array_namespace(logits_RV)
        logits_RV /= xp.asarray(divisors, dtype=xp.float32, device=device(logits_RV))[:, None]
        return logits_RV
