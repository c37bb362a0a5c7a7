"""Packed weight matrices: the same logits as from plain ones, for every family, and nothing stored twice in vain."""

import random

import pytest
import torch

from families import tiny
from ridgeline.backends.reference import packed
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.program.lower import lower
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.spec import families

CONTEXT = 24


@pytest.fixture
def pack_all(monkeypatch):
    monkeypatch.setattr(packed, "MIN_ELEMENTS", 0)


def program_and_weights(name, dtype):
    rng = random.Random(name)
    program = lower(families.read_spec(tiny(name, lambda *options: rng.choice(options))), CONTEXT)
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)
        for key, shape in program.weights.items()
    }
    return program, weights


@pytest.mark.parametrize("name", families.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_programs_give_the_same_logits(name, dtype, pack_all):
    program, weights = program_and_weights(name, dtype)
    packed_program, packed_weights = packed.pack_matrices(program, weights)
    tokens_BT = torch.arange(2 * CONTEXT).reshape(2, CONTEXT) % program.vocab_size
    with torch.inference_mode():
        expected = dense_logits(program, weights, tokens_BT)
        actual = dense_logits(packed_program, packed_weights, tokens_BT)
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    if packed._can_pack(weights["embed.weight"]):
        matrices = [op.weights[0] for op in packed_program.ops if op.kind in MATRIX_OPS]
        assert all(packed_weights[name].is_mkldnn for name in matrices)
    used = {weight for op in packed_program.ops for weight in op.weights}
    assert set(packed_weights) == used  # the plain copy of a packed matrix is let go


@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_takes_any_number_of_rows(num_rows, with_bias, pack_all):
    weight, bias = torch.randn(7, 5), torch.randn(7) if with_bias else None
    x = torch.randn(num_rows, 10)[:, ::2]  # not contiguous
    actual = packed.linear(x, torch.ops.mkldnn._reorder_linear_weight(weight, packed.ROWS), bias)
    torch.testing.assert_close(actual, packed.linear(x, weight, bias))


def test_small_matrices_and_other_dtypes_stay_plain(monkeypatch):
    program, weights = program_and_weights("llama", torch.float32)
    assert packed.pack_matrices(program, weights)[1].keys() == weights.keys()
    monkeypatch.setattr(packed, "MIN_ELEMENTS", 0)
    half = {name: weight.half() for name, weight in weights.items()}
    assert packed.pack_matrices(program, half)[1].keys() == half.keys()
