"""The drafters: proposers that compute a model of their own. One file each, file name == name, with a `build`.

They cost time of the machine that verifies, so they are asked for many sequences at once, and for so many tokens each
as are worth it. As with every proposer, what they draft changes no token of the output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from ridgeline.backends.step import Chained
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import Choice
from ridgeline.core.step import IntArray, Rounds, Span, StepPlan, StepResult, Vectors, Weights
from ridgeline.decoding.strategy import SequenceView


class Chain(Protocol):
    """Computes a plan, and those that follow from what each samples: tokens of so many for each row to sample.

    None, with nothing done, where it takes a step at a time.
    """

    def __call__(self, plan: StepPlan, lengths: Sequence[int], *, tells: bool) -> Chained | None: ...


@dataclass(slots=True)
class Companion:
    """A model or a head beside the target, with weights and a cache of its own, whose steps no scheduler plans.

    Token ids below `vocab_size` mean the same to both models; others are neither computed nor drafted. `compute`
    computes a step over `cache`; `fold` returns what a head computes with, of the target's hidden states side by side.
    Where `num_heads` guess a token each, that is the logits of all, side by side, over the tokens `token_ids_V`.
    `mask_id` stands for a token that is not known, in a model that was trained with it.
    """

    cache: CacheManager
    vocab_size: int
    max_model_len: int
    max_step_tokens: int
    choices: Mapping[str, Choice]
    compute: Callable[[StepPlan], StepResult]
    fold: Callable[[Vectors], Vectors] | None = None
    num_heads: int = 0
    token_ids_V: IntArray | None = None  # None: those of the target
    branches: bool = True  # whether the target verifies trees
    chain: Chain | None = None
    mask_id: int | None = None
    goes_on: bool = False  # whether steps of the target have several rounds with what this drafts
    listen: Callable[[bool], None] | None = None  # whether hidden states are asked for, where the target can do without


class DraftRequest(NamedTuple):
    """Asks for at most `num_tokens`, at least one, that may follow the known tokens of `view`.

    `by_rejection`: each is sampled by a random number that nothing else uses, and its distribution is told.
    """

    view: SequenceView
    num_tokens: int
    by_rejection: bool = False


class Drafted(NamedTuple):
    """Tokens that may follow, and what each was sampled from, where the request is verified by rejection.

    `parents` make a tree of them, as those of `decoding/trees.py:tree_of`.
    """

    token_ids: Sequence[int]
    weights: Sequence[Weights] = ()
    parents: Sequence[int] = ()


class Drafter(Protocol):
    """Makes drafts of how sequences go on."""

    def max_tokens(self, view: SequenceView) -> int:
        """Return how many tokens may be asked for, at most; 0 where the model cannot draft for the sequence."""
        ...

    def lag(self, view: SequenceView) -> int:
        """Return how many known tokens are computed before the newest one, at most, where a draft is asked for."""
        ...

    def observe(self, running: Sequence[SequenceView], plan: StepPlan, taps: Sequence[Vectors]) -> None:
        """Take in the target's hidden states, side by side, of a step and of those that went on token by token.

        `running` is what now runs; what the first of several steps has of a sequence is one token.
        """
        ...

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        """Return drafts by sequence, for those that have one.

        At most `max_catch_up` tokens are computed of what is known beyond each sequence's newest token.
        """
        ...

    def forget(self, view: SequenceView) -> None:
        """Forget the sequence: it has ended."""
        ...


@runtime_checkable
class RoundsDrafter(Drafter, Protocol):
    """A drafter that may draft within the target's steps, behind what comes of each round."""

    @property
    def goes_on(self) -> bool:
        """Whether it does with this target."""
        ...

    def rounds(self, asked: Sequence[DraftRequest], most: int, least_room: int) -> Rounds | None:
        """Return how a step goes on that verifies drafts of so many tokens, as they were just made: `most` rounds, with
        room for what these may bring, and for `least_room` tokens.

        None where it ends before, or blocks lack.
        """
        ...

    def went_on(self, view: SequenceView, last: Span) -> None:
        """Take in that there were several rounds, of which this one was the last; what came of it is known."""
        ...


@runtime_checkable
class ListeningDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states."""

    def listen(self, asked: bool) -> None:
        """Ask for them, or for none: where some were not told, a sequence's drafts begin anew with the next ones."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter whose tokens are trees."""

    def survival(self, view: SequenceView, num_tokens: int) -> Sequence[float]:
        """Return the chance that each of so many tokens is accepted, with all on its way: the likeliest first, in
        which order they are drafted."""
        ...


def translated(weights_V: Weights, token_ids_V: IntArray) -> Weights:
    """Return a head's distribution by the ids of the model."""
    found_V = np.zeros(token_ids_V.max() + 1, dtype=np.float32)
    found_V[token_ids_V] = weights_V[: len(token_ids_V)]
    return found_V


def build_drafter(name: str, companion: Companion) -> Drafter:
    """Build the drafter `name`, one of those that the configuration knows."""
    return cast("Drafter", import_module(f"{__name__}.{name.replace('-', '_')}").build(companion))
