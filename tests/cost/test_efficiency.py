"""Fits of efficiencies: they find the parameters that made the times, say when they do not know, and are stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.cost import hardware
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.efficiency import (
    BOUNDS,
    POWERS,
    VERSION,
    Calibration,
    Efficiency,
    Rest,
    Sample,
    fit,
    held_out_error,
    keys_of,
)  # fmt: skip
from ridgeline.cost.hardware import Machine
from ridgeline.cost.steptime import StepTime, pieces_of
from ridgeline.explain.pricing import spec_of
from ridgeline.program.lower import lower
from ridgeline.program.pricing import ElementBytes

SIZES = [(c, m) for c in (1e-6, 1e-4, 1e-3) for m in (1e-6, 1e-4, 1e-3)]
MACHINE = Machine(cpu_model="Some CPU", num_cores=2, memory_bytes=2**34, isa_level="avx2")


def samples_of(truth, sizes=SIZES, key="linear"):
    return [Sample(key, f"load {i}", c, m, truth.predict(c, m)) for i, (c, m) in enumerate(sizes)]


@given(
    compute=st.floats(0.35, 1.0),
    memory=st.floats(0.35, 1.0),
    power=st.sampled_from(POWERS),
    overhead_s=st.sampled_from([0.0, 1e-7]),
)
def test_a_fit_predicts_what_it_was_fitted_on(compute, memory, power, overhead_s):
    truth = Efficiency(compute, memory, power, overhead_s, 0, 0, 0)
    (fitted,) = fit(samples_of(truth)).values()
    assert fitted.median_error < 0.1
    assert fitted.num_samples == len(SIZES)


def test_the_parameters_are_found():
    truth = Efficiency(0.6, 0.9, 8.0, 0.0, 0, 0, 0)
    (fitted,) = fit(samples_of(truth)).values()
    assert fitted.compute_share == pytest.approx(0.6, rel=0.02)
    assert fitted.memory_share == pytest.approx(0.9, rel=0.02)
    assert not {fitted.compute_share, fitted.memory_share} & {*BOUNDS}


def test_what_was_never_bound_that_way_is_unknown():
    truth = Efficiency(None, 0.8, 1.0, 0.0, 0, 0, 0)
    (fitted,) = fit(samples_of(truth, [(0.0, 1e-3), (0.0, 2e-3), (0.0, 4e-3)])).values()
    assert fitted.compute_share is None
    assert fitted.predict(0.0, 8e-3) == pytest.approx(0.01)
    assert fitted.predict(1.0, 8e-3) is None


def test_limits_that_are_always_about_as_long_are_fitted_too():
    truth = Efficiency(0.5, 0.5, 2.0, 0.0, 0, 0, 0)
    (fitted,) = fit(samples_of(truth, [(1e-4 * n, 1.3e-4 * n) for n in (1, 2, 4, 8)])).values()
    assert fitted.predict(3e-4, 3.9e-4) == pytest.approx(truth.predict(3e-4, 3.9e-4), rel=0.02)


def test_shares_stay_within_bounds_and_say_so():
    slow = [Sample("x", str(i), 0.0, size, 100 * size) for i, size in enumerate((1e-3, 2e-3, 3e-3))]
    (fitted,) = fit(slow).values()
    assert fitted.memory_share == BOUNDS[0]
    assert {fitted.compute_share, fitted.memory_share} & {*BOUNDS}


def test_few_samples_are_no_fit():
    truth = Efficiency(0.5, 0.5, 1.0, 0.0, 0, 0, 0)
    assert fit(samples_of(truth, SIZES[:2])) == {}
    assert fit([]) == {}
    assert held_out_error([]) is None


def test_nothing_to_do_takes_the_overhead():
    assert Efficiency(0.5, 0.5, 2.0, 3e-6, 5, 0, 0).predict(0.0, 0.0) == 3e-6


def test_what_is_a_little_longer_in_few_samples_is_known_where_it_is_longer_by_more():
    truth = Efficiency(0.6, 0.7, 4.0, 1e-7)
    sizes = [(rows * 1e-5, 1.6e-5) for rows in (1, 1, 2, 4, 8, 16)]  # a matrix, by so many rows
    (fitted,) = fit(samples_of(truth, sizes)).values()
    for compute_s, memory_s in ((1e-5, 1.6e-5), (1e-5, 2.4e-5), (16e-5, 1.6e-5)):
        assert fitted.predict(compute_s, memory_s) == pytest.approx(truth.predict(compute_s, memory_s), rel=0.2)


def test_held_out_loads_are_predicted_by_the_others():
    truth = Efficiency(0.6, 0.9, 8.0, 0.0, 0, 0, 0)
    assert held_out_error(samples_of(truth)) < 0.1
    other = [*samples_of(truth), Sample("linear", "odd", 0.0, 1e-3, 1.0)]
    assert held_out_error(other) < 0.1  # a median: one load that is off does not make it


def calibration(efficiencies, **changes):
    values = {"version": VERSION, "num_threads": 2, "measured_at": "2026-11-22T12:00:00+00:00", "held_out_error": 0.1}
    return Calibration(efficiencies=efficiencies, **values | changes)


def test_calibrations_are_stored_beside_the_ceilings_and_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = (Efficiency(0.5, share, 2.0, 0.0, 9, 0.05, 0.2) for share in (0.7, 0.8))
    assert hardware.load_calibration(MACHINE, 2) is None
    hardware.save_calibration(MACHINE, calibration({"linear": one}))
    hardware.save_calibration(MACHINE, calibration({"attention": two}))
    hardware.save_calibration(MACHINE, calibration({"linear": two}, num_threads=1))
    assert hardware.load_calibration(MACHINE, 2).efficiencies == {"linear": one, "attention": two}
    assert hardware.load_calibration(MACHINE, 1).efficiencies == {"linear": two}
    assert hardware.load_calibration(MACHINE, 4) is None
    hardware.save_calibration(MACHINE, calibration({"x": one}, version=VERSION + 1, num_threads=4))
    assert hardware.load_calibration(MACHINE, 4) is None


def test_what_is_around_ops_is_each_model_s_own_whichever_was_calibrated_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program, sheet = lower(spec_of("python-1m")), datasheet("h100-sxm")
    wide, narrow, other = (pieces_of(program, ElementBytes(weight=size), "bf16") for size in (2, 1, 4))
    for pieces, step_s in ((wide, 1e-3), (narrow, 2e-3)):
        rest = Rest(step_s, 0.0)
        hardware.save_calibration(MACHINE, calibration({}, rest=rest, rests={keys_of(pieces): rest}))
    known = hardware.load_calibration(MACHINE, 2)
    found = [StepTime(program, pieces, sheet, 2, known).rest.step_s for pieces in (wide, narrow, other)]
    assert found == [1e-3, 2e-3, 2e-3]


def test_predictions_of_unknown_kinds_are_unknown():
    known = calibration({"linear": Efficiency(None, 0.5, 2.0, 0.0, 9, 0.0, 0.0)})
    assert known.predict("linear", 0.0, 1.0) == 2.0
    assert known.predict("attention", 0.0, 1.0) is None


def test_what_took_more_than_shares_say_is_a_bend():
    truth = Efficiency(0.6, 0.9, 8.0, 0.0)
    sizes = [(2.0**n * 1e-4, 1e-4) for n in range(-4, 5)]
    slow = [Sample("x", str(c), c, m, truth.predict(c, m) * (1.5 if c == 4e-4 else 1.0)) for c, m in sizes]
    (fitted,) = fit(slow).values()
    assert fitted.predict(4e-4, 1e-4) == pytest.approx(1.5 * truth.predict(4e-4, 1e-4), rel=1e-6)
    assert fitted.predict(16e-4, 1e-4) == pytest.approx(truth.predict(16e-4, 1e-4), rel=1e-6)
    assert fitted.predict(8e-3, 1e-5) == pytest.approx(truth.predict(8e-3, 1e-5), rel=1e-6)  # beyond all samples
    between = fitted.predict(4e-4 * 2**0.5, 1e-4) / truth.predict(4e-4 * 2**0.5, 1e-4)
    assert between == pytest.approx(1.25, rel=0.02)


@pytest.mark.parametrize("key", ["attention bf16", "ssd f32 w4 short"])
def test_attention_and_recurrences_take_time_for_each_token_whatever_it_sees(key):
    """Long contexts are not priced by what short ones take; some samples were disturbed."""
    truth = Efficiency(0.7, 0.4, 1.0, 4e-7, token_s=3e-7)
    sizes = [(batch, keys) for batch in (1, 2, 4, 8, 16) for keys in (16, 64, 256)]
    limits = [(batch, 1e-9 * batch * keys, 1.2e-9 * batch * keys) for batch, keys in sizes]
    samples = [
        Sample(key, str(i), c, m, truth.predict(c, m, batch) * (1.9 if i % 5 == 4 else 1), batch)
        for i, (batch, c, m) in enumerate(limits)
    ]
    (fitted,) = fit(samples).values()
    one = 1e-9 * 768
    assert fitted.predict(one, 1.2 * one, 1) == pytest.approx(truth.predict(one, 1.2 * one, 1), rel=0.1)
    assert fitted.predict(16 * one, 19.2 * one, 16) == pytest.approx(truth.predict(16 * one, 19.2 * one, 16), rel=0.1)
    assert fitted.median_error < 0.05 < fitted.worst_error
    assert held_out_error(samples) < 0.1


def test_older_efficiencies_become_shares_of_newer_ceilings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = Efficiency(0.5, 0.6, 2.0, 1e-6)
    hardware.save_calibration(
        MACHINE, calibration({"linear bf16 w2": old}, stream_bytes_per_s=4e10, ops_per_s={"bf16": 1e12, "f32": 1e11})
    )
    newer = {"stream_bytes_per_s": 5e10, "ops_per_s": {"bf16": 8e11, "f32": 1e11}}
    hardware.save_calibration(MACHINE, calibration({"embed f32 w2": old}, **newer))
    found = hardware.load_calibration(MACHINE, 2).efficiencies
    assert found["embed f32 w2"] == old
    assert found["linear bf16 w2"].memory_share == pytest.approx(0.6 * 4 / 5)
    assert found["linear bf16 w2"].compute_share == pytest.approx(0.5 * 10 / 8)
