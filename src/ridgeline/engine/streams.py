"""OpenStreams: the outputs that callers still read, by request; on one event loop. Every EngineClient has them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.core.errors import OverloadedError
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineStats, by_adapter
from ridgeline.engine.outputs import OutputDelta

POLL_S = 0.01  # how often `drain` looks whether the last output has left
DEADLINE_GRACE_S = 0.25  # an engine ends what is late by itself; after this it is taken to be stuck
LATE = "the request's deadline passed before the output was complete; retry"
HOLD_BYTES = 64 * 2**10  # about what waits for the reader of one output before the engine computes no more of it
DELTA_BYTES, LOGPROB_BYTES = 256, 128  # of a delta as its reader writes it, and of each log-probability in it
PILE = 8  # deltas that wake a reader of whole outputs: one at a time, it takes thrice the time for them
STOPPED = "the engine stopped before the output was complete; retry"


@dataclass(slots=True)
class _Reader:
    """Reads the outputs of some requests, and may be behind the engine."""

    room_bytes: int
    pile: int  # of deltas that it is woken for; for the end of an output always
    ready: deque[OutputDelta | OverloadedError] = field(default_factory=deque)  # an error is the last that it gets
    waits: asyncio.Future[None] | None = None  # for something to be ready; a queue of asyncio's takes thrice as long
    num_bytes: int = 0  # of what came since nothing was ready
    is_behind: bool = False  # the engine was told

    def put(self, delta: OutputDelta | OverloadedError) -> None:
        self.ready.append(delta)
        waits_on = len(self.ready) < self.pile and self.num_bytes <= self.room_bytes
        if waits_on and isinstance(delta, OutputDelta) and delta.finish is None:
            return
        if self.waits is not None and not self.waits.done():
            self.waits.set_result(None)


@dataclass(slots=True)
class _Open:
    request: Request
    reader: _Reader
    num_computing: int  # outputs that the engine has not ended


class OpenStreams:
    """Hands deltas to their readers. `submit`, `abort` and `hold` (or go on with) a request reach the engine;
    `accepting` tells whether it takes more."""

    def __init__(
        self,
        submit: Callable[[Sequence[Request]], None],
        abort: Callable[[str], None],
        hold: Callable[[str, bool], None],
        accepting: Callable[[], bool],
    ) -> None:
        self._submit, self._abort, self._hold, self._accepting = submit, abort, hold, accepting
        self._open: dict[str, _Open] = {}
        self._num_stalls = 0

    def __len__(self) -> int:
        return len(self._open)

    def requests(self) -> list[Request]:
        """Return the requests that the engine still computes, whatever their readers have left to read."""
        return [each.request for each in self._open.values() if each.num_computing]

    def counted(self, stats: EngineStats) -> EngineStats:
        """Return an engine's counts with those of its streams."""
        return replace(stats, open_adapters=by_adapter(self.requests()), num_stalls=self._num_stalls)

    async def read(self, *requests: Request, whole: bool = False) -> AsyncGenerator[OutputDelta, None]:
        """Do `EngineClient.stream`. Deadlines end here too, where the engine itself is late."""
        if not self._accepting():
            raise OverloadedError("the engine is starting, shutting down or has stopped; retry")
        reader = _Reader(HOLD_BYTES * sum(request.params.n for request in requests), PILE if whole else 1)
        ready, loop = reader.ready, asyncio.get_running_loop()
        unfinished = {request.request_id: request.params.n for request in requests}
        timer = _at_deadline(requests, reader)
        self._open.update((each.request_id, _Open(each, reader, each.params.n)) for each in requests)
        try:
            self._submit(requests)
            while unfinished:
                while not ready:
                    reader.waits = loop.create_future()
                    await reader.waits
                delta = ready.popleft()
                if not ready:
                    reader.num_bytes = 0
                    if reader.is_behind:
                        self._keep_up(reader)
                if isinstance(delta, OverloadedError):
                    raise delta
                if delta.finish is not None:
                    unfinished[delta.request_id] -= 1
                    if not unfinished[delta.request_id]:
                        del unfinished[delta.request_id], self._open[delta.request_id]
                yield delta
        finally:
            if timer is not None:
                timer.cancel()
            for request_id in unfinished:
                if self._open.pop(request_id).num_computing:
                    self._abort(request_id)

    def dispatch(self, deltas: Sequence[OutputDelta]) -> None:
        """Hand each delta to its reader. Deltas of aborted requests have no reader any more."""
        now_s = time.monotonic()
        for delta in deltas:
            if (found := self._open.get(delta.request_id)) is not None:
                found.num_computing -= delta.finish is not None
                reader, delta.came_s = found.reader, now_s
                reader.num_bytes += DELTA_BYTES
                if delta.logprobs:
                    reader.num_bytes += LOGPROB_BYTES * sum(1 + len(each.top) for each in delta.logprobs)
                reader.put(delta)
                if reader.num_bytes > reader.room_bytes and not reader.is_behind:
                    asyncio.get_running_loop().call_soon(self._keep_up, reader)  # it may be about to read all of it

    def _keep_up(self, reader: _Reader) -> None:
        """Tell the engine to hold what its reader cannot keep up with, or to go on once it has read all."""
        is_behind = reader.num_bytes > reader.room_bytes
        if is_behind != reader.is_behind:
            reader.is_behind = is_behind
            self._num_stalls += is_behind
            for request_id, each in self._open.items():
                if each.reader is reader and each.num_computing:
                    self._hold(request_id, is_behind)

    def close(self) -> None:
        """End all outputs: nobody may wait for what cannot come."""
        readers = {id(each.reader): each.reader for each in self._open.values() if each.num_computing}
        for reader in readers.values():
            reader.put(OverloadedError(STOPPED))
        for each in self._open.values():
            each.num_computing = 0

    async def drain(self, timeout_s: float) -> bool:
        """Wait until all outputs have ended; True if they did in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._open


def first_deadline_s(requests: Sequence[Request]) -> float | None:
    """Return when the first of `requests` must have ended, on the engine's clock; None: never."""
    return min((request.deadline_s for request in requests if request.deadline_s is not None), default=None)


def _at_deadline(requests: Sequence[Request], reader: _Reader) -> asyncio.TimerHandle | None:
    """Tell the reader once the engine should have ended the first of `requests`."""
    if (end_s := first_deadline_s(requests)) is None:
        return None
    wait_s = end_s - time.monotonic() + DEADLINE_GRACE_S
    return asyncio.get_running_loop().call_later(max(0.0, wait_s), reader.put, OverloadedError(LATE))
