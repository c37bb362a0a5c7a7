"""OpenStreams: the outputs that callers still read, by request; on one event loop. Every EngineClient has them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from ridgeline.core.errors import OverloadedError
from ridgeline.decoding.request import Request
from ridgeline.engine.outputs import OutputDelta

POLL_S = 0.01  # how often `drain` looks whether the last output has left
DEADLINE_GRACE_S = 0.25  # an engine ends what is late by itself; after this it is taken to be stuck
STOPPED = "the engine stopped before the output was complete; retry"

_Queue = asyncio.Queue[OutputDelta | OverloadedError]  # an error is the last that a reader gets


class OpenStreams:
    """Hands deltas to their readers. `submit` and `abort` reach the engine; `accepting` tells whether it takes more."""

    def __init__(
        self, submit: Callable[[Sequence[Request]], None], abort: Callable[[str], None], accepting: Callable[[], bool]
    ) -> None:
        self._submit, self._abort, self._accepting = submit, abort, accepting
        self._open: dict[str, tuple[Request, _Queue]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def requests(self) -> list[Request]:
        """Return the requests whose outputs are still being read."""
        return [request for request, _ in self._open.values()]

    async def read(self, *requests: Request) -> AsyncGenerator[OutputDelta, None]:
        """Do `EngineClient.stream`. Deadlines end here too, where the engine itself is late."""
        if not self._accepting():
            raise OverloadedError("the engine is starting, shutting down or has stopped; retry")
        queue: _Queue = asyncio.Queue()  # one for all of them
        unfinished = {request.request_id: request.params.n for request in requests}
        timer = _at_deadline(requests, queue)
        self._open.update((request.request_id, (request, queue)) for request in requests)
        try:
            self._submit(requests)
            while unfinished:
                delta = await queue.get()
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
                del self._open[request_id]
                self._abort(request_id)

    def dispatch(self, deltas: Sequence[OutputDelta]) -> None:
        """Hand each delta to its reader. Deltas of aborted requests have no reader any more."""
        for delta in deltas:
            if (found := self._open.get(delta.request_id)) is not None:
                found[1].put_nowait(delta)

    def close(self) -> None:
        """End all outputs: nobody may wait for what cannot come."""
        for queue in {id(queue): queue for _, queue in self._open.values()}.values():
            queue.put_nowait(OverloadedError(STOPPED))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until all outputs have ended; True if they did in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._open


def _at_deadline(requests: Sequence[Request], queue: _Queue) -> asyncio.TimerHandle | None:
    """Tell the reader once the engine should have ended the first of `requests`."""
    deadlines_s = [request.deadline_s for request in requests if request.deadline_s is not None]
    if not deadlines_s:
        return None
    wait_s = min(deadlines_s) - time.monotonic() + DEADLINE_GRACE_S
    late = OverloadedError("the request's deadline passed before the output was complete; retry")
    return asyncio.get_running_loop().call_later(max(0.0, wait_s), queue.put_nowait, late)
