"""Finds what followed the last few tokens where they stood before: prompt lookup (LLMA, arXiv 2304.04487).

Takes the longest match with the sequence's last tokens, among equals the last one. Where the match reaches up to the
end, the text is in a loop, and the draft goes round it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.speculation import SpeculationConfig
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategy import SequenceView

MAX_CANDIDATES = 16  # places that are compared: bounds a lookup in a text of one repeated token


def build(config: SpeculationConfig) -> "Ngram":
    return Ngram(config.prompt_lookup_min, config.prompt_lookup_max)


@dataclass(slots=True)
class _Index:
    """Where each n-gram of the shortest length ends, the latest first: `latest`, then along `earlier`.

    `num_indexed` tokens have been read; an n-gram that ends at position e is that of the tokens before e.
    """

    latest: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    earlier: list[int] = field(default_factory=lambda: [0])
    num_indexed: int = 0


class Ngram:
    """Looks up matches of `min_length` to `max_length` tokens."""

    def __init__(self, min_length: int, max_length: int) -> None:
        self._min, self._max = min_length, max_length
        self._indexes: dict[int, _Index] = {}

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        tokens = view.token_ids
        known = len(tokens)
        index = self._indexes.setdefault(view.seq_id, _Index())
        self._extend(index, tokens, known - 1)
        end = index.latest.get(tuple(tokens[known - self._min :]), 0)
        best_end = best_length = 0
        for _ in range(MAX_CANDIDATES):
            if not end or best_length == self._max:
                break
            length = self._min
            while length < min(self._max, end) and tokens[end - length - 1] == tokens[known - length - 1]:
                length += 1
            if length > best_length:
                best_end, best_length = end, length
            end = index.earlier[end]
        if not best_end:
            return None
        period = known - best_end
        following = tokens[best_end : best_end + max_tokens]
        return Draft([following[i % period] for i in range(max_tokens)], best_length - self._min)

    def forget(self, view: SequenceView) -> None:
        self._indexes.pop(view.seq_id, None)

    def _extend(self, index: _Index, tokens: Sequence[int], upto: int) -> None:
        """Read the n-grams that end at or before position `upto`."""
        for end in range(index.num_indexed + 1, upto + 1):
            ngram = tuple(tokens[max(end - self._min, 0) : end])
            index.earlier.append(index.latest.get(ngram, 0) if end >= self._min else 0)
            if end >= self._min:
                index.latest[ngram] = end
        index.num_indexed = max(index.num_indexed, upto)
