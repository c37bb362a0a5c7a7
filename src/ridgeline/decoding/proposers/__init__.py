"""The proposers: guesses of the next tokens that a step verifies. One file each, file name == name, with a `build`.

A proposal changes no token, only how many of them a step decides: whatever it is, the output stays that of plain
decoding. So a proposer may look at anything it likes, and needs no tests of exactness of its own.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast, runtime_checkable

from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import Rounds, SampledToken, Span, Weights
from ridgeline.decoding.strategy import SequenceView

Gains = Callable[[int, int], bool]  # of a draft's evidence and its number of tokens


class Draft(NamedTuple):
    """Tokens that may follow, at least one; `evidence` sorts them by how far they can be trusted, 0 is least.

    Acceptance is learnt for each method and value of `evidence` apart, so there should be few. `method` is the
    proposer's name; who asks it fills it in.
    """

    token_ids: Sequence[int]
    evidence: int
    method: str = ""
    weights: Sequence[Weights] = ()
    parents: Sequence[int] = ()  # `decoding/trees.py:tree_of`; (): each token follows the one before
    depth: int = 0  # what a tree that is verified whole, or not at all, gains at most

    def shortened(self, length: int) -> "Draft":
        """Return the draft with its first tokens alone."""
        return self._replace(token_ids=self.token_ids[:length], parents=self.parents[:length])

    def first_way(self) -> "Draft":
        """Return the draft without what branches off."""
        apart = (i for i, parent in enumerate(self.parents) if parent != i - 1)
        return self._replace(token_ids=self.token_ids[: next(apart, len(self.token_ids))], parents=())

    @property
    def kind(self) -> tuple[str, int]:
        """Return what acceptance is learnt by."""
        return self.method, self.evidence


class Proposer(Protocol):
    """Makes drafts of how a sequence goes on."""

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        """Return at most `max_tokens` tokens that may follow the known ones; None without a guess."""
        ...

    def forget(self, view: SequenceView) -> None:
        """Forget the sequence: it has ended."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A proposer that learns from what was sampled, also behind what was wrong."""

    def observe(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> None:
        """Take in what was sampled behind the newest known token and each of its draft, the optional tokens."""
        ...


@runtime_checkable
class RoundsProposer(Proposer, Protocol):
    """A proposer whose drafts native code may look up itself, behind what comes of each round of a step."""

    def rounds(self, views: Sequence[SequenceView], most: int, num_tokens: Sequence[int]) -> Rounds | None:
        """Return how a step goes on that verifies the drafts, of so many tokens, which were just made of all `views`;
        None: it ends."""
        ...

    def is_own(self, view: SequenceView) -> bool:
        """Return whether the last draft of a sequence is of its own text."""
        ...

    def evidence(self, num_matched: int) -> int:
        """Return the evidence for a draft behind so many tokens that stood before, where all places go on like it."""
        ...

    def watched(self, view: SequenceView, max_tokens: int, gains: Gains, *, ends: bool) -> tuple[object, int]:
        """Return the index of the text, and from how long a match on a draft of it `gains` more than a model's, whose
        rounds it `ends`."""
        ...

    @property
    def limits(self) -> tuple[float, float]:
        """The factor and the least share of places of `Rounds.limits`."""
        ...


def build_proposer(name: str, config: SpeculationConfig) -> Proposer:
    """Build the proposer `name`, one of those that the configuration knows."""
    return cast("Proposer", import_module(f"{__name__}.{name}").build(config))
