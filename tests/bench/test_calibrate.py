"""Calibrations time loads in turn, so that what else the machine does for a while does not count."""

from types import SimpleNamespace

import pytest

from ridgeline.bench.calibrate import LOADS, calibration
from ridgeline.cost.datasheets import datasheet
from ridgeline.cost.efficiency import Behind, Efficiency, Sample, keys_of
from ridgeline.cost.steptime import StepTime, pieces_of
from ridgeline.explain.pricing import spec_of
from ridgeline.program.lower import lower
from ridgeline.program.pricing import ElementBytes, Load

TRUTH = Efficiency(0.5, 0.8, 2.0, 0.0)


class Disturbed:
    """Times one op in each load, five times as long while something else runs: in calls 20 to 79 of all."""

    max_model_len = 1024
    program = lower(spec_of("python-1m"))
    pieces = pieces_of(program, ElementBytes(), "bf16")
    moments = (
        SimpleNamespace(ops_per_s={}, stream=lambda threads: 1e10, calibrated=lambda found: datasheet("h100-sxm")),
    )

    def __init__(self):
        self.loads, self.samples = [], []

    def decode(self, batch, context, num_steps):
        return self._timed((batch, context, 0), batch * 1e-5, 1e-4)

    def prefill(self, prompt, num_steps, count=1):
        return self._timed((count, 0, prompt), count * prompt * 1e-5, 1e-4)

    def _timed(self, load, compute_s, memory_s):
        seconds = TRUTH.predict(compute_s, memory_s) * (5 if 20 <= len(self.loads) < 80 else 1)
        self.loads.append(load)
        self.samples = [Sample("linear bf16 w2", str(load), compute_s, memory_s, seconds)]
        return SimpleNamespace(step_s=seconds)

    def mixed(self, num_steps, limit_s):
        return [(Load.decode(1, 9), Behind(), 1e-3)] * (num_steps // 20)


@pytest.mark.parametrize(("longer", "mean"), [(1, 1.0), (4, 1.3), (40, 1.5)])
def test_what_some_steps_take_longer_is_in_the_mean_alone(longer, mean):
    profiler = Disturbed()
    times_s = [3e-4 * (longer if number % 10 == 9 else 1) for number in range(2000)]
    profiler.mixed = lambda *_: [(Load.decode(1, 9), Behind(), seconds) for seconds in times_s]
    found = calibration(profiler, 1)
    assert found.mean == pytest.approx(mean, rel=0.02)
    time = StepTime(profiler.program, profiler.pieces, datasheet("h100-sxm"), 1, found)
    assert time.seconds(Load.decode(1, 9), Behind()) == pytest.approx(3e-4, rel=0.02)
    assert time.mean_seconds(Load.decode(1, 9), Behind()) == pytest.approx(3e-4 * mean, rel=0.03)


def test_some_seconds_of_something_else_are_in_the_mean_of_steps_alone():
    profiler, slower = Disturbed(), iter((1, 2, 1, 1))

    def mixed(num_steps, limit_s):
        seconds = 3e-4 * next(slower)
        return [(Load.decode(1, 9), Behind(), seconds) for _ in range(500)]

    profiler.mixed = mixed
    found = calibration(profiler, 1)
    time = StepTime(profiler.program, profiler.pieces, datasheet("h100-sxm"), 1, found)
    assert time.seconds(Load.decode(1, 9), Behind()) == pytest.approx(3e-4, rel=0.02)
    assert found.mean == pytest.approx(1.25, rel=0.02)


def test_a_large_model_has_one_long_round():
    profiler, asked = Disturbed(), []

    def mixed(num_steps, limit_s):
        asked.append((num_steps, limit_s))
        return [(Load.decode(1, 9), Behind(), 0.2) for _ in range(int(limit_s / 0.2))]

    profiler.mixed = mixed
    assert calibration(profiler, 1).rest is not None
    assert asked == [(600, 2.5), (2400, 10.0)]


def test_some_seconds_of_something_else_spoil_no_load():
    profiler = Disturbed()
    found = calibration(profiler, 1)
    assert found.rest is not None and found.rests == {keys_of(profiler.pieces): found.rest}
    (fitted,) = found.efficiencies.values()
    assert profiler.loads[: len(LOADS)] == list(LOADS) == profiler.loads[-len(LOADS) :]
    for compute_s in (1e-5, 4e-5, 16e-5, 256e-5):
        assert fitted.predict(compute_s, 1e-4) == pytest.approx(TRUTH.predict(compute_s, 1e-4), rel=0.03)
