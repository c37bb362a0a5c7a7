"""The journal holds what the plans were, when, and why; a reader never sees a record that is half another."""

import itertools
import threading

import numpy as np
import pytest
from engine_fakes import FakeExecutor, make_layout, make_request

from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.host import HostSample
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.journal import (
    FINISH_REASONS,
    KINDS,
    SPAN_FIELDS,
    STEP_FIELDS,
    WAIT_REASONS,
    Ring,
    load_of,
    step_seconds,
    timed_steps,
)
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.recording import MemoryRecorder
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler


class Ticking:
    """A clock that is one second on or `tick`, at every look."""

    def __init__(self):
        self.now, self.tick = 0.0, 1

    def __call__(self):
        self.now += self.tick
        return self.now


class Engine:
    def __init__(self, blocks=8, **config):
        layout = make_layout((blocks, 9), (None, 5))
        self.clock, self.deltas = Ticking(), []
        self.executor = FakeExecutor(layout)
        cache = CacheManager(layout)
        config = SchedulerConfig(**({"max_num_seqs": 3, "max_num_batched_tokens": 8} | config))
        scheduler = Scheduler(config, cache, Autoregressive(), 100, 8, self.clock)
        self.loop = EngineLoop(scheduler, self.executor, Renderer(None), self.deltas.extend, self.clock)
        self.journal = self.loop.journal

    def run(self, **requests):
        for name, (prompt, max_tokens) in requests.items():
            self.loop.submit(make_request(name, prompt, self.clock, max_tokens=max_tokens))
        while self.loop.step():
            pass


@pytest.fixture
def engine():
    engine = Engine()
    engine.run(a=([1, 2, 3], 20), b=([4] * 11, 12), c=([5], 3), d=([1, 2, 3, 9, 9], 9))
    return engine


def test_every_step_is_there_with_its_spans(engine):
    first, steps = engine.journal.steps.read()
    recording, plans = MemoryRecorder().recording(engine.journal), engine.executor.plans
    assert first == 0
    assert steps["step"].tolist() == [plan.step for plan in plans]
    for step, plan in zip(steps, plans):
        spans = recording.spans_of(step)
        counts = [(s.num_tokens, s.num_logit_rows, s.num_tokens, s.num_further) for s in plan.spans]
        expected = [(s.seq_id, s.start, *each, s.adapter) for s, each in zip(plan.spans, counts)]
        assert spans.tolist() == expected
        assert step["num_spans"] == len(plan.spans)
        assert step["num_tokens"] == plan.num_tokens
        assert step["num_rows"] == sum(span.num_logit_rows for span in plan.spans)
        assert step["num_copies"] == len(plan.copies)
        assert [sum(step[f"{state}_{group}"] for state in ("free", "cached", "used")) for group in (0, 1)] == [8, 9]
    assert engine.journal.spans.num_written < 0.6 * sum(len(plan.spans) for plan in plans)  # many steps are as before


def test_seconds_of_the_parts_add_up(engine):
    _, steps = engine.journal.steps.read()
    for name in ("plan_s", "run_s", "commit_s", "render_s"):
        assert (steps[name] >= 1).all()
        assert steps[name].sum() == getattr(engine.journal.totals(), name)
    assert np.isnan(steps["batch_s"]).all()
    ends = steps["start_s"] + sum(steps[name] for name in ("plan_s", "run_s", "commit_s", "render_s"))
    assert (ends[:-1] < steps["start_s"][1:]).all()


def test_outputs_ended_in_the_step_of_their_last_token(engine):
    recording, computed = MemoryRecorder().recording(engine.journal), {}
    for number, step in enumerate(recording.steps):
        computed |= dict.fromkeys(recording.spans_of(step)["seq_id"].tolist(), number)
    assert {int(output["seq_id"]): int(output["last_step"]) for output in recording.outputs} == computed


def test_decisions_and_their_reasons(engine):
    journal, plans = engine.journal, engine.executor.plans
    _, decisions = journal.decisions.read()
    expected = []
    for plan in plans:
        expected += [(plan.step, "admitted", a.seq_id, a.num_cached, a.reason) for a in plan.decisions.admitted]
        expected += [(plan.step, "preempted", p.seq_id, p.for_seq_id, None) for p in plan.decisions.preempted]
    got = [
        (
            d["step"],
            KINDS[d["kind"]],
            d["seq_id"],
            d["value"],
            journal.cache_reasons[d["reason"]] if d["kind"] == 0 else None,
        )
        for d in decisions
    ]
    assert got == expected
    assert {kind for _, kind, *_ in got} == {"admitted", "preempted"}
    _, steps = journal.steps.read()
    waits = [WAIT_REASONS[step["head_waits"]] or None for step in steps]
    assert waits == [plan.decisions.head_waits for plan in plans]
    assert {"slots", "just_preempted", None} <= set(waits)


def test_every_answer_is_there_once(engine):
    _, completions = engine.journal.outputs.read()
    finished = [delta for delta in engine.deltas if delta.finish]
    assert len(completions) == len(finished) == 4
    by_name = {delta.request_id: delta.finish for delta in finished}
    for completion, num_prompt, num_output in zip(
        sorted(completions, key=lambda a: a["seq_id"]), (3, 11, 1, 5), (20, 12, 3, 9)
    ):
        finish = by_name["abcd"[completion["seq_id"]]]
        assert (completion["num_prompt"], completion["num_output"]) == (num_prompt, num_output)
        assert completion["latency_s"] == finish.timings.latency_s
        assert completion["num_preemptions"] == finish.timings.num_preemptions
        assert completion["num_cached"] == finish.num_cached_tokens
        assert FINISH_REASONS[completion["reason"]] == finish.reason
    totals = engine.journal.totals()
    assert totals.num_requests == 4
    assert totals.num_computed_tokens == sum(plan.num_tokens for plan in engine.executor.plans)
    assert totals.num_sampled_tokens == sum(len(plan.samples) for plan in engine.executor.plans)
    assert totals.num_steps == len(engine.executor.plans)


def test_prompts_are_hashes_of_their_blocks_that_tell_equal_beginnings_and_nothing_else():
    engine, other = Engine(blocks=20), Engine(blocks=20)
    prompts = {"a": [*range(1, 12)], "b": [*range(1, 9), 40], "c": [9, *range(2, 12)], "d": [1, 2, 3]}
    hashes = []
    for journal in (engine.journal, other.journal):
        (engine if journal is engine.journal else other).run(**{name: (ids, 2) for name, ids in prompts.items()})
        recording = MemoryRecorder().recording(journal)
        by_id = {int(output["seq_id"]): recording.hashes_of(output) for output in recording.outputs}
        hashes.append([by_id[seq_id] for seq_id in range(4)])
    (a, b, c, d), again = hashes
    assert [len(a), len(b), len(c), len(d)] == [3, 2, 3, 1]  # whole blocks of four tokens, with two that came after
    assert a[:2] == b
    assert not set(a) & set(c)
    assert not set(a) & set(again[0])  # another process, another key


def test_the_machine_is_asked_once_a_second():
    engine = Engine()
    now = []

    def read():
        now.append(engine.clock.now)
        return HostSample(*range(len(HostSample._fields)))

    engine.clock.tick = 0.1
    engine.loop._read_host = read
    engine.run(a=([1, 2, 3], 40))
    assert len(now) > 5
    assert all(0.9 < after - before < 2.1 for before, after in itertools.pairwise(now))
    _, records = engine.journal.host.read()
    assert len(records) == len(now)
    assert records["energy_j"].tolist() == [HostSample._fields.index("energy_j")] * len(now)


def test_a_ring_forgets_its_oldest_and_numbers_the_rest():
    ring = Ring((("number", "i8"), ("half", "f8"), ("less", "i4")), 8)
    for number in range(21):
        ring.append(number, number / 2, -number)
        for since in (0, 5, number, number + 1):
            first, records = ring.read(since)
            assert records["number"].tolist() == list(range(first, number + 1))
            assert (records["half"] * 2 == records["number"]).all()
            assert len(records) >= min(7, number + 1 - since)


def test_a_reader_beside_the_writer_sees_whole_records():
    ring, stop, wrong = Ring((("number", "i8"), ("same", "i8")), 64), threading.Event(), []

    def read():
        while not stop.is_set():
            first, records = ring.read()
            if records["number"].tolist() != list(range(first, first + len(records))):
                wrong.append("numbers")
            if not (records["number"] == records["same"]).all():
                wrong.append("halves")

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100_000):
        ring.append(number, number)
    stop.set()
    reader.join()
    assert not wrong


def test_a_reader_within_taking_records_sees_none_of_them_under_old_numbers():
    ring, found = Ring((("number", "i8"),), 64), []

    class Records(np.ndarray):
        def __setitem__(self, places, records):
            super().__setitem__(places, records)
            found.append(ring.read())

    for first, count in ((0, 60), (60, 30)):
        ring._records = ring._records.view(Records)
        ring.take(first, np.arange(first, first + count).astype([("number", "i8")]).tobytes())
    for first, records in found:
        assert np.asarray(records["number"]).tolist() == list(range(first, first + len(records)))


def test_steps_are_told_with_what_they_follow(engine):
    recording = MemoryRecorder().recording(engine.journal)
    told, last, before, num_tokens = list(recording.timed()), set(), 0, 0
    assert len(told) == len(engine.executor.plans)
    for step, plan, (load, behind, _) in zip(recording.steps, engine.executor.plans, told):
        seq_ids = {span.seq_id for span in plan.spans}
        assert load == load_of(recording.spans_of(step))
        before = before if step["span_shift"] else num_tokens
        # Nothing is planned while a step runs.
        assert behind == (step["span_shift"], bool(last - seq_ids), False, len(seq_ids - last), before)
        last, num_tokens = seq_ids, load.num_tokens
    assert list(recording.timed(5)) == told[:: -(-len(told) // 5)]
    assert sum(behind.gone for _, behind, _ in told) > 3 and max(behind.age for _, behind, _ in told) > 2
    assert max(behind.tokens for load, behind, _ in told if load.num_tokens == 1) > 1


def test_what_is_between_overlapped_steps_is_the_next_one_s_as_far_as_it_is_work():
    steps = np.zeros(4, [(name, "<" + kind) for name, kind in STEP_FIELDS])
    begun_s, steps["run_s"] = np.array([1.0, 3.0, 5.5, 100.0]), [2.0, 2.0, 1.0, 1.0]
    steps["plan_s"], steps["commit_s"], steps["render_s"] = 0.25, 0.5, 0.125
    steps["start_s"] = begun_s - steps["plan_s"]
    # Planned ahead; behind half a second of taking in; after an hour's rest, of which planning and taking in count.
    assert step_seconds(steps, 2).tolist() == [2.0, 2.0, 1.5, 1.875]
    assert step_seconds(steps, 1).tolist() == [2.875, 2.875, 1.875, 1.875]


def test_a_step_is_told_whether_the_next_one_is_planned_anew_while_it_runs():
    steps = np.zeros(5, [(name, "<" + kind) for name, kind in STEP_FIELDS])
    steps["run_s"], steps["plan_s"], steps["num_spans"], steps["span_shift"] = 2.0, 0.25, 1, [0, 1, 0, 1, 0]
    steps["num_rounds"] = 1
    steps["start_s"] = (
        np.array([1.0, 3.0, 5.0, 7.0, 9.5]) - steps["plan_s"]
    )  # the last one is planned behind the fourth
    spans = np.zeros(1, [(name, "<" + kind) for name, kind in SPAN_FIELDS])
    for depth, expected in ((2, [False, True, False, False, False]), (1, [False] * 5)):
        assert [behind.plans for _, behind, _ in timed_steps(steps, spans, depth)] == expected


def test_what_the_next_step_is_laid_out_in_is_no_part_of_a_step():
    """It ends when its tokens are there, and what is taken in of it afterwards does not have that time either."""
    times = []
    for next_s in (0.0, 0.5):
        engine = Engine()
        collect, engine.clock.tick = engine.executor.collect, 0.0

        def slow(collect=collect, clock=engine.clock, next_s=next_s):
            result, clock.now = collect(), clock.now + 2.0 + next_s
            return result._replace(next_s=next_s)

        engine.executor.collect = slow
        engine.run(a=([1, 2, 3], 8))
        steps = MemoryRecorder().recording(engine.journal).steps
        times.append(steps[["run_s", "commit_s", "render_s"]].tolist())
    assert times[0] == times[1] == [(2.0, 0.0, 0.0)] * 8
