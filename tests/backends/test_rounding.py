"""The reference rounds the inputs of integer matrices as the kernels' rule says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import tiny
from ridgeline import quant
from ridgeline.backends.reference.rounding import (
    InputRounding,
    RoundedInputs,
    rounded,
    roundings_of,
    with_rounded_inputs,
)
from ridgeline.program.lower import lower
from ridgeline.program.op import Plain
from ridgeline.spec import families

LARGEST = {8: 127, 16: 32767}


def round_one(x, bits):
    """The rule for one group [n], number by number."""
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan)
    scale = np.abs(x).max() / np.float32(LARGEST[bits])
    if scale < np.finfo(np.float32).tiny:
        return np.zeros_like(x)
    return np.rint(x / scale) * scale


@given(
    st.integers(1, 5),
    st.integers(1, 200),
    st.sampled_from([0, 32, 64, 256]),
    st.sampled_from([8, 16]),
    st.integers(0, 2**32),
)
def test_groups_are_rounded_apart(rows, width, group, bits, seed):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, width)) * np.exp(rng.normal(0, 8, (rows, width)))).astype(np.float32)
    x[rng.random(x.shape) < 0.003] = np.inf
    x[rng.random((rows, 1)).repeat(width, axis=1) < 0.1] *= np.float32(1e-38)
    size = group or width
    expected = [[round_one(row[i : i + size], bits) for i in range(0, width, size)] for row in x]
    actual = InputRounding(group, bits)(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(actual, np.stack([np.concatenate(parts) for parts in expected]))


def test_an_outlier_costs_its_own_group():
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    alone = InputRounding(32)(x)
    x[1, 40] = 1e4
    beside = InputRounding(32)(x)
    assert torch.equal(beside[[0, 2]], alone[[0, 2]])
    assert torch.equal(beside[1, :32], alone[1, :32]) and torch.equal(beside[1, 64:], alone[1, 64:])
    assert (beside[1, 32:40] == 0).all()


def test_results_keep_the_dtype():
    x = torch.randn(2, 64).bfloat16()
    assert InputRounding(32)(x).dtype is torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
def test_matrices_of_integers_and_no_others(family):
    program = lower(families.read_spec(tiny(family, lambda *options: options[0])))
    form = quant.scheme("int8").stored_format(None, False)
    chosen = quant.quantized_names(program, embeddings=True)
    assert roundings_of(dict.fromkeys(chosen, form), "int16") == {}
    after = with_rounded_inputs(program, roundings_of(dict.fromkeys(chosen, form), "auto"))
    for old, new in zip(program.ops, after.ops, strict=True):
        if old.kind in ("linear", "lm_head", "experts") and old.weights[0] in chosen:
            assert isinstance(new.attrs, RoundedInputs) and new.attrs.attrs == old.attrs
            assert [x is not None for x in new.attrs.roundings] == [name in chosen for name in old.weights]
        else:
            assert new == old
    assert with_rounded_inputs(program, {}) == program


def test_without_rounding_inputs_are_as_they_come():
    x = torch.randn(2, 8)
    assert rounded(x, Plain()) is x
    assert rounded(x, RoundedInputs(Plain(), (None, InputRounding(32)))) is x
    assert not torch.equal(rounded(x, RoundedInputs(Plain(), (None, InputRounding(32))), weight=1), x)
