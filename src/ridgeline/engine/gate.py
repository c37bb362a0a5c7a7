"""The way into the engine's loop: requests wait at it until their grammar is compiled, and nobody waits for them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ridgeline.core.errors import RequestError
from ridgeline.core.log import get_logger
from ridgeline.decoding.request import Request
from ridgeline.engine.engine import Engine
from ridgeline.engine.outputs import Finish, OutputDelta
from ridgeline.engine.request import FinishReason, Timings

log = get_logger("engine")

_NEVER = Timings(queue_s=0.0, ttft_s=None, tpot_s=None, latency_s=0.0, num_preemptions=0)


class Gate:
    """Gives an engine requests, in the order in which they are ready; those without a grammar are at once. Any thread.

    `deliver` gets the ends of those whose grammar cannot be compiled, in a thread of the gate's.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[OutputDelta]], None]) -> None:
        self._engine, self._deliver = engine, deliver
        self._threads = ThreadPoolExecutor(1, "grammar")  # starts with the first request that needs it
        self._lock = threading.Lock()
        self._waiting: set[str] = set()

    def submit(self, request: Request) -> None:
        if request.params.structured_outputs is None or request.grammar is not None:
            self._engine.loop.submit(request)
            return
        with self._lock:
            self._waiting.add(request.request_id)
        self._threads.submit(self._compile, request)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; unknown and finished ones are ignored."""
        with self._lock:
            self._waiting.discard(request_id)
        self._engine.loop.abort(request_id)

    def _compile(self, request: Request) -> None:
        if request.request_id not in self._waiting:
            return
        end: Finish | None = None
        try:
            request = self._engine.intake.with_grammar(request)
        except Exception as error:
            reason = FinishReason.REFUSED if isinstance(error, RequestError) else FinishReason.ERROR
            end = Finish(reason=reason, timings=_NEVER, num_cached_tokens=0, error=str(error))
            log.warning(
                "the grammar of request %s was not compiled", request.request_id, exc_info=reason is FinishReason.ERROR
            )
        with self._lock:  # an abort comes before, and nothing is submitted, or behind it, and reaches the loop
            if request.request_id not in self._waiting:
                return
            self._waiting.discard(request.request_id)
            if end is None:
                self._engine.loop.submit(request)
                return
        self._deliver([OutputDelta(request.request_id, index, finish=end) for index in range(request.params.n)])
