"""The paged cache's memory: what is written is read back, at every ISA level, kind and block size."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.quant.kv import SCALED, as_cached

native = pytest.importorskip("ridgeline._native", reason="the native kernels are not built")

Floats = npt.NDArray[np.float32]
LEVELS = native.runnable_levels()
KINDS = ("f32", "bf16", *SCALED)


def to_bf16(x: Floats) -> Floats:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def stored(kind: str, x: Floats, *, keys: bool) -> Floats:
    """What is read where `x` was written."""
    if kind in SCALED:
        return as_cached(kind, x, keys=keys)
    return to_bf16(x) if kind == "bf16" else x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from((1, 8, 15, 16, 24, 33, 64, 80, 128, 256)),
    block_size=st.sampled_from((1, 2, 8, 16, 32, 64, 256)),
    seed=st.integers(0, 2**32 - 1),
)
def test_tokens_are_read_as_they_were_rounded(
    level: str, kind: str, heads: int, head_dim: int, block_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    state = native.KvState(level, kind, heads, head_dim, block_size, 3)
    slots = np.arange(3 * block_size)  # in order, as a sequence fills its blocks
    shape = (len(slots), heads, head_dim)
    k = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-20, 20, (*shape[:2], 1))).astype(np.float32)
    v = rng.standard_normal(shape, np.float32)
    v[0] = 0
    state.write(slots, k, v)
    read_k, read_v = state.read(slots)
    np.testing.assert_array_equal(read_k, stored(kind, k, keys=True))
    np.testing.assert_array_equal(read_v, stored(kind, v, keys=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_first_token_of_a_block_clears_what_was_there(level: str, kind: str) -> None:
    state = native.KvState(level, kind, 2, 24, 8, 3)
    ones = np.ones((24, 2, 24), np.float32)
    state.write(np.arange(24), ones * np.float32(np.nan), ones * np.float32(np.nan))
    assert all(np.isnan(x).all() for x in state.read(np.arange(24)))  # a NaN stays visible until then
    state.write(np.asarray([8]), ones[:1], ones[:1])
    for number, x in enumerate(state.read(np.arange(24))):
        np.testing.assert_array_equal(x[8], stored(kind, ones[8], keys=number == 0))
        np.testing.assert_array_equal(x[9:16], 0 * ones[9:16])
        assert np.isnan(x[:8]).all() and np.isnan(x[16:]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_in_the_middle_keeps_its_neighbours(level: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    state = native.KvState(level, kind, 2, 80, 32, 2)
    slots = np.arange(64)
    k, v = rng.standard_normal((2, 64, 2, 80), np.float32)
    state.write(slots, k, v)
    k[37], v[37] = 5, -7
    state.write(slots[37:38], k[37:38], v[37:38])
    for x, want, keys in zip(state.read(slots), (k, v), (True, False), strict=True):
        np.testing.assert_array_equal(x, stored(kind, want, keys=keys))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_copied_by_its_bytes(kind: str) -> None:
    rng = np.random.default_rng(5)
    state = native.KvState(LEVELS[-1], kind, 2, 40, 16, 4)
    k, v = rng.standard_normal((2, 16, 2, 40), np.float32)
    state.write(16 + np.arange(16), k, v)
    state.copy_block(1, 3)
    for x, y in zip(state.read(16 + np.arange(16)), state.read(48 + np.arange(16)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_int8_rounds_ties_to_even_and_survives_subnormals() -> None:
    state = native.KvState(LEVELS[-1], "int8", 1, 8, 1, 2)
    ties = np.asarray([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], np.float32).reshape(1, 1, 8)
    tiny = np.asarray([1e-45, 1e-39, -3e-39, 2e-38, 0, 0, 0, 0], np.float32).reshape(1, 1, 8)
    state.write(np.asarray([0]), ties, tiny)
    k, v = state.read(np.asarray([0]))
    np.testing.assert_array_equal(k[0, 0], [127, 0, 2, 2, 0, -2, -2, 126])
    assert np.abs(v - tiny).max() <= tiny.max() / 127


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scaled_token_that_is_not_finite_says_so(value: float, kind: str) -> None:
    state = native.KvState(LEVELS[-1], kind, 1, 8, 16, 1)
    x = np.ones((2, 1, 8), np.float32)
    x[0, 0, 3] = value
    state.write(np.arange(2), x, x)
    for read, keys in zip(state.read(np.arange(2)), (True, False), strict=True):
        assert np.isnan(read[0]).all()
        np.testing.assert_array_equal(read[1], stored(kind, x[1], keys=keys))


@pytest.mark.parametrize(
    ("kind", "head_dim", "block_size", "words"),
    [
        ("f32", 0, 16, "head_dim"),
        ("f32", 577, 16, "head_dim"),
        ("int8", 257, 16, "int8"),
        ("int4", 257, 16, "int4"),
        ("f32", 64, 24, "block_size"),
        ("fp4", 64, 16, "fp4"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(kind: str, head_dim: int, block_size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        native.KvState(LEVELS[0], kind, 1, head_dim, block_size, 1)


def test_slots_and_shapes_are_checked() -> None:
    state = native.KvState(LEVELS[0], "f32", 1, 8, 16, 2)
    x = np.zeros((1, 1, 8), np.float32)
    for slot in (-1, 32):
        with pytest.raises(ValueError, match="slot"):
            state.write(np.asarray([slot]), x, x)
    with pytest.raises(ValueError, match="heads"):
        state.write(np.asarray([0]), x[..., :4].copy(), x)
