"""The largest logits of a row, exactly, ties to the lower column. Called by the sampler, top_k and logprobs.

The columns are divided into groups. The k-th largest of the groups' maxima is a floor that at least k values reach, and
few more do: only these are sorted.
"""

from array_api_compat import array_namespace

from ridgeline.core.arrays import Array

_MAX_GROUP = 128  # columns


def largest(logits_V: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` largest values and their columns, [min(k, V)], by value descending, then column ascending."""
    xp = array_namespace(logits_V)
    (num_columns,) = logits_V.shape
    k = min(k, num_columns)
    group = max(1, min(_MAX_GROUP, num_columns // (2 * k)))
    num_groups = num_columns // group  # at least k
    # Column c is in group c mod num_groups: rows of maxima are taken side by side.
    maxima_G = xp.max(xp.reshape(logits_V[: group * num_groups], (group, num_groups)), axis=0)
    floor = xp.sort(maxima_G)[num_groups - k]
    (columns_C,) = xp.nonzero(~(logits_V < floor))  # a NaN is among them
    values_C = logits_V[columns_C]
    order_K = xp.argsort(values_C, descending=True, stable=True)[:k]
    return values_C[order_K], columns_C[order_K]
