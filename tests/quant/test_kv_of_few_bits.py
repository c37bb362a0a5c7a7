"""What a cache of few bits keeps of keys and values: the definition that every backend is held to."""

import ml_dtypes
import numpy as np
import pytest

from ridgeline.quant.kv import MIN_NORMAL, SCALED, as_cached, rotate, rotation_width

HEAD_DIMS = (1, 15, 16, 24, 64, 80, 128, 256)
STEPS = {"int8": (1 / 127, 1 / 127), "fp8": (1 / 14, 1 / 14), "int4": (1 / 32, 1 / 8)}  # of keys and values, at most


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_rotation_is_a_hadamard_matrix_in_every_block(head_dim):
    width = rotation_width(head_dim)
    matrix = rotate(np.eye(head_dim, dtype=np.float32))
    assert head_dim % width == 0 and (head_dim // width) % 2 == 1
    np.testing.assert_array_equal(matrix @ matrix.T, width * np.eye(head_dim))
    np.testing.assert_array_equal(matrix, matrix.T)
    blocks = np.kron(np.eye(head_dim // width), np.ones((width, width)))
    np.testing.assert_array_equal(np.abs(matrix), blocks)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", SCALED)
def test_errors_are_half_a_step_and_tokens_stand_alone(kind, head_dim, keys):
    x = np.random.default_rng(head_dim).standard_normal((50, 3, head_dim), np.float32)
    x[7] = 0
    x[9] *= 1e-20
    found = as_cached(kind, x, keys=keys)
    np.testing.assert_array_equal(found[7], 0)
    for token in (0, 9, 49):
        np.testing.assert_array_equal(as_cached(kind, x[token, 1:2], keys=keys), found[token, 1:2])
    turn, width = (rotate, rotation_width(head_dim)) if kind == "int4" else (np.asarray, 1)
    largest = np.abs(turn(x)).max(-1, keepdims=True)
    step = STEPS[kind][0 if keys else 1]
    # the level opposite of an extreme is missing: what would be there loses up to a whole step
    most = step * (1.0 if kind == "int4" else 0.5) * largest
    assert (np.abs(turn(found - x)) <= (1 + 2.0**-8) * most + 1e-38).all()  # scales are bfloat16
    assert width == rotation_width(head_dim) or kind != "int4"


def test_fp8_has_the_numbers_of_e4m3_but_its_subnormals():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = codes[np.isfinite(codes) & ((np.abs(codes) >= MIN_NORMAL) | (codes == 0))]
    np.testing.assert_array_equal(as_cached("fp8", numbers[None], keys=True)[0], numbers)
    small = np.asarray([[448, 0.5001, 0.4999, -0.9, 2**-9]], np.float32) * np.asarray([1, *[MIN_NORMAL] * 4])
    want = np.asarray([448, MIN_NORMAL, 0, -MIN_NORMAL, 0])
    np.testing.assert_array_equal(as_cached("fp8", small.astype(np.float32), keys=False)[0], want)


def test_a_rotation_saves_a_key_with_an_outlier():
    """One entry that is a hundred times as large takes all bits of its token, unless it is a part of every entry."""
    x = np.random.default_rng(1).standard_normal((200, 64), np.float32)
    x[:, 5] *= 100
    others = np.arange(64) != 5
    error = np.square(as_cached("int4", x, keys=True) - x)[:, others].mean()
    step = np.abs(x).max(-1, keepdims=True) / 32
    plain = np.square(np.rint(x / step) * step - x)[:, others].mean()
    assert error < 0.6 * plain


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_token_nan(kind, value):
    x = np.ones((2, 16), np.float32)
    x[0, 3] = value
    found = as_cached(kind, x, keys=True)
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_the_first_half_of_rotated_values_has_a_bit_more():
    """Entries there are twice as near, and no more bits are stored than a float32 scale for each would take."""
    x = np.random.default_rng(2).standard_normal((400, 64), np.float32)
    error = np.square(rotate(as_cached("int4", x, keys=False) - x)).mean(0)
    assert 3 < error[32:].mean() / error[:32].mean() < 5
    keys = np.square(rotate(as_cached("int4", x, keys=True) - x)).mean(0)
    assert 0.8 < keys[32:].mean() / keys[:32].mean() < 1.25
