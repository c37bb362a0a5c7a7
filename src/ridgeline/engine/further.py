"""Take in the rounds of a step behind the first: what each verified, and sampled. Called by the executor."""

from collections.abc import Mapping, Sequence

from ridgeline.core.step import Round, SampledToken, Span
from ridgeline.decoding.sampling import NOT_FINITE

_new = tuple.__new__  # a NamedTuple's own constructor is a call of Python


def further_rounds(
    spans: Sequence[Span],
    token_ids_RT: Sequence[Sequence[int]],
    sampled_RT: Sequence[Sequence[int]],
    told_R: Sequence[Sequence[int]],
) -> Mapping[int, Sequence[Round]]:
    """Return the rounds behind the first, by sequence.

    `told_R` has of each its number of rows, the same unless there is one span, and the match of `Span.matched`. Of
    tokens that are not there, NO_TOKEN, none is right; a round in which one could not be sampled is the last. What was
    sampled behind the first drafted token that was wrong is left out.
    """
    further: dict[int, list[Round]] = {}
    row = 0
    for first in spans:
        seq_id, start, _, _, block, _, pooled, adapter, parents, *_ = first
        rounds = further[seq_id] = list[Round]()
        end = row + first.num_tokens
        right = _num_right(token_ids_RT[0][row:end], sampled_RT[0][row:end])
        for token_ids_T, sampled_T, (num_rows, matched) in zip(
            token_ids_RT[1:], sampled_RT[1:], told_R[1:], strict=True
        ):
            start += 1 + right
            end = row + (num_rows if len(spans) == 1 else first.num_tokens)
            drafted, sampled, count = token_ids_T[row:end], sampled_T[row:end], end - row
            of_rows = count, block, count - 1
            span = _new(Span, (seq_id, start, drafted, *of_rows, pooled, adapter, parents, 0, matched, 0))
            right = _num_right(drafted, sampled)
            gained = sampled[: right + 1]
            tokens = [_new(SampledToken, (seq_id, t, None, NOT_FINITE if t < 0 else None, None)) for t in gained]
            rounds.append((span, tokens))
        row += first.num_tokens
    return further


def _num_right(token_ids: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many tokens behind the first are those sampled before them."""
    right, most = 0, len(token_ids) - 1
    while right < most and token_ids[right + 1] == sampled[right]:
        right += 1
    return right
