"""The scheduler: decides every step which tokens of which sequences are computed, and takes in what came of it.

There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and every step lets
the second catch up with the first under one token budget (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).
`plan` decides, `commit` is the only writer of sequences. An error while one sequence is planned or committed ends that
sequence and touches no other. No torch, no clock of its own, no I/O.
"""

import itertools
from collections.abc import Sequence as Items

from ridgeline.cache.manager import CacheManager
from ridgeline.core.clock import Clock
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.log import get_logger
from ridgeline.core.step import BlockTable, Preemption, SampledToken, Span, StepPlan, StepResult, Vectors, WaitReason
from ridgeline.decoding.strategy import Room, Strategy
from ridgeline.engine.planning import StepDraft
from ridgeline.engine.prompt_logprobs import scores_by_sequence
from ridgeline.engine.queue import WaitingQueue
from ridgeline.engine.request import (
    Event,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    Sequence,
    TokenEvent,
    VectorEvent,
)
from ridgeline.engine.siblings import fork_siblings, hand_over, sequences_of
from ridgeline.engine.stats import SchedulerStats

log = get_logger("engine")


class Scheduler:
    """Admits, batches, preempts and finishes sequences over one cache.

    `max_model_len` bounds prompt plus output of a sequence, in tokens, `max_num_rows` the rows of logits that a step
    decides tokens from; `clock` gives monotonic seconds; up to `depth` plans, of disjoint sequences, may be made before
    the first is committed. Raises ConfigError for a strategy that rolls back over a cache that cannot.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        strategy: Strategy,
        max_model_len: int,
        max_num_rows: int,
        clock: Clock,
        depth: int = 1,
    ) -> None:
        if strategy.rolls_back and (kinds := cache.kinds_without_rollback()):
            raise ConfigError(
                f"{type(strategy).__name__} rolls back computed tokens, and {' and '.join(kinds)} "
                f"states of this model cannot be rolled back; use a strategy that accepts all it computes"
            )
        self._config = config
        self._cache = cache
        self._strategy = strategy
        self._max_model_len = max_model_len
        self._max_num_rows = max_num_rows
        self._clock = clock
        self._depth = depth
        self._waiting = WaitingQueue(use_priority=config.policy == "priority")
        self._running: list[Sequence] = []  # sorted by the queue's key
        self._in_flight: dict[int, Span] = {}  # by sequence, what was planned for it and is not committed
        self._sequences: dict[str, list[Sequence]] = {}  # unfinished, by request
        self._seq_ids = itertools.count()
        self._events: list[Event] = []  # what no caller has heard yet
        self.num_final: dict[int, int] = {}  # by sequence, where the last commit took part of a span back
        self._step = 0
        self._num_preemptions = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Its other outputs (n > 1) are forked from the first one's prompt."""
        sequences = sequences_of(request, self._seq_ids)
        self._sequences[request.request_id] = sequences
        self._waiting.push(sequences[0])

    def finish(self, request_id: str, index: int | None, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End one output, or with None all outputs, of a request now; unknown ones are ignored."""
        for seq in [seq for seq in self._sequences.get(request_id, ()) if index is None or seq.index == index]:
            self._end(seq, reason, error=error)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Take the events that no method has returned yet: of outputs that ended while they were planned."""
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        return bool(self._running) or len(self._waiting) > 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> tuple[Sequence, ...]:
        """Return the sequences that hold cache blocks, in the order they are served."""
        return tuple(self._running)

    def expire(self) -> list[Event]:
        """End every output whose deadline has passed."""
        now = self._clock()
        late = [
            seq
            for sequences in self._sequences.values()
            for seq in sequences
            if seq.request.deadline_s is not None and seq.request.deadline_s <= now
        ]
        for seq in late:
            self._end(seq, FinishReason.DEADLINE)
        return self.take_events()

    # ---- the step

    def plan(self) -> StepPlan | None:
        """Plan what to compute now; None when there is nothing to do. Outputs that ended meanwhile: `take_events`."""
        num_tokens, num_rows = self._config.max_num_batched_tokens, self._max_num_rows
        num_running, num_preemptions = len(self._running), self._num_preemptions
        self._strategy.begin(
            self._running, Room(num_tokens - num_running, num_rows - num_running, others_wait=len(self._waiting) > 0)
        )
        draft = StepDraft(self._cache, self._strategy, self._max_model_len, num_tokens, num_rows)
        self._plan_running(draft)
        if self._num_preemptions == num_preemptions:
            draft.head_waits = self._plan_waiting(draft)
        else:  # the next victim would be admitted in the same breath
            draft.head_waits = "just_preempted"
        samples, prompt_rows, vector_rows = draft.rows(self._fault)
        if not draft.spans:
            return None
        self._step += 1
        self._in_flight.update((span.seq_id, span) for _, span in draft.spans)
        tables: list[tuple[BlockTable, ...]] = [self._cache.tables(seq.seq_id) for seq, _ in draft.spans]
        return StepPlan(
            step=self._step,
            spans=tuple([span for _, span in draft.spans]),
            tables=tuple(zip(*tables, strict=True)),
            copies=tuple(draft.copies),
            samples=samples,
            prompt_rows=prompt_rows,
            vector_rows=vector_rows,
            decisions=draft.decisions(),
        )

    def commit(self, plan: StepPlan, result: StepResult, seconds: float) -> list[Event]:
        """Take in a step's result: tokens, cache contents, forks and ends. Returns what callers must hear.

        `seconds` is how long the step was computed. Spans of sequences that ended or were preempted since are ignored.
        """
        sampled: dict[int, list[SampledToken]] = {}
        for token in result.samples:
            sampled.setdefault(token.seq_id, []).append(token)
        scores = scores_by_sequence(plan, result) if plan.prompt_rows else {}
        vectors = dict(zip([row.seq_id for row in plan.vector_rows], result.vectors)) if plan.vector_rows else {}
        by_id = {seq.seq_id: seq for seq in self._running}
        self.num_final.clear()
        for span in plan.spans:
            if self._in_flight.get(span.seq_id) is not span:
                continue
            del self._in_flight[span.seq_id]
            seq = by_id[span.seq_id]
            try:
                if scored := scores.get(seq.seq_id):
                    seq.num_prompt_logprobs += len(scored)
                    self._events.append(PromptLogprobsEvent(seq.request, scored))
                if span.pooled:
                    self._commit_pooled(seq, span, vectors[seq.seq_id])
                else:
                    self._commit_span(seq, span, sampled)
            except Exception as error:
                self._fault(seq, error)
        try:
            self._strategy.observe(plan, result, seconds)
        except Exception:
            log.exception("the strategy could not observe step %d", plan.step)
        return self.take_events()

    def fail(self, plan: StepPlan | None, message: str) -> list[Event]:
        """End, with an error, every request in a step that could not be computed; None: all that are unfinished."""
        if plan is None:
            requests = list(self._sequences)
        else:
            planned = {span.seq_id for span in plan.spans if self._in_flight.get(span.seq_id) is span}
            requests = list(dict.fromkeys(s.request.request_id for s in self._running if s.seq_id in planned))
        for seq in [seq for request_id in requests for seq in self._sequences[request_id]]:
            self._end(seq, FinishReason.ERROR, error=message)
        return self.take_events()

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks away; it waits, and recomputes its tokens when it is admitted again."""
        self._leave(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(seq)

    def _leave(self, seq: Sequence) -> None:
        """Free a running sequence's blocks. A plan in flight may still write them: before any plan that gets them."""
        self._running.remove(seq)
        self._in_flight.pop(seq.seq_id, None)
        try:
            self._cache.release(seq.seq_id)
        except Exception:  # it is gone all the same: at worst its blocks are lost
            log.exception("the blocks of output %d of %s were not freed", seq.index, seq.request.request_id)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            len(self._waiting), len(self._running), self._num_preemptions, self._step, self._cache.stats()
        )

    def block_counts(self) -> list[int]:
        """Free, cached and used blocks of each cache group, one after the other."""
        return self._cache.block_counts()

    # ---- planning

    def _plan_running(self, draft: StepDraft) -> None:
        """Plan spans for the running sequences, oldest first.

        Each leaves a token and a row for every sequence behind it, so that a long prompt never stalls a decode. Those
        in flight are passed over, and a plan takes no more than its share: the next one has to have some as well.
        """
        share = -(-len(self._running) // self._depth)
        position = 0
        while position < len(self._running) and len(draft.spans) < share:
            seq = self._running[position]
            if seq.seq_id in self._in_flight:
                position += 1
                continue
            try:
                span = draft.next_span(seq, len(self._running) - position - 1)
                if span is None and not draft.spans:  # the oldest may take all
                    span = draft.next_span(seq)
            except Exception as error:
                self._fault(seq, error)
                continue
            if span is not None and not self._place(seq, span, draft):
                return
            position += 1

    def _place(self, seq: Sequence, span: Span, draft: StepDraft) -> bool:
        """Reserve blocks for a span. Where they run out optional tokens go, then the youngest sequences are preempted.

        False where that was `seq` itself.
        """
        placed = draft.place(seq, span) or (draft.give_back(self._in_flight) and draft.place(seq, span.required()))
        while not placed:
            victim = self._running[-1]
            self.preempt(victim)
            draft.preempted.append(Preemption(victim.seq_id, seq.seq_id))
            if victim is seq:
                return False
            placed = draft.place(seq, span.required())
        return True

    def _plan_waiting(self, draft: StepDraft) -> WaitReason | None:
        """Admit from the head of the queue while budget, sequence slots and blocks for the whole prompt last.

        Why it stopped; None where nobody waits.
        """
        while (seq := self._waiting.peek()) is not None:
            if draft.tokens_left <= 0:
                return "budget"
            slots = sum(1 + len(running.siblings) for running in self._running)
            if slots and slots + 1 + len(seq.siblings) > self._config.max_num_seqs:
                return "slots"
            try:
                reason = draft.admit(seq)
            except Exception as error:
                self._fault(seq, error)
                continue
            if reason is not None:
                return reason
            if seq.scheduled_s is None:
                seq.scheduled_s = self._clock()
            self._waiting.pop()
            self._insert_running(seq)
        return None

    def _insert_running(self, seq: Sequence) -> None:
        self._running.append(seq)
        self._running.sort(key=self._waiting.key)

    # ---- committing

    def _commit_span(self, seq: Sequence, span: Span, sampled: dict[int, list[SampledToken]]) -> None:
        """Accept, append, commit to the cache what is final, then fork: in this order, so that what is final and
        what is known agree."""
        tokens = sampled.get(seq.seq_id)
        if tokens is None:
            self._commit(seq, span.end)
            return
        if self._end_if_broken(seq, tokens, sampled):
            return
        accepted = self._strategy.accept(seq, span, tokens)
        if accepted.num_final < span.num_tokens:
            self.num_final[seq.seq_id] = accepted.num_final
        ends = self._append(seq, accepted.tokens)
        self._commit(seq, min(span.start + accepted.num_final, len(seq.token_ids)))
        for sibling in fork_siblings(seq, self._cache) if seq.siblings else ():
            self._insert_running(sibling)
            try:
                if not self._end_if_broken(sibling, sampled[sibling.seq_id], sampled):
                    gained = self._strategy.accept(sibling, span, sampled[sibling.seq_id]).tokens
                    self._end_as(sibling, self._append(sibling, gained))
            except Exception as error:
                self._fault(sibling, error)
        self._end_as(seq, ends)

    def _commit_pooled(self, seq: Sequence, span: Span, rows_RH: Vectors) -> None:
        vector_H = self._strategy.pool(seq, span, rows_RH)
        self._commit(seq, span.end)
        if vector_H is not None:
            self._events.append(VectorEvent(seq.request, seq.index, vector_H))
            self._end(seq, FinishReason.STOP)

    def _commit(self, seq: Sequence, num_computed: int) -> None:
        seq.num_computed = num_computed
        self._cache.commit(seq.seq_id, seq.token_ids, num_computed)

    def _append(self, seq: Sequence, tokens: Items[SampledToken]) -> FinishReason | None:
        """Add tokens up to the one that ends the output; return why it ends, if it does."""
        request = seq.request
        for token in tokens:
            token_id = token.token_id
            seq.token_ids.append(token_id)
            if seq.first_token_s is None:
                seq.first_token_s = self._clock()
            stops = token_id in request.stop_ids and seq.num_output >= request.params.min_tokens
            self._events.append(TokenEvent(request, seq.index, token_id, token.logprob, stops))
            if stops:
                return FinishReason.STOP
            if seq.num_output >= request.max_tokens or len(seq.token_ids) >= self._max_model_len:
                return FinishReason.LENGTH
        return None

    def _end_as(self, seq: Sequence, reason: FinishReason | None) -> None:
        if reason is not None:
            self._end(seq, reason, stop_token_id=seq.token_ids[-1] if reason is FinishReason.STOP else None)

    def _end_if_broken(
        self, seq: Sequence, tokens: Items[SampledToken], sampled: dict[int, list[SampledToken]]
    ) -> bool:
        """End an output whose logits were not finite, and before it the siblings that share them."""
        for token in tokens:
            if token.error is not None:
                for sibling in tuple(seq.siblings):
                    self._end_if_broken(sibling, sampled[sibling.seq_id], sampled)
                self._end(seq, FinishReason.ERROR, error=token.error)
                return True
        return False

    def _fault(self, seq: Sequence, error: Exception) -> None:
        """End this sequence for an error that concerns it alone; the step goes on without it."""
        log.error("output %d of %s failed", seq.index, seq.request.request_id, exc_info=error)
        if seq in self._sequences.get(seq.request.request_id, ()):
            self._end(seq, FinishReason.ERROR, error=f"this output could not be computed: {type(error).__name__}")

    def _end(
        self, seq: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str | None = None
    ) -> None:
        """Remove an output wherever it is: queued, running, or still to be forked."""
        request = seq.request
        members = self._sequences[request.request_id]
        members.remove(seq)
        if not members:
            del self._sequences[request.request_id]
        self._events.append(seq.finished(reason, self._clock(), stop_token_id, error))
        carrier = next((other for other in members if seq in other.siblings), None)
        if carrier is not None:
            carrier.siblings.remove(seq)
        else:
            if seq in self._running:
                self._leave(seq)
            else:
                self._waiting.remove(seq)
            if (heir := hand_over(seq)) is not None:
                self._waiting.push(heir)
        try:
            self._strategy.forget(seq)
        except Exception:
            log.exception("output %d of %s could not be forgotten", seq.index, request.request_id)
