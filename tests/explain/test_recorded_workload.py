"""The workload of what a server still records of its last steps: a queue and a cache that it did not begin with."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.bench.arrivals import Arrivals, greedy_requests
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.engine import journal
from ridgeline.engine.build import build_engine
from ridgeline.engine.recording import FileRecorder, read_recording
from ridgeline.explain.machine import recorded_machine
from ridgeline.explain.recorded_workload import RecordedWorkload

SHARED = [7 + position % 90 for position in range(64)]
NUM_CLIENTS = 4


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    """Return a recording of all steps, of which each computes one of four clients' requests, and of the last 200."""
    monkeypatch.setitem(journal.CAPACITIES, "steps", 200)
    path = tmp_path / "journal"
    config = EngineConfig.of("python-1m", num_threads=1, tuning="default", max_num_seqs=1, journal=str(path))
    arrivals = Arrivals()
    engine = build_engine(config, arrivals.deliver)
    asked = [BenchRequest(prompt=[*SHARED, 5 + number, 6 + number], max_tokens=24) for number in range(20)]
    arrivals.run(engine.loop, greedy_requests(asked), NUM_CLIENTS)
    FileRecorder(tmp_path / "recent", engine.setup).write_recent(engine.loop.journal)
    engine.loop.close()
    return read_recording(path), read_recording(tmp_path / "recent")


def test_steps_of_the_last_records_are_those_of_the_whole_run(recordings):
    whole, recent = recordings
    assert 190 <= len(recent.steps) < len(whole.steps)
    told, all_of_them = list(recent.timed()), list(whole.timed())[-len(recent.steps) :]
    assert [load for load, _, _ in told] == [load for load, _, _ in all_of_them]
    assert [behind.age for _, behind, _ in told] == [behind.age for _, behind, _ in all_of_them]


def test_a_whole_recording_begins_with_nothing(recordings):
    whole, _ = recordings
    found = RecordedWorkload.of(whole, whole.setup.layout.block_size)
    assert (len(found.whole), len(found.in_part), len(found.cached)) == (20, 0, 0)


def test_the_queue_and_the_prefixes_of_the_first_recorded_step_are_there_before_it(recordings):
    _, recent = recordings
    block_size = recent.setup.layout.block_size
    workload = RecordedWorkload.of(recent, block_size)
    assert len(workload.in_part) == NUM_CLIENTS
    assert {request.arrival_s for request in workload.in_part} == {0.0}
    assert [len(prompt) for prompt in workload.cached] == [1 + len(SHARED) // block_size * block_size]
    steps = workload.run(recorded_machine(recent.setup)).recording.steps
    assert (steps["run_s"] > 0).sum() == len(recent.steps)
    assert steps["num_tokens"][steps["run_s"] > 0].sum() == recent.steps["num_tokens"].sum()


def test_what_was_computed_again_and_again_is_no_longer_than_the_context(recordings):
    _, recent = recordings
    spans = recent.spans.copy()
    spans["num_tokens"][~np.isin(spans["seq_id"], recent.outputs["seq_id"])] = 500
    setup = replace(recent.setup, max_model_len=len(SHARED) + 2 + 24)
    found = RecordedWorkload.of(replace(recent, spans=spans, setup=setup), setup.layout.block_size)
    assert max(len(each.prompt) + each.max_tokens for each in found.in_part) == setup.max_model_len
