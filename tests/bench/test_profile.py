"""Profiles of a bundled model: parts sum to the step, costs are the account's, and the clock changes no result.

The clock of these tests moves by one second whenever it is read, so every time is a count of readings.
"""

import itertools
import time

import numpy as np
import pytest
import torch

from ridgeline import LLM
from ridgeline.bench.profile import Profiler, scheduler_config
from ridgeline.core.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, EngineError
from ridgeline.core.params import SamplingParams
from ridgeline.cost.hardware import PROBE_VERSION, Ceiling, Hardware, Machine
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.build import build_engine
from ridgeline.program.pricing import ElementBytes, Load
from walked import account, total

CEILING = {1: Ceiling.of([1e9])}
HARDWARE = Hardware(
    machine=Machine(cpu_model="Some CPU", num_cores=1, memory_bytes=2**34, isa_level="avx2"),
    probe_version=PROBE_VERSION,
    measured_at="2026-11-21T12:00:00+00:00",
    stream_buffer_bytes=2**28,
    cache_bytes=2**10,
    cached_buffer_bytes=2**9,
    stream_bytes_per_s=CEILING,
    cached_bytes_per_s=CEILING,
    reread_bytes_per_s={},
    ops_per_s={"f32": CEILING},
    scalar_per_cycle=None,
)


def engine_for(batch, prompt, **options):
    config = EngineConfig(
        model=ModelConfig(model="python-1m", dtype="float32", max_model_len=128),
        cache=CacheConfig(prefix_caching=False, **options),
        scheduler=scheduler_config(batch, prompt),
        backend=BackendConfig(backend="reference"),  # one op at a time
        num_threads=1,
    )
    threads = torch.get_num_threads()
    try:
        return build_engine(config, lambda deltas: None)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def profiler():
    return Profiler(engine_for(3, 64), HARDWARE, 1)


@pytest.fixture
def counting_clock(profiler, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(profiler._loop, "clock", time.perf_counter)
    monkeypatch.setattr(profiler._engine.executor, "_clock", time.perf_counter)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_parts_sum_to_the_step(profiler, counting_clock, kind):
    step = profiler.decode(3, 120, 4) if kind == "decode" else profiler.prefill(64, 4)
    assert step.num_steps == 2, "the faster half"
    assert step.num_tokens == (3 if kind == "decode" else 64)
    assert step.measured_ops_s + sum(step.rest_s.values()) == pytest.approx(step.step_s)
    rest_s = dict(step.rest_s)
    assert rest_s.pop("between ops") > 0
    # Where nothing overlaps a step is rendered at its end, and there is nothing left to render before the next one.
    assert rest_s == {"plan": 1, "batch": 1, "sample": 1, "commit": 1, "render": 3, "other": 7}, "readings of the clock"
    assert all(op.measured_s == op.count for op in step.ops), "every op has its reading"
    assert step.timed_step_s == step.step_s > step.untimed_step_s


def test_costs_are_those_of_the_steps(profiler):
    program, element = profiler._engine.program, ElementBytes(weight=4, activation=4, kv=4)
    step = profiler.prefill(64, 2)
    expected = total(account(program, Load(((64, 64),), num_rows=1), element))
    assert sum(op.cost.flops for op in step.ops) == pytest.approx(expected.flops)
    assert sum(op.cost.num_bytes for op in step.ops) == pytest.approx(expected.num_bytes)
    bounds = [max(op.cost.num_bytes, op.cost.flops) / 1e9 for op in step.ops]  # every ceiling is 1e9 per second
    assert [op.limit_s for op in step.ops] == pytest.approx(bounds)
    assert step.limit_s == pytest.approx(sum(bounds))


def test_decode_ends_at_the_context(profiler):
    element = ElementBytes(weight=4, activation=4, kv=4)
    profiler.decode(1, 100, 1)
    last = profiler._last.load
    assert last.spans == ((1, 99),), "with the token drawn from it, 100"
    step = profiler.decode(3, 120, 2)
    assert all(tokens == 1 and 100 < end <= 120 for tokens, end in profiler._last.load.spans)
    attention = next(op for op in step.ops if op.kind == "attention")
    least = total(account(profiler._engine.program, Load.decode(3, 100), element)).kv_read_bytes
    most = total(account(profiler._engine.program, Load.decode(3, 120), element)).kv_read_bytes
    assert least < attention.cost.kv_read_bytes < most
    assert not (profiler._loop.scheduler.running() or profiler._loop.scheduler.stats().num_waiting), (
        "a profile leaves nothing behind"
    )


def test_layers_are_one_row_or_many(profiler):
    program = profiler._engine.program
    step = profiler.prefill(8, 1, by_layer=True)
    assert [op.label for op in step.ops] == [op.label for op in program.ops]
    assert {op.count for op in step.ops} == {1}
    together = profiler.prefill(8, 1)
    assert sum(op.count for op in together.ops) == len(program.ops)
    assert sum(op.count for op in together.ops if op.label == "layers.*.ffn.down") == len(program.states)


def test_the_clock_changes_no_result():
    engine = engine_for(1, 64)
    engine.loop.scheduler.add(engine.intake.request(range(40), SamplingParams(max_tokens=4)))
    plan = engine.loop.scheduler.plan()
    executable = engine.executor._executable
    batch = BatchBuilder(engine.layout).build(plan, Sampler().sampling_metadata(plan.samples))
    plain_RV = executable.run(batch).logits_RV.copy()
    started = time.perf_counter()
    timed, timings = executable.timed(batch)
    elapsed_s = time.perf_counter() - started
    assert np.array_equal(plain_RV, timed.logits_RV)
    assert [timing.ops for timing in timings] == [(op.label,) for op in engine.program.ops]
    assert all(timing.seconds > 0 for timing in timings)
    assert np.sum([timing.seconds for timing in timings]) < elapsed_s


def test_steps_whose_ops_are_timed_are_computed_as_they_are_collected(monkeypatch):
    """By all threads from the first op on; the others are started before, and all tokens are as without a clock."""
    llm = LLM("python-1m", num_threads=2, tuning="default")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (plain,) = llm.generate("def f", params, use_tqdm=False)
    executor, seen, calls = llm.engine.executor, [], []

    class Looking:
        times_ops = True

        def observe(self, plan, times):
            seen.append(len(list(times.ops)) > 0)
            self.times_ops = not seen[-1] and (self.times_ops or len(seen) % 3 == 0)  # until it was

    for name in ("timed", "start", "follow"):
        known = getattr(executor._executable, name)
        monkeypatch.setattr(
            executor._executable,
            name,
            lambda *a, _name=name, _known=known, **o: (calls.append(_name), _known(*a, **o))[1],
        )
    executor.observer = Looking()
    (again,) = llm.generate("def f", params, use_tqdm=False)
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids
    assert calls.count("timed") == sum(seen) >= 3
    assert calls.count("start") + calls.count("follow") >= len(seen) - sum(seen) >= 3 and calls.count("follow") > 0


def test_mixed_steps_are_not_looked_at_and_told_with_what_they_computed(profiler, monkeypatch):
    seen = []
    monkeypatch.setattr(profiler, "observe", lambda plan, times: seen.append(plan))
    told = profiler.mixed(60, 20.0)
    assert not seen  # looking at a step makes the next one wait
    assert len(told) > 20
    assert {len(load.spans) for load, _, _ in told} >= {1, 3}
    for load, behind, seconds in told:
        assert behind.age >= 0 and seconds > 0
        assert behind.age == 0 or load.num_tokens == len(load.spans)
    assert any(behind.age > 3 for _, behind, _ in told)
    assert [load for load, _, _ in profiler.mixed(60, 20.0)] == [load for load, _, _ in told]
    monkeypatch.undo()
    assert profiler.decode(2, 40, 4).num_steps == 2  # it looks again


def test_mixed_steps_ask_for_no_more_than_the_context(profiler, monkeypatch):
    asked, request = [], profiler._request
    monkeypatch.setattr(profiler, "_request", lambda *sizes: asked.append(sum(sizes)) or request(*sizes))
    monkeypatch.setattr(profiler, "max_model_len", 60)
    profiler.mixed(60, 20.0)
    assert max(asked) == 60


def test_an_ops_time_is_not_that_of_the_one_that_was_disturbed(profiler, counting_clock):
    of = profiler._profile

    def disturbed(name, steps, by_layer):
        for step in steps:
            step.ops = [op._replace(seconds=100.0) if op.label.startswith("layers.1.") else op for op in step.ops]
        return of(name, steps, by_layer)

    profiler._profile = disturbed
    profiler.prefill(8, 4)
    assert profiler.samples and all(sample.measured_s == 1 for sample in profiler.samples)


def test_no_room(profiler):
    with pytest.raises(ConfigError, match="do not fit in a context of 20 tokens: raise --context"):
        Profiler(engine_for(1, 8), HARDWARE, 1).decode(1, 20, 9)
    for_two = 2 * 128 * profiler._engine.layout.groups[0].bytes_per_token
    small = Profiler(engine_for(8, 8, kv_cache_bytes=for_two), HARDWARE, 1)
    with pytest.raises(ConfigError, match="no room for 8 sequences of 120 tokens"):
        small.decode(8, 120, 1)


def test_a_step_that_fails_is_an_error(profiler, monkeypatch):
    def broken(batch):
        raise ValueError("no memory")

    monkeypatch.setattr(profiler._engine.executor._executable, "run", broken)
    with pytest.raises(EngineError, match="failed"):
        profiler.prefill(8, 1)
