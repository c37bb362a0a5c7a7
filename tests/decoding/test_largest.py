"""argmax and the k largest against a plain sort, with many ties, over every path (sort, blocks, topk, regrowth)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.decoding.largest import argmax, largest


@settings(deadline=None, max_examples=120)
@given(
    num_columns=st.sampled_from([1, 2, 127, 128, 129, 1024, 1025, 5000, 20011]),
    levels=st.sampled_from([1, 2, 40, 3000, 10**9]),
    k=st.sampled_from([1, 2, 20, 100, 1000, 30000]),
    hidden=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 1000),
)
def test_as_a_stable_sort(num_columns, levels, k, hidden, seed):
    rng = np.random.default_rng(seed)
    x_RV = rng.integers(0, levels, (3, num_columns)).astype(np.float32)
    x_RV[rng.random(x_RV.shape) < hidden] = -np.inf
    x_RV[:, rng.integers(num_columns)] = 1.0
    values_RK, columns_RK = largest(torch.from_numpy(x_RV), k)
    order_RK = np.argsort(-x_RV, axis=1, kind="stable")[:, :k]
    expected_RK = np.take_along_axis(x_RV, order_RK, 1)
    np.testing.assert_array_equal(values_RK.numpy(), expected_RK)
    finite_RK = np.isfinite(expected_RK)
    np.testing.assert_array_equal(columns_RK.numpy()[finite_RK], order_RK[finite_RK])
    assert all(len(set(row)) == len(row) for row in columns_RK.tolist())
    np.testing.assert_array_equal(argmax(torch.from_numpy(x_RV)).numpy(), x_RV.argmax(1))


@pytest.mark.parametrize("num_columns", [5, 300, 20011])
def test_argmax_finds_nan(num_columns):
    x_RV = torch.zeros(2, num_columns)
    x_RV[1, num_columns - 1] = torch.nan
    assert argmax(x_RV).tolist() == [0, num_columns - 1]
