"""The Executor seam: takes StepPlans and gives back their StepResults.

InlineExecutor computes in the calling thread; other executors put a device, a process or a gang of machines behind the
same calls.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ridgeline.backends.step import Executable
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.clock import Clock
from ridgeline.core.config import Choice
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.cost.efficiency import OpTiming
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import BatchBuilder


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
        self._sampler = sampler
        self._layout = layout
        self._batches = BatchBuilder(layout)
        self._clock = clock
        self._plan: StepPlan | None = None

    def facts(self) -> Mapping[str, Choice]:
        return self._executable.facts()

    def submit(self, plan: StepPlan) -> None:
        assert self._plan is None, "a plan is in flight"
        self._plan = plan

    def collect(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "no plan is in flight"
        try:
            return self._compute(plan)
        except Exception:  # what was laid out for it may be half written, and is not to be built upon
            self._batches = BatchBuilder(self._layout)
            raise

    def _compute(self, plan: StepPlan) -> StepResult:
        observer, ops = self.observer, ()
        start_s = self._clock()
        sampling = self._sampler.sampling_metadata(plan.samples, follows=self._batches.goes_on(plan))
        batch = self._batches.build(plan, sampling)
        built_s = self._clock()
        if observer is not None and observer.times_ops:
            output, ops = self._executable.timed(batch)
        else:
            output = self._executable.run(batch, plan.features_TW)
        ran_s = self._clock()
        samples, prompt_logprobs = self._sampler.sample(output, plan.samples, plan.prompt_rows)
        batch_s, run_s, sample_s = built_s - start_s, ran_s - built_s, self._clock() - ran_s
        if observer is not None:
            observer.observe(plan, StepTimes(batch_s, run_s, sample_s, ops))
        rows_RH = output.logits_RV
        vectors = tuple([rows_RH[v.first_row : v.first_row + v.num_rows].copy() for v in plan.vector_rows])
        return StepResult(plan.step, samples, prompt_logprobs, vectors, batch_s, sample_s, output.taps)
