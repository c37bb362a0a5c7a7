"""Predict with Medusa heads: each guesses a token further on from the last hidden state alone (arXiv 2401.10774).

One call of all heads drafts a chain of the best token of each, with no cache and nothing sampled:

    known  a b c d | computed  a b c | hidden  h_c, from which d was sampled | heads  0 of h_c → e, 1 of h_c → f
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.core.step import StepPlan, StepResult, Vectors
from ridgeline.decoding.drafters import Companion, Drafted, DraftRequest
from ridgeline.decoding.strategy import SequenceView


def build(companion: Companion) -> "Medusa":
    return Medusa(companion)


class Medusa:
    """Drafter over `companion`, heads whose logits `fold` returns side by side."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self._hidden: dict[int, tuple[int, Vectors]] = {}  # by sequence: of its newest computed token, and how many are

    def max_tokens(self, view: SequenceView) -> int:
        return self._companion.num_heads

    def observe(self, running: Sequence[SequenceView], plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden state of each sequence's newest computed token that came to stay."""
        views = {view.seq_id: view for view in running}
        (tap_TH,) = result.taps
        at = 0
        for span in plan.spans:
            at += span.num_tokens
            view = views.get(span.seq_id)
            if view is not None and span.start < view.num_computed <= span.end:
                way = span.along(view.token_ids[span.start :])
                row = at - span.num_tokens + way[view.num_computed - 1 - span.start]
                self._hidden[span.seq_id] = view.num_computed, tap_TH[row].copy()

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        ready = [request for request in asked if self._knows(request.view)]
        if not ready:
            return {}
        fold, token_ids_V = self._companion.fold, self._companion.token_ids_V
        assert fold is not None, "heads compute with hidden states"
        logits = fold(np.stack([self._hidden[request.view.seq_id][1] for request in ready]))
        best_BJ = logits.reshape(len(ready), self._companion.num_heads, -1).argmax(axis=2)
        if token_ids_V is not None:
            best_BJ = token_ids_V[best_BJ]
        drafts = zip(ready, best_BJ.tolist(), strict=True)
        return {request.view.seq_id: Drafted(row[: request.num_tokens]) for request, row in drafts}

    def forget(self, view: SequenceView) -> None:
        self._hidden.pop(view.seq_id, None)

    def _knows(self, view: SequenceView) -> bool:
        """Tell whether the newest known token is the one behind the hidden state."""
        num_computed, _ = self._hidden.get(view.seq_id, (0, None))
        return num_computed == len(view.token_ids) - 1
