"""The Strategy seam: which tokens a sequence computes next, and which tokens the outcome adds.

The files of `strategies/` are the strategies. The scheduler asks for spans and rows while planning and calls `accept`
while committing, and knows nothing else about how tokens come to be.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ridgeline.core.step import DraftStats, Rounds, SampledToken, SampleRow, Span, StepPlan, StepResult, Vectors
from ridgeline.decoding.request import Request
from ridgeline.text.grammar import GrammarState

_new = tuple.__new__  # a NamedTuple's own constructor is a call of Python


class SequenceView(Protocol):
    """Says what a strategy sees of a sequence: known tokens, of which the first `num_computed` are in the cache."""

    @property
    def seq_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def grammar(self) -> GrammarState | None: ...


class Room(NamedTuple):
    """Says what a step has beyond a token and a row of logits for each running sequence."""

    num_tokens: int
    num_rows: int


class Accepted(NamedTuple):
    """Says what an output gains from a span, and how many of the span's first tokens are final: the rest is taken back.

    A token that is gained may be final already: a draft that was right. `method` is who drafted, "" if nobody. The
    first tokens of a tree are those on the way that is final, which ends in `branch` of `Span.branches`.
    """

    tokens: Sequence[SampledToken]
    num_final: int
    method: str = ""
    branch: int = 0


class Strategy(Protocol):
    """How one kind of decoding moves sequences forward. What it raises ends the sequence that it was asked about."""

    @property
    def rolls_back(self) -> bool:
        """Whether `accept` may accept less than the whole span."""
        ...

    @property
    def one_token(self) -> bool:
        """Whether a sequence that lacks its newest token alone computes it, samples one by `sample_row` and gains that.

        Then decode steps may go on without asking for spans, rows, and what to accept.
        """
        ...

    def ahead(self, running: Sequence[SequenceView]) -> bool:
        """Tell whether a step may be planned now though the tokens of the one before are not known yet."""
        ...

    def begin(self, running: Sequence[SequenceView], room: Room) -> None:
        """Prepare to plan a step for `running`, in this order; who wants more than one token each shares `room`.

        As for `ahead`, `running` is another object where other sequences run.
        """
        ...

    def next_span(self, view: SequenceView, max_tokens: int, *, score_all: bool) -> Span | None:
        """Return the next tokens to compute, at most `max_tokens`; `score_all` asks for logits of all of them.

        None where more than `max_tokens` must be computed together: the sequence waits for a step with more room. The
        scheduler may leave out any of the span's optional tokens.
        """
        ...

    def rows(self, view: SequenceView, span: Span, first_row: int) -> Sequence[SampleRow]:
        """Return what to decide for `view` from the logits of `span`, whose rows begin at `first_row` of the step.

        `span` is that of `next_span`, for the same sequence or for one that still shares all its tokens.
        """
        ...

    def rounds(self, spans: Sequence[Span]) -> Rounds | None:
        """Return how a step of these spans goes on by itself, where all of them have room for further rounds."""
        ...

    def accept(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> Accepted:
        """Return what comes of the decisions on the sequence's `rows`; not called where there were none.

        The span of each round is taken in by itself.
        """
        ...

    def pool(self, view: SequenceView, span: Span, rows_RH: Vectors) -> Vectors | None:
        """Return the vector [H] that ends the sequence, from the outputs of a pooled span; None: more spans follow."""
        ...

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Observe a step that took `seconds` to compute. What this raises is logged and harms no sequence."""
        ...

    def drafts(self) -> Mapping[str, DraftStats] | None:
        """Return what became of drafts, by method; None from a strategy that makes none."""
        ...

    def draft_gain(self) -> float | None:
        """Return how many times the throughput without drafts it lately was; None where that is not known."""
        ...

    def salt(self, view: SequenceView) -> str:
        """Return what keys and values depend on beside the tokens before them; where equal, prefixes are shared."""
        ...

    def forget(self, view: SequenceView) -> None:
        """Forget the sequence: it has ended."""
        ...


def sample_row(view: SequenceView, row: int, num_output: int | None = None) -> SampleRow:
    """Return the row of the token after the last known one, or after `num_output`, some of which are to be sampled."""
    num_prompt, params = len(view.request.prompt_ids), view.request.params
    if num_output is None:
        num_output = len(view.token_ids) - num_prompt
    output_ids = view.token_ids[num_prompt:] if params.needs_history else ()
    stop_ids = tuple(view.request.stop_ids) if num_output < params.min_tokens else ()
    allowed = None if view.grammar is None else view.grammar.allowed
    checker = view.grammar if view.grammar is not None and view.grammar.guesses else None
    of_output = view.request.prompt_ids, output_ids, stop_ids, (), allowed, None, False, (), checker
    return _new(SampleRow, (view.seq_id, row, params, view.seed, num_output, *of_output))


def row_after(first: SampleRow, row: int, drafted: Sequence[int]) -> SampleRow:
    """Return the row that decides the token after `drafted`, of which `first` decides the first."""
    num_output, params = first.num_output + len(drafted), first.params
    output_ids = [*first.output_ids, *drafted] if params.needs_history else ()
    stop_ids = first.stop_ids if num_output < params.min_tokens else ()
    return _new(SampleRow, (first[0], row, *first[2:4], num_output, first[5], output_ids, stop_ids, *first[8:]))


def rows_along(first: SampleRow, drafted: Sequence[int]) -> list[SampleRow]:
    """Return `first`, which decides the first of the tokens that are `drafted`, and the rows behind each of them."""
    seq_id, row, *same, num_output = first[:5]
    if first.params.needs_history or first.stop_ids:
        return [row_after(first, row + i, drafted[:i]) for i in range(1 + len(drafted))]
    rest = first[5:]
    return [_new(SampleRow, (seq_id, row + i, *same, num_output + i, *rest)) for i in range(1 + len(drafted))]


def num_left(view: SequenceView) -> int:
    """Return how many tokens an output may still get."""
    return view.request.max_tokens - len(view.token_ids) + len(view.request.prompt_ids)


def room_for_drafts(running: Sequence[SequenceView], room: Room) -> int:
    """Return how many tokens may be drafted: none where prompts are computed, since that step is busy."""
    is_busy = any(len(view.token_ids) - view.num_computed != 1 for view in running)
    return 0 if is_busy else min(room.num_tokens, room.num_rows)
