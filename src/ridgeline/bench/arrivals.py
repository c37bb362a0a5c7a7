"""Arrivals: a workload through an engine in this process, each request at its time, or as soon as a user is free.

The loop may be a real one or a simulated one: the clock decides. Times are those of the loop's deltas, so nothing of a
server is in them.
"""

from collections.abc import Callable, Sequence

from ridgeline.bench.record import RunLog
from ridgeline.bench.recorder import Recorder
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.clock import Clock
from ridgeline.core.params import SamplingParams
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.request import Request


class Arrivals:
    """Sends requests to a loop and keeps when their tokens came; `deliver` is what the loop calls.

    `wait` lets time pass until some moment of `clock`, when there is nothing to compute before it.
    """

    def __init__(self, clock: Clock, wait: Callable[[float], None]) -> None:
        self._clock, self._wait = clock, wait
        self._recorder = Recorder(clock)
        self._max_concurrency: int | None = None
        self._freed_s = 0.0  # when one ended of as many as may be under way

    def deliver(self, deltas: list[OutputDelta]) -> None:
        """Take in the deltas of a step."""
        were_open = self._recorder.num_open
        self._recorder.deliver(deltas)
        if self._recorder.num_open < were_open == self._max_concurrency:
            self._freed_s = self._clock()

    def run(
        self, loop: EngineLoop, requests: Sequence[BenchRequest], max_concurrency: int | None = None, run: int = 0
    ) -> RunLog:
        """Run requests, in order of arrival, to their end; prompts are token ids. Runs of other numbers share nothing.

        At most `max_concurrency` are under way; the others are sent when one has ended.
        """
        self._recorder = recorder = Recorder(self._clock)
        self._max_concurrency = max_concurrency
        self._freed_s = start_s = recorder.start_s
        next_one = 0
        while next_one < len(requests) or recorder.num_open:
            while next_one < len(requests) and (max_concurrency is None or recorder.num_open < max_concurrency):
                due_s = start_s + requests[next_one].arrival_s
                if due_s > self._clock():
                    break
                self._send(loop, requests[next_one], due_s, next_one, run)
                next_one += 1
            if not loop.step() and next_one < len(requests):
                self._wait(start_s + requests[next_one].arrival_s)
        return recorder.log()

    def _send(self, loop: EngineLoop, asked: BenchRequest, due_s: float, number: int, run: int) -> None:
        assert not isinstance(asked.prompt, str), "prompts are token ids"
        # One that comes within a step waits for its end, and that is part of its latency.
        sent_s = max(due_s, self._freed_s)
        request = Request(
            request_id=f"request-{number}",
            prompt_ids=asked.prompt,
            params=SamplingParams(temperature=0, max_tokens=asked.max_tokens, ignore_eos=True),
            arrival_s=sent_s,
            seed=number,
            max_tokens=asked.max_tokens,
            stop_ids=frozenset(),
            salt=f"run {run}",
        )
        self._recorder.sent(request, due_s, sent_s)
        loop.submit(request)
