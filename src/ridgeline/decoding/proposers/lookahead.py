"""Has the model make n-grams of its own by Jacobi iteration, and drafts those that begin where the text ends.

Lookahead decoding (Fu et al., arXiv 2402.02057). A window of guesses is computed beside the next token: levels of some
columns, each level what was sampled behind the one above, a step earlier:

    known  a b c | level 0  d e f       ways  d, d e, d e f: level 0 is a chain
                   level 1    g h i           d g, d e h, d e f i: behind column 1, 2, 3 of it

What is sampled behind the last level ends an n-gram in each column, and is the last level of the next step. N-grams
that begin with the newest token are drafted as ways of the same tree.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import SampledToken, Span
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategy import SequenceView
from ridgeline.decoding.trees import followed, tree_of


def build(config: SpeculationConfig) -> "Lookahead":
    return Lookahead(config.lookahead_window, config.lookahead_ngram - 1, config.lookahead_guesses)


@dataclass(slots=True)
class _Window:
    """A sequence's guesses [level][column], and by their first token n-grams, the newest at the end."""

    levels: list[list[int]]
    asked: int = 0  # columns that were drafted last
    ngrams: dict[int, deque[tuple[int, ...]]] = field(default_factory=dict[int, deque[tuple[int, ...]]])

    def way(self, column: int) -> list[int]:
        """Return what a column's last guess stands behind, and the guess."""
        return [*self.levels[0][: column + 1], *(level[column] for level in self.levels[1:])]


class Lookahead:
    """Drafts up to `num_guesses` n-grams, of `num_levels` tokens and the newest one, and a window as wide as there is
    room for, half of it at least."""

    def __init__(self, num_columns: int, num_levels: int, num_guesses: int) -> None:
        self._num_columns, self._num_levels, self._num_guesses = num_columns, num_levels, num_guesses
        self._windows: dict[int, _Window] = {}

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        window = self._windows.get(view.seq_id)
        if window is None:
            if len(view.token_ids) < self._num_levels:
                return None  # of which there are no guesses to be made
            levels = [self._fillers(view, level, self._num_columns) for level in range(self._num_levels)]
            window = self._windows[view.seq_id] = _Window(levels)
        known = window.ngrams.get(view.token_ids[-1], ())
        guesses = list(reversed(known))[: max(max_tokens // 2 // self._num_levels, 0)]
        room = max_tokens - sum(map(len, guesses))
        window.asked = min(self._num_columns, room // self._num_levels)
        ways = [*guesses, *(window.way(column) for column in range(window.asked))]
        if not ways:
            return None
        token_ids, parents = tree_of(ways)
        return Draft(token_ids, int(len(guesses) > 0), parents=parents, depth=self._num_levels)

    def observe(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> None:
        """Take the n-grams that the columns have ended into the pool, and move the window behind what was gained."""
        window = self._windows.get(view.seq_id)
        if window is None:
            return
        known, levels = span.num_tokens - span.num_optional, window.levels
        last = list(levels[-1])
        for column in range(window.asked):
            way = window.way(column)
            found = span.way(lambda _, depth, way=way: way[depth] if depth < len(way) else -1)
            if len(found) < len(way) or (token := sampled[found[-1] - known + 1]).error is not None:
                continue
            last[column] = token.token_id
            first, *rest = way[column:]
            made, before = (*rest, token.token_id), window.ngrams.setdefault(first, deque(maxlen=self._num_guesses))
            if made in before:
                before.remove(made)
            before.append(made)
        gone = len(followed(span, sampled))  # columns that are known now, beside the one that each step leaves behind
        moved = [level[gone:] for level in (*levels[1:], last)]
        missing = self._num_columns - len(moved[0])
        window.levels = [level + self._fillers(view, at, missing) for at, level in enumerate(moved)]

    def forget(self, view: SequenceView) -> None:
        self._windows.pop(view.seq_id, None)

    def _fillers(self, view: SequenceView, level: int, count: int) -> list[int]:
        """Return guesses for want of better ones: tokens of the text."""
        place = random.Random(len(view.token_ids) * 64 + level)
        return [view.token_ids[place.randrange(len(view.token_ids))] for _ in range(count)]
