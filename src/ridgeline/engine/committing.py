"""Steps are taken in here: what their sequences gain, what of it is final, which outputs end."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.cache.manager import CacheManager
from ridgeline.core.clock import Clock
from ridgeline.core.step import NO_TOKEN, Round, SampledToken, Span, StepPlan, StepResult, Vectors
from ridgeline.engine.beams import Search
from ridgeline.engine.decode import DecodeRun
from ridgeline.engine.prompt_logprobs import scores_by_sequence
from ridgeline.engine.request import (
    DecodeEvent,
    FinishReason,
    PromptLogprobsEvent,
    Sequence,
    TokenEvent,
    TokensEvent,
    VectorEvent,
)

if TYPE_CHECKING:
    from ridgeline.engine.scheduler import Scheduler

NONE_LEFT = "allowed_token_ids, bad_words and what else excludes tokens leave none to be sampled; exclude less"


def compute_masks(scheduler: "Scheduler") -> None:
    """Find out what the oldest plan in flight may sample by the grammars, now that all before it is taken in; where a
    grammar rarely forbids the likeliest token, that is looked at once it is there."""
    for seq in [one for first in scheduler.running() if first.grammar is not None for one in (first, *first.siblings)]:
        try:
            if seq.grammar is not None:
                seq.grammar.prepare()
        except Exception as error:
            scheduler.fault(seq, error)


@dataclass(slots=True)
class StepCommit:
    """Takes in steps' results for their sequences, each with the span that was computed for it."""

    scheduler: "Scheduler"
    cache: CacheManager
    max_model_len: int
    clock: Clock
    num_recomputed: int = 0  # tokens

    def decode(self, run: DecodeRun, result: StepResult) -> None:
        """Take in one token for each sequence of the oldest plan in flight of `run`."""
        token_ids = [token.token_id for token in result.samples]
        changes, may_end = run.land(token_ids)
        if may_end or any(token.error for token in result.samples):
            self._decode_each(run.seqs, result.samples)
            return
        for seq, token_id in zip(run.seqs, token_ids):
            seq.token_ids.append(token_id)
            seq.num_computed += 1
        self.scheduler.events.append(DecodeEvent(run.seqs, result.samples))
        for seq in [run.seqs[index] for index in changes]:
            try:
                self._commit(seq, seq.num_computed)
            except Exception as error:
                self.scheduler.fault(seq, error)
        for seq, grammar in run.grammars:
            try:
                if seq.num_computed and grammar.accept(seq.token_ids[-1]):  # 0: it failed above, or when another ended
                    self._end_as(seq, FinishReason.STOP)
            except Exception as error:
                self.scheduler.fault(seq, error)

    def _decode_each(self, seqs: Items[Sequence], samples: Items[SampledToken]) -> None:
        """Take in the tokens of a decode step where some may be the last of their outputs."""
        for seq, token in zip(seqs, samples):
            try:
                if not seq.num_computed:
                    continue  # it failed when another ended
                if token.error is not None:
                    self._end_without_token(seq, token.error)
                    continue
                ends = self._append(seq, token)
                self._commit(seq, seq.num_computed + 1)
                self._end_as(seq, ends)
            except Exception as error:
                self.scheduler.fault(seq, error)

    def spans(self, landed: Iterable[tuple[Sequence, Span]], plan: StepPlan, result: StepResult) -> None:
        """Take in spans of any kind."""
        sampled: dict[int, list[SampledToken]] = {}
        for token in result.samples:
            sampled.setdefault(token.seq_id, []).append(token)
        scores = scores_by_sequence(plan, result) if plan.prompt_rows else {}
        vectors = dict(zip([row.seq_id for row in plan.vector_rows], result.vectors)) if plan.vector_rows else {}
        for seq, span in landed:
            try:
                if scored := scores.get(seq.seq_id):
                    seq.num_prompt_logprobs += len(scored)
                    self.scheduler.events.append(PromptLogprobsEvent(seq.request, scored))
                if span.pooled:
                    self._pooled(seq, span, vectors[seq.seq_id])
                else:
                    self._span(seq, span, sampled, result.further.get(seq.seq_id, ()))
            except Exception as error:
                self.scheduler.fault(seq, error)

    def _span(
        self, seq: Sequence, span: Span, sampled: dict[int, list[SampledToken]], further: Items[Round] = ()
    ) -> None:
        """Accept, append, commit to the cache what is final, then fork: in this order, so that what is final and
        what is known agree."""
        tokens = sampled.get(seq.seq_id)
        if tokens is None:
            self._commit(seq, span.end)
            return
        if not span.num_optional and self._end_if_broken(seq, tokens, sampled):
            return
        if isinstance(seq.search, Search):
            self._beam(seq, seq.search, span, tokens[0])
            return
        accepted = self.scheduler.strategy.accept(seq, span, tokens)
        if span.parents:
            self.cache.take_branch(seq.seq_id, accepted.branch)
        if span.num_optional and self._end_if_broken(seq, accepted.tokens, sampled):
            return  # rows behind a rejected token are of no text: what they are does not matter
        if span.num_optional:
            num_accepted = accepted.num_final - (span.num_tokens - span.num_optional)
            seq.drafted.add(accepted.method, span.num_optional, num_accepted)
        ends = self._extend(seq, accepted.tokens)
        num_final = accepted.num_final
        for behind, tokens in further:
            if ends is not None:
                break
            accepted = self.scheduler.strategy.accept(seq, behind, tokens)
            if self._end_if_broken(seq, accepted.tokens, sampled):
                return
            if behind.num_optional:
                num_drafted = behind.num_optional - list(behind.token_ids).count(NO_TOKEN)
                seq.drafted.add(accepted.method, num_drafted, accepted.num_final - 1)
            ends = self._extend(seq, accepted.tokens)
            num_final += accepted.num_final
        if num_final < span.num_tokens + span.num_further:
            self.scheduler.num_final[seq.seq_id] = num_final
        end = min(span.start + num_final, len(seq.token_ids))
        self._commit(seq, end, end - span.start if span.num_optional else 0)
        if span.num_further:
            self.cache.truncate(seq.seq_id, end)  # the next step plans for others before it asks again
        for sibling in self._forked(seq) if seq.siblings else ():
            self.scheduler.insert_running(sibling)
            try:
                if not self._end_if_broken(sibling, sampled[sibling.seq_id], sampled):
                    gained = self.scheduler.strategy.accept(sibling, span, sampled[sibling.seq_id]).tokens
                    self._end_as(sibling, self._extend(sibling, gained))
            except Exception as error:
                self.scheduler.fault(sibling, error)
        self._end_as(seq, ends)

    def _beam(self, seq: Sequence, search: Search, span: Span, token: SampledToken) -> None:
        """Take in what may follow a beam; all go on when that is known of each."""
        self._commit(seq, span.end)
        if seq.first_token_s is None:
            seq.first_token_s = self.clock()
        for sibling in self._forked(seq):
            sibling.first_token_s = seq.first_token_s
            self.scheduler.insert_running(sibling)
        assert token.logprob is not None, "a search asks for log-probabilities"
        if search.take_in(seq.seq_id, token.logprob.top):
            search.go_on(self.scheduler)

    def _forked(self, seq: Sequence) -> Iterator[Sequence]:
        """Fork the other outputs once the prompt is computed: they share its blocks, copy-on-write, and run alone."""
        while seq.siblings:
            sibling = seq.siblings[0]
            self.cache.fork(seq.seq_id, sibling.seq_id)
            del seq.siblings[0]
            sibling.num_computed = seq.num_computed
            sibling.cached = seq.cached
            sibling.scheduled_s = seq.scheduled_s
            yield sibling

    def _pooled(self, seq: Sequence, span: Span, rows_RH: Vectors) -> None:
        vector_H = self.scheduler.strategy.pool(seq, span, rows_RH)
        self._commit(seq, span.end)
        if vector_H is not None:
            self.scheduler.events.append(VectorEvent(seq.request, seq.index, vector_H))
            self.scheduler.end(seq, FinishReason.STOP)

    def _commit(self, seq: Sequence, num_computed: int, num_logged: int = 0) -> None:
        if seq.num_computed < seq.num_lost:
            self.num_recomputed += min(num_computed, seq.num_lost) - seq.num_computed
        seq.num_computed = num_computed
        self.cache.commit(seq.seq_id, seq.token_ids, num_computed, num_logged)

    def _extend(self, seq: Sequence, tokens: Items[SampledToken]) -> FinishReason | None:
        """Add tokens up to the one that ends the output; return why it ends, if it does."""
        if len(tokens) > 1 and self._goes_on(seq, token_ids := [token.token_id for token in tokens]):
            seq.token_ids += token_ids
            self.scheduler.events.append(TokensEvent(seq.request, seq.index, token_ids))
            return None
        for token in tokens:
            if (ends := self._append(seq, token)) is not None:
                return ends
        return None

    def _goes_on(self, seq: Sequence, token_ids: list[int]) -> bool:
        """Tell whether none of these can end an output, which has its first token, nor has anything beside its id."""
        request, num_known = seq.request, len(seq.token_ids) + len(token_ids)
        if seq.grammar is not None or seq.first_token_s is None or request.params.logprobs is not None:
            return False
        is_short = num_known - len(request.prompt_ids) < request.max_tokens and num_known < self.max_model_len
        return is_short and request.stop_ids.isdisjoint(token_ids)

    def _append(self, seq: Sequence, token: SampledToken) -> FinishReason | None:
        """Add a token; return why it ends the output, if it does."""
        request, token_ids, token_id = seq.request, seq.token_ids, token.token_id
        token_ids.append(token_id)
        if seq.first_token_s is None:
            seq.first_token_s = self.clock()
        num_output = len(token_ids) - len(request.prompt_ids)
        stops = token_id in request.stop_ids and num_output >= request.params.min_tokens
        self.scheduler.events.append(TokenEvent(request, seq.index, token_id, token.logprob, stops))
        if stops or (seq.grammar is not None and seq.grammar.accept(token_id)):
            return FinishReason.STOP
        if num_output >= request.max_tokens or len(token_ids) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _end_as(self, seq: Sequence, reason: FinishReason | None) -> None:
        if reason is not None:
            self.scheduler.end(seq, reason, stop_token_id=seq.token_ids[-1] if reason is FinishReason.STOP else None)

    def _end_if_broken(
        self, seq: Sequence, tokens: Items[SampledToken], sampled: dict[int, list[SampledToken]]
    ) -> bool:
        """End an output whose logits were not finite, and before it the siblings that share them."""
        for token in tokens:
            if token.error is not None:
                for sibling in tuple(seq.siblings):
                    self._end_if_broken(sibling, sampled[sibling.seq_id], sampled)
                self._end_without_token(seq, token.error)
                return True
        return False

    def _end_without_token(self, seq: Sequence, error: str) -> None:
        params = seq.request.params
        if params.allowed_token_ids or params.bad_words:
            self.scheduler.end(seq, FinishReason.REFUSED, error=NONE_LEFT)
        else:
            self.scheduler.end(seq, FinishReason.ERROR, error=error)
