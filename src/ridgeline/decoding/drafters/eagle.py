"""Predict with an EAGLE head: a layer over a token and the hidden state before it (arXiv 2401.15077, 2503.01840).

It drafts as a model does, over a cache of such pairs, counted from where it began to follow the sequence. A prefix that
the model had cached may be there from another sequence; else it is missing, as all is that the head never saw, and
harms nothing else. Drafts go on with the head's own hidden states; once the true ones are there their pairs are
computed again:

    known  a b c d | hidden  a b c | pairs  (h_a b) (h_b c) (h_c d) → e, y | drafts  (y e) → f, (y' f) → g
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import BlockCopy, Span, StepPlan, Vectors
from ridgeline.decoding.drafters import Companion
from ridgeline.decoding.drafters.draft import DraftModel, Resident
from ridgeline.decoding.strategy import SequenceView

MAX_WAITING = 1024  # hidden states of a sequence that wait until it is drafted for; of more the latest half stays
MAX_HIDDEN = 8192  # of all sequences


def build(companion: Companion) -> "Eagle":
    return Eagle(companion)


@dataclass(slots=True)
class _Hidden:
    """The hidden states of the tokens `first .. end` of a sequence that is followed from token `begin` on."""

    begin: int
    first: int
    end: int
    chunks: list[Vectors] = field(default_factory=list[Vectors])

    def drop(self, start: int) -> None:
        """Forget those before token `start`."""
        while self.chunks and start - self.first >= len(self.chunks[0]):
            self.first += len(self.chunks.pop(0))
        if start > self.first and self.chunks:
            self.chunks[0] = self.chunks[0][start - self.first :].copy()
        self.first = start

    def rows(self, start: int, end: int) -> Vectors:
        """Return those of tokens `start .. end`, and forget those before."""
        self.drop(start)
        if len(self.chunks) > 1:
            self.chunks = [np.concatenate(self.chunks)]
        return self.chunks[0][: end - start]


class Eagle(DraftModel):
    """Drafter over `companion`, a head with a cache of its own."""

    _max_right = 1  # the newest known token's: its hidden state was a true one

    def __init__(self, companion: Companion) -> None:
        super().__init__(companion)
        self._hidden: dict[int, _Hidden] = {}

    def observe(self, running: Sequence[SequenceView], plan: StepPlan, taps: Sequence[Vectors]) -> None:
        """Take in the hidden states of all tokens that came to stay, also of who waits to be computed again."""
        views = {view.seq_id: view for view in running}
        at, later = 0, len(taps) - 1
        for span in plan.spans:
            rows, at = slice(at, at + span.num_tokens), at + span.num_tokens
            view, hidden = views.get(span.seq_id), self._hidden.get(span.seq_id)
            if view is None and (hidden is None or span.num_optional):
                continue
            if hidden is None or span.start > hidden.end:  # tokens in between were not seen
                self._release(span.seq_id)
                hidden = self._hidden[span.seq_id] = _Hidden(span.start, span.start, span.start)
                if span.start and view is not None:
                    self._share(view, hidden)
            end = min(span.end + later, view.num_computed if view is not None else span.end + later)
            if end > hidden.end:
                parts = [taps_TW[rows] for taps_TW in taps]
                rows_NW = parts[0] if len(parts) == len(plan.spans) == 1 else np.concatenate(parts)
                if span.parents and view is not None:
                    rows_NW = rows_NW[span.along(view.token_ids[span.start :])]
                hidden.chunks.append(rows_NW[hidden.end - span.start : end - span.start])
                hidden.end = end
            most = min(MAX_WAITING, MAX_HIDDEN // len(self._hidden))
            if end - hidden.first > most:
                self._release(span.seq_id)
                hidden.drop(end - most // 2)
                hidden.begin = hidden.first

    def listen(self, asked: bool) -> None:
        if self._companion.listen is not None:
            self._companion.listen(asked)

    def went_on(self, view: SequenceView, last: Span) -> None:
        super().went_on(view, last)
        if (hidden := self._hidden.get(view.seq_id)) is not None:
            hidden.chunks.clear()
            hidden.first = hidden.end = last.start

    def forget(self, view: SequenceView) -> None:
        super().forget(view)
        self._hidden.pop(view.seq_id, None)

    def _share(self, view: SequenceView, hidden: _Hidden) -> None:
        """Follow it from its start if the cache has the pairs of all before the first hidden state that is there."""
        end, hidden.begin = hidden.first, 0
        text, salt = view.token_ids[1:], self._salt(view)
        if self._knows(view, 0) and self._cache.can_admit(text, salt):
            cached = self._cache.admit(view.seq_id, text, salt)
            if cached.num_tokens >= end:
                params = self._own_params(view.request.params)
                self._residents[view.seq_id] = Resident(params, cached.num_tokens, num_checked=len(view.token_ids))
                return
            self._cache.release(view.seq_id)
        hidden.begin = end

    def _begins(self, view: SequenceView) -> int:
        hidden = self._hidden.get(view.seq_id)
        return len(view.token_ids) if hidden is None else hidden.begin + 1

    def _salt(self, view: SequenceView) -> str:
        if self._hidden[view.seq_id].begin == 0:  # pairs have no first token, but their hidden states depend on it
            return f"{view.request.salt} first {view.token_ids[0]}"
        return f"{view.request.salt} sequence {view.seq_id}"

    def _features(self, spans: Sequence[Span]) -> Vectors:
        pairs = [(self._hidden[span.seq_id], span) for span in spans]
        parts = [hidden.rows(hidden.begin + span.start, hidden.begin + span.end) for hidden, span in pairs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _catch_up(
        self, view: SequenceView, num_tokens: int, max_tokens: int, members: set[int], copies: list[BlockCopy]
    ) -> Span | None:
        hidden = self._hidden.get(view.seq_id)
        if hidden is None or hidden.end != len(view.token_ids) - 1 or hidden.begin == hidden.end:
            return None
        if view.seq_id not in self._residents and hidden.first > hidden.begin:  # its blocks were lost: begin anew
            hidden.begin = hidden.first
        return super()._catch_up(view, num_tokens, max_tokens, members, copies)

    def _own_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters without those that name tokens: the head may have another vocabulary."""
        return SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
