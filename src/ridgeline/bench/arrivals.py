"""Arrivals: requests through an engine in this process, each at its time, or as soon as a user is free.

The loop may be a real one or a simulated one: the clock decides. Times are those of the loop's deltas, so nothing of a
server is in them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.clock import Clock
from ridgeline.core.params import SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import FinishReason


@dataclass(slots=True)
class _Output:
    num_prompt: int
    due_s: float
    sent_s: float
    token_ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    end_s: float = 0.0
    end: Finish | None = None

    def record(self, index: int, start_s: float) -> RequestRecord:
        """Return the finished record; tokens of an output that neither stopped nor reached its length do not count."""
        assert self.end is not None, "the run has ended"
        is_whole = self.end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        return RequestRecord(
            index=index,
            arrival_s=self.due_s - start_s,
            sent_s=self.sent_s - start_s,
            end_s=self.end_s - start_s,
            chunk_times_s=tuple(time_s - start_s for time_s in self.times_s),
            prompt_tokens=self.num_prompt,
            cached_tokens=self.end.num_cached_tokens,
            output_tokens=len(self.token_ids),
            usage_reported=True,
            finish_reason=str(self.end.reason),
            error=None if is_whole else self.end.error or str(self.end.reason),
        )


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


class Arrivals:
    """Sends requests to a loop and keeps when their tokens came; `deliver` is what the loop calls.

    `wait` lets time pass until some moment of `clock`, when there is nothing to compute before it.
    """

    def __init__(self, clock: Clock = time.monotonic, wait: Callable[[float], None] = _sleep_until) -> None:
        self._clock, self._wait = clock, wait
        self._outputs: dict[str, _Output] = {}
        self._num_open = 0
        self._think_s = 0.0
        self._free_s: deque[float] | None = None  # from when on each user that waits for nothing asks; None: any number

    def deliver(self, deltas: list[OutputDelta]) -> None:
        """Take in the deltas of a step."""
        for delta in deltas:
            output = self._outputs[delta.request_id]
            if delta.token_ids:
                output.token_ids.extend(delta.token_ids)
                output.times_s.append(self._clock())
            if delta.finish is not None:
                output.end_s, output.end = self._clock(), delta.finish
                self._num_open -= 1
                if self._free_s is not None:
                    self._free_s.append(output.end_s + self._think_s)

    def run(
        self, loop: EngineLoop, requests: Sequence[Request], max_concurrency: int | None = None, think_s: float = 0.0
    ) -> RunLog:
        """Run requests, whose arrival times are in order and count from now, to their end.

        At most `max_concurrency` are under way; the others are sent `think_s` after one has ended.
        """
        self._outputs, self._think_s, start_s = {}, think_s, self._clock()
        self._free_s = None if max_concurrency is None else deque([start_s] * max_concurrency)
        next_one = 0
        while next_one < len(requests) or self._num_open:
            while (
                next_one < len(requests)
                and self._asked_s(due_s := start_s + requests[next_one].arrival_s) <= self._clock()
            ):
                self._send(loop, requests[next_one], due_s)
                next_one += 1
            if loop.step():
                continue
            if next_one < len(requests):
                self._wait(self._asked_s(start_s + requests[next_one].arrival_s))
            else:
                assert not self._num_open, "requests are unfinished, but the engine has nothing to compute"
        records = [output.record(index, start_s) for index, output in enumerate(self._outputs.values())]
        return RunLog(records=records, duration_s=self._clock() - start_s, unsent=0)

    def token_ids(self) -> list[list[int]]:
        """Return the outputs of the last run, in the order of sending."""
        return [output.token_ids for output in self._outputs.values()]

    def _asked_s(self, due_s: float) -> float:
        """Return when a user asks for what is due: not before one is free."""
        if self._free_s is None:
            return due_s
        return max(due_s, self._free_s[0]) if self._free_s else math.inf

    def _send(self, loop: EngineLoop, request: Request, due_s: float) -> None:
        # One that comes within a step waits for its end, and that is part of its latency.
        sent_s = self._asked_s(due_s)
        if self._free_s is not None:
            self._free_s.popleft()
        self._outputs[request.request_id] = _Output(len(request.prompt_ids), due_s, sent_s)
        self._num_open += 1
        loop.submit(replace(request, arrival_s=sent_s))


def greedy_requests(workload: Sequence[BenchRequest], run: int = 0) -> list[Request]:
    """Make requests of prompts of token ids, which no stop id ends. Those of other runs share no prefix with them."""
    return [_greedy(number, asked, f"run {run}") for number, asked in enumerate(workload)]


def _greedy(number: int, asked: BenchRequest, salt: str) -> Request:
    assert not isinstance(asked.prompt, str), "prompts are token ids"
    return Request(
        request_id=f"request-{number}",
        prompt_ids=asked.prompt,
        params=SamplingParams(temperature=0, max_tokens=asked.max_tokens, ignore_eos=True),
        arrival_s=asked.arrival_s,
        seed=number,
        max_tokens=asked.max_tokens,
        stop_ids=frozenset(),
        salt=salt,
    )
