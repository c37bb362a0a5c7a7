"""Arrivals: a workload through an engine in this process, each request at its time, or as soon as a user is free.

The loop may be a real one or a simulated one: the clock decides. Times are those of the loop's deltas, so nothing of a
server is in them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.clock import Clock
from ridgeline.core.params import SamplingParams
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.request import FinishReason, Request


@dataclass(slots=True)
class _Sent:
    arrival_s: float
    sent_s: float
    num_prompt: int
    times_s: list[float] = field(default_factory=list[float])
    num_output: int = 0
    end_s: float = 0.0
    num_cached: int = 0
    reason: FinishReason | None = None
    error: str | None = None


class Arrivals:
    """Sends requests to a loop and keeps when their tokens came; `deliver` is what the loop calls.

    `wait` lets time pass until some moment of `clock`, when there is nothing to compute before it.
    """

    def __init__(self, clock: Clock, wait: Callable[[float], None]) -> None:
        self._clock, self._wait = clock, wait
        self._sent: dict[str, _Sent] = {}
        self._max_concurrency: int | None = None
        self._num_open = 0
        self._freed_s = 0.0  # when one ended of as many as may be under way

    def deliver(self, deltas: list[OutputDelta]) -> None:
        """Take in the deltas of a step."""
        now = self._clock()
        for delta in deltas:
            sent = self._sent[delta.request_id]
            if delta.token_ids:
                sent.times_s.append(now)
                sent.num_output += len(delta.token_ids)
            if (end := delta.finish) is not None:
                sent.end_s, sent.reason, sent.error = now, end.reason, end.error
                sent.num_cached = end.num_cached_tokens
                if self._num_open == self._max_concurrency:
                    self._freed_s = now
                self._num_open -= 1

    def run(
        self, loop: EngineLoop, requests: Sequence[BenchRequest], max_concurrency: int | None = None, run: int = 0
    ) -> RunLog:
        """Run requests, in order of arrival, to their end; prompts are token ids. Runs of other numbers share nothing.

        At most `max_concurrency` are under way; the others are sent when one has ended.
        """
        self._sent, self._num_open, self._max_concurrency = {}, 0, max_concurrency
        start_s, next_one = self._clock(), 0
        self._freed_s = start_s
        while next_one < len(requests) or self._num_open:
            while next_one < len(requests) and (max_concurrency is None or self._num_open < max_concurrency):
                due_s = start_s + requests[next_one].arrival_s
                if due_s > self._clock():
                    break
                self._send(loop, requests[next_one], due_s, next_one, run)
                next_one += 1
            if not loop.step() and next_one < len(requests):
                self._wait(start_s + requests[next_one].arrival_s)
        return self._log(start_s)

    def _send(self, loop: EngineLoop, request: BenchRequest, due_s: float, number: int, run: int) -> None:
        assert not isinstance(request.prompt, str), "prompts are token ids"
        # One that comes within a step waits for its end, and that is part of its latency.
        name, sent_s = f"request-{number}", max(due_s, self._freed_s)
        self._sent[name] = _Sent(due_s, sent_s, len(request.prompt))
        self._num_open += 1
        loop.submit(
            Request(
                request_id=name,
                prompt_ids=request.prompt,
                params=SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True),
                arrival_s=sent_s,
                seed=number,
                max_tokens=request.max_tokens,
                stop_ids=frozenset(),
                salt=f"run {run}",
            )
        )

    def _log(self, start_s: float) -> RunLog:
        records = [
            RequestRecord(
                index=index,
                arrival_s=sent.arrival_s - start_s,
                sent_s=sent.sent_s - start_s,
                end_s=sent.end_s - start_s,
                chunk_times_s=tuple(time_s - start_s for time_s in sent.times_s),
                prompt_tokens=sent.num_prompt,
                cached_tokens=sent.num_cached,
                output_tokens=sent.num_output,
                usage_reported=True,
                finish_reason=str(sent.reason),
                error=None
                if sent.reason in (FinishReason.STOP, FinishReason.LENGTH)
                else sent.error or str(sent.reason),
            )
            for index, sent in enumerate(self._sent.values())
        ]
        return RunLog(records=records, duration_s=self._clock() - start_s, unsent=0)
