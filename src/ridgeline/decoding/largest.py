"""The largest logits of a row, exactly, ties to the lower column. Called by the sampler, top_k and logprobs.

The columns are divided into groups. The k-th largest of the groups' maxima is a floor that at least k values reach, and
few more do: only these are sorted.
"""

from array_api_compat import array_namespace, device

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
    floor = xp.sort(maxima_G, stable=False)[num_groups - k]
    (groups_F,) = xp.nonzero(~(maxima_G < floor))  # a NaN is among them
    place = {"dtype": groups_F.dtype, "device": device(logits_V)}
    rows = xp.arange(0, group * num_groups, num_groups, **place)
    rest = xp.arange(group * num_groups, num_columns, **place)
    columns_C = xp.concat([xp.reshape(rows[:, None] + groups_F, (-1,)), rest])  # ascending within a row, as rows are
    values_C = logits_V[columns_C]
    (reaching_C,) = xp.nonzero(~(values_C < floor))
    columns_C, values_C = columns_C[reaching_C], values_C[reaching_C]
    order_K = xp.argsort(values_C, descending=True, stable=True)[:k]
    return values_C[order_K], columns_C[order_K]
