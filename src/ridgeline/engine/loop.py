"""The engine's loop: inbox -> plan -> run -> commit -> outbox. It names no feature.

One thread owns an EngineLoop; `submit` and `abort` may be called from any thread and take effect before the next step.
"""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.core.log import get_logger
from ridgeline.engine.executor import Executor
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.render import Renderer
from ridgeline.engine.request import Event, FinishReason, Request
from ridgeline.engine.scheduler import Scheduler, SchedulerStats

log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Abort:
    """The caller of a request went away."""

    request_id: str


@dataclass(slots=True)
class LoopTimes:
    """Where the loop's time went since the start, in seconds, and what it did. Written by the loop alone."""

    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0
    render_s: float = 0.0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_requests: int = 0
    last_step_s: float = 0.0

    @property
    def scheduling_s_per_request(self) -> float:
        """Time of `plan` and `commit` per request submitted."""
        return (self.plan_s + self.commit_s) / max(1, self.num_requests)


class EngineLoop:
    """Runs steps until nothing is left to do. `deliver` is called in the loop's thread with each step's deltas."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        renderer: Renderer,
        deliver: Callable[[list[OutputDelta]], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._renderer = renderer
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Request | Abort | None] = queue.SimpleQueue()
        self.times = LoopTimes()

    def submit(self, request: Request) -> None:
        """Any thread: queue a request."""
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """Any thread: end a request; unknown and finished ones are ignored."""
        self._inbox.put(Abort(request_id))

    def wake(self) -> None:
        """Any thread: make a waiting loop look around."""
        self._inbox.put(None)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def step(self) -> bool:
        """Takes in messages and computes one step; False if there was nothing to compute."""
        self.settle()
        started = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        self.times.plan_s += planned - started
        if plan is None:
            return False
        try:
            result = self._executor.run(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._publish(self._scheduler.fail(plan, f"the step failed: {type(error).__name__}"))
            return True
        ran = time.perf_counter()
        events = self._scheduler.commit(plan, result)
        committed = time.perf_counter()
        self._publish(events)
        self._account(started, planned, ran, committed)
        self.times.num_computed_tokens += plan.num_tokens
        self.times.num_sampled_tokens += len(result.samples)
        return True

    def settle(self) -> None:
        """Takes in messages and passed deadlines without computing anything."""
        self._publish(self._drain() + self._scheduler.expire())

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a message arrives or `timeout_s` passes. Call it only when `step` had nothing to do."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        self._publish(self._receive(message))

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        while not self._inbox.empty():
            events.extend(self._receive(self._inbox.get()))
        return events

    def _receive(self, message: Request | Abort | None) -> list[Event]:
        match message:
            case Request():
                self.times.num_requests += 1
                self._scheduler.add(message)
            case Abort():
                return self._scheduler.finish(message.request_id, None, FinishReason.ABORT)
            case None:
                pass
        return []

    def _publish(self, events: list[Event]) -> None:
        if not events:
            return
        deltas, stopped = self._renderer.render(events)
        if stopped:
            ends = [end for key in stopped for end in self._scheduler.finish(*key, FinishReason.STOP)]
            closing = {(delta.request_id, delta.index): delta for delta in self._renderer.render(ends)[0]}
            for delta in deltas:
                if last := closing.get((delta.request_id, delta.index)):
                    delta.finish = last.finish
        self._deliver(deltas)

    def _account(self, started: float, planned: float, ran: float, committed: float) -> None:
        finished = time.perf_counter()
        self.times.run_s += ran - planned
        self.times.commit_s += committed - ran
        self.times.render_s += finished - committed
        self.times.num_steps += 1
        self.times.last_step_s = finished - started
