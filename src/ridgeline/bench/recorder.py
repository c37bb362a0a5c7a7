"""Keep when the tokens of requests came that run in this process, by a clock that is real or simulated.

Called by bench/offline.py, bench/naive.py and bench/arrivals.py. Nothing of a server is in these times.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.core.clock import Clock
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.request import FinishReason, Request


@dataclass(slots=True)
class _Output:
    num_prompt: int
    due_s: float
    sent_s: float
    token_ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    end_s: float = 0.0
    num_cached: int = 0
    reason: FinishReason | None = None
    error: str | None = None


class Recorder:
    """A run that begins now: its requests, and the time of every token."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._outputs: dict[str, _Output] = {}
        self.start_s = clock()
        self.num_open = 0

    def sent(self, request: Request, due_s: float, sent_s: float) -> None:
        """Record that a request was to be sent at one time and was at another."""
        self._outputs[request.request_id] = _Output(len(request.prompt_ids), due_s, sent_s)
        self.num_open += 1

    def deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """Record the deltas of a step; this is what a loop calls."""
        for delta in deltas:
            if delta.token_ids:
                self.tokens(delta.request_id, delta.token_ids)
            if (end := delta.finish) is not None:
                self.finish(delta.request_id, end.reason, num_cached=end.num_cached_tokens, error=end.error)

    def tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Record tokens that came now."""
        output = self._outputs[request_id]
        output.token_ids.extend(token_ids)
        output.times_s.append(self._clock())

    def finish(self, request_id: str, reason: FinishReason, *, num_cached: int = 0, error: str | None = None) -> None:
        """Record that the request has ended; its last tokens are already recorded."""
        output = self._outputs[request_id]
        output.end_s, output.reason, output.num_cached, output.error = self._clock(), reason, num_cached, error
        self.num_open -= 1

    def log(self) -> RunLog:
        """Return the run that ends now, in the order of sending."""
        start_s = self.start_s
        records = [
            RequestRecord(
                index=index,
                arrival_s=output.due_s - start_s,
                sent_s=output.sent_s - start_s,
                end_s=output.end_s - start_s,
                chunk_times_s=tuple(time_s - start_s for time_s in output.times_s),
                prompt_tokens=output.num_prompt,
                cached_tokens=output.num_cached,
                output_tokens=len(output.token_ids),
                usage_reported=True,
                finish_reason=str(output.reason),
                error=_failure(output),
            )
            for index, output in enumerate(self._outputs.values())
        ]
        return RunLog(records=records, duration_s=self._clock() - start_s, unsent=0)

    def token_ids(self) -> list[list[int]]:
        """Return the outputs so far, in the order of sending."""
        return [output.token_ids for output in self._outputs.values()]


def _failure(output: _Output) -> str | None:
    """Return why an output failed: it neither stopped nor reached its length, and its tokens are not counted."""
    is_whole = output.reason in (FinishReason.STOP, FinishReason.LENGTH)
    return None if is_whole else output.error or str(output.reason)
