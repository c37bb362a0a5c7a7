"""The drafters: proposers that compute a model of their own. One file each, file name == name, with a `build`.

They cost time of the machine that verifies, so they are asked for many sequences at once, and for so many tokens each
as are worth it. As with every proposer, what they draft changes no token of the output.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from ridgeline.cache.manager import CacheManager
from ridgeline.core.step import StepPlan, StepResult, Weights
from ridgeline.decoding.strategy import SequenceView


class Companion(Protocol):
    """A model beside the target, with weights and a cache of its own, whose steps no scheduler plans."""

    @property
    def cache(self) -> CacheManager: ...
    @property
    def vocab_size(self) -> int:
        """Token ids below this mean the same to both models; others are neither computed nor drafted."""
        ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute a step over the companion's cache."""
        ...


class DraftRequest(NamedTuple):
    """Asks for at most `num_tokens`, at least one, that may follow the known tokens of `view`.

    `by_rejection`: each is sampled by a random number that nothing else uses, and its distribution is told.
    """

    view: SequenceView
    num_tokens: int
    by_rejection: bool = False


class Drafted(NamedTuple):
    """Tokens that may follow, and what each was sampled from, where the request is verified by rejection."""

    token_ids: Sequence[int]
    weights: Sequence[Weights] = ()


class Drafter(Protocol):
    """Makes drafts of how sequences go on."""

    def max_tokens(self, view: SequenceView) -> int:
        """Return how many tokens may be asked for, at most; 0 where the model cannot draft for the sequence."""
        ...

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        """Return drafts by sequence, for those that have one.

        At most `max_catch_up` tokens are computed of what is known beyond each sequence's newest token.
        """
        ...

    def forget(self, view: SequenceView) -> None:
        """Forget the sequence: it has ended."""
        ...


def build_drafter(name: str, companion: Companion) -> Drafter:
    """Build the drafter `name`, one of those that the configuration knows."""
    return cast("Drafter", import_module(f"{__name__}.{name}").build(companion))
