"""The scheduler: decides every step which tokens of which sequences are computed, and takes in what came of it.

There is no prefill phase and no decode phase: a sequence has known tokens and computed tokens, and every step lets
the second catch up with the first under one token budget (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).
`plan` decides, `commit` is the only writer of sequences. An error while one sequence is planned or committed ends that
sequence and touches no other. No torch, no clock of its own, no I/O.
"""

from ridgeline.cache.manager import CacheManager
from ridgeline.core.clock import Clock
from ridgeline.core.config import SchedulerConfig
from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.core.log import get_logger
from ridgeline.core.step import BlockCopy, BlockTable, Preemption, Span, StepPlan, StepResult, WaitReason
from ridgeline.decoding.request import Request
from ridgeline.decoding.strategy import Room, Strategy
from ridgeline.engine.client import EngineStats
from ridgeline.engine.committing import StepCommit
from ridgeline.engine.decode import DecodeRun, is_decode
from ridgeline.engine.pacing import Pacing
from ridgeline.engine.planning import Flight, StepDraft, goes_on, landed
from ridgeline.engine.queue import WaitingQueue
from ridgeline.engine.request import Event, FinishReason, Sequence
from ridgeline.engine.sharing import SlotCap, making_way
from ridgeline.engine.unfinished import Unfinished, hand_over

log = get_logger("engine")


class Scheduler:
    """Admits, batches, preempts and finishes sequences over one cache.

    `max_model_len` bounds prompt plus output of a sequence, in tokens, `max_num_rows` the rows of logits that a step
    decides tokens from; `clock` gives monotonic seconds; up to `depth` plans may be made before the first is committed,
    of disjoint sequences unless the executor `chains` plans.

    Raises ConfigError for a strategy that rolls back over a cache that cannot.
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
        *,
        chains: bool = False,
    ) -> None:
        if strategy.rolls_back and (kinds := cache.kinds_without_rollback()):
            what = f"rolls back computed tokens, and {' and '.join(kinds)} states of this model cannot be rolled back"
            raise ConfigError(f"{type(strategy).__name__} {what}; use a strategy that accepts all it computes")
        self._config = config
        self.cache = cache  # whose blocks it gives out; nobody else changes it
        self.strategy = strategy
        self._max_model_len = max_model_len
        self._max_num_rows = max_num_rows
        self._clock = clock
        self._depth = depth
        self._chains = chains and cache.plans_ahead  # a checkpoint is made of a state at its commit
        self.waiting = WaitingQueue(use_priority=config.policy == "priority")  # filled by those who give way, too
        self._running: tuple[Sequence, ...] = ()  # sorted by the queue's key; another object where others run
        self._in_flight: dict[int, list[Flight]] = {}  # by sequence, what is not committed, in order; not of `_decode`
        self._decode: DecodeRun | None = None  # of all that run, if the last plan was a decode step of them
        self._crowded = False  # whether clients may have other shares of the slots than when a step was last planned
        self._unfinished = Unfinished()
        self.events: list[Event] = []  # what no caller has heard yet
        self.num_final: dict[int, int] = {}  # by sequence, where the last commit took part of a span back
        self._pacing = Pacing(config)
        self.cap = SlotCap()  # another one where steps are replayed
        self.client_slots: int | None = None  # what it was for the last plan
        self._commit = StepCommit(self, cache, max_model_len, clock)
        self._step = 0
        self._num_preemptions = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Its other outputs (n > 1) are forked from the first one's prompt."""
        self.waiting.push(self._unfinished.add(request))
        self.cap.came(request.client, self._clock())
        self._crowded = True

    def hold(self, request_id: str, held: bool) -> list[Event]:
        """Compute no more of a request than its prompt while it is held; unknown ones are ignored."""
        for seq in self._unfinished.hold(request_id, held):
            self.waiting.push(seq)
        return self.take_events()

    def finish(self, request_id: str, index: int | None, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End one output, or with None all outputs, of a request now; unknown ones are ignored."""
        for seq in self._unfinished.of(request_id):
            if index is None or seq.index == index:
                self.end(seq, reason, error=error)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Take the events that no method has returned yet: of outputs that ended while they were planned."""
        events, self.events = self.events, []
        return events

    def running(self) -> tuple[Sequence, ...]:
        """Return the sequences that hold cache blocks, in the order they are served."""
        return self._running

    def expire(self) -> list[Event]:
        """End every output whose deadline has passed."""
        for seq in self._unfinished.late(self._clock()):
            self.end(seq, FinishReason.DEADLINE)
        return self.take_events()

    # ---- the step

    def plan(self) -> StepPlan | None:
        """Plan what to compute now; None when there is nothing to do. Outputs that ended meanwhile: `take_events`."""
        chain = self._chains and bool(self._in_flight or (self._decode is not None and self._decode.flights))
        if chain and not self._all_go_on():
            return None  # what would be left out would read all weights again for itself
        self.client_slots = self.cap.slots(self._step + 1, self._clock())
        for seq in self._unfinished.leaving(self._running):
            self._leave(seq)
        preempted = self._make_way()
        num_tokens, num_rows = self._config.max_num_batched_tokens, self._max_num_rows
        if self._decode is None or len(self.waiting):
            num_tokens = self._pacing.max_tokens(self._running, num_tokens)
        num_running, num_preemptions = len(self._running), self._num_preemptions
        room = Room(num_tokens - num_running, num_rows - num_running)
        self.strategy.begin(self._running, room)
        copies: list[BlockCopy] = []
        if self._decode is not None:
            if (plan := self._plan_decode(self._decode, copies, chain=chain)) is not None:
                return plan
            self._stop_decoding()
        limits = self._max_model_len, num_tokens, num_rows
        draft = StepDraft(self.cache, self.strategy, *limits, copies=copies, preempted=preempted)
        self._plan_running(draft)
        if self._num_preemptions == num_preemptions:
            draft.head_waits = self._plan_waiting(draft)
        else:  # the next victim would be admitted in the same breath
            draft.head_waits = "just_preempted"
        while not draft.spans and len(self.waiting) and self._running and all(seq.waits for seq in self._running):
            self.preempt(self._running[-1])  # who it waits for needs its blocks
            draft.head_waits = self._plan_waiting(draft)
        if draft.spans and draft.spans[0][1].num_further:
            draft.reserve_further()
        rows = draft.rows(self.fault)
        if not draft.spans:
            return None
        self._step += 1
        tables: list[tuple[BlockTable, ...]] = [self.cache.tables(seq.seq_id) for seq, _ in draft.spans]
        spans, by_group = tuple([span for _, span in draft.spans]), tuple(zip(*tables, strict=True))
        plan = StepPlan(self._step, spans, by_group, tuple(draft.copies), *rows, draft.decisions())
        if all(span.num_further for span in spans):
            plan = plan._replace(rounds=self.strategy.rounds(spans))
        self._take_off(plan)
        if (self._depth == 1 or self._chains) and self.strategy.one_token and is_decode(plan, self._running):
            self._decode = DecodeRun(plan, self._running, self.cache, self._depth, self._max_model_len)
        return plan

    def _all_go_on(self) -> bool:
        """Tell whether every running sequence may be planned on from what of it is in flight."""
        flights, length, run = self._in_flight, self._max_model_len, self._decode
        if not self.strategy.ahead(self._running):
            return False
        if run is not None and run.num_planned:
            return run.goes_on()
        return all(seq.seq_id not in flights or goes_on(seq, flights[seq.seq_id], length) for seq in self._running)

    def _take_off(self, plan: StepPlan) -> None:
        """Note what is in flight with the plan."""
        for span in plan.spans:
            self._in_flight.setdefault(span.seq_id, []).append(Flight(plan.step, span))

    def _stop_decoding(self) -> None:
        """Plan the next step anew. What is in flight of the steps before is taken in sequence by sequence."""
        run, self._decode = self._decode, None
        if run is None or not run.num_planned:
            return
        for plan in run.flights:
            self._take_off(plan)
        for seq in self._running:
            try:
                self.cache.commit(seq.seq_id, seq.token_ids, seq.num_computed)
            except Exception as error:
                self.fault(seq, error)

    def commit(self, plan: StepPlan, result: StepResult, seconds: float) -> list[Event]:
        """Take in a step's result: tokens, cache contents, forks and ends. Returns what callers must hear.

        `seconds` is how long the step was computed. Spans of sequences that ended or were preempted since are ignored.
        """
        self.num_final.clear()
        run = self._decode
        if run is not None and run.flights and run.flights[0] is plan:
            self._commit.decode(run, result)
        else:
            self._commit.spans(landed(plan, self._running, self._in_flight), plan, result)
        self._pacing.observe(plan, seconds / result.num_rounds)
        self.cap.observe(len(self._running), plan.num_tokens, self._clock())
        try:
            self.strategy.observe(plan, result, seconds)
        except Exception:
            log.exception("the strategy could not observe step %d", plan.step)
        return self.take_events()

    def fail(self, plan: StepPlan | None, message: str) -> list[Event]:
        """End, with an error, every request in a step that could not be computed; None: all that are unfinished."""
        if plan is None:
            requests = self._unfinished.request_ids()
        else:
            self._stop_decoding()
            flown = self._in_flight.items()
            planned = {seq_id for seq_id, flights in flown if any(flight.step == plan.step for flight in flights)}
            requests = list(dict.fromkeys(s.request.request_id for s in self._running if s.seq_id in planned))
        for seq in [seq for request_id in requests for seq in self._unfinished.of(request_id)]:
            self.end(seq, FinishReason.ERROR, error=message)
        return self.take_events()

    def preempt(self, seq: Sequence, *, yields: bool = False) -> None:
        """Take a running sequence's blocks away; it waits, and recomputes its tokens when it is admitted again.

        It goes first then, but where it `yields` to another client or request.
        """
        self._leave(seq)
        seq.yields = yields
        seq.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.push(seq)

    def _leave(self, seq: Sequence) -> None:
        """Free a running sequence's blocks. A plan in flight may still write them: before any plan that gets them."""
        self._running = tuple([other for other in self._running if other is not seq])
        self._stop_decoding()
        self._in_flight.pop(seq.seq_id, None)
        seq.num_lost, seq.num_computed = max(seq.num_lost, seq.num_computed), 0
        try:
            self.cache.release(seq.seq_id)
        except Exception:  # it is gone all the same: at worst its blocks are lost
            log.exception("the blocks of output %d of %s were not freed", seq.index, seq.request.request_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self.waiting),
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._commit.num_recomputed,
            num_steps=self._step,
            cache=self.cache.stats(),
            drafts=self.strategy.drafts(),
        )

    # ---- planning

    def _make_way(self) -> list[Preemption]:
        """Preempt for a client or request that has less than its share of the slots, where others have all of them."""
        if not self._crowded or not len(self.waiting):
            self._crowded = False
            return []
        self._crowded = any(len(seq.token_ids) - seq.num_computed > 1 for seq in self._running)  # may leave later
        for seq in self._running:
            self.waiting.charge_output(seq)
        if (head := self._next_waiting()) is None:
            return []
        leaving = making_way(head, self._running, self._config.max_num_seqs, self.waiting.key)
        for seq in leaving:
            self.preempt(seq, yields=True)
        return [Preemption(seq.seq_id, head.seq_id) for seq in leaving]

    def _plan_running(self, draft: StepDraft) -> None:
        """Plan spans for the running sequences, oldest first.

        Each leaves a token and a row for every sequence behind it, so that a long prompt never stalls a decode. Those
        in flight go on from there where they can; else they are passed over, and a plan takes no more than its share:
        the next one has to have some as well.
        """
        share = len(self._running) if self._chains else -(-len(self._running) // self._depth)
        chains = self._chains and self.strategy.one_token
        position = 0
        while position < len(self._running) and len(draft.spans) < share:
            seq = self._running[position]
            flights = self._in_flight.get(seq.seq_id)
            if seq.waits or (flights is not None and not chains):
                position += 1
                continue
            try:
                span = draft.span_after(seq, flights, len(self._running) - position - 1)
            except Exception as error:
                self.fault(seq, error)
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
            if victim.seq_id == seq.seq_id:
                return False
            placed = draft.place(seq, span.required())
        return True

    def _plan_waiting(self, draft: StepDraft) -> WaitReason | None:
        """Admit from the head of the queue while budget, sequence slots and blocks for the whole prompt last.

        Why it stopped; None where nobody waits.
        """
        while (seq := self._next_waiting()) is not None:
            if draft.tokens_left <= 0:
                return "budget"
            slots = sum(running.num_slots for running in self._running)
            if slots and slots + seq.num_slots > self._config.max_num_seqs:
                return "slots"
            try:
                reason = draft.admit(seq)
            except Exception as error:
                self.fault(seq, error)
                continue
            if reason is not None:
                return reason
            if seq.scheduled_s is None:
                seq.scheduled_s = self._clock()
            self.waiting.take(seq)
            self.insert_running(seq)
        return "slots" if len(self.waiting) else None

    def _plan_decode(self, run: DecodeRun, copies: list[BlockCopy], *, chain: bool) -> StepPlan | None:
        """Plan one more token of each sequence of `run`, where nobody waits who could be admitted.

        Otherwise None: `copies` gets what has to be copied for those that did get a block.
        """
        num_running, config = len(self._running), self._config
        waiting = len(self.waiting) > 0
        may_admit = waiting and num_running < config.max_num_seqs and self._next_waiting() is not None
        if may_admit or not self.strategy.one_token:
            return None
        full: WaitReason = "slots" if config.max_num_batched_tokens > num_running else "budget"
        plan = run.plan(self._step + 1, full if waiting else None, copies, chain=chain)
        if plan is not None:
            self._step = plan.step
        return plan

    def _next_waiting(self) -> Sequence | None:
        """Return who is next of those that wait; None: nobody, or their clients have what they may have."""
        return self.waiting.peek(self._running, self.client_slots)

    def insert_running(self, seq: Sequence) -> None:
        """Take in a sequence that the cache holds now."""
        self._stop_decoding()
        self._crowded = True
        self._running = tuple(sorted((*self._running, seq), key=self.waiting.key))

    # ---- ends

    def fault(self, seq: Sequence, error: Exception) -> None:
        """End this sequence, perhaps as it is planned, for an error that concerns it alone; the step goes on."""
        seq = next((member for member in self._running if member.seq_id == seq.seq_id), seq)
        if isinstance(error, RequestError):
            reason, why = FinishReason.REFUSED, str(error)
        else:
            log.error("output %d of %s failed", seq.index, seq.request.request_id, exc_info=error)
            reason, why = FinishReason.ERROR, f"this output could not be computed: {type(error).__name__}"
        self.end(seq, reason, error=why)

    def end(
        self, seq: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str | None = None
    ) -> None:
        """Remove an output wherever it is: queued, running, or still to be forked."""
        if seq not in self._unfinished:
            return  # it was a beam of one that has ended
        self.waiting.charge_output(seq)
        is_carried = self._unfinished.remove(seq)
        self.events.append(seq.finished(reason, self._clock(), stop_token_id, error))
        if not is_carried:
            if seq in self._running:
                self._leave(seq)
            else:
                self.waiting.remove(seq)
            if (heir := hand_over(seq)) is not None:
                self.waiting.push(heir)
        try:
            self.strategy.forget(seq)
        except Exception:
            log.exception("output %d of %s could not be forgotten", seq.index, seq.request.request_id)
        if seq.search is not None and reason not in (FinishReason.STOP, FinishReason.LENGTH):
            for other in self._unfinished.of(seq.request.request_id):
                self.end(other, reason, error=error)
