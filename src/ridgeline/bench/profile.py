"""Profiles: where the time of real engine steps goes, op by op, beside what the machine's ceilings allow.

The engine's own loop runs, and its executor is observed. Called by `ridgeline profile`. Steps with a clock at every op
alternate with steps without, which say what the clock costs.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from statistics import fmean, median

import numpy as np

from ridgeline.backends.probe import Moment
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.errors import ConfigError, EngineError
from ridgeline.core.step import StepPlan
from ridgeline.core.words import counted
from ridgeline.cost.efficiency import Behind, Calibration, OpTiming, Sample, key_of
from ridgeline.cost.hardware import Hardware, InputKind
from ridgeline.cost.prices import forms_of
from ridgeline.cost.roofline import Bound, Prediction, Roofline, costs_of
from ridgeline.decoding.request import Request
from ridgeline.engine.engine import Engine
from ridgeline.engine.executor import StepTimes
from ridgeline.engine.intake import default_params
from ridgeline.engine.journal import planned_load, timed_steps
from ridgeline.program.pricing import Load, OpCost

WARM_STEPS = 2  # at least
READINGS = 4  # of the ceilings, before the steps and after them
MIN_CHUNK = 256  # tokens of a prompt that a step has room for beside the sequences that decode
MIXED, PART_STEPS = (1, 4, 16, 2, 8), 24  # sequences under way at once, each for so many steps, again and again
MAX_MIXED = 200  # tokens of their prompts
LAYER = re.compile(r"^layers\.\d+\.")
LAYERS = "layers.*."  # in front of what is the same in every layer


def scheduler_config(batch: int, prompt: int) -> SchedulerConfig:
    """Return limits for an engine to profile: a prompt in one step, half of every step's budget for prompts."""
    return SchedulerConfig(max_num_seqs=max(batch, 1), max_num_batched_tokens=max(2 * MIN_CHUNK, 2 * batch, prompt))


@dataclass(frozen=True, slots=True)
class OpProfile:
    """Ops of one label, or of the same label in every layer: means of one step, all of them together."""

    label: str
    kind: str
    count: int
    cost: OpCost
    limit_s: float
    measured_s: float
    bound: Bound
    predicted_s: float | None
    """The limit with the efficiency of this kind of op on this machine; None where that was not calibrated."""

    @property
    def efficiency(self) -> float | None:
        """Share of the roofline that was reached; None where there was nothing to do."""
        return self.limit_s / self.measured_s if self.limit_s and self.measured_s else None


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Holds means over the faster half of the timed steps, `num_steps` of them, in seconds.

    `ops` and `rest_s` are all parts of `step_s`. The slower half is where something else had the processor.

    `rest_s` has what is outside the ops: the engine's parts by name. Nothing else runs while these do, as the next step
    is planned beside the ops of one without a clock only: `successive_step_s` is the time of such steps, one behind
    another, where they can be so.
    `stream_bytes_per_s` and `ops_per_s` are the ceilings that the ops are compared with.
    `timed_step_s` is the median of all timed steps, `untimed_step_s` of as many without a clock at every op.
    """

    name: str
    num_steps: int
    num_tokens: int
    step_s: float
    timed_step_s: float
    untimed_step_s: float
    stream_bytes_per_s: float
    ops_per_s: dict[InputKind, float]
    ops: Sequence[OpProfile]
    rest_s: dict[str, float]
    successive_step_s: float | None = None

    @property
    def outside_s(self) -> float:
        """How much longer than its ops a step takes, where the next one is planned beside them if it can be."""
        return (self.successive_step_s or self.step_s) - self.measured_ops_s

    @property
    def measured_ops_s(self) -> float:
        return sum(op.measured_s for op in self.ops)

    @property
    def limit_s(self) -> float:
        return sum(op.limit_s for op in self.ops)

    @property
    def predicted_s(self) -> float | None:
        """The time that all ops should take; None where some were not calibrated."""
        known = [op.predicted_s for op in self.ops if op.predicted_s is not None]
        return sum(known) if len(known) == len(self.ops) else None


@dataclass(slots=True)
class _Step:
    """One step as it was measured: its load, and the seconds of the executor's parts and of the loop's."""

    load: Load
    times: StepTimes
    ops: Sequence[OpTiming] = field(default_factory=list)
    step_s: float = 0.0
    plan_s: float = 0.0
    commit_s: float = 0.0
    render_s: float = 0.0


class Profiler:
    """Runs steps of an engine that nobody else uses, whose executor tells it the times of each."""

    def __init__(
        self, engine: Engine, hardware: Hardware, num_threads: int, seed: int = 0, moment: Moment | None = None
    ) -> None:
        """Compare with the ceilings that `moment` measures before and after steps; without it, with `hardware`'s."""
        self._engine, self._hardware, self._num_threads = engine, hardware, num_threads
        self.max_model_len = engine.info.max_model_len
        self._moment, self._now = moment, hardware
        self.calibration: Calibration | None = None  # has the efficiencies to predict with; without it, nothing is
        self.moments: list[Hardware] = []  # ceilings, at each profile
        self.samples: list[Sample] = []  # of the last one
        self.pieces: Sequence[OpTiming] = ()  # of a step of it
        self.times_ops = False  # in the next step
        self._last: _Step | None = None
        engine.executor.observer = self
        self._loop = engine.loop
        self._overlaps = engine.executor.depth > 1
        self._random = np.random.default_rng(seed)
        self.program = engine.program

    def observe(self, plan: StepPlan, times: StepTimes) -> None:
        """Keep the times of the last step."""
        self._last = _Step(planned_load(plan), times)

    def decode(self, batch: int, context: int, num_steps: int, *, by_layer: bool = False) -> StepProfile:
        """Profile steps of one token for each of `batch` sequences of nearly `context` tokens, prompt and output.

        Raises ConfigError where the cache or the context has no room for them.
        """
        # While the last prompts are computed, at least MIN_CHUNK tokens a step, the first sequences decode already.
        early = batch + -(-(batch - 1) * context // MIN_CHUNK) if batch > 1 else 0
        successive = WARM_STEPS + num_steps if self._overlaps else 0
        prompt = context - successive - _num_warm(num_steps) - 2 * num_steps - early - 2
        if prompt < 1:
            raise ConfigError(
                f"the timed steps of {counted(batch, 'sequence')}, {num_steps} each, do not fit in a context of "
                f"{counted(context, 'token')}: raise --context or lower --steps"
            )
        requests = [self._request(prompt, context - prompt) for _ in range(batch)]
        for request in requests:
            self._loop.submit(request)
        self._until_decoding(batch, context)
        successive_s = self._successive(num_steps) if self._overlaps else None
        steps = self._alternate(num_steps, lambda: None)
        for request in requests:
            self._loop.abort(request.request_id)
        while self._loop.step():  # what was in flight
            pass
        profile = self._profile(f"decode of {batch:,} at {counted(context, 'token')}", steps, by_layer)
        return replace(profile, successive_step_s=successive_s)

    def prefill(self, prompt: int, num_steps: int, *, by_layer: bool = False, count: int = 1) -> StepProfile:
        """Profile steps that compute `count` prompts of `prompt` tokens and sample one token of each."""

        def ask() -> None:
            for _ in range(count):
                self._loop.submit(self._request(prompt, 1))

        steps, many = self._alternate(num_steps, ask), "" if count == 1 else f" for each of {count}"
        return self._profile(f"prefill of {counted(prompt, 'token')}{many}", steps, by_layer)

    def mixed(self, num_steps: int, limit_s: float) -> list[tuple[Load, Behind, float]]:
        """Run requests that come and go, some at a time and then more, for so many steps or seconds.

        Return what each step computed, what it follows, and its seconds: the same steps each time.
        """
        random = np.random.default_rng(0)
        loop, executor, longest = self._loop, self._engine.executor, max(5, min(MAX_MIXED, self.max_model_len // 2))
        # Made before: that takes as long as a step.
        sizes = (2 ** random.uniform(2, np.log2(longest), num_steps // 2)).astype(int).tolist()
        asked = [self._request(n, min(int(random.integers(8, 48)), self.max_model_len - n)) for n in sizes]
        coming, started, first = iter(asked), time.monotonic(), loop.journal.steps.num_written
        executor.observer = None  # nobody looks between steps: where these are short, it would be much of their time
        for index in range(num_steps):
            under_way = len(loop.scheduler.running()) + len(loop.scheduler.waiting)
            for request in islice(coming, max(0, MIXED[index // PART_STEPS % len(MIXED)] - under_way)):
                loop.submit(request)
            loop.step()
            if time.monotonic() - started > limit_s:
                break
        steps = loop.journal.steps.read(first)[1]
        found = list(timed_steps(steps, loop.journal.spans.read(int(steps["first_span"][0]))[1], executor.depth))
        for request in asked:
            loop.abort(request.request_id)
        while loop.step():
            pass
        executor.observer = self
        return found[WARM_STEPS:]

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        token_ids = self._random.integers(0, self._engine.spec.vocab_size, num_tokens).tolist()
        params = default_params(self._engine.info.generation, max_tokens=max_tokens, ignore_eos=True, seed=0)
        return self._engine.intake.request(token_ids, params)

    def _until_decoding(self, batch: int, context: int) -> None:
        """Compute the prompts, until a step has one token of every sequence."""
        while True:
            lengths = [tokens for tokens, _ in self._step(times_ops=False).load.spans]
            stats = self._loop.stats()
            if stats.num_preemptions or (stats.num_waiting and set(lengths) == {1}):
                raise ConfigError(
                    f"the cache has no room for {counted(batch, 'sequence')} of {context} tokens: lower either"
                )
            if lengths == [1] * batch:
                return

    def _alternate(self, num_steps: int, before: Callable[[], None]) -> list[_Step]:
        """Run warm steps, which are left out, then `num_steps` of each kind in turn, those without a clock first."""
        readings = self._readings()
        steps: list[_Step] = []
        for index in range(_num_warm(num_steps) + 2 * num_steps):
            before()
            steps.append(self._step(times_ops=index % 2 == 1))
        readings += self._readings()
        self._now = self._hardware
        if readings:
            ops: dict[InputKind, list[float]] = {kind: [each[kind] for _, each in readings] for kind in readings[0][1]}
            self._now = self._hardware.measured_now(self._num_threads, [read for read, _ in readings], ops)
        self.moments.append(self._now)
        for step in steps:  # not between them: the other threads would stop and wait
            step.ops = list(step.times.ops)
        return steps[_num_warm(num_steps) :]

    def _successive(self, num_steps: int) -> float:
        """Run `num_steps` without a clock, one behind another; return the mean seconds of the faster half."""
        self.times_ops, ends = False, list[float]()
        for _ in range(WARM_STEPS + num_steps):
            self._loop.step()
            self._loop.process_input_queue()
            ends.append(time.perf_counter())
        between = sorted(after - before for before, after in pairwise(ends[WARM_STEPS - 1 :]))
        return fmean(between[: (num_steps + 1) // 2])

    def _readings(self) -> list[tuple[float, dict[InputKind, float]]]:
        return [self._moment.read() for _ in range(READINGS)] if self._moment else []

    def _step(self, *, times_ops: bool) -> _Step:
        self.times_ops, self._last = times_ops, None
        journal = self._loop.journal.steps
        started = time.perf_counter()
        self._loop.step()
        self._loop.process_input_queue()  # renders what the step brought
        elapsed_s = time.perf_counter() - started
        step = self._last
        if step is None:
            raise EngineError("the step that was to be profiled failed, or there was nothing to compute")
        _, (record,) = journal.read(journal.num_written - 1)
        # One whose ops were not timed was started before this one was waited for.
        is_started = self._overlaps and step.times.ops == ()
        step.step_s = step.times.batch_s + step.times.run_s + step.times.sample_s if is_started else elapsed_s
        step.plan_s, step.commit_s, step.render_s = (float(record[part]) for part in ("plan_s", "commit_s", "render_s"))
        return step

    def _profile(self, name: str, steps: Sequence[_Step], by_layer: bool) -> StepProfile:
        all_timed = sorted((step for step in steps if step.ops), key=lambda step: step.step_s)
        timed = all_timed[: (len(all_timed) + 1) // 2]
        between_ops = [step.times.run_s - sum(timing.seconds for timing in step.ops) for step in timed]
        rest = {"between ops": fmean(between_ops)}
        rest |= {part: fmean(getattr(step.times, f"{part}_s") for step in timed) for part in ("batch", "sample")}
        rest |= {part: fmean(getattr(step, f"{part}_s") for step in timed) for part in ("plan", "commit", "render")}
        self.pieces = timed[0].ops
        ops, step_s = self._ops(name, timed, by_layer), fmean(step.step_s for step in timed)
        rest["other"] = step_s - sum(rest.values()) - sum(op.measured_s for op in ops)
        return StepProfile(
            name=name,
            num_steps=len(timed),
            num_tokens=timed[0].load.num_tokens,
            step_s=step_s,
            timed_step_s=median(step.step_s for step in all_timed),
            untimed_step_s=median(step.step_s for step in steps if not step.ops),
            stream_bytes_per_s=self._now.stream(self._num_threads),
            ops_per_s={kind: self._now.peak(kind, self._num_threads) or 0.0 for kind in self._now.ops_per_s},
            ops=ops,
            rest_s=rest,
        )

    def _ops(self, name: str, steps: Sequence[_Step], by_layer: bool) -> list[OpProfile]:
        """Compute means over the steps, ops in the order in which they first ran."""
        rows: dict[tuple[str, str], list[_TimedOp]] = {}
        self.samples = []
        for step in steps:
            costs = costs_of(self.program, [(t.ops, t.element) for t in step.ops], step.load)
            memory_bytes = sum(cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes for cost in costs)
            roofline = Roofline(self._now, self._num_threads, memory_bytes)
            for timing, cost in zip(step.ops, costs, strict=True):
                label = timing.label if by_layer else LAYER.sub(LAYERS, timing.label)
                row = rows.setdefault((label, timing.kind), [])
                key = key_of(timing) + forms_of(timing.kind, step.load)[-1][0] + roofline.where
                limit = roofline.predict(cost, timing.inputs)
                row.append(_TimedOp(key, cost, limit, timing.seconds, step.load.num_tokens))
        for row in rows.values():
            compute_s, moving_s = (fmean(getattr(op.limit, part) for op in row) for part in ("compute_s", "moving_s"))
            measured_s = median(op.seconds for op in row)  # whoever takes a core takes it for longer than an op
            self.samples.append(Sample(row[0].key, name, compute_s, moving_s, measured_s, row[0].num_tokens))
        return [_mean(*labels, row, len(steps), self.calibration) for labels, row in rows.items()]


@dataclass(frozen=True, slots=True)
class _TimedOp:
    """Holds one op of one step: the key of its efficiency, its cost, its limit and its time in seconds."""

    key: str
    cost: OpCost
    limit: Prediction
    seconds: float
    num_tokens: int  # of the step


def _num_warm(num_steps: int) -> int:
    """Return how many steps warm up: an even number, so that those with a clock are every second one."""
    return max(WARM_STEPS, num_steps // 4 * 2)


def _mean(label: str, kind: str, row: Sequence[_TimedOp], num_steps: int, calibration: Calibration | None) -> OpProfile:
    """Compute one row of the profile; its bound is that of most of its limit."""
    limit_s: dict[Bound, float] = {}
    for op in row:
        limit_s[op.limit.bound] = limit_s.get(op.limit.bound, 0.0) + op.limit.seconds
    predicted: list[float] = []
    if calibration is not None:
        times = (calibration.predict(op.key, op.limit.compute_s, op.limit.moving_s, op.num_tokens) for op in row)
        predicted = [time for time in times if time is not None]
    return OpProfile(
        label=label,
        kind=kind,
        count=len(row) // num_steps,
        cost=sum((op.cost for op in row), OpCost()) * (1 / num_steps),
        limit_s=sum(limit_s.values()) / num_steps,
        measured_s=sum(op.seconds for op in row) / num_steps,
        bound=max(limit_s, key=lambda bound: limit_s[bound]),
        predicted_s=sum(predicted) / num_steps if len(predicted) == len(row) else None,
    )
