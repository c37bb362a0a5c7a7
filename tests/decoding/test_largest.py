"""The k largest against a plain sort, with many ties, over every path (sort, blocks, whole row, regrowth)."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.decoding.largest import largest


@settings(deadline=None, max_examples=120)
@given(
    num_columns=st.sampled_from([1, 2, 127, 128, 129, 1024, 1025, 5000, 20011]),
    levels=st.sampled_from([1, 2, 40, 3000, 10**9]),
    k=st.sampled_from([1, 2, 20, 100, 1000, 30000]),
    hidden=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 1000),
    as_array=st.sampled_from([np.asarray, torch.from_numpy]),
)
def test_as_a_stable_sort(num_columns, levels, k, hidden, seed, as_array):
    rng = np.random.default_rng(seed)
    x_RV = rng.integers(0, levels, (3, num_columns)).astype(np.float32)
    x_RV[rng.random(x_RV.shape) < hidden] = -np.inf
    x_RV[:, rng.integers(num_columns)] = 1.0
    values_RK, columns_RK = zip(*(largest(as_array(x_V), k) for x_V in x_RV))
    order_RK = np.argsort(-x_RV, axis=1, kind="stable")[:, :k]
    expected_RK = np.take_along_axis(x_RV, order_RK, 1)
    np.testing.assert_array_equal(np.asarray(values_RK), expected_RK)
    finite_RK = np.isfinite(expected_RK)
    np.testing.assert_array_equal(np.asarray(columns_RK)[finite_RK], order_RK[finite_RK])
    assert all(len(set(row)) == len(row) for row in (column_K.tolist() for column_K in columns_RK))
