"""Count what is looked up amid the rounds of a model, and what it takes. Called by strategies."""

from collections.abc import Mapping

from ridgeline.core.step import LookupSteps, StepResult
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.proposers import Proposer, RoundsProposer


class Lookups:
    """Counts, of the step that lands, what `proposer`, called `method`, looked up amid a model's rounds."""

    def __init__(self, method: str, proposer: RoundsProposer) -> None:
        self.method, self.proposer = method, proposer
        self._steps, self._num_right = LookupSteps(), 0

    def kind(self, num_matched: int) -> tuple[str, int]:
        """Return what the acceptance of a draft behind so many tokens that stood before is learnt by."""
        return self.method, self.proposer.evidence(num_matched)

    def land(self, result: StepResult) -> None:
        """Take in how many steps there were, and what they took."""
        self._steps = result.lookups

    def accept(self, num_right: int) -> None:
        """Take in a round."""
        self._num_right += num_right

    def tell(self, control: DraftControl, num_decodes: int) -> float:
        """Tell what there was since the last time, and forget it; return the seconds that it took."""
        count, num_drafted, seconds = self._steps
        if count:
            control.looked_up(num_decodes, num_drafted // count, self._num_right / count, seconds / count, count)
        self._steps, self._num_right = LookupSteps(), 0
        return seconds


def lookups_of(proposers: Mapping[str, Proposer]) -> Lookups | None:
    """Return those of the first proposer whose drafts native code may look up."""
    pairs = [(name, each) for name, each in proposers.items() if isinstance(each, RoundsProposer)]
    return Lookups(*pairs[0]) if pairs else None
