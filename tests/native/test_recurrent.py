"""Kernels of recurrent layers at every ISA level, over generated shapes, against numpy in float64."""

import numpy as np
import pytest

pytest.importorskip("ridgeline._native", reason="the native module is not built")
from recurrent_layers import LAYERS, Layer, Run, inputs_of, silu, softplus

from ridgeline import _native

EPS = 2.0**-24
LEVELS = _native.runnable_levels()

every_level = pytest.mark.parametrize("level", LEVELS)
every_kind = pytest.mark.parametrize("kind", LAYERS)


def expected(layer, inputs):
    """Outputs [S, L, W] and states [S, ..] in float64, and how far off the same in float32 may be: several times what
    it is when numpy computes it."""
    results = [
        [layer.oracle([x[s] for x in inputs], dtype) for s in range(len(inputs[0]))] for dtype in (float, np.float32)
    ]
    (out, state), (rough_out, rough_state) = ([np.asarray(part) for part in zip(*of)] for of in results)
    return out, state, bound(out, rough_out), bound(state, rough_state)


def bound(exact, rough):
    return 8 * np.abs(exact - rough).max(initial=0) + 32 * EPS * np.abs(exact).max(initial=0)


def random_chunks(rng):
    return lambda: int(rng.choice([0, 1, 1, 2, 7, 9, 33, 64, 65, 150]))


@every_level
@every_kind
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_what_the_definition_says(kind, level, seed):
    """Spans of mixed lengths in one step, new and continued, in shapes that fill no vector; NaN where nothing was."""
    rng = np.random.default_rng([seed, len(kind)])
    layer = LAYERS[kind](rng)
    inputs = inputs_of(layer, rng, 3, int(rng.choice([1, 20, 140])))
    run = Run(layer, inputs, level, threads=seed % 3 + 1)
    actual = run.all(random_chunks(rng))
    out, state, out_bound, state_bound = expected(layer, inputs)
    assert np.abs(actual - out).max() <= out_bound
    slots = [run.slot(s) for s in range(3)]
    assert np.abs(run.state[slots] - state).max() <= state_bound
    assert np.isnan(np.delete(run.state, slots, axis=0)).all(), "wrote to a slot of nobody"


@every_level
@every_kind
def test_the_step_and_the_threads_around_a_sequence_leave_no_trace(kind, level):
    """Bitwise: alone or beside others, on any number of threads, as long as its own spans are the same."""
    rng = np.random.default_rng(len(kind))
    layer = LAYERS[kind](rng)
    inputs = inputs_of(layer, rng, 2, 100)
    results = []
    for threads, others in ((1, False), (2, True), (5, False)):
        run = Run(layer, inputs, level, threads)
        spans = [(0, 0, 70), (0, 70, 29), (0, 99, 1)]
        results.append(np.concatenate([run.step([span, (1, 0, 80)] if others else [span])[0] for span in spans]))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


@every_level
@every_kind
def test_deterministic_results_do_not_depend_on_the_spans(kind, level):
    rng = np.random.default_rng(len(kind))
    layer = LAYERS[kind](rng)
    inputs = inputs_of(layer, rng, 1, 90)
    whole = Run(layer, inputs, level, 2, deterministic=True).all(lambda: 90)
    for chunks in (lambda: 1, random_chunks(rng)):
        assert (Run(layer, inputs, level, 3, deterministic=True).all(chunks) == whole).all()


@every_level
@every_kind
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_that_are_taken_back_leave_no_trace(kind, level, seed, deterministic):
    """Bitwise: any number of tokens behind spans of any length, none as well, in states and outputs."""
    rng = np.random.default_rng([seed, len(kind)])
    layer = LAYERS[kind](rng)
    inputs = inputs_of(layer, rng, 3, 60)
    most = 7
    sizes = rng.choice([0, 1, 1, 2, 5, 20 if deterministic else 7], 400)

    def drafts(size):
        room = most - size
        return rng.integers(0, 180, rng.integers(0, room + 1)).tolist() if room > 0 else []

    runs = [Run(layer, inputs, level, seed + 1, deterministic, max_logged) for max_logged in (0, most)]
    plain, drafted = (run.all(map(int, sizes).__iter__().__next__, *more) for run, more in zip(runs, ((), (drafts,))))
    assert (plain == drafted).all()
    slots = [runs[0].slot(s) for s in range(3) if not runs[1].pending[s]]
    assert (runs[0].state[slots] == runs[1].state[slots]).all()


@every_level
@pytest.mark.parametrize("kind", ["ssd", "delta_rule", "selective_scan"])
@pytest.mark.parametrize("steps", ["long", "short", "mixed"])
def test_steps_of_any_size_keep_their_digits(kind, level, steps):
    """A token that makes a head forget everything harms no later one, and nothing is forgotten without a reason."""
    rng = np.random.default_rng(3)
    layer = LAYERS[kind](rng)
    inputs = inputs_of(layer, rng, 1, 100)
    dt = inputs[3 if kind == "delta_rule" else 1]
    dt[:] = {"long": 90.0, "short": -80.0, "mixed": np.where(rng.random(dt.shape) < 0.2, 200.0, -9.0)}[steps]
    actual = Run(layer, inputs, level, 1).all(lambda: 100)
    out, _, out_bound, _ = expected(layer, inputs)
    assert np.abs(actual - out).max() <= out_bound


@every_level
def test_not_a_number_goes_forward_only(level):
    """It stays in its sequence and does not reach the tokens before it."""
    rng = np.random.default_rng(0)
    for kind in ("causal_conv", "selective_scan"):
        layer = LAYERS[kind](rng)
        inputs = inputs_of(layer, rng, 2, 30)
        inputs[0][0, 11] = np.nan
        actual = Run(layer, inputs, level, 2).all(lambda: 30)
        assert np.isfinite(actual[0, :11]).all()
        assert np.isnan(actual[0, 11]).all()
        assert np.isfinite(actual[1]).all()


@every_level
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norm(level, before, shared):
    rng = np.random.default_rng(1)
    for group in (1, 5, 16, 33, 128):
        groups, eps = int(rng.integers(1, 5)), 1e-5
        x, z = (2 * rng.standard_normal((7, groups * group)).astype(np.float32) for _ in range(2))
        weight = rng.standard_normal(group if shared else groups * group).astype(np.float32)
        wide = x.astype(float) * (1 if before else silu(z.astype(float)))
        parts = wide.reshape(7, groups, group)
        parts = parts / np.sqrt(np.square(parts).mean(-1, keepdims=True) + eps) * weight.reshape(-1, group)
        out = parts.reshape(7, -1) * (silu(z.astype(float)) if before else 1)
        assert np.abs(gated_norm(level, x, z, group, eps, before, weight, shared) - out).max() <= (
            (group + 32) * EPS * np.abs(out).max()
        )


def gated_norm(level, x, z, group, eps, before, weight, shared):
    def add(tape, buffers, out, _):
        tape.gated_norm(*buffers, out, group, eps, before, weight.ctypes.data, shared)

    layer = Layer([x.shape[1]] * 2, x.shape[1], (1,), None, add, [weight], [])
    return Run(layer, [x[None], z[None]], level, 2).all(lambda: len(x))[0]


@every_level
def test_softplus_keeps_the_digits_of_small_results(level):
    """Seen through a scan of one channel that holds exactly its step size: x = B = C = 1 and D = 0."""
    rate, skip = np.asarray([[-1.0]], np.float32), np.zeros(1, np.float32)
    dt = np.concatenate([np.linspace(-80, 60, 2001), np.linspace(-2, 2, 501)]).astype(np.float32)

    def add(tape, buffers, out, state):
        tape.selective_scan(*buffers, out, rate.ctypes.data, skip.ctypes.data, state)

    layer = Layer([1] * 4, 1, (1, 1), None, add, [], [])
    ones = np.ones((len(dt), 1, 1), np.float32)
    run = Run(layer, [ones, dt.reshape(-1, 1, 1), ones, ones], level, 2)
    exact = softplus(dt.astype(float))
    assert (np.abs(run.all(lambda: 1).ravel() - exact) <= 8 * EPS * exact).all()


def test_operands_that_do_not_fit_are_refused():
    tape = _native.Tape("portable", _native.Pool(1))
    one, wide = tape.buffer("tokens", 4), tape.buffer("tokens", 8)
    keep = np.zeros(64, np.float32)
    at = keep.ctypes.data
    state = _native.StatePart(at, 12, 0)
    with pytest.raises(ValueError, match="2 to 64 taps"):
        tape.causal_conv(one, wide, 1, at, state)
    with pytest.raises(ValueError, match="does not fit the rows"):
        tape.causal_conv(wide, wide, 4, at, state)
    with pytest.raises(ValueError, match="selective scan"):
        tape.selective_scan(one, wide, one, one, one, at, at, state)
    with pytest.raises(ValueError, match="share keys evenly"):
        tape.recur("retention", 3, 2, one, one, one, None, None, one, at, state)
    with pytest.raises(ValueError, match="whole heads"):
        tape.recur("retention", 3, 3, one, one, one, None, None, one, at, state)
    with pytest.raises(ValueError, match="do not fit one another"):
        tape.recur("retention", 2, 2, one, one, one, None, None, one, at, state)
    with pytest.raises(ValueError, match="gates"):
        tape.recur("retention", 1, 1, one, one, wide, one, None, wide, at, _native.StatePart(at, 32, 0))
    with pytest.raises(ValueError, match="none of: ssd"):
        tape.recur("rwkv", 1, 1, one, one, one, None, None, one, at, state)
    with pytest.raises(ValueError, match="gated norm"):
        tape.gated_norm(one, wide, one, 4, 1e-5, True, at, True)
