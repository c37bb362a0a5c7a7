"""The engine's loop: inbox -> plan -> submit, collect -> commit -> outbox. It names no feature.

One thread owns an EngineLoop; `submit` and `abort` may be called from any thread and take effect before the next step.
"""

import math
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ridgeline.core.clock import Clock
from ridgeline.core.errors import WeightsLostError
from ridgeline.core.host import HostSample
from ridgeline.core.log import get_logger
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineStats
from ridgeline.engine.committing import compute_masks
from ridgeline.engine.executor import Executor
from ridgeline.engine.journal import Journal, Recorder
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.render import Renderer
from ridgeline.engine.request import Event, FinishReason, Sequence
from ridgeline.engine.rerun import rerun
from ridgeline.engine.scheduler import Scheduler

log = get_logger("engine")


Message = Callable[[], list[Event]]  # what it does returns the events that it makes
Deliver = Callable[[list[OutputDelta]], None]  # receives a step's deltas


class _Planned(NamedTuple):
    """A plan in flight: when planning began and ended, and how many slots a client might have (None: all)."""

    plan: StepPlan
    start_s: float
    planned_s: float
    client_slots: int | None


class EngineLoop:
    """Runs steps until nothing is left to do. `deliver` is called in the loop's thread with each step's deltas.

    `clock` gives monotonic seconds; `journal` is what happened, beside what `read_host` says of the machine. `record`
    is called with it after every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        renderer: Renderer,
        deliver: Deliver,
        clock: Clock,
        read_host: Callable[[], HostSample] | None = None,
        record: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._renderer = renderer
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._in_flight: deque[_Planned] = deque()
        self._collected_s = -math.inf
        self._unheard: list[Event] = []  # what callers are to be told
        self._num_of_step = 0  # of these, the first ones, which the last step's record came before
        self._is_heard = True  # the last step
        self._running: tuple[Sequence, ...] = ()  # behind the last step
        self._may_stop = False  # whether a stop string may end one of these
        self.clock = clock
        self.journal = Journal(len(scheduler.stats().cache.groups), scheduler.cache.layout.block_size)
        self._read_host, self._record = read_host, record
        self._idle_s = 0.0

    def submit(self, request: Request) -> None:
        """Queue a request, from any thread."""
        self._tell(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """End a request, from any thread; unknown and finished ones are ignored."""
        self._tell(partial(self.scheduler.finish, request_id, None, FinishReason.ABORT))

    def hold(self, request_id: str, held: bool) -> None:
        """Compute no more of a request until it is not `held`, from any thread; it stays open."""
        self._tell(partial(self.scheduler.hold, request_id, held))

    def wake(self) -> None:
        """Wake a waiting loop to look around, from any thread."""
        self._tell(list)

    def close(self) -> None:
        """Finish the recording of the journal. Call it where no step comes any more."""
        if self._record is not None:
            self._record.close()

    def stats(self) -> EngineStats:
        """Return the counts of now, from any thread: single fields are read, so no lock is needed."""
        return replace(self.scheduler.stats(), idle_s=self._idle_s)

    def step(self) -> bool:
        """Take in messages, plan as far ahead as the executor allows, and take in the oldest step's result.

        What callers hear of a step is rendered while the next one is computed, unless a stop string may be among it or
        the executor computes nothing meanwhile. False if there was nothing to compute and nothing to tell.
        """
        heard = len(self._in_flight) > 0 and self._publish()  # what comes while that is computed is in the next plan
        self._take_in()
        while len(self._in_flight) < self._executor.depth:
            start_s = self.clock()
            try:
                plan = self.scheduler.plan()
            except Exception as error:
                return self._fail(None, error, "no step could be planned")
            self._unheard += self.scheduler.take_events()
            if plan is None:
                break
            planned_s = self.clock()
            try:
                self._executor.submit(plan)
            except Exception as error:
                return self._fail(plan, error, "the step failed")
            self._in_flight.append(_Planned(plan, start_s, planned_s, self.scheduler.client_slots))
        heard = self._publish() or heard
        return self._collect() if self._in_flight else heard

    def _collect(self) -> bool:
        """Take in the result of the oldest plan in flight; return True."""
        plan, start_s, planned_s, client_slots = self._in_flight.popleft()
        # With others in flight, it is computed since then, or since the one before it was.
        begun_s = max(planned_s, self._collected_s) if self._executor.depth > 1 else self.clock()
        compute_masks(self.scheduler)
        try:
            result = self._executor.collect()
        except Exception as error:
            if (result := self._rerun(plan, error)) is None:
                return self._fail(plan, error, "the step failed")
        self._collected_s = ran_s = self.clock() - result.next_s
        try:
            self._unheard += self.scheduler.commit(plan, result, ran_s - begun_s)
        except Exception as error:
            return self._fail(plan, error, "the step could not be taken in")
        committed_s = end_s = self.clock() - result.next_s
        if (running := self.scheduler.running()) is not self._running:
            self._running, self._may_stop = running, any(seq.request.params.stop_strings for seq in running)
        if self._may_stop or self._executor.depth == 1:  # nothing is computed meanwhile: the next plan may take in more
            self._publish()
            end_s = self.clock() - result.next_s
        times_s = begun_s - (planned_s - start_s), begun_s, ran_s, committed_s, end_s
        blocks, num_final = self.scheduler.cache.block_counts(), self.scheduler.num_final
        self.journal.step(plan, result, times_s, blocks, num_final, client_slots)
        self._is_heard, self._num_of_step = False, len(self._unheard)
        return True

    def process_input_queue(self) -> None:
        """Take in messages and passed deadlines without computing anything."""
        self._take_in()
        self._publish()

    def wait(self, timeout_s: float) -> None:
        """Finish what is recorded, then sleep until a message arrives or `timeout_s` passes.

        Call it only when `step` had nothing to do.
        """
        if self._record is not None:
            self._record.flush(self.journal)
        began_s = self.clock()
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        finally:
            self._idle_s += self.clock() - began_s
        self._unheard += message()
        self._publish()

    def _tell(self, message: Message) -> None:
        """Put a message in the inbox, from any thread; no step goes on for long before it is read."""
        self._inbox.put(message)
        self._executor.hurry(True)

    def _take_in(self) -> None:
        """Take in messages and passed deadlines."""
        self._executor.hurry(False)  # first: what comes from here on is waited for
        while not self._inbox.empty():
            self._unheard += self._inbox.get()()
        self._unheard += self.scheduler.expire()

    def _add(self, request: Request) -> list[Event]:
        self.journal.request(request)
        self.scheduler.add(request)
        return []

    def _rerun(self, plan: StepPlan, error: Exception) -> StepResult | None:
        """Compute a failed step by halves, and end the requests that make it fail; None where that is all of them."""
        if isinstance(error, WeightsLostError):
            raise error
        if len(plan.spans) == 1 or not self.scheduler.cache.plans_ahead:  # states change in place
            return None
        result, culprits = rerun(plan, self._executor.compute, error)
        if len(culprits) == len(plan.spans):
            return None
        for seq in self.scheduler.running():
            if (raised := culprits.get(seq.seq_id)) is not None:
                log.error("the step failed because of %s", seq.request.request_id, exc_info=raised)
                why = f"the step failed: {type(raised).__name__}"
                self._unheard += self.scheduler.finish(seq.request.request_id, None, FinishReason.ERROR, why)
        return result

    def _fail(self, plan: StepPlan | None, error: Exception, what: str) -> bool:
        """End what the step was for, where no single output is to blame; the loop goes on if it can."""
        if isinstance(error, WeightsLostError):
            raise error
        log.error(what, exc_info=error)
        self._unheard += self.scheduler.fail(plan, f"{what}: {type(error).__name__}")
        return self._publish()

    def _publish(self) -> bool:
        """Tell callers what they have not heard yet; return whether there was something."""
        events, self._unheard = self._unheard, []
        num, self._num_of_step = self._num_of_step, 0
        start_s, num_steps = self.clock(), self.journal.steps.num_written
        if num:
            self._render(events[:num], num_steps - 1)
        if len(events) > num:
            self._render(events[num:], num_steps)
        if not self._is_heard:
            self._is_heard = True
            self.journal.rendered(self.clock() - start_s)
            if self._read_host is not None:
                self.journal.sample_host(start_s, self._read_host)
            if self._record is not None:
                self._record(self.journal)
        return len(events) > 0

    def _render(self, events: list[Event], num_steps: int) -> None:
        """Tell what the events say; outputs among them ended when there had been so many steps."""
        rendered = self._renderer.render(events)
        if rendered.stopped or rendered.failed:
            ends = [end for key in rendered.stopped for end in self.scheduler.finish(*key, FinishReason.STOP)]
            for key, why in rendered.failed.items():
                ends += self.scheduler.finish(*key, FinishReason.ERROR, why)
            closed = self._renderer.render(ends)
            for key, last in closed.deltas.items():
                rendered.deltas.setdefault(key, last).finish = last.finish
            rendered.finished += closed.finished
        # Callers take turns in this order: those who wait for a whole output go before those who read on.
        self._deliver(sorted(rendered.deltas.values(), key=lambda delta: delta.finish is None))
        for event in rendered.finished:
            self.journal.finish(event, num_steps)
