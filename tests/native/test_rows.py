"""Kernels over rows at every ISA level, against numpy in float64: norms, rotary embedding, activations, soft caps."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.spec.spec import Activation

_native = pytest.importorskip("ridgeline._native", reason="the native module is not built")

EPS = 2.0**-24  # half a unit in the last place of 1, the error of one float32 operation
TINY = 2.0**-120  # below this an absolute error is no error: subnormal numbers may count as 0
INF, NAN = np.inf, np.nan
LEVELS = _native.runnable_levels()
ACTIVATIONS = get_args(Activation)

every_level = pytest.mark.parametrize("level", LEVELS)
few = settings(max_examples=60, deadline=None)
widths = st.integers(1, 300)
seeds = st.integers(0, 2**32 - 1)
magnitudes = st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 30.0, 1e4, 1e15])  # the first one subnormal


def row(seed, width, magnitude=1.0):
    return (np.random.default_rng(seed).standard_normal(width) * magnitude).astype(np.float32)


def assert_near(actual, expected, bound):
    """Elementwise; where the expected value is not finite the two agree in kind."""
    assert actual.dtype == np.float32
    assert np.isnan(actual).tolist() == np.isnan(expected).tolist()
    finite = np.isfinite(expected)
    assert actual[~finite & ~np.isnan(expected)].tolist() == expected[~finite & ~np.isnan(expected)].tolist()
    error = np.abs(actual[finite].astype(np.float64) - expected[finite])
    allowed = np.broadcast_to(bound, expected.shape)[finite]
    worst = np.argmax(error - allowed) if error.size else 0
    assert (error <= allowed).all(), (error[worst], allowed[worst])


def activation(name, x):
    """In float64, as the definitions say it; infinities as IEEE arithmetic has them."""
    x = x.astype(np.float64)
    with np.errstate(all="ignore"):
        match name:
            case "silu":
                return x / (1 + np.exp(-x))
            case "gelu":
                return x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))
            case "gelu_tanh":
                return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            case "quick_gelu":
                return x / (1 + np.exp(-1.702 * x))
            case "sigmoid":
                return 1 / (1 + np.exp(-x))
            case "relu2":
                return np.square(np.maximum(x, 0).astype(np.float32)).astype(np.float64)  # overflows as float32 does
            case _:
                return np.maximum(x, 0)


@every_level
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
@few
@given(width=widths, seed=seeds, magnitude=magnitudes, offset=st.sampled_from([0.0, 3.0]))
def test_normalize(level, kind, width, seed, magnitude, offset):
    x, weight = row(seed, width, magnitude) + np.float32(offset * magnitude), row(seed + 1, width) + 1
    bias = row(seed + 2, width) if kind == "layer with bias" else None
    kind = kind.split()[0]
    exact, eps = x.astype(np.float64), 1e-6
    mean = exact.mean() if kind == "layer" else 0.0
    factor = 1 / math.sqrt(np.square(exact - mean).mean() + np.float64(np.float32(eps)))
    expected = (exact - mean) * factor * weight + (bias if bias is not None else 0.0)
    # A sum of n terms loses at most n roundings, of the mean as of the squares; the rest a handful of operations.
    mean_error = (width + 2) * EPS * np.abs(exact).mean() if kind == "layer" else 0.0
    factor_error = (width / 2 + 8) * EPS + mean_error * factor
    bound = np.abs(weight) * (mean_error * factor + np.abs(exact - mean) * factor * (factor_error + 4 * EPS))
    bound += 2 * EPS * (np.abs(expected) + (np.abs(bias) if bias is not None else 0)) + TINY * factor
    assert_near(_native.Rows(level).normalize(kind, x, eps, weight, bias), expected, bound)


@every_level
@few
@given(
    seed=seeds,
    heads=st.integers(1, 4),
    half=st.integers(0, 70),
    rest=st.integers(0, 5),
    magnitude=magnitudes,
    interleaved=st.booleans(),
)
def test_rotate(level, seed, heads, half, rest, magnitude, interleaved):
    x = row(seed, heads * (2 * half + rest + 1), magnitude).reshape(heads, -1)
    angles = np.random.default_rng(seed).uniform(-9, 9, half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[:, :half].astype(np.float64), x[:, half : 2 * half].astype(np.float64)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[:, 2 * half :]], axis=1)
    size = np.concatenate([abs(a * cos) + abs(b * sin), abs(b * cos) + abs(a * sin), 0 * x[:, 2 * half :]], axis=1)
    order = np.arange(x.shape[1])
    if interleaved:  # the halves' entries one by one
        order[: 2 * half] = order[: 2 * half].reshape(2, half).T.flatten()
    shuffled = np.ascontiguousarray(x[:, order])
    actual = _native.Rows(level).rotate(shuffled, cos, sin, interleaved)
    assert_near(actual, expected[:, order], 3 * EPS * size[:, order] + TINY)


@every_level
@few
@given(width=widths, seed=seeds, magnitude=magnitudes, factor=st.sampled_from([0.0, -1.5, 1e-8, 45.25]))
def test_add_and_scale_round_once(level, width, seed, magnitude, factor):
    x, y = row(seed, width, magnitude), row(seed + 1, width, magnitude)
    rows = _native.Rows(level)
    assert_near(rows.add(x, y), (x + y).astype(np.float64), 0)
    assert_near(rows.scale(x, factor), (x * np.float32(factor)).astype(np.float64), 0)


@every_level
@pytest.mark.parametrize("name", ACTIVATIONS)
@few
@given(width=widths, seed=seeds, magnitude=magnitudes, gated=st.booleans())
def test_activate(level, name, width, seed, magnitude, gated):
    x, factor = row(seed, width, magnitude), row(seed + 1, width) if gated else None
    exact = activation(name, x)
    expected = exact * (1 if factor is None else factor)
    bound = 2e-7 * np.maximum(np.abs(x), np.abs(exact)) * (1 if factor is None else np.abs(factor)) + TINY
    assert_near(_native.Rows(level).activate(name, x, factor), expected, bound)


@every_level
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_negative_tails_keep_their_digits(level, name):
    """Where the value is small against the input the error is small against the value: not made by a difference to 1.

    The bounds are relative. gelu's erfc is a polynomial of bounded absolute error, so its tail is the worst.
    """
    x = np.linspace(-8, -1e-4, 5001, dtype=np.float32)
    bound = {"gelu": 2e-2, "gelu_tanh": 2e-5}.get(name, 1e-6)
    expected = activation(name, x)
    assert_near(_native.Rows(level).activate(name, x), expected, bound * np.abs(expected) + TINY)
    near = x[x > -2]
    expected = activation(name, near)
    assert_near(_native.Rows(level).activate(name, near), expected, 1e-5 * np.abs(expected) + TINY)


@every_level
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_extreme_inputs_of_activations(level, name):
    """Large inputs reach their limits, a NaN stays one, and lanes do not mix."""
    finite = [0.0, -0.0, 1e-45, -1e-45, 88.0, -88.0, 88.8, -88.8, 104.0, -104.0, 1e9, -1e9, 3.4e38, -3.4e38]
    x = np.asarray([value for each in finite for value in (each, NAN, INF)], dtype=np.float32)
    for begin in range(18):  # every lane, and the rest of a row that fills no vector
        out = _native.Rows(level).activate(name, x[begin:].copy())
        bound = 2e-7 * np.maximum(np.abs(x[begin:]) * (x[begin:] > -80), np.abs(activation(name, x[begin:])))
        assert_near(out, activation(name, x[begin:]), bound + 1e-35)
    (limit,) = _native.Rows(level).activate(name, np.asarray([-INF], dtype=np.float32))
    assert limit == 0 if name in ("relu", "relu2", "sigmoid") else np.isnan(limit)  # -inf * 0, as in PyTorch


@every_level
@few
@given(width=widths, seed=seeds, magnitude=magnitudes, cap=st.sampled_from([0.5, 30.0, 50.0]))
def test_softcap(level, width, seed, magnitude, cap):
    x = row(seed, width, magnitude)
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    assert_near(_native.Rows(level).softcap(x, cap), expected, 8 * EPS * np.abs(expected) + TINY)


@every_level
def test_softcap_of_extremes(level):
    x = np.asarray([INF, -INF, NAN, 3e38, -3e38, 0.0, 1e-45] * 5, dtype=np.float32)
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    assert_near(_native.Rows(level).softcap(x, 30.0), expected, 8 * EPS * 30)


@every_level
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_what_is_not_finite_say_so(level, kind):
    """A NaN or an infinity anywhere leaves no number in a layer norm and no trace of one in a root mean square."""
    for bad in (NAN, INF):
        for at in (0, 20):
            x = row(3, 21)
            x[at] = bad
            ones = np.ones(21, dtype=np.float32)
            out = _native.Rows(level).normalize(kind, x, 1e-6, ones, ones if kind == "layer" else None)
            assert np.isnan(out[at])
            assert np.isnan(out).all() or (kind == "rms" and bad == INF and (np.delete(out, at) == 0).all())


def test_wrong_rows_are_refused():
    rows, x = _native.Rows("portable"), np.ones(8, dtype=np.float32)
    with pytest.raises(ValueError, match="does not run here"):
        _native.Rows("sse9")
    with pytest.raises(ValueError, match="as wide"):
        rows.add(x, x[:7])
    with pytest.raises(ValueError, match="as wide as the row"):
        rows.normalize("rms", x, 1e-6, x[:7])
    with pytest.raises(ValueError, match="has a bias"):
        rows.normalize("rms", x, 1e-6, x, x)
    with pytest.raises(ValueError, match="two entries for each angle"):
        rows.rotate(x.reshape(1, 8), x[:5], x[:5])
    with pytest.raises(ValueError, match="none of: silu"):
        rows.activate("tanh", x)
    with pytest.raises(TypeError):
        rows.scale(x.astype(np.float64), 2.0)
