"""The scheduler: decides every step which tokens of which sequences are computed, and takes in what came of it.

There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and every step lets
the second catch up with the first under one token budget (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).
`plan` decides, `commit` is the only writer of sequences. No torch, no clock of its own, no I/O.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ridgeline.cache.manager import CacheManager, CacheStats
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.step import (
    BlockCopy,
    BlockTable,
    PromptLogprobRow,
    SampledToken,
    SampleRow,
    Span,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from ridgeline.decoding.strategy import Strategy
from ridgeline.engine.queue import WaitingQueue
from ridgeline.engine.request import (
    Event,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    Sequence,
    Timings,
    TokenEvent,
)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters; `num_preemptions` and `num_steps` since the start."""

    num_waiting: int
    num_running: int
    num_preemptions: int
    num_steps: int
    cache: CacheStats


class Scheduler:
    """Admits, batches, preempts and finishes sequences over one cache.

    `max_model_len` bounds prompt plus output of a sequence, in tokens; `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        strategy: Strategy,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._cache = cache
        self._strategy = strategy
        self._max_model_len = max_model_len
        self._clock = clock
        self._waiting = WaitingQueue(use_priority=config.policy == "priority")
        self._running: list[Sequence] = []  # sorted by the queue's key
        self._sequences: dict[str, list[Sequence]] = {}  # unfinished, by request
        self._seq_ids = itertools.count()
        self._step = 0
        self._num_preemptions = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. Its other answers (n > 1) are forked from the first one's prompt."""
        first, *others = (
            Sequence(next(self._seq_ids), request, index, list(request.prompt_ids)) for index in range(request.params.n)
        )
        first.siblings = others
        self._sequences[request.request_id] = [first, *others]
        self._waiting.push(first)

    def finish(self, request_id: str, index: int | None, reason: FinishReason) -> list[Event]:
        """Ends one answer, or with None all answers, of a request now; unknown ones are ignored."""
        ending = [seq for seq in self._sequences.get(request_id, ()) if index is None or seq.index == index]
        return [self._end(seq, reason) for seq in ending]

    @property
    def has_work(self) -> bool:
        return bool(self._running) or len(self._waiting) > 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold cache blocks, in the order they are served."""
        return tuple(self._running)

    def expire(self) -> list[Event]:
        """Ends every answer whose deadline has passed."""
        now = self._clock()
        late = [
            seq
            for sequences in self._sequences.values()
            for seq in sequences
            if seq.request.deadline_s is not None and seq.request.deadline_s <= now
        ]
        return [self._end(seq, FinishReason.DEADLINE) for seq in late]

    # ---- the step

    def plan(self) -> StepPlan | None:
        """What to compute now; None when there is nothing to do."""
        spans: list[tuple[Sequence, Span]] = []
        copies: list[BlockCopy] = []
        num_preemptions = self._num_preemptions
        budget = self._plan_running(self._config.max_num_batched_tokens, spans, copies)
        if self._num_preemptions == num_preemptions:  # else the next victim would be admitted in the same breath
            self._plan_waiting(budget, spans, copies)
        if not spans:
            return None
        self._step += 1
        samples, prompt_rows = self._rows(spans)
        tables: list[tuple[BlockTable, ...]] = [self._cache.tables(seq.seq_id) for seq, _ in spans]
        return StepPlan(
            step=self._step,
            spans=tuple(span for _, span in spans),
            tables=tuple(zip(*tables, strict=True)),
            copies=tuple(copies),
            samples=samples,
            prompt_rows=prompt_rows,
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Takes in a step's result: tokens, cache contents, forks and ends. Returns what callers must hear."""
        sampled: dict[int, list[SampledToken]] = {}
        for token in result.samples:
            sampled.setdefault(token.seq_id, []).append(token)
        prompt_logprobs = _by_sequence(plan, result)
        by_id = {seq.seq_id: seq for seq in self._running}
        events: list[Event] = []
        for span in plan.spans:
            seq = by_id[span.seq_id]
            seq.num_computed = span.kept_end
            self._cache.commit(seq.seq_id, seq.token_ids, span.kept_end)
            if scored := prompt_logprobs.get(seq.seq_id):
                seq.num_prompt_logprobs += len(scored)
                events.append(PromptLogprobsEvent(seq.request, scored))
            if seq.seq_id not in sampled:
                continue
            members = [seq, *self._fork_siblings(seq)]
            for member in members:
                events.extend(self._advance(member, span, sampled[member.seq_id]))
        return events

    def fail(self, plan: StepPlan, message: str) -> list[Event]:
        """The step could not be computed: every request in it ends with an error."""
        planned = {span.seq_id for span in plan.spans}
        requests = {seq.request.request_id for seq in self._running if seq.seq_id in planned}
        ending = [seq for request_id in requests for seq in self._sequences[request_id]]
        return [self._end(seq, FinishReason.ERROR, error=message) for seq in ending]

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks away; it waits, and recomputes its tokens when it is admitted again."""
        self._cache.release(seq.seq_id)
        self._running.remove(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(seq)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            len(self._waiting), len(self._running), self._num_preemptions, self._step, self._cache.stats()
        )

    # ---- planning

    def _plan_running(self, budget: int, spans: list[tuple[Sequence, Span]], copies: list[BlockCopy]) -> int:
        """Spans for the running sequences, oldest first; the youngest are preempted when blocks run out.

        Each keeps one token of the budget for every sequence behind it, so that a long prompt never stalls a decode.
        """
        position = 0
        while position < len(self._running):
            seq = self._running[position]
            behind = len(self._running) - position - 1
            span = self._span(seq, budget - behind)
            if span is None and not spans:  # the oldest may take all
                span = self._span(seq, budget)
            if span is None:
                position += 1
                continue
            made = self._cache.reserve(seq.seq_id, span.end)
            while made is None:
                victim = self._running[-1]
                self.preempt(victim)
                if victim is seq:
                    break
                made = self._cache.reserve(seq.seq_id, span.end)
            if made is None:
                break
            copies.extend(made)
            spans.append((seq, span))
            budget -= span.num_tokens
            position += 1
        return budget

    def _plan_waiting(self, budget: int, spans: list[tuple[Sequence, Span]], copies: list[BlockCopy]) -> None:
        """Admits from the head of the queue while budget, sequence slots and blocks for the whole prompt last."""
        while budget > 0 and (seq := self._waiting.peek()) is not None:
            slots = sum(1 + len(running.siblings) for running in self._running)
            if slots and slots + 1 + len(seq.siblings) > self._config.max_num_seqs:
                return
            salt = self._salt(seq)
            if not self._cache.can_admit(seq.token_ids, salt):
                return
            cached = self._cache.admit(seq.seq_id, seq.token_ids, salt)
            seq.num_computed = cached.num_tokens
            span = self._span(seq, budget)
            made = None if span is None else self._cache.reserve(seq.seq_id, span.end)
            if span is None or made is None:
                self._cache.release(seq.seq_id)
                seq.num_computed = 0
                return
            if seq.scheduled_s is None:
                seq.scheduled_s = self._clock()
                seq.cached = cached
            self._waiting.pop()
            self._insert_running(seq)
            copies.extend(made)
            spans.append((seq, span))
            budget -= span.num_tokens

    def _span(self, seq: Sequence, budget: int) -> Span | None:
        start = seq.num_computed
        end = self._cache.span_end(start, min(start + budget, len(seq.token_ids)))
        most = end - start if end < len(seq.token_ids) else budget
        span = self._strategy.next_span(seq, most, score_all=self._scores_prompt(seq))
        adapter = seq.request.adapter
        return replace(span, adapter=adapter) if span is not None and adapter else span

    def _rows(self, spans: list[tuple[Sequence, Span]]) -> tuple[tuple[SampleRow, ...], tuple[PromptLogprobRow, ...]]:
        """Which logit row decides which token, and which rows score prompt tokens."""
        samples: list[SampleRow] = []
        prompt_rows: list[PromptLogprobRow] = []
        first_row = 0
        for seq, span in spans:
            if self._scores_prompt(seq):
                prompt_rows.extend(_prompt_rows(seq, span, first_row))
            for member in (seq, *seq.siblings):
                samples.extend(self._strategy.rows(member, span, first_row))
            first_row += span.num_logit_rows
        return tuple(samples), tuple(prompt_rows)

    def _scores_prompt(self, seq: Sequence) -> bool:
        """Prompt log-probabilities are still owed: every prompt token but the first has one."""
        wanted = seq.request.params.prompt_logprobs is not None and seq.index == 0
        return wanted and seq.num_prompt_logprobs < seq.num_prompt - 1

    def _salt(self, seq: Sequence) -> str:
        """Prompt log-probabilities need every prompt token computed, so nothing cached may be used."""
        salt = seq.request.salt + self._strategy.salt(seq)
        return f"{salt}\0scored {seq.seq_id}" if self._scores_prompt(seq) else salt

    def _insert_running(self, seq: Sequence) -> None:
        self._running.append(seq)
        self._running.sort(key=self._waiting.key)

    # ---- committing

    def _fork_siblings(self, seq: Sequence) -> list[Sequence]:
        """The prompt is computed: the other answers share its blocks, copy-on-write, and run on their own."""
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            self._cache.fork(seq.seq_id, sibling.seq_id)
            sibling.num_computed = seq.num_computed
            sibling.cached = seq.cached
            sibling.scheduled_s = seq.scheduled_s
            self._insert_running(sibling)
        return siblings

    def _advance(self, seq: Sequence, span: Span, sampled: list[SampledToken]) -> Iterator[Event]:
        errors = [token.error for token in sampled if token.error is not None]
        if errors:
            yield self._end(seq, FinishReason.ERROR, error=errors[0])
            return
        request = seq.request
        for token in self._strategy.accept(seq, span, sampled):
            token_id = token.token_id
            seq.token_ids.append(token_id)
            if seq.first_token_s is None:
                seq.first_token_s = self._clock()
            ends = token_id in request.stop_ids and seq.num_output >= request.params.min_tokens
            yield TokenEvent(request, seq.index, token_id, token.logprob, ends)
            if ends:
                yield self._end(seq, FinishReason.STOP, stop_token_id=token_id)
                return
            if seq.num_output >= request.max_tokens or len(seq.token_ids) >= self._max_model_len:
                yield self._end(seq, FinishReason.LENGTH)
                return

    def _end(
        self, seq: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str | None = None
    ) -> FinishEvent:
        """Removes an answer wherever it is: queued, running, or still to be forked."""
        request = seq.request
        self._strategy.forget(seq)
        members = self._sequences[request.request_id]
        members.remove(seq)
        if not members:
            del self._sequences[request.request_id]
        carrier = next((other for other in members if seq in other.siblings), None)
        if carrier is not None:
            carrier.siblings.remove(seq)
        elif seq in self._running:
            self._running.remove(seq)
            self._cache.release(seq.seq_id)
            self._hand_over(seq)
        else:
            self._waiting.remove(seq)
            self._hand_over(seq)
        return FinishEvent(
            request, seq.index, reason, self._timings(seq), seq.cached, stop_token_id=stop_token_id, error=error
        )

    def _hand_over(self, seq: Sequence) -> None:
        """The answer that carried the prompt for its siblings is gone: the next one takes over from the start."""
        if seq.siblings:
            heir, *rest = seq.siblings
            heir.siblings, seq.siblings = rest, []
            self._waiting.push(heir)

    def _timings(self, seq: Sequence) -> Timings:
        now, arrival = self._clock(), seq.request.arrival_s
        first = seq.first_token_s
        tpot_s = (now - first) / (seq.num_output - 1) if first is not None and seq.num_output > 1 else None
        return Timings(
            queue_s=(now if seq.scheduled_s is None else seq.scheduled_s) - arrival,
            ttft_s=None if first is None else first - arrival,
            tpot_s=tpot_s,
            latency_s=now - arrival,
            num_preemptions=seq.num_preemptions,
        )


def _prompt_rows(seq: Sequence, span: Span, first_row: int) -> Iterator[PromptLogprobRow]:
    """The row of position p scores prompt token p + 1, once, also when preemption computes it again."""
    num_top = seq.request.params.prompt_logprobs
    assert num_top is not None
    for offset in range(span.num_tokens):
        target = span.start + offset + 1
        if seq.num_prompt_logprobs < target < seq.num_prompt:
            yield PromptLogprobRow(seq.seq_id, first_row + offset, seq.token_ids[target], num_top)


def _by_sequence(plan: StepPlan, result: StepResult) -> dict[int, tuple[TokenLogprob, ...]]:
    scored: dict[int, tuple[TokenLogprob, ...]] = {}
    for row, logprob in zip(plan.prompt_rows, result.prompt_logprobs, strict=True):
        scored[row.seq_id] = (*scored.get(row.seq_id, ()), logprob)
    return scored
