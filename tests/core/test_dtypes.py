"""Casts between the number types of weights: every value of the small types, as torch has them."""

import numpy as np
import pytest
import torch

from ridgeline.backends.reference.tensors import as_array, as_tensor
from ridgeline.core.dtypes import (
    BFLOAT16,
    DTYPES,
    FLOAT8_E4M3,
    FLOAT32,
    all_finite,
    assign,
    contiguous,
    equal,
    float32,
    to_dtype,
)

BITS = np.arange(1 << 16, dtype=np.uint16)
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def same(found, expected):
    """Bits, but for which NaN it is."""
    found, expected = torch.as_tensor(float32(found)), expected.float()
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(7).view(torch.int32), expected.nan_to_num(7).view(torch.int32)
    )


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", DTYPES)
def test_every_value_of_16_bits(source, target):
    array = BITS.view(DTYPES[source])
    tensor = torch.from_numpy(BITS).view(TORCH[source])
    cast = to_dtype(array, DTYPES[target])
    assert cast.dtype == DTYPES[target] and same(cast, tensor.to(TORCH[target]))


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_float32_is_rounded_to_nearest_and_halves_to_even(target):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 300_000, dtype=np.uint64).astype(np.uint32)
    halves = (rng.integers(0, 1 << 16, 100_000).astype(np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, halves, halves & 0xFFFFF000]).view(np.float32)
    assert same(to_dtype(values, DTYPES[target]), torch.from_numpy(values).to(TORCH[target]))


def test_every_float8():
    codes = np.arange(256, dtype=np.uint8)
    assert same(float32(codes.view(FLOAT8_E4M3)), torch.from_numpy(codes).view(torch.float8_e4m3fn))


def test_a_cast_is_contiguous_and_the_same_type_is_no_copy():
    turned = to_dtype(np.arange(12, dtype=np.float32).reshape(3, 4), BFLOAT16).T
    assert to_dtype(turned, BFLOAT16) is turned
    assert contiguous(turned).flags.c_contiguous and equal(contiguous(turned), turned)
    assert float32(turned).flags.c_contiguous and np.array_equal(float32(turned), turned.astype(np.float32))
    assert not equal(turned, float32(turned))
    out = np.zeros((4, 3), BFLOAT16)
    assign(out, float32(turned))
    assert equal(out, contiguous(turned))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_and_arrays_share_their_memory(dtype):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).astype(DTYPES[dtype])
    tensor = as_tensor(array)
    assert tensor.dtype == TORCH[dtype] and tensor.data_ptr() == array.ctypes.data
    tensor[1, 2] = 9
    assert float(array[1, 2]) == 9 and equal(as_array(tensor), array)
    assert as_array(tensor.requires_grad_()).dtype == DTYPES[dtype]
    assert to_dtype(array, FLOAT32).dtype == FLOAT32


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_no_number_is_found_wherever_it_is(name):
    array = np.full((3, 40_000), 1.5, np.float32).astype(DTYPES[name])
    array[0, 0], array[1, 1] = (np.float32(sign * torch.finfo(TORCH[name]).max) for sign in (1, -1))
    assert all_finite(array) and all_finite(array.T) and all_finite(array[:0])
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for at in ((0, 0), (2, 39_999)):
            bad = array.copy()
            bad[at] = value
            assert not all_finite(bad) and not all_finite(bad.T)
