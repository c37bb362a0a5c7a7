"""The Executor seam: runs a StepPlan and returns its StepResult.

InlineExecutor computes in the calling thread; other executors put a process or a gang of machines behind the same call.
"""

from typing import Protocol

from ridgeline.backends.step import Executable
from ridgeline.cache.layout import CacheLayout
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import BatchBuilder


class Executor(Protocol):
    """Computes steps in the order in which they are given."""

    def run(self, plan: StepPlan) -> StepResult:
        """Runs the model over the plan's spans and decides its tokens."""
        ...


class InlineExecutor:
    """Model and sampler in this thread."""

    def __init__(self, executable: Executable, sampler: Sampler, layout: CacheLayout) -> None:
        self._executable = executable
        self._sampler = sampler
        self._batches = BatchBuilder(layout)

    def run(self, plan: StepPlan) -> StepResult:
        batch = self._batches.build(plan, self._sampler.draw_rows(plan.samples))
        output = self._executable.run(batch)
        samples, prompt_logprobs = self._sampler.sample(output, plan.samples, plan.prompt_rows)
        return StepResult(plan.step, samples, prompt_logprobs)
