"""The Executor seam: takes StepPlans and gives back their StepResults.

InlineExecutor computes in the calling thread, OverlappedExecutor on other threads as well while the calling one does
something else; other executors put a device, a process or a gang of machines behind the same calls.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from ridgeline.backends.step import (
    Chained,
    ChainEnds,
    Chaining,
    Executable,
    Overlapping,
    Rounding,
    StepBatch,
    StepOutput,
)
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.clock import Clock
from ridgeline.core.config import Choice
from ridgeline.core.step import PENDING, LookupSteps, SampledToken, StepPlan, StepResult
from ridgeline.cost.efficiency import OpTiming
from ridgeline.decoding.checking import Checked, check_tokens
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.further import further_rounds

_NO_LOGITS_RV = np.empty((0, 0), dtype=np.float32)  # where tokens are sampled within a step, and nobody asks for more


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of one step; `ops`, to be read once, is empty where no clock was read between them."""

    batch_s: float
    run_s: float
    sample_s: float
    ops: Iterable[OpTiming]


class StepObserver(Protocol):
    """Is told how long the parts of each step took."""

    @property
    def times_ops(self) -> bool:
        """Whether the next step reads the clock at every op, which makes it slower."""
        ...

    def observe(self, plan: StepPlan, times: StepTimes) -> None:
        """Take in the times of a step that has been computed."""
        ...


class Executor(Protocol):
    """Computes plans one after the other, in the order in which they are submitted.

    So a block that a plan in flight writes may be another sequence's in every plan that is submitted later.
    """

    observer: StepObserver | None

    @property
    def depth(self) -> int:
        """How many plans may be in flight, that is submitted and not yet collected; at least 1."""
        ...

    @property
    def chains(self) -> bool:
        """Whether a plan may go on from plans in flight, with tokens that they sample (`Span.pending`) as its inputs.

        Otherwise a sequence is in one plan in flight at a time. Where such a token could not be sampled, what follows
        from it is not used: any token will do.
        """
        ...

    def submit(self, plan: StepPlan) -> None:
        """Take in a plan. Its block tables change with the next plan."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight, and return its result.

        Raises the error of computing the plan; it is no longer in flight then, and later ones are not concerned.
        """
        ...

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute a plan at once, before those that are in flight."""
        ...

    def hurry(self, asked: bool) -> None:
        """Make steps begin no further round while that is `asked`; any thread."""
        ...

    def facts(self) -> Mapping[str, Choice]:
        """Return `Executable.facts`."""
        ...


class InlineExecutor:
    """Model and sampler in this thread; the step is computed when it is collected."""

    depth = 1
    chains = False

    def __init__(self, executable: Executable, sampler: Sampler, layout: CacheLayout, clock: Clock) -> None:
        self.observer: StepObserver | None = None
        self._executable = executable
        self._chaining = executable if isinstance(executable, Chaining) else None  # to ask takes as long as to plan
        self._rounding = executable if isinstance(executable, Rounding) else None
        self._hurry = np.zeros(1, dtype=np.int64)
        self._sampler = sampler
        self._layout = layout
        self._batches = BatchBuilder(layout)
        self._clock = clock
        self._queued: deque[StepPlan] = deque()

    def facts(self) -> Mapping[str, Choice]:
        return self._executable.facts()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._queued) < self.depth, "enough plans are in flight"
        self._queued.append(plan)

    def collect(self) -> StepResult:
        return self.compute(self._queued.popleft())

    def hurry(self, asked: bool) -> None:
        self._hurry[0] = asked

    @property
    def goes_on(self) -> bool:
        """Whether steps that verify drafts may have several rounds."""
        return self._rounding is not None and self._rounding.goes_on

    def compute(self, plan: StepPlan) -> StepResult:
        try:
            start_s = self._clock()
            batch = self._built(plan)
            self._sampler.write_masks(batch.sampling)
            built_s, ops = self._clock(), ()
            if self._has_rounds(plan):
                return self._rounds(plan, batch, built_s - start_s, built_s)
            if self._times_ops and plan.features_TW is None:
                output, ops = self._executable.timed(batch)
            else:
                output = self._executable.run(batch, plan.features_TW)
            check_tokens(self._sampler.checked, output)
            return self._sampled(plan, output, ops, built_s - start_s, built_s)
        except Exception:
            self._forget()
            raise

    def chain(self, ends: ChainEnds, plan: StepPlan, lengths: Sequence[int], *, tells: bool) -> Chained | None:
        """Compute a plan and those that follow from what each samples, as `Chaining` has it; its rows sample plainly.

        None, with nothing done, where some rows need more than that, or the executable does not go on by itself.
        """
        if self._chaining is None or (plan.features_TW is not None and ends.fold is None):
            return None
        sampling = self._sampler.sampling_metadata(plan.samples)
        if not self._sampler.in_step:
            return None
        try:
            batch = self._batches.build(plan, sampling)
            return self._chaining.chain(batch, np.array(lengths), ends, plan.features_TW, tells=tells)
        except Exception:
            self._forget()
            raise

    @property
    def _times_ops(self) -> bool:
        return self.observer is not None and self.observer.times_ops

    def _built(self, plan: StepPlan) -> StepBatch:
        sampling = self._sampler.sampling_metadata(plan.samples, follows=self._batches.goes_on(plan))
        batch, trials = self._batches.build(plan, sampling), self._sampler.trials()
        return batch if trials is None else replace(batch, trials=trials)

    def _has_rounds(self, plan: StepPlan) -> bool:
        """Tell whether a plan that is laid out is computed in several rounds."""
        return plan.rounds is not None and self._rounding is not None and self._sampler.is_bare and not self._times_ops

    def _rounds(self, plan: StepPlan, batch: StepBatch, batch_s: float, built_s: float) -> StepResult:
        """Return the result of a step that goes on by itself."""
        assert self._rounding is not None and plan.rounds is not None, "it has rounds"
        ran = self._rounding.rounds(batch, plan.rounds, self._hurry)
        first = StepOutput(_NO_LOGITS_RV, ran.sampled_RT[0, : len(plan.samples)], taps_TW=ran.taps_TW)
        result = self._sampled(plan, first, (), batch_s, built_s)
        if (num_rounds := len(ran.token_ids_RT)) == 1:
            return result
        told_R = [(len(plan.samples), 0)] * num_rounds if ran.told_R is None else ran.told_R.tolist()
        drafted = [num_rows - 1 for num_rows, matched in told_R if matched > 0]
        lookups = LookupSteps(len(drafted), sum(drafted), ran.lookup_s)
        further = further_rounds(plan.spans, ran.token_ids_RT.tolist(), ran.sampled_RT.tolist(), told_R)
        result = result._replace(further=further, num_rounds=num_rounds, rounds_s=ran.seconds)
        return result._replace(lookups=lookups, plain_s=ran.plain_s)

    def _forget(self) -> None:
        """Forget how a step was laid out that failed: it may be half written, and is not to be built upon."""
        self._batches = BatchBuilder(self._layout)

    def _sampled(
        self, plan: StepPlan, output: StepOutput, ops: Iterable[OpTiming], batch_s: float, built_s: float
    ) -> StepResult:
        """Return the result of a step whose logits are there."""
        ran_s = self._clock()
        samples, prompt_logprobs = self._sampler.sample(output, plan.samples, plan.prompt_rows)
        sample_s = self._clock() - ran_s
        if self.observer is not None:
            self.observer.observe(plan, StepTimes(batch_s, ran_s - built_s, sample_s, ops))
        rows_RH = output.logits_RV
        vectors = tuple([rows_RH[v.first_row : v.first_row + v.num_rows].copy() for v in plan.vector_rows])
        return StepResult(plan.step, samples, prompt_logprobs, vectors, batch_s, sample_s, output.taps_TW)


class OverlappedExecutor(InlineExecutor):
    """Has a step computed on other threads while the caller takes in the one before, and plans the one after.

    The caller helps with what is left of the step when it collects it. The next one starts before `collect` returns;
    where it goes on from this one token by token, it is laid out before that and starts as this one ends. A step whose
    ops are timed is computed as it is collected: some of its ops would else be as slow as the caller is late. So is one
    of several rounds.
    """

    depth = 2
    chains = True

    def __init__(self, executable: Overlapping, sampler: Sampler, layout: CacheLayout, clock: Clock) -> None:
        super().__init__(executable, sampler, layout, clock)
        self._overlapping = executable
        self._started: _Started | None = None
        self._following: _Started | None = None
        self._samples: tuple[SampledToken, ...] = ()  # of the last steps

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if self._started is None:
            self._start_next()
        elif not (
            self._following or self._started.timed or self._started.rounds or self._times_ops
        ) and self._batches.goes_on(plan):
            self._follow(plan)

    def collect(self) -> StepResult:
        plan = self._queued.popleft()
        try:
            if self._started is None:  # it failed to start, or a step before it failed
                self._started = self._start(plan)
            started, self._started = self._started, None
            following, self._following = self._following, None
            self._sampler.write_masks(started.batch.sampling)
            if started.rounds:
                result = self._rounds(plan, started.batch, started.batch_s, self._clock())
            else:
                result = self._finished(plan, started, following)
        except Exception:
            self._started = None  # one that was begun meanwhile is computed again
            self._forget()
            raise
        self._samples, ended_s = result.samples, self._clock()
        self._start_next()
        return result._replace(next_s=self._clock() - ended_s)

    def compute(self, plan: StepPlan) -> StepResult:
        result = super().compute(plan)
        self._samples += result.samples
        return result

    def _finished(self, plan: StepPlan, started: "_Started", following: "_Started | None") -> StepResult:
        """Return the result of a step that was started, and note whether the one that follows was."""
        batch, batch_s, built_s, checked, timed, _ = started
        if timed:
            built_s = self._clock()
            (output, ops), goes_on = self._executable.timed(batch), False
        else:
            (output, goes_on), ops = self._overlapping.finish(), ()
        if following is None:
            check_tokens(checked, output)
        if goes_on and following is not None:
            self._started = following._replace(began_s=self._clock())
        return self._sampled(plan, output, ops, batch_s, built_s)

    def _start_next(self) -> None:
        """Start the oldest plan, unless one runs; why it fails is said where it is collected."""
        if self._queued and self._started is None:
            try:
                self._started = self._start(self._queued[0])
            except Exception:
                self._forget()

    def _start(self, plan: StepPlan) -> "_Started":
        start_s = self._clock()
        batch = self._built(plan)
        built_s = self._clock()
        rounds = self._has_rounds(plan)
        if not (timed := self._times_ops) and not rounds:
            self._overlapping.start(batch)
        return _Started(batch, built_s - start_s, built_s, self._sampler.checked, timed, rounds)

    def _follow(self, plan: StepPlan) -> None:
        """Lay the plan out, to be started where the one before it ends; where that cannot be, it is started later."""
        if not self._sampler.in_step:
            return
        try:
            start_s = self._clock()
            batch = super()._built(plan)
            batch_s = self._clock() - start_s
            checked = () if self._started is None else self._started.checked
            checking = partial(check_tokens, checked) if checked else None
            if self._overlapping.follow(batch, check=checking):
                self._following = _Started(batch, batch_s, checked=self._sampler.checked)
        except Exception:
            self._forget()

    def _built(self, plan: StepPlan) -> StepBatch:
        """Lay the plan out, with the tokens that it waited for; where one could not be sampled, any will do."""
        batch = super()._built(plan)
        if pending := [span.seq_id for span in plan.spans if span.pending]:
            tokens = {token.seq_id: token.token_id for token in self._samples}
            found = [tokens.get(seq_id, 0) for seq_id in pending]
            batch.token_ids_T[batch.token_ids_T == PENDING] = np.maximum(found, 0)
        return batch


class _Started(NamedTuple):
    """A step that is computed, one that is `timed` or has `rounds` only laid out: the seconds of that, and when it
    began."""

    batch: StepBatch
    batch_s: float
    began_s: float = 0.0
    checked: Sequence[Checked] = ()
    timed: bool = False
    rounds: bool = False


def open_executor(executable: Executable, layout: CacheLayout, clock: Clock, *, ahead: bool) -> InlineExecutor:
    """Return an executor; one that overlaps where the executable can, and plans may be made `ahead`."""
    if ahead and isinstance(executable, Overlapping) and executable.overlaps:
        return OverlappedExecutor(executable, Sampler(), layout, clock)
    return InlineExecutor(executable, Sampler(), layout, clock)
