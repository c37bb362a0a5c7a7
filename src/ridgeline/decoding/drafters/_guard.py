"""Guard a strategy from its drafter: errors harm no request, and drafts that do not pay are tried now and then."""

from collections.abc import Mapping, Sequence

from ridgeline.core.log import get_logger
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.decoding.drafters import Drafted, Drafter, DraftRequest
from ridgeline.decoding.strategy import SequenceView

MAX_FAILURES = 3  # in a row, after which a drafter is left alone for good
FIRST_WAIT, MAX_WAIT = 4, 32  # rounds without drafts, each behind a rest of the control, between two tries
DRAFTING_WAIT = 12  # rounds with drafts between two that try a longer one

log = get_logger("engine")


class Shielded:
    """Drafter that does what `drafter` does until it fails: sequences then go on without drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._failures = 0

    def max_tokens(self, view: SequenceView) -> int:
        return self._drafter.max_tokens(view) if self._failures < MAX_FAILURES else 0

    def observe(self, running: Sequence[SequenceView], plan: StepPlan, result: StepResult) -> None:
        try:
            self._drafter.observe(running, plan, result)
        except Exception:
            self._failures = MAX_FAILURES
            log.exception("hidden states could not be taken in, and what drafts from them is left alone")

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        try:
            drafts = self._drafter.draft(asked, max_catch_up)
        except Exception:
            self._failures += 1
            ends = ", and it is left alone" if self._failures == MAX_FAILURES else ""
            log.exception("%d sequences go on without drafts, which could not be made%s", len(asked), ends)
            for request in asked:
                self.forget(request.view)
            return {}
        self._failures = 0
        return drafts

    def forget(self, view: SequenceView) -> None:
        self._drafter.forget(view)


class Probes:
    """Says when to draft one token more than pays: nothing is learnt of what is never drafted, and texts change.

    Now and then while drafts pay, less and less often while none do.
    """

    def __init__(self) -> None:
        self._waited, self._wait = 0, FIRST_WAIT
        self._drafted = False

    def due(self, drafts: bool) -> bool:
        """Take in whether a round drafts at all; return whether it should draft one token more."""
        if drafts is not self._drafted:
            self._drafted, self._waited, self._wait = drafts, 0, FIRST_WAIT
        self._waited += 1
        if self._waited < self._wait:
            return False
        self._waited = 0
        self._wait = DRAFTING_WAIT if drafts else min(2 * self._wait, MAX_WAIT)
        return True
