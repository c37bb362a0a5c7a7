"""ThreadEngine: an EngineClient whose engine runs in a thread of this process.

The event loop never waits for a step: submitting puts a message in the inbox, and each step's deltas come back in one
call_soon_threadsafe.
"""

import asyncio
import atexit
import faulthandler
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import WeightsLostError
from ridgeline.core.log import get_logger
from ridgeline.decoding.request import Request
from ridgeline.engine.adapters import Adapters
from ridgeline.engine.build import build_engine
from ridgeline.engine.client import EngineInfo, EngineStats
from ridgeline.engine.gate import Gate
from ridgeline.engine.journal import Journal
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.recording import FileRecorder
from ridgeline.engine.streams import OpenStreams

log = get_logger("engine")

IDLE_WAIT_S = 0.5  # an idle loop looks around this often; a message wakes it at once


class ThreadEngine:
    """Owns an Engine and its thread. Build it anywhere, `start` it on the event loop that will read the outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, self._deliver)
        self.tokenizer = self.engine.tokenizer  # a server in this process need not load it again
        self._gate = Gate(self.engine, self._deliver)
        self._streams = OpenStreams(self._submit, self._gate.abort, self._hold, lambda: self.accepting)
        load = partial(asyncio.to_thread, self.engine.load_adapter)
        self.adapters = Adapters(self.engine.info.adapters, config, self._streams.requests, load)
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
        return self._streams.counted(self.engine.stats())

    @property
    def process_id(self) -> None:
        return None

    @property
    def journal(self) -> Journal:
        """Holds what the engine did in its last steps."""
        return self.engine.loop.journal

    def write_journal(self, path: Path) -> None:
        FileRecorder(path, self.engine.setup).write_recent(self.journal)

    @property
    def accepting(self) -> bool:
        return self._thread.is_alive() and not self._draining

    def watch(self, step_timeout_s: float) -> str | None:
        began_s = self._step_began_s
        if began_s is not None and time.monotonic() - began_s > step_timeout_s:
            faulthandler.dump_traceback()
            return f"a step has not ended within {step_timeout_s:g} s"
        return None if self._draining or self._thread.is_alive() else "the engine has died"

    def give_up(self) -> None:
        """End all open streams and wait for the thread no more, because it hangs; the process must end."""
        self._given_up = self._draining = True
        self._streams.close()

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def stream(self, *requests: Request, whole: bool = False) -> AsyncGenerator[OutputDelta, None]:
        return self._streams.read(*requests, whole=whole)

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        return await self._streams.drain(timeout_s)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._draining = True
        self._stopping.set()
        self.engine.loop.wake()
        if self._thread.is_alive() and not self._given_up:
            self._thread.join()

    def _submit(self, requests: Sequence[Request]) -> None:
        self.adapters.require(requests)
        for request in requests:
            self._gate.submit(request)

    def _hold(self, request_id: str, held: bool) -> None:
        self.engine.loop.hold(request_id, held)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step_began_s = time.monotonic()
                worked = self.engine.loop.step()
                self._step_began_s = None
                if not worked:
                    self.engine.loop.wait(IDLE_WAIT_S)
        except Exception as error:
            log.error("the engine's thread died: %s", error, exc_info=not isinstance(error, WeightsLostError))
        self.engine.loop.close()
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._streams.close)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Send deltas to the event loop; runs in the engine's thread."""
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._streams.dispatch, deltas)
