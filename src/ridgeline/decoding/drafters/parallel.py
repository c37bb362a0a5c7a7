"""Predict all tokens of a draft in one step of a model that was trained for it (PARD, arXiv 2504.18583).

Behind the newest known token stand mask tokens, and each of them says what is in its place's next one:

    known  a b c d | computed  a b | one step  c d m m → e f g

As with a draft model, the rule `match` samples each with the random number of its place. What tokens between say, such
as penalties, is not known there, and the keys and values of masks are written over by those of what comes.
"""

from collections.abc import Mapping, Sequence

from ridgeline.core.step import Span, StepPlan
from ridgeline.decoding.drafters import Companion, Drafted, DraftRequest
from ridgeline.decoding.drafters.draft import DraftModel
from ridgeline.decoding.strategy import row_after


def build(companion: Companion) -> "Parallel":
    return Parallel(companion)


class Parallel(DraftModel):
    """Drafter over `companion`, whose `mask_id` stands for tokens that are not known."""

    def draft(self, asked: Sequence[DraftRequest], max_catch_up: int) -> Mapping[int, Drafted]:
        assert self._companion.mask_id is not None, "a parallel draft model has a mask token"
        room = self._companion.max_step_tokens - sum(request.num_tokens for request in asked)
        spans, copies, chains = self._begin(asked, min(max_catch_up, max(room, 0)))
        if not spans:
            return {}
        masks = {chain.view.seq_id: [self._companion.mask_id] * (chain.num_tokens - 1) for chain in chains}
        rows = [
            row_after(chain.row, 0, masks[chain.view.seq_id][:i]) for chain in chains for i in range(chain.num_tokens)
        ]
        rows = [row._replace(row=index) for index, row in enumerate(rows)]
        tables = tuple(zip(*[self._cache.tables(span.seq_id) for span in spans], strict=True))
        masked = [_behind(span, masks.get(span.seq_id, ())) for span in spans]
        self._step += 1
        result = self._companion.compute(StepPlan(self._step, masked, tables, tuple(copies), rows))
        self._commit(asked, spans)
        samples = iter(result.samples)
        for chain in chains:
            for token in [next(samples) for _ in range(chain.num_tokens)]:  # behind one that ends it none is taken
                chain.take(token, self._companion.vocab_size)
        return {chain.view.seq_id: Drafted(chain.token_ids, chain.weights) for chain in chains if chain.token_ids}


def _behind(span: Span, masks: Sequence[int]) -> Span:
    """Return the span with `masks` behind it, each with a row of logits."""
    return span._replace(token_ids=[*span.token_ids, *masks], num_logit_rows=span.num_logit_rows + len(masks))
