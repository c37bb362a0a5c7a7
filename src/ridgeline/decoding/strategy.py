"""The Strategy seam: which tokens a sequence computes next, and which tokens the outcome adds.

Autoregressive decoding is one strategy; speculation and diffusion are others. The scheduler asks for spans and rows
while planning and calls `accept` while committing, and knows nothing else about how tokens come to be.
"""

from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import SampledToken, SampleRow, Span


class Answer(Protocol):
    """What a strategy sees of a sequence: known tokens, of which the first `num_computed` are in the cache."""

    @property
    def seq_id(self) -> int: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def stop_ids(self) -> Sequence[int]: ...


class Strategy(Protocol):
    """How one kind of decoding moves sequences forward."""

    def next_span(self, answer: Answer, max_tokens: int, *, score_all: bool) -> Span | None:
        """The next tokens to compute, at most `max_tokens`; `score_all` asks for logits of every one of them.

        None where more than `max_tokens` must be computed together: the sequence waits for a step with more room.
        """
        ...

    def rows(self, answer: Answer, span: Span, first_row: int) -> Sequence[SampleRow]:
        """What to decide for `answer` from the logits of `span`, whose rows begin at `first_row` of the step.

        `span` is that of `next_span`, for the same answer or for one that still shares all its tokens.
        """
        ...

    def accept(self, answer: Answer, span: Span, sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
        """The tokens that the answer gains, given the decisions on its `rows`."""
        ...

    def salt(self, answer: Answer) -> str:
        """What keys and values depend on beside the tokens before them; prefixes are shared where it is equal."""
        ...

    def forget(self, answer: Answer) -> None:
        """The answer has ended."""
        ...


def sample_row(answer: Answer, row: int) -> SampleRow:
    """The row that decides the token after the last known one."""
    num_prompt, params = len(answer.prompt_ids), answer.params
    num_output = len(answer.token_ids) - num_prompt
    return SampleRow(
        seq_id=answer.seq_id,
        row=row,
        params=params,
        seed=answer.seed,
        num_output=num_output,
        prompt_ids=answer.prompt_ids,
        output_ids=answer.token_ids[num_prompt:] if params.needs_history else (),
        stop_ids=answer.stop_ids if num_output < params.min_tokens else (),
    )


class Autoregressive:
    """One token at a time: compute what is known but not computed, sample one token at its end."""

    def next_span(self, answer: Answer, max_tokens: int, *, score_all: bool) -> Span | None:
        start, known = answer.num_computed, answer.token_ids
        end = min(start + max_tokens, len(known))
        num_rows = end - start if score_all else int(end == len(known))
        return Span(answer.seq_id, start, known[start:end], num_rows)

    def rows(self, answer: Answer, span: Span, first_row: int) -> Sequence[SampleRow]:
        if span.end < len(answer.token_ids):
            return ()
        return (sample_row(answer, first_row + span.num_logit_rows - 1),)

    def accept(self, answer: Answer, span: Span, sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
        return sampled

    def salt(self, answer: Answer) -> str:
        return ""

    def forget(self, answer: Answer) -> None:
        """Nothing is kept."""
