"""List the logits that a sparse edit touches. Used by the processors that change the logits of single tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device

from ridgeline.core.arrays import Array

Values = float | npt.NDArray[np.float64]


def cells(edits: Iterable[tuple[int, Sequence[int], Values]], logits_RV: Array) -> tuple[Array, Array, Array]:
    """Flatten (row, token ids, one value or one per id) edits to rows int64 [E], ids int64 [E], values float32 [E].

    An id outside the vocabulary is dropped: front ends refuse it, and here it would take the whole step down.
    """
    parts: list[tuple[npt.NDArray[Any], ...]] = []
    for row, token_ids, value in edits:
        ids = np.asarray(token_ids, dtype=np.int64)
        spread = np.broadcast_to(np.asarray(value, dtype=np.float32), ids.shape)
        parts.append((np.full(ids.shape, row, dtype=np.int64), ids, spread))
    rows_E, ids_E, values_E = map(np.concatenate, zip(*parts))
    known_E = (ids_E >= 0) & (ids_E < logits_RV.shape[1])
    xp, place = array_namespace(logits_RV), device(logits_RV)
    rows, ids, values = (xp.asarray(each_E[known_E], device=place) for each_E in (rows_E, ids_E, values_E))
    return rows, ids, values
