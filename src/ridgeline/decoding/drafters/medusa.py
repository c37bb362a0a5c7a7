"""Predict with Medusa heads: each guesses a token further on from the last hidden state alone (arXiv 2401.10774).

One call of all heads, with no cache and nothing sampled, ranks tokens for each place. A tree of the likeliest ways
through them is drafted: how often a head's first, second, .. token is right is learnt from what comes.

    known  a b c d | computed  a b c | hidden  h_c, from which d was sampled | heads  0 of h_c → e e', 1 of h_c → f f'
                                                                               tree   e, e f, e', e f', e' f, ..
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.core.step import StepPlan, Vectors
from ridgeline.decoding.drafters import Companion, Drafted, DraftRequest
from ridgeline.decoding.largest import largest
from ridgeline.decoding.strategy import SequenceView
from ridgeline.decoding.trees import best_ways, tree_of

MAX_RANKS = 6  # of a head's tokens
MAX_NODES = 64
LEARN_ROUNDS = 8  # between two in which all ranks of all heads are looked at
FADE = 0.99  # of what was seen, with each time more


def build(companion: Companion) -> "Medusa":
    return Medusa(companion)


class Medusa:
    """Drafter over `companion`, heads whose logits `fold` returns side by side."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self._hidden: dict[int, tuple[int, Vectors]] = {}  # by sequence: of its newest computed token, and how many are
        self._ranked: dict[int, tuple[int, list[list[int]]]] = {}  # by sequence: what heads said behind how many tokens
        ranks = np.arange(MAX_RANKS if companion.branches else 1)
        usual_JK = np.tile(0.5 / (1 + ranks) ** 2, (companion.num_heads, 1))
        self._right_JK, self._seen_JK = 2 * usual_JK, np.full_like(usual_JK, 2.0)
        self._ways: dict[int, list[tuple[float, tuple[int, ...]]]] = {}  # by how many; what was learnt changes them
        self._num_rounds = 0

    def max_tokens(self, view: SequenceView) -> int:
        return MAX_NODES if self._companion.branches else self._companion.num_heads

    def lag(self, view: SequenceView) -> int:
        return 0

    def survival(self, view: SequenceView, num_tokens: int) -> Sequence[float]:
        return [chance for chance, _ in self._likeliest(num_tokens)]

    def observe(self, running: Sequence[SequenceView], plan: StepPlan, taps: Sequence[Vectors]) -> None:
        """Keep the hidden state of each sequence's newest computed token that came to stay."""
        views = {view.seq_id: view for view in running}
        at, shift = 0, len(taps) - 1
        for span in plan.spans:
            at += span.num_tokens
            view = views.get(span.seq_id)
            if view is not None and span.start < view.num_computed - shift <= span.end:
                way = span.along(view.token_ids[span.start :])
                row = at - span.num_tokens + way[view.num_computed - shift - 1 - span.start]
                self._hidden[span.seq_id] = view.num_computed, taps[-1][row].copy()

    def listen(self, asked: bool) -> None:
        if self._companion.listen is not None:
            self._companion.listen(asked)

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        ready = [request for request in asked if self._knows(request.view)]
        if not ready:
            return {}
        fold, self._num_rounds = self._companion.fold, self._num_rounds + 1
        assert fold is not None, "heads compute with hidden states"
        for request in ready:
            self._learn(request.view)
        self._ways.clear()
        ways = [way for _, way in self._likeliest(max(request.num_tokens for request in ready))]
        num_heads, max_ranks = self._seen_JK.shape
        num_ranks = [0] * num_heads
        for way in ways:
            num_ranks[len(way) - 1] = max(num_ranks[len(way) - 1], way[-1] + 1)
        if self._num_rounds % LEARN_ROUNDS == 0:
            num_ranks = [max_ranks] * num_heads
        logits = fold(np.stack([self._hidden[request.view.seq_id][1] for request in ready]))
        logits_BJV = logits.reshape(len(ready), num_heads, -1)
        first_BJ, found = logits_BJV.argmax(axis=2), dict[int, Drafted]()
        for (view, count, _), first_J, logits_JV in zip(ready, first_BJ, logits_BJV, strict=True):
            ranked = [self._best(*each) for each in zip(first_J, logits_JV, num_ranks, strict=True)]
            self._ranked[view.seq_id] = len(view.token_ids), ranked
            token_ids, parents = tree_of([[ranked[at][rank] for at, rank in enumerate(way)] for way in ways[:count]])
            found[view.seq_id] = Drafted(token_ids, parents=parents)
        return found

    def forget(self, view: SequenceView) -> None:
        self._hidden.pop(view.seq_id, None)
        self._ranked.pop(view.seq_id, None)

    def _best(self, first: np.int64, logits_V: Vectors, count: int) -> list[int]:
        """Return a head's likeliest tokens, of which the first is known."""
        best_K = largest(logits_V, count)[1] if count > 1 else np.array([first][:count], dtype=np.int64)
        token_ids_V = self._companion.token_ids_V
        return (best_K if token_ids_V is None else token_ids_V[best_K]).tolist()

    def _likeliest(self, count: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return the ways of a tree of `count` tokens, by how often each head's tokens were right."""
        if count not in self._ways:
            falling_JK = np.minimum.accumulate(self._right_JK / self._seen_JK, axis=1)
            self._ways[count] = best_ways(falling_JK.tolist(), count)
        return self._ways[count]

    def _learn(self, view: SequenceView) -> None:
        """Compare what the heads said last with what came, of tokens that were not drafted as well."""
        known, ranked = self._ranked.pop(view.seq_id, (0, []))
        for depth, (token, best) in enumerate(zip(view.token_ids[known:], ranked, strict=False)):
            right = np.asarray(best, dtype=np.int64) == token
            seen = np.s_[depth, : len(best)]
            self._right_JK[seen] = self._right_JK[seen] * FADE + right
            self._seen_JK[seen] = self._seen_JK[seen] * FADE + 1

    def _knows(self, view: SequenceView) -> bool:
        """Tell whether the newest known token is the one behind the hidden state."""
        num_computed, _ = self._hidden.get(view.seq_id, (0, None))
        return num_computed == len(view.token_ids) - 1
