"""What a recording tells of its machine: how fast memory and arithmetic were, each for itself."""

from dataclasses import replace

import planted
import pytest

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.cost.hardware import INPUT_KINDS, Ceiling
from ridgeline.explain import machine
from ridgeline.explain.pace import at_its_pace
from ridgeline.explain.simulation import run_simulated

ASKED = [BenchRequest(prompt=[number + 3] * 400, max_tokens=48) for number in range(16)]


@pytest.fixture(autouse=True)
def _balanced(monkeypatch):
    """Compute on a machine whose memory bounds single sequences, and whose arithmetic bounds prompts."""

    def ceilings(native, isa=None):
        products = {kind: {1: Ceiling.of([4e10])} for kind in INPUT_KINDS}
        return replace(planted.ceilings(native), stream_bytes_per_s={1: Ceiling.of([2e9])}, ops_per_s=products)

    monkeypatch.setattr(machine, "ceilings", ceilings)


def small(pace=(1.0, 1.0), **options):
    found = machine.simulated_machine(EngineConfig.of("python-9m", num_threads=1, max_model_len=512, **options))
    return replace(found, step_time=found.step_time.with_pace(*pace))


def steps_s(pace, **options):
    return run_simulated(small(pace, **options), ASKED).recording.steps["run_s"].sum()


@pytest.mark.parametrize("pace", [(1.0, 1.0), (1.0, 1.5), (1.4, 1.0), (0.7, 1.2)])
def test_steps_of_each_bound_tell_its_pace(pace):
    recording = run_simulated(small(pace, max_num_seqs=1), ASKED).recording
    assert at_its_pace(small(), recording).step_time.pace == pytest.approx(pace, abs=0.15)


def test_steps_of_one_bound_tell_the_pace_of_all():
    few = [replace(each, prompt=each.prompt[:2]) for each in ASKED[:1]]
    recording = run_simulated(small((1.0, 1.5)), few).recording
    compute, moving = at_its_pace(small(), recording).step_time.pace
    assert compute == moving == pytest.approx(1.5, abs=0.1)


def test_a_machine_of_such_a_pace_computes_other_steps_as_the_recorded_one_would():
    pace = 1.0, 1.8
    recording = run_simulated(small(pace, max_num_seqs=1), ASKED).recording
    told = at_its_pace(small(max_num_seqs=1), recording).step_time.pace
    real_s = steps_s(pace, max_num_seqs=16)
    assert steps_s(told, max_num_seqs=16) == pytest.approx(real_s, rel=0.07)
    one = recording.steps["run_s"].sum() / steps_s((1.0, 1.0), max_num_seqs=1)
    assert steps_s((one, one), max_num_seqs=16) > 1.15 * real_s  # all of it would be as slow as memory was
