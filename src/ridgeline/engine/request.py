"""A request has sequences, whose tokens become events."""

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Protocol

from ridgeline.cache.manager import NOT_ADMITTED, PrefixMatch
from ridgeline.core.step import SampledToken, TokenLogprob, Vectors
from ridgeline.decoding.request import Request
from ridgeline.text.grammar import GrammarState

SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the outputs of one request never share a random stream


class FinishReason(enum.StrEnum):
    """The reason why a sequence ended is one of these; the first two as OpenAI spells them."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller went away
    DEADLINE = "deadline"  # its deadline passed
    ERROR = "error"  # the step failed, or its logits were not finite
    REFUSED = "refused"  # what it asks for turned out to be too much


@dataclass(slots=True)
class DraftedTokens:
    """Counts the drafted tokens of one output that were verified, and those accepted; of its prediction alone, too."""

    verified: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0

    def add(self, method: str, verified: int, accepted: int) -> None:
        """Take in a round."""
        self.verified += verified
        self.accepted += accepted
        if method == "prediction":
            self.predicted += verified
            self.predicted_accepted += accepted


class Rounds(Protocol):
    """Says which sequences have all of a round, after which others go on too: `engine/beams.py`."""

    def waits(self, seq_id: int) -> bool: ...


@dataclass(slots=True)
class Sequence:
    """One output being generated: all its tokens, and how many of them the cache holds.

    Invariant: num_computed <= len(token_ids); a running sequence is caught up when it lacks only its newest token.
    """

    seq_id: int
    request: Request
    index: int  # 0 .. n-1
    token_ids: list[int]
    num_computed: int = 0
    cached: PrefixMatch = NOT_ADMITTED  # what the first admission found in the prefix cache
    num_prompt_logprobs: int = 0  # already reported
    num_preemptions: int = 0
    num_lost: int = 0  # tokens that were computed when its blocks were taken
    num_charged: int = 0  # of its output, on its client's account
    yields: bool = False  # it was preempted for another client: its turn is its client's
    scheduled_s: float | None = None
    first_token_s: float | None = None
    drafted: DraftedTokens = field(default_factory=DraftedTokens)
    is_aside: bool = False  # it waits for its caller or other beams, and not in the queue
    search: Rounds | None = None  # of which it is a beam
    grammar: GrammarState | None = None
    siblings: list["Sequence"] = field(default_factory=list)  # n > 1: forked when the prompt is computed

    @property
    def seed(self) -> int:
        """Seed of this sequence's random stream."""
        return (self.request.seed + self.index * SEED_STRIDE) % 2**64

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def call(self) -> int | str:
        """The caller's request that it is an output of, whatever prompts and outputs that has."""
        return self.request.call or self.request.request_id

    @property
    def is_decoding(self) -> bool:
        """Tell whether it lacks its newest token alone."""
        return len(self.token_ids) - self.num_computed == 1

    @property
    def waits(self) -> bool:
        """Tell whether it goes on when others have computed what it has."""
        return self.search is not None and self.search.waits(self.seq_id)

    @property
    def num_slots(self) -> int:
        """Outputs that run where this sequence does: its own, and those that are forked from it later."""
        return 1 + len(self.siblings)

    def finished(
        self, reason: FinishReason, now_s: float, stop_token_id: int | None, error: str | None
    ) -> "FinishEvent":
        """Return the end of the output, which is `now_s`."""
        of = self.request, self.index, self.seq_id, self.num_output
        return FinishEvent(*of, reason, self._timings(now_s), self.cached, self.token_ids, stop_token_id, error)

    def _timings(self, now_s: float) -> "Timings":
        arrival_s, first_s = self.request.arrival_s, self.first_token_s
        return Timings(
            queue_s=(now_s if self.scheduled_s is None else self.scheduled_s) - arrival_s,
            ttft_s=None if first_s is None else first_s - arrival_s,
            tpot_s=None,
            latency_s=now_s - arrival_s,
            num_preemptions=self.num_preemptions,
            drafted=replace(self.drafted),
        ).of_tokens(self.num_output)


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Log-probabilities of the next few prompt tokens, in order."""

    request: Request
    logprobs: tuple[TokenLogprob, ...]
    index: int = 0  # of the output that is told them


@dataclass(slots=True)
class TokenEvent:
    """Output `index` of `request` got one more token; `ends` where it is an end-of-sequence or stop id."""

    request: Request
    index: int
    token_id: int
    logprob: TokenLogprob | None
    ends: bool


@dataclass(slots=True)
class TokensEvent:
    """Tells that output `index` of `request` got tokens of which nobody asked more than their ids, and goes on."""

    request: Request
    index: int
    token_ids: Items[int]


@dataclass(slots=True)
class DecodeEvent:
    """Tells that each of `seqs` got one more token, and goes on."""

    seqs: Items[Sequence]
    tokens: Items[SampledToken]


@dataclass(frozen=True, slots=True)
class VectorEvent:
    """The vector [H] that `request` is waiting for."""

    request: Request
    index: int
    vector_H: Vectors


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """Output `index` of `request` has ended, a sequence of `num_output` tokens after the prompt."""

    request: Request
    index: int
    seq_id: int
    num_output: int
    reason: FinishReason
    timings: "Timings"
    cached: PrefixMatch
    token_ids: Items[int]  # the prompt and all that came after it, of which callers may get fewer
    stop_token_id: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When an output was begun, continued and ended, in seconds: TPOT = (latency - TTFT) / (output tokens - 1)."""

    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float
    num_preemptions: int
    drafted: DraftedTokens = field(default_factory=DraftedTokens)

    def of_tokens(self, num_output: int) -> "Timings":
        """Return the timings of an output of `num_output` tokens."""
        if self.ttft_s is None or num_output < 2:
            return replace(self, tpot_s=None)
        return replace(self, tpot_s=(self.latency_s - self.ttft_s) / (num_output - 1))


Event = DecodeEvent | TokenEvent | TokensEvent | PromptLogprobsEvent | VectorEvent | FinishEvent
