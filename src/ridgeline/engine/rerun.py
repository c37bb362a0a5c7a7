"""Compute a step that failed again, by halves: the sequences that make it fail are found, the others get their tokens.

Nothing of a failed step has been taken in, and its keys and values are written again at the same places.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from ridgeline.core.step import SampledToken, StepPlan, StepResult, TokenLogprob

MAX_RUNS = 32  # two culprits among 64 sequences; where there are more, what is left fails with them
_NO_SCORE = TokenLogprob(0, float("nan"), 0, ())


@dataclass(slots=True)
class _Rerun:
    plan: StepPlan
    compute: Callable[[StepPlan], StepResult]
    parts: list[StepResult] = field(default_factory=list)  # of the plan's spans, in their order
    culprits: dict[int, Exception] = field(default_factory=dict[int, Exception])  # by sequence
    runs_left: int = MAX_RUNS
    copied: bool = False

    def halves(self, begin: int, end: int, error: Exception) -> None:
        """Compute the spans `begin .. end`, which failed together, each half by itself."""
        middle = (begin + end) // 2
        if middle == begin:
            self.parts.append(self._nothing(begin, error))
            return
        for first, last in ((begin, middle), (middle, end)):
            if not self.runs_left:
                self.parts += [self._nothing(index, error) for index in range(first, last)]
                continue
            self.runs_left -= 1
            try:
                part = self.compute(part_of(self.plan, first, last, with_copies=not self.copied))
            except Exception as halved:
                self.halves(first, last, halved)
            else:
                self.copied = True  # again would undo what has been written over it
                self.parts.append(part)

    def _nothing(self, index: int, error: Exception) -> StepResult:
        """Stand in for the result of one span, for whose request nothing is taken in."""
        plan = part_of(self.plan, index, index + 1, with_copies=False)
        self.culprits[plan.spans[0].seq_id] = error
        samples = tuple(SampledToken(row.seq_id, 0, error="the step failed") for row in plan.samples)
        vectors = tuple(np.zeros((rows.num_rows, 0), np.float32) for rows in plan.vector_rows)
        return StepResult(self.plan.step, samples, (_NO_SCORE,) * len(plan.prompt_rows), vectors)


def rerun(
    plan: StepPlan, compute: Callable[[StepPlan], StepResult], error: Exception
) -> tuple[StepResult, dict[int, Exception]]:
    """Return the result of a plan that raised `error`, and the sequences that have none, each with what it raised.

    The result has rows for those too, which mean nothing, and no taps: drafts from hidden states begin anew.
    """
    again = _Rerun(plan, compute)
    again.halves(0, len(plan.spans), error)
    parts = [(part.samples, part.prompt_logprobs, part.vectors) for part in again.parts]
    samples, scores, vectors = (tuple(chain.from_iterable(rows)) for rows in zip(*parts))
    return StepResult(plan.step, samples, scores, vectors), again.culprits


def part_of(plan: StepPlan, begin: int, end: int, *, with_copies: bool) -> StepPlan:
    """Return the plan of some spans alone. Its number is that of no step: none goes on from it."""
    rows = [span.num_logit_rows for span in plan.spans]
    first, last = sum(rows[:begin]), sum(rows[:end])
    features = plan.features_TW
    if features is not None:
        tokens = [span.num_tokens for span in plan.spans]
        features = features[sum(tokens[:begin]) : sum(tokens[:end])]
    spans, copies = plan.spans[begin:end], plan.copies if with_copies else ()
    tables = tuple(tables[begin:end] for tables in plan.tables)
    samples = tuple(row._replace(row=row.row - first) for row in plan.samples if first <= row.row < last)
    scores = tuple(replace(row, row=row.row - first) for row in plan.prompt_rows if first <= row.row < last)
    pooled = tuple(replace(r, first_row=r.first_row - first) for r in plan.vector_rows if first <= r.first_row < last)
    return StepPlan(-plan.step, spans, tables, copies, samples, scores, pooled, features_TW=features)
