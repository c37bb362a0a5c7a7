"""What the engine decides in a decode step, in microseconds, beside an executor that computes nothing.

usage: python -m benchmarks.decode_steps [--steps 900] [--batches 1 16 64] [--out DIR]

The loop, scheduler, cache, sampler and renderer are the engine's. Cold: 48 MiB are written after each step, as the
weights of a large model are read, so that code and objects come from memory again.
"""

import gc
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from benchmarks.common import option_parser, save
from rich.console import Console
from rich.table import Table

from ridgeline.backends.step import StepOutput
from ridgeline.bench.report import Report
from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.decoding.request import Request
from ridgeline.decoding.sampling import Sampler
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler

WARM_STEPS = 8
EVICT_BYTES = 48 << 20
LINE_BYTES = 64
PROMPT, VOCAB, MAX_STEPS = 100, 150_000, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Medians of what a step takes, in microseconds."""

    caches: str
    num_sequences: int
    plan_us: float
    commit_us: float
    batch_us: float
    render_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport(Report):
    """All numbers of sequences, with warm and with cold caches."""

    runs: list[Parts]


class Instant:
    """Two plans in flight that go on from one another, as in the engine; its tokens are random."""

    depth, chains, observer = 2, True, None

    def __init__(self, layout: CacheLayout, *, cold: bool) -> None:
        self._sampler, self._batches = Sampler(), BatchBuilder(layout)
        self._queued: deque[StepPlan] = deque()
        self._random = np.random.default_rng(0)
        self._memory = np.zeros(EVICT_BYTES if cold else 0, dtype=np.uint8)
        self.batch_s: list[float] = []

    def facts(self) -> dict:
        return {}

    def hurry(self, asked: bool) -> None:
        pass

    def submit(self, plan: StepPlan) -> None:
        start_s = time.perf_counter()
        sampling = self._sampler.sampling_metadata(plan.samples, follows=self._batches.goes_on(plan))
        self._batches.build(plan, sampling)
        self.batch_s.append(time.perf_counter() - start_s)
        self._queued.append(plan)

    def collect(self) -> StepResult:
        return self.compute(self._queued.popleft())

    def compute(self, plan: StepPlan) -> StepResult:
        self._memory[::LINE_BYTES] += 1
        rows = len(plan.samples)
        output = StepOutput(np.zeros((rows, 1), np.float32), self._random.integers(0, VOCAB, rows))
        return StepResult(plan.step, *self._sampler.sample(output, plan.samples))


def measure(batch: int, num_steps: int, *, cold: bool) -> Parts:
    """Run steps of `batch` sequences."""
    layout = CacheLayout(32, (GroupLayout("full", (0,), None, 8, 40 * batch),), None)
    executor, clock = Instant(layout, cold=cold), time.perf_counter
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8192, max_itl_ratio=4.0)
    cache, strategy = CacheManager(layout), Speculative({}, 1, None, clock)
    scheduler = Scheduler(config, cache, strategy, 4096, batch, clock, executor.depth, chains=executor.chains)
    loop = EngineLoop(scheduler, executor, Renderer(None), lambda deltas: None, clock)
    random = np.random.default_rng(1)
    for index in range(batch):
        prompt = tuple(random.integers(0, VOCAB, PROMPT + int(random.integers(0, 64))).tolist())
        params = SamplingParams(max_tokens=MAX_STEPS + 100, temperature=0.0)
        shared = {"arrival_s": float(index), "seed": index, "max_tokens": params.max_tokens}
        name, stop_ids = f"{index}", frozenset({VOCAB, VOCAB + 1})
        loop.submit(Request(request_id=name, prompt_ids=prompt, params=params, stop_ids=stop_ids, **shared))
    for _ in range(WARM_STEPS):
        loop.step()
    first = loop.journal.steps.num_written
    executor.batch_s.clear()
    for _ in range(num_steps):
        loop.step()
    _, steps = loop.journal.steps.read(first)
    assert (steps["num_tokens"] == batch).all()
    parts = (steps["plan_s"].tolist(), steps["commit_s"].tolist(), executor.batch_s, steps["render_s"].tolist())
    plan_us, commit_us, batch_us, render_us = (median(part) * 1e6 for part in parts)
    times_us = {"plan_us": plan_us, "commit_us": commit_us, "batch_us": batch_us, "render_us": render_us}
    return Parts(caches="cold" if cold else "warm", num_sequences=batch, **times_us)


def show(report: DecodeReport) -> None:
    table = Table("caches", "sequences", "plan, µs", "commit, µs", "both, µs a sequence", "batch, µs", "render, µs")
    for run in report.runs:
        both = f"{(run.plan_us + run.commit_us) / run.num_sequences:.2f}"
        parts = (f"{part:.1f}" for part in (run.plan_us, run.commit_us))
        table.add_row(run.caches, str(run.num_sequences), *parts, both, f"{run.batch_us:.1f}", f"{run.render_us:.1f}")
    Console().print(table)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    if not 1 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps {options.steps}: at most {MAX_STEPS}, as long as the sequences are")
    gc.collect()
    gc.freeze()
    runs = [
        measure(batch, min(options.steps, 200) if cold else options.steps, cold=cold)
        for cold in (False, True)
        for batch in options.batches
    ]
    report = DecodeReport(name="decode-steps", runs=runs)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
