"""Nucleus sampling: keeps the fewest largest tokens with mass >= top_p (Holtzman et al., arXiv:1904.09751)."""

import math
from collections.abc import Sequence

from array_api_compat import array_namespace

from ridgeline.core.arrays import Array
from ridgeline.core.step import SampleRow
from ridgeline.decoding.random_sample import integer_weights


class TopP:
    order = 80
    in_step = True

    def uses(self, row: SampleRow) -> bool:
        return row.params.top_p < 1.0

    def apply(self, logits_RV: Array, rows: Sequence[SampleRow]) -> Array:
        for i, row in enumerate(rows):
            if self.uses(row):
                _cut(logits_RV[i, :], row.params.top_p)
        return logits_RV


def _cut(logits_V: Array, top_p: float) -> None:
    """Write -inf to what lies outside of the nucleus; of equal logits the lower columns are inside.

    Tokens of weight w <= rest / V, where `rest` is the mass that may stay outside, together have no more than it: all
    of the nucleus is at or above the smallest logit of the others, and only these candidates are sorted.
    """
    xp = array_namespace(logits_V)
    if not xp.isfinite(xp.max(logits_V)):
        return  # nothing can be sampled from it, which the sampler says
    (num_columns,) = logits_V.shape
    weights_V = integer_weights(logits_V[None, :])[0, :]
    total = int(xp.sum(weights_V))
    need = _least_mass(top_p, total)
    floor = xp.min(logits_V[weights_V > (total - need) // num_columns])
    (columns_C,) = xp.nonzero(logits_V >= floor)
    values_C = logits_V[columns_C]
    by_value_C = xp.argsort(values_C, descending=True, stable=False)  # equal logits have equal weights
    mass_C = xp.cumulative_sum(weights_V[columns_C][by_value_C])
    last = int(xp.count_nonzero(mass_C < need))  # of the nucleus
    cut = values_C[by_value_C[last]]
    (above_N,) = xp.nonzero(values_C > cut)
    (equal_N,) = xp.nonzero(values_C == cut)
    inside_N = columns_C[xp.concat((above_N, equal_N[: last + 1 - above_N.shape[0]]))]
    nucleus_N = logits_V[inside_N]
    logits_V[:] = -math.inf
    logits_V[inside_N] = nucleus_N


def _least_mass(top_p: float, total: int) -> int:
    """Return ceil(top_p * total), exactly."""
    numerator, denominator = top_p.as_integer_ratio()
    return -(-numerator * total // denominator)
