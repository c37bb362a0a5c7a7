"""AsyncEngine: the loop in a thread of its own, answers as async iterators. What a server talks to.

The event loop never waits for a step: submitting puts a message in the inbox, and each step's deltas come back in one
call_soon_threadsafe.
"""

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, OverloadedError
from ridgeline.core.log import get_logger
from ridgeline.engine.build import Engine, build_engine
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.request import Request

log = get_logger("engine")

IDLE_WAIT_S = 0.5  # an idle loop looks around this often; a message wakes it at once
POLL_S = 0.01  # how often `drain` looks whether the last answer has left


class AsyncEngine:
    """Owns an Engine and its thread. Build it anywhere, `start` it on the event loop that will read the answers."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_queued = config.scheduler.max_queued_requests
        self.engine: Engine = build_engine(config, self._deliver)
        self._answers: dict[str, asyncio.Queue[OutputDelta | None]] = {}  # None: the engine has stopped
        self._stopping = threading.Event()
        self._draining = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="ridgeline-engine", daemon=True)

    def start(self) -> None:
        """Starts the engine's thread. Call it once, on the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        atexit.register(self.stop)  # a thread that the interpreter's end meets within native code aborts the process
        self._thread.start()

    @property
    def accepting(self) -> bool:
        """False once a shutdown has begun, or if the thread has died."""
        return self._thread.is_alive() and not self._draining

    @property
    def num_unfinished(self) -> int:
        """Requests whose answers are still being read."""
        return len(self._answers)

    def require_room(self, num_requests: int = 1) -> None:
        """Raises OverloadedError if `num_requests` more would overfill the queue or the engine is shutting down."""
        if not self.accepting:
            raise OverloadedError("the engine is shutting down; retry elsewhere")
        waiting, unfinished = self.engine.loop.scheduler.num_waiting, len(self._answers)
        if waiting + num_requests > self._max_queued or unfinished + num_requests > 2 * self._max_queued:
            raise OverloadedError(f"the queue is full ({self._max_queued} requests); retry later")

    async def stream(self, *requests: Request) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of all answers of all `requests` until each has finished. Closing the generator aborts the others.

        Raises OverloadedError before anything is queued if they do not fit or the engine is shutting down, and
        EngineError if it stops before they have finished.
        """
        self.require_room(len(requests))
        answers: asyncio.Queue[OutputDelta | None] = asyncio.Queue()
        unfinished = {request.request_id: request.params.n for request in requests}
        self._answers.update(dict.fromkeys(unfinished, answers))
        try:
            for request in requests:
                self.engine.loop.submit(request)
            while unfinished:
                delta = await answers.get()
                if delta is None:
                    raise EngineError("the engine stopped before the answer was complete")
                if delta.finish is not None:
                    unfinished[delta.request_id] -= 1
                    if not unfinished[delta.request_id]:
                        del unfinished[delta.request_id], self._answers[delta.request_id]
                yield delta
        finally:
            for request_id in unfinished:
                del self._answers[request_id]
                self.engine.loop.abort(request_id)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits for the open ones; True if all of them finished in time."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._answers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._answers

    def stop(self) -> None:
        """Ends the thread after its current step; open streams raise EngineError. Idempotent, from any thread."""
        atexit.unregister(self.stop)
        self._draining = True
        self._stopping.set()
        self.engine.loop.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self.engine.loop.step():
                    self.engine.loop.wait(IDLE_WAIT_S)
        except Exception:
            log.exception("the engine's thread died")
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._close_answers)

    def _close_answers(self) -> None:
        """On the event loop, when the thread has ended: nobody may wait for a delta that cannot come."""
        self._draining = True
        for answers in set(self._answers.values()):
            answers.put_nowait(None)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """In the engine's thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._dispatch, deltas)

    def _dispatch(self, deltas: list[OutputDelta]) -> None:
        """On the event loop. Deltas of aborted requests have no reader any more."""
        for delta in deltas:
            answers = self._answers.get(delta.request_id)
            if answers is not None:
                answers.put_nowait(delta)
