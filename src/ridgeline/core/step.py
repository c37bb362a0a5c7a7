"""One step of the engine is a plan that the scheduler makes, and the result that the executor gives back.

Legend of shape letters used across the project:
    T tokens in the step · S spans (one per scheduled sequence) · R rows that need logits · V vocabulary
    N query heads · K key/value heads · D head size · H hidden size · F feed-forward size · B blocks · L layers

Plain data, no torch: the same structs cross a thread, a process or a machine boundary.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.core.params import SamplingParams

IntArray = npt.NDArray[np.int64]
PENDING = -1  # in a span, the token that a step in flight samples
NO_TOKEN = -1  # what is sampled from logits that are not finite
Vectors = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint64]  # of tokens: bit i % 64 of word i // 64 is token i


class Branch(NamedTuple):
    """Names tokens `begin .. end` of a span, each behind the one before, the first behind the last one of `way`.

    `way` are the indices of the span's tokens before it. All are computed as those of a sequence of their own would be.
    """

    begin: int
    end: int
    way: tuple[int, ...]


class Span(NamedTuple):
    """Consecutive tokens of one sequence that are computed in one step.

    A prompt chunk, one decode token, one with a draft behind it and a diffusion block are all spans: positions
    `start .. start + len(token_ids)`, of which the last `num_logit_rows` need logits. The last `num_optional` tokens,
    each with logits, may be left out where a step has no room for them. The rows of a `pooled` span are results
    themselves: no token is sampled from them.

    With `parents` the optional tokens are a tree: each stands behind the token of that index, and attends to what is
    on its way from there to the start alone. A token follows its parent, or begins a branch behind all that follow
    from an earlier child of it: `Branch`.

    `bidirectional_block`: 1 is causal attention. With k, tokens attend to everything before and inside their block of k
    tokens, counted from `start`.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    num_logit_rows: int
    bidirectional_block: int = 1
    num_optional: int = 0
    pooled: bool = False
    adapter: int = 0  # number of the LoRA adapter that computes it, from 1; 0: none
    parents: tuple[int, ...] = ()  # of each optional token, an index of `token_ids`; (): each follows the one before
    num_further: int = 0  # tokens behind it that further rounds of the step may compute, as `StepPlan.rounds` has it
    matched: int = 0  # tokens before it that stood before, if looked up amid a model's rounds; -1 - these if it drafted
    pending: int = 0  # the step in flight that samples its last token, for this sequence: PENDING here; 0: it is known

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """One past the last position of the span: the sequence's KV length once the step has run."""
        return self.start + (max(self.depths()) + 1 if self.parents else len(self.token_ids))

    def depths(self) -> list[int]:
        """Return the position of each token, from `start`."""
        depths = list(range(len(self.token_ids) - len(self.parents)))
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def branches(self) -> list[Branch]:
        """Return the runs of tokens that follow one another, in order; a span without `parents` is one."""
        known = len(self.token_ids) - len(self.parents)
        begins = [0, *(i for i, parent in enumerate(self.parents, known) if parent != i - 1), len(self.token_ids)]
        ways: dict[int, tuple[int, ...]] = {0: (), known - 1: tuple(range(known - 1))}  # before each token
        for index, parent in enumerate(self.parents, known):
            ways[index] = (*ways[parent], parent)
        return [Branch(begin, end, ways[begin]) for begin, end in pairwise(begins)]

    def way(self, behind: Callable[[int, int], int]) -> list[int]:
        """Return the indices of the optional tokens on the way from the last required one on which each is what
        `behind` says: of the index of the token before it, and of how many are on the way until there."""
        required = len(self.token_ids) - self.num_optional
        way: list[int] = []
        at = required - 1
        for index, parent in enumerate(self.parents or range(at, len(self.token_ids) - 1), required):
            if parent == at and self.token_ids[index] == behind(at, len(way)):
                way.append(index)
                at = index
        return way

    def along(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the indices of the span's tokens on the way of `token_ids`, from its start on; all of a chain."""
        required = len(self.token_ids) - len(self.parents)
        if not self.parents:
            return range(required)
        known = dict(enumerate(token_ids[required:]))
        return [*range(required), *self.way(lambda _, depth: known.get(depth, -1))]

    def first_branch(self) -> "Span":
        """Return the span without what branches off."""
        return self.shortened(len(self.token_ids) - self.branches()[0].end)._replace(parents=())

    def shortened(self, count: int) -> "Span":
        """Return the span without the last `count` of its optional tokens."""
        assert count <= self.num_optional, f"{count} tokens cannot be left out of {self.num_optional}"
        if count <= 0:
            return self
        token_ids = self.token_ids[: len(self.token_ids) - count]
        rows, optional = self.num_logit_rows - count, self.num_optional - count
        parents = self.parents[:optional]
        changed = {"num_optional": optional, "parents": parents, "num_further": 0}
        return self._replace(token_ids=token_ids, num_logit_rows=rows, **changed)

    def required(self) -> "Span":
        """Return the span without its optional tokens."""
        return self.shortened(self.num_optional)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where one cache group keeps one sequence: block `i` holds positions `first_token + i * block_size ..`."""

    first_token: int  # a multiple of the block size, above 0 only where a sliding window has freed the start
    blocks: Sequence[int]
    num_logged: int = 0  # the sequence's last tokens, which a recurrent state lacks: they are in its log
    branches: Sequence[Sequence[int]] = ()  # of a tree, but for its first: in place of the last blocks of the table


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: before anything is written, block `source` of `group` is copied to `target`."""

    group: int
    source: int
    target: int


Weights = npt.NDArray[np.float32]
"""A distribution after all processors [V]: a whole number of each token; tokens past the end have 0."""


class Trial(NamedTuple):
    """A drafted token that was sampled from `weights_V`, where its own is above 0.

    `joint`: it is verified together with those of the sequence's other rows that are.
    """

    token_id: int
    weights_V: Weights
    joint: bool = False


class Checker(Protocol):
    """Looks at tokens of a row whose mask allows all, in place of what it would take to find out the mask."""

    allowed: Mask
    is_open: bool  # `allowed` allows all

    def allows(self, token_id: int) -> bool:
        """Tell whether a token may follow; True where `allowed` is the mask."""
        ...

    def first_allowed(self, likeliest: Iterable[int]) -> int | None:
        """Return the first of the tokens that may; None where none may: `allowed` is the mask then."""
        ...


class SampleRow(NamedTuple):
    """One token to decide, from logit row `row` (index into the R rows of the step), for sequence `seq_id`.

    `seed` and `num_output` fix the random number, so a token does not depend on the batch, the chunking or preemption.
    `output_ids` is filled only where `params.needs_history`; `banned_ids` are never sampled, nor what is not `allowed`.
    With a `trial` the token is that one or another, by the rules of `decoding/rejection.py`; with `typical` it is the
    first of these that is likely enough, which samples from another distribution. `tells_weights`: the outcome says
    what it is from. A `checker` has the last word on the token.
    """

    seq_id: int
    row: int
    params: SamplingParams
    seed: int
    num_output: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    stop_ids: Sequence[int]  # end-of-sequence ids, suppressed while fewer than min_tokens are out; () is enough later
    banned_ids: Sequence[int] = ()
    allowed: Mask | None = None  # good from when the step before is taken in; None: every token is allowed
    trial: Trial | None = None
    tells_weights: bool = False
    typical: Sequence[int] = ()
    checker: Checker | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobRow:
    """Logit row `row` is asked for the score of the known prompt token `token_id` and `num_top` alternatives."""

    seq_id: int
    row: int
    token_id: int
    num_top: int


@dataclass(frozen=True, slots=True)
class VectorRows:
    """Rows of the step that are pooled for sequence `seq_id`: `first_row .. first_row + num_rows`."""

    seq_id: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token in the raw model distribution, its rank (1: most likely), and the top ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence left the queue; `num_cached` of its tokens were in the prefix cache, and `reason` says why no more."""

    seq_id: int
    num_cached: int
    reason: str


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence lost its blocks to another, or to itself where it was the youngest."""

    seq_id: int
    for_seq_id: int


# slots: max_num_seqs · budget: tokens or rows of the step · blocks: of the cache · just_preempted: the next to be
# admitted is the last that was sent back · together: its tokens must be computed in one step
WaitReason = Literal["slots", "budget", "blocks", "just_preempted", "together"]


@dataclass(frozen=True, slots=True)
class Decisions:
    """Planning decided this beside the spans; `head_waits`: why the queue's head was not admitted, if there is one."""

    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    head_waits: WaitReason | None = None


class Rounds(NamedTuple):
    """Says how a step goes on by itself: what drafts drafts as many tokens behind those that came, and so on.

    `most` rounds, the first one included; the sequences are those of the spans, in their order. No round begins behind
    one of their `stop_ids`, nor where it could bring more tokens than their `room`. A model drafts, over a cache with
    `tables`, until one of `texts`, if there are some, ends in what it had before for `min_matched` tokens; or without
    `tables` the index of each text does, with `limits` of `native/lookup/suffix_index.h`. A single text has up to
    `longest` tokens verified there, if any, and the model goes on behind. One round of a single sequence, from
    `plain_round` on, has no drafts, if that is not 0: it says how fast the machine is. Tokens that have a trial are
    followed by such, sampled by seeds that differ by `proposal`.
    """

    most: int
    room: Sequence[int]
    stop_ids: Sequence[Collection[int]]
    begins: Sequence[int] = ()  # the position of each at which the drafter's text begins
    tables: tuple[tuple[BlockTable, ...], ...] = ()  # [group][span], with blocks for all rounds
    max_final: int = 1  # computed tokens of a draft that stay in that cache where they were right, at most
    texts: Sequence[object] = ()
    min_matched: Sequence[int] = ()  # beside a model
    limits: tuple[float, float] = (1.0, 0.0)  # factor, least share of places
    longest: int = 0
    max_s: float = 0.0  # from when no further round begins, where there is such a text
    plain_round: int = 0
    proposal: int = 0


class StepPlan(NamedTuple):
    """Everything an executor needs for one step, and what was decided on the way to it."""

    step: int
    spans: Sequence[Span]
    tables: tuple[tuple[BlockTable, ...], ...]  # [group][span]
    copies: tuple[BlockCopy, ...]
    samples: Sequence[SampleRow]
    prompt_rows: tuple[PromptLogprobRow, ...] = ()
    vector_rows: tuple[VectorRows, ...] = ()
    decisions: Decisions = Decisions()
    # The step before, where rows too are sampled as there, nothing is copied, and `tables` are the same tuple unless
    # one has changed or a token begins a block; 0: it is not promised.
    follows: int = 0
    token_ids: Sequence[int] = ()  # of the spans, where it is the step before with every span, of one token, one on
    features_TW: Vectors | None = None  # hidden states of another model that the program reads
    rounds: Rounds | None = None  # an executor may leave out those behind the first

    @property
    def num_tokens(self) -> int:
        return len(self.spans) if self.follows else sum([len(span.token_ids) for span in self.spans])


class SampledToken(NamedTuple):
    """The token sampled for a SampleRow; `error` is set, the token meaningless, if its logits are not finite."""

    seq_id: int
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    weights: Weights | None = None


Round = tuple[Span, Sequence[SampledToken]]  # of one sequence: what was verified, and sampled from each of its rows


class LookupSteps(NamedTuple):
    """Steps amid the rounds of a model whose drafts were looked up: how many, of how many tokens, and their seconds."""

    num_steps: int = 0
    num_drafted: int = 0
    seconds: float = 0.0


class StepResult(NamedTuple):
    """All that a step produced, aligned with the plan's `samples`, `prompt_rows` and `vector_rows` ([rows, H] each)."""

    step: int
    samples: tuple[SampledToken, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    vectors: tuple[Vectors, ...] = ()
    batch_s: float = math.nan  # before the model; NaN from an executor that does not tell
    sample_s: float = math.nan  # after it
    taps_TW: Vectors | None = None  # hidden states that the program keeps, side by side
    next_s: float = 0.0  # behind it, in which the next one was laid out before this was told
    further: Mapping[int, Sequence[Round]] = MappingProxyType({})  # rounds behind the first, by sequence
    num_rounds: int = 1  # `taps_TW` are those of the last one
    rounds_s: float = 0.0  # that they took by themselves, where there were several
    lookups: LookupSteps = LookupSteps()
    plain_s: float = 0.0  # of the one among them that had no drafts, if there was one

    @property
    def num_alike(self) -> int:
        """Return the number of rounds that have as many rows as the first."""
        return self.num_rounds - self.lookups.num_steps - (self.plain_s > 0)

    def drafted(self, seconds: float) -> tuple[int, float]:
        """Return the number of rounds that a model drafted for, or of all where none did, and the seconds of one, of a
        step that took `seconds`."""
        count = self.num_alike
        return count, ((self.rounds_s or seconds) - self.lookups.seconds - self.plain_s) / count


class DraftStats(NamedTuple):
    """Counts since the start: verified drafts, their tokens, and how many of those were accepted, also by position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()

    def with_draft(self, num_drafted: int, num_accepted: int) -> "DraftStats":
        """Return the counts with one more verified draft."""
        known = self.num_accepted_per_position
        by_position = [*known, *[0] * (num_accepted - len(known))]
        tokens, accepted = self.num_draft_tokens + num_drafted, self.num_accepted_tokens + num_accepted
        counts = tuple(count + (position < num_accepted) for position, count in enumerate(by_position))
        return DraftStats(self.num_drafts + 1, tokens, accepted, counts)
