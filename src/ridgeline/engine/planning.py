"""A step while it is being planned: what one sequence computes in it, and what is left for the others."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ridgeline.cache.manager import CacheManager
from ridgeline.core import step as steps
from ridgeline.core.step import PENDING, Admission, BlockCopy, Decisions, Preemption, Span, StepPlan, WaitReason
from ridgeline.decoding.strategy import Strategy, sample_row
from ridgeline.engine.decode import may_chain
from ridgeline.engine.prompt_logprobs import owes_scores, scoring_rows, scoring_salt
from ridgeline.engine.request import Sequence

NO_DECISIONS = Decisions()
_new = tuple.__new__  # a NamedTuple's own constructor is a call of Python


class Flight(NamedTuple):
    """Names a span in flight and the step that computes it."""

    step: int
    span: Span


def goes_on(seq: Sequence, flights: Items[Flight], max_model_len: int) -> bool:
    """Tell whether more of a sequence may be planned before its spans in flight are taken in.

    Not where others fork from it, scores are owed, or more hangs on the tokens, as with beams.
    """
    num_pending = flights[-1].span.end - len(seq.token_ids) + 1
    return not (seq.siblings or seq.search or owes_scores(seq)) and (
        num_pending <= 0 or may_chain(seq, num_pending, max_model_len)
    )


def landed(
    plan: StepPlan, running: Items[Sequence], in_flight: dict[int, list[Flight]]
) -> Iterator[tuple[Sequence, Span]]:
    """Yield the sequences that still wait for the plan, with their spans, which are in flight no more."""
    by_id = {seq.seq_id: seq for seq in running}
    for span in plan.spans:
        flights = in_flight.get(span.seq_id)
        if flights is not None and flights[0].span is span:
            del flights[0]
            if not flights:
                del in_flight[span.seq_id]
            yield by_id[span.seq_id], span


@dataclass(slots=True)
class StepDraft:
    """Spans so far, and how many tokens and rows of logits are left.

    Rows that score a prompt's own tokens are not counted among the rows: the tokens of the step bound them.
    """

    cache: CacheManager
    strategy: Strategy
    max_model_len: int
    tokens_left: int
    rows_left: int
    spans: list[tuple[Sequence, Span]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    head_waits: WaitReason | None = None

    def span_after(self, seq: Sequence, flights: Items[Flight] | None, num_behind: int) -> Span | None:
        """Return what `seq` computes behind its spans in flight; None: it waits.

        Each of `num_behind` others keeps a token and a row; the oldest may take these where it would wait else.
        """
        if flights is not None:
            step, last = flights[-1]
            if (end := last.end) >= len(seq.token_ids):  # as `Strategy.one_token` has it
                return _new(Span, (seq.seq_id, end, (PENDING,), 1, 1, 0, False, seq.request.adapter, (), 0, 0, step))
            seq = replace(seq, num_computed=end)
        span = self.next_span(seq, num_behind)
        return self.next_span(seq) if span is None and not self.spans else span

    def next_span(self, seq: Sequence, num_behind: int = 0) -> Span | None:
        """Return what `seq` computes if each of `num_behind` others keeps a token and a row; None: it waits."""
        start, known = seq.num_computed, len(seq.token_ids)
        max_tokens, max_rows = self.tokens_left - num_behind, self.rows_left - num_behind
        end = self.cache.span_end(start, min(start + max_tokens, known))
        scores = owes_scores(seq)
        span = self.strategy.next_span(seq, end - start if end < known else max_tokens, score_all=scores)
        if span is None:
            return None
        if span.num_optional:
            span = self._within_limits(seq, span, max_rows)
        return span if scores or span.num_logit_rows <= max_rows else None

    def _within_limits(self, seq: Sequence, span: Span, max_rows: int) -> Span:
        """Return the span with as many optional tokens as the context, the cache's checkpoints and the rows allow."""
        if seq.siblings:
            return span.required()  # what forks shares known tokens alone
        if span.parents and not self.cache.can_branch:
            span = span.first_branch()
        end = min(self.cache.span_end(span.start, span.end, drafts=True), self.max_model_len)
        span = span.shortened(min(max(span.num_logit_rows - max_rows, 0), span.num_optional))
        while span.end > end and span.num_optional:
            span = span.shortened(1)
        return span._replace(num_further=0) if span.end + span.num_further > self.max_model_len else span

    def place(self, seq: Sequence, span: Span) -> bool:
        """Reserve blocks for `span`, or for its required tokens; False, with nothing changed, where blocks lack."""
        copies = self.cache.reserve(seq.seq_id, span.end)
        if copies is None and span.num_optional:
            span = span.required()
            copies = self.cache.reserve(seq.seq_id, span.end)
        if copies is None:
            return False
        if span.parents:
            ways = span.branches()[1:]
            branched = self.cache.branch(seq.seq_id, [span.start + len(w.way) + w.end - w.begin for w in ways])
            if branched is None:
                span = span.first_branch()
            else:
                copies += branched
        self.copies.extend(copies)
        self.spans.append((seq, span))
        self._take(seq, span, 1)
        return True

    def admit(self, seq: Sequence) -> WaitReason | None:
        """Take a waiting sequence into the cache, with a span in this step; else say why not, with nothing changed."""
        salt = seq.request.salt + self.strategy.salt(seq) + scoring_salt(seq)
        if not self.cache.can_admit(seq.token_ids, salt):
            return "blocks"
        cached = self.cache.admit(seq.seq_id, seq.token_ids, salt)
        seq.num_computed = cached.num_tokens
        span, placed = None, False
        try:
            span = self.next_span(seq)
            placed = span is not None and self.place(seq, span)
        finally:
            if not placed:
                self.cache.release(seq.seq_id)
                seq.num_computed = 0
        if not placed:
            return "together" if span is None else "blocks"
        if seq.scheduled_s is None:
            seq.cached = cached
        self.admitted.append(Admission(seq.seq_id, cached.num_tokens, cached.reason))
        return None

    def reserve_further(self) -> None:
        """Reserve blocks for further rounds, now that all else has its own: where some lack them, the step has none."""
        has_room = not self.admitted
        for index, (seq, span) in enumerate(self.spans):
            has_room = has_room and span.num_further > 0
            has_room = has_room and self.cache.reserve(seq.seq_id, span.end + span.num_further) is not None
            self.spans[index] = (seq, span if has_room else span._replace(num_further=0))

    def rows(
        self, fault: Callable[[Sequence, Exception], None]
    ) -> tuple[tuple[steps.SampleRow, ...], tuple[steps.PromptLogprobRow, ...], tuple[steps.VectorRows, ...]]:
        """Return the rows that decide tokens, score prompt tokens, or are results. Call it when all spans are placed.

        `fault` hears of a sequence that fails here, and its span goes; what is copied for it goes where nobody reads.
        """
        samples: list[steps.SampleRow] = []
        prompt_rows: list[steps.PromptLogprobRow] = []
        vector_rows: list[steps.VectorRows] = []
        first_row, planned, self.spans = 0, self.spans, []
        for seq, span in planned:
            rows: list[steps.SampleRow] = []
            for member in (seq, *seq.siblings):
                try:
                    if span.pending:
                        rows.append(sample_row(seq, first_row, span.start + 1 - len(seq.request.prompt_ids)))
                    else:
                        rows.extend(self.strategy.rows(member, span, first_row))
                except Exception as error:
                    fault(member, error)
                    if member is seq:
                        break
            else:
                self.spans.append((seq, span))
                samples.extend(rows)
                if owes_scores(seq):
                    prompt_rows.extend(scoring_rows(seq, span, first_row))
                if span.pooled:
                    vector_rows.append(steps.VectorRows(seq.seq_id, first_row, span.num_logit_rows))
                first_row += span.num_logit_rows
        return tuple(samples), tuple(prompt_rows), tuple(vector_rows)

    def give_back(self, in_flight: Mapping[int, Items[Flight]]) -> bool:
        """Drop every optional token, and free all blocks reserved beyond the spans and those of earlier plans
        that are `in_flight`, by sequence; return whether there were any."""
        ends = {seq_id: flights[-1].span.end for seq_id, flights in in_flight.items()}
        for index, (seq, span) in enumerate(self.spans):
            if span.num_optional:
                self._take(seq, span, -1)
                span = span.required()
                self._take(seq, span, 1)
                self.spans[index] = (seq, span)
            ends[seq.seq_id] = span.end
        return self.cache.give_back(ends)

    def decisions(self) -> Decisions:
        """Return what was decided beside the spans."""
        if not self.admitted and not self.preempted and self.head_waits is None:
            return NO_DECISIONS
        return Decisions(tuple(self.admitted), tuple(self.preempted), self.head_waits)

    def _take(self, seq: Sequence, span: Span, sign: int) -> None:
        self.tokens_left -= sign * len(span.token_ids)
        if span.num_logit_rows <= 1 or not owes_scores(seq):
            self.rows_left -= sign * span.num_logit_rows
