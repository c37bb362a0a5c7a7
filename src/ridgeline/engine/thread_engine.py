"""ThreadEngine: an EngineClient whose engine runs in a thread of this process.

The event loop never waits for a step: submitting puts a message in the inbox, and each step's deltas come back in one
call_soon_threadsafe.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import OverloadedError
from ridgeline.core.log import get_logger
from ridgeline.decoding.request import Request
from ridgeline.engine.build import build_engine
from ridgeline.engine.client import EngineInfo, EngineStats
from ridgeline.engine.journal import Journal
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.recording import FileRecorder

log = get_logger("engine")

IDLE_WAIT_S = 0.5  # an idle loop looks around this often; a message wakes it at once
POLL_S = 0.01  # how often `drain` looks whether the last output has left


class ThreadEngine:
    """Owns an Engine and its thread. Build it anywhere, `start` it on the event loop that will read the outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, self._deliver)
        self.tokenizer = self.engine.tokenizer  # a server in this process need not load it again
        self._queues: dict[str, asyncio.Queue[OutputDelta | None]] = {}  # None: the engine has stopped
        self._stopping = threading.Event()
        self._draining = False
        self._given_up = False
        self._step_began_s: float | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="ridgeline-engine", daemon=True)

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        atexit.register(self.stop)  # a thread that the interpreter's end meets within native code aborts the process
        self._thread.start()

    def info(self) -> EngineInfo:
        return self.engine.info

    def stats(self) -> EngineStats:
        return self.engine.loop.stats()

    @property
    def journal(self) -> Journal:
        """Holds what the engine did in its last steps."""
        return self.engine.loop.journal

    def write_journal(self, path: Path) -> None:
        FileRecorder(path, self.engine.setup).write_recent(self.journal)

    @property
    def accepting(self) -> bool:
        return self._thread.is_alive() and not self._draining

    @property
    def busy_s(self) -> float:
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def give_up(self) -> None:
        """End all open streams and wait for the thread no more, because it hangs; the process must end."""
        self._given_up = True
        self._close_queues()

    @property
    def num_unfinished(self) -> int:
        return len(self._queues)

    async def stream(self, *requests: Request) -> AsyncGenerator[OutputDelta, None]:
        if not self.accepting:
            raise OverloadedError("the engine is shutting down or has stopped; retry elsewhere")
        queue: asyncio.Queue[OutputDelta | None] = asyncio.Queue()  # one for all of them
        self._queues.update((request.request_id, queue) for request in requests)
        for request in requests:
            self.engine.loop.submit(request)
        unfinished = {request.request_id: request.params.n for request in requests}
        try:
            while unfinished:
                delta = await queue.get()
                if delta is None:
                    raise OverloadedError("the engine stopped before the output was complete; retry")
                if delta.finish is not None:
                    unfinished[delta.request_id] -= 1
                    if not unfinished[delta.request_id]:
                        del unfinished[delta.request_id], self._queues[delta.request_id]
                yield delta
        finally:
            for request_id in unfinished:
                del self._queues[request_id]
                self.engine.loop.abort(request_id)

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._queues and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._queues

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._draining = True
        self._stopping.set()
        self.engine.loop.wake()
        if self._thread.is_alive() and not self._given_up:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step_began_s = time.monotonic()
                worked = self.engine.loop.step()
                self._step_began_s = None
                if not worked:
                    self.engine.loop.wait(IDLE_WAIT_S)
        except Exception:
            log.exception("the engine's thread died")
        self.engine.loop.close()
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._close_queues)

    def _close_queues(self) -> None:
        """Close all outputs, on the event loop: the thread has ended, and nobody may wait for what cannot come."""
        self._draining = True
        for queue in set(self._queues.values()):
            queue.put_nowait(None)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Send deltas to the event loop; runs in the engine's thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._dispatch, deltas)

    def _dispatch(self, deltas: list[OutputDelta]) -> None:
        """Hand each delta to its reader, on the event loop. Deltas of aborted requests have no reader any more."""
        for delta in deltas:
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                queue.put_nowait(delta)
