"""ProcessEngine: an EngineClient whose engine runs in a process of its own, and is started again when it dies."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from ridgeline.core import errors
from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, OverloadedError, RidgelineError
from ridgeline.core.log import get_logger
from ridgeline.decoding.request import Request
from ridgeline.engine.adapters import Adapters
from ridgeline.engine.client import EngineInfo, EngineStats
from ridgeline.engine.journal import Journal
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.process import wire
from ridgeline.engine.process.link import Link
from ridgeline.engine.process.quarantine import Quarantine
from ridgeline.engine.recording import FileRecorder
from ridgeline.engine.streams import STOPPED, OpenStreams, first_deadline_s
from ridgeline.weights.folder import ModelFolder

log = get_logger("engine")

QUIET_S = 0.85  # without a beat, a server is not ready: three are lost, and it shows within a second
SILENT_S = 5.0  # without a beat, the process hangs
LOAD_S, LOAD_RATIO = 60.0, 10.0  # what a process gets to load its model again: this, or so many times the first load
TICK_S = 0.5  # at most counted between two looks: a server that was itself stopped blames nobody
MAX_DEATHS, DEATHS_WITHIN_S = 5, 600.0
FIRST_PAUSE_S = 1.0  # after a start that failed, and twice as long after each one more
STOP_S = 10.0  # for the current step to end


class Deaths:
    """Counts deaths of an engine's processes: when the next one may start, and whether there were too many."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s: deque[float] = deque(maxlen=MAX_DEATHS)
        self._num_failed_starts = 0  # in a row
        self._next_start_s = 0.0

    def add(self, *, served: bool) -> None:
        """Count a death. After one that `served` another starts at once; one that never got ready may do so again."""
        self._num_failed_starts = 0 if served else self._num_failed_starts + 1
        pause_s = FIRST_PAUSE_S * 2.0 ** (self._num_failed_starts - 1) if self._num_failed_starts else 0.0
        self._last_s.append(self._clock())
        self._next_start_s = self._last_s[-1] + pause_s

    @property
    def may_start(self) -> bool:
        return self._clock() >= self._next_start_s

    @property
    def too_many(self) -> bool:
        return len(self._last_s) == MAX_DEATHS and self._clock() - self._last_s[0] < DEATHS_WITHIN_S


class ProcessEngine:
    """Owns the engine's process. Build it anywhere, `start` it on the event loop that will read the outputs.

    Its log has the level of this one, on the same stderr. Raises what `build_engine` does.
    """

    def __init__(self, config: EngineConfig) -> None:
        folder = ModelFolder.open(config.model.model, config.model.revision)  # may fetch it, so before the other does
        began_s = time.monotonic()
        self._link: Link | None = Link(config)
        try:
            self.tokenizer = folder.tokenizer()
            if not isinstance(ready := self._link.first(), wire.Ready):
                raise _error_of(ready)
        except BaseException:
            self._link.end(0.0)
            raise
        self._max_load_s = max(LOAD_S, LOAD_RATIO * (time.monotonic() - began_s))
        self._gone: Link | None = None  # the last one that died, which may still be ending
        self._info, self._stats, self._setup = ready.info, ready.stats, ready.setup
        self._journal = _journal(ready)
        limits = replace(config.model, max_model_len=self._info.max_model_len)  # requests are checked against it
        self._config = replace(config, model=limits)
        self._streams = OpenStreams(self._submit, self._abort, self._hold, lambda: self.accepting)
        self.adapters = Adapters(self._info.adapters, config, self._streams.requests, self._load_adapter)
        self._loading: dict[int, asyncio.Future[wire.Failed | None]] = {}  # adapters, by number
        self._quarantine = Quarantine(time.monotonic)
        self._ready = False
        self._draining = False
        self._busy_s = self._silence_s = 0.0
        self._looked_s = time.monotonic()
        self._deaths = Deaths(time.monotonic)

    def start(self) -> None:
        assert self._link is not None
        self._attach(self._link)
        self._ready = True

    def info(self) -> EngineInfo:
        return self._info

    def stats(self) -> EngineStats:
        return replace(self._streams.counted(self._stats), silence_s=self._silence_s)

    @property
    def process_id(self) -> int | None:
        return None if self._link is None else self._link.process.pid

    @property
    def journal(self) -> Journal:
        """Holds what the engine's process did in its last steps, but for the last quarter of a second."""
        return self._journal

    def write_journal(self, path: Path) -> None:
        FileRecorder(path, self._setup).write_recent(self._journal, self.process_id)

    @property
    def accepting(self) -> bool:
        return self._ready and not self._draining and self._silence_s < QUIET_S

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def stream(self, *requests: Request, whole: bool = False) -> AsyncGenerator[OutputDelta, None]:
        suspects = self._quarantine.suspects(requests)
        stream = self._streams.read(*requests, whole=whole)
        return self._quarantine.tried(suspects, stream, first_deadline_s(requests)) if suspects else stream

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        return await self._streams.drain(timeout_s)

    def stop(self) -> None:
        self._draining = True
        (link, gone), self._link, self._gone = (self._link, self._gone), None, None
        if gone is not None:
            gone.end(0.0)
        if link is not None:
            link.end(0.0 if self._streams else STOP_S)
            if link.loop is not None and not link.loop.is_closed():
                link.loop.call_soon_threadsafe(self._streams.close)

    def give_up(self) -> None:
        self._draining = True
        self._streams.close()

    def watch(self, step_timeout_s: float) -> str | None:
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, TICK_S), now_s
        if self._draining and self._link is None:
            return None
        if self._deaths.too_many:
            return f"the engine died {MAX_DEATHS} times within {DEATHS_WITHIN_S / 60:g} minutes"
        if self._link is None:
            self._restart()
        else:
            self._silence_s += passed_s
            max_silence_s = SILENT_S if self._ready else self._max_load_s
            if self._busy_s > step_timeout_s:
                self._hangs(self._link, f"a step has not ended within {step_timeout_s:g} s")
            elif self._silence_s > max_silence_s:
                self._hangs(self._link, f"it has not {'reacted' if self._ready else 'loaded'} for {max_silence_s:g} s")
        return None

    # ---- the process comes and goes

    def _restart(self) -> None:
        """Start another process once the last one is gone: two have no room beside each other."""
        if self._gone is None or (fate := self._gone.fate) is None or not self._deaths.may_start:
            return
        config, restarts = replace(self._config, adapters=self.adapters.again()), dict(self._stats.restarts)
        restarts[self._gone.cause] += 1
        if config.journal is not None:  # what the processes before wrote stays as it is
            config = replace(config, journal=f"{config.journal}.{sum(restarts.values())}")
        try:
            link = Link(config)
        except OSError as error:
            log.error("no engine process can be started: %s", error)
            self._deaths.add(served=False)
            return
        log.warning("engine process %d %s; another one starts", self._gone.process.pid, fate)
        self._gone, self._link = None, link
        self._stats = replace(self._stats, restarts=restarts)
        self._attach(link)

    def _attach(self, link: Link) -> None:
        self._attaching = asyncio.ensure_future(link.attach(self._receive, self._died))

    def _hangs(self, link: Link, why: str) -> None:
        log.critical("engine process %d is ended with its stacks in the log: %s", link.process.pid, why)
        link.kill_with_stacks()
        self._stats = replace(self._stats, num_hangs=self._stats.num_hangs + 1)
        self._died()

    def _died(self) -> None:
        """Take in a death: end what the process had to do."""
        if self._link is None:  # `stop` has ended it
            return
        self._deaths.add(served=self._ready)
        self._gone, self._link, self._ready = self._link, None, False
        self._busy_s = self._silence_s = 0.0
        log.error(
            "engine process %d died: %d open requests are told to retry", self._gone.process.pid, self.num_unfinished
        )
        self._quarantine.died(self._streams.requests())
        self._streams.close()
        for loading in self._loading.values():
            loading.set_result(wire.Failed(OverloadedError.__name__, STOPPED))
        self._loading.clear()
        self._stats = replace(self._stats, num_running=0, num_waiting=0)

    # ---- messages

    def _receive(self, message: wire.FromEngine) -> None:
        self._silence_s = 0.0
        match message:
            case wire.Outputs():
                self._streams.dispatch(message.deltas)
            case wire.Beat():
                self._busy_s, self._stats = message.busy_s, self._counted(message.stats)
                for name, (first, data) in message.records.items():
                    self._journal.rings[name].take(first, data)
                self._journal.cache_reasons = message.cache_reasons
            case wire.Ready():
                log.warning("the engine serves again, as process %s", self.process_id)
                self._ready, self._stats, self._journal = True, self._counted(message.stats), _journal(message)
            case wire.AdapterLoaded():
                self._loading.pop(message.number).set_result(message.failed)
            case wire.Failed():
                log.error("the engine cannot load its model again: %s", message.message)

    def _counted(self, stats: EngineStats) -> EngineStats:
        return replace(stats, restarts=self._stats.restarts, num_hangs=self._stats.num_hangs)

    async def _load_adapter(self, number: int, name: str, folder: str) -> None:
        if self._link is None or not self.accepting:
            raise OverloadedError(STOPPED)
        loading = self._loading[number] = asyncio.get_running_loop().create_future()
        self._link.send(wire.LoadAdapter(number, name, folder))
        if (failed := await asyncio.shield(loading)) is not None:
            raise _error_of(failed)

    def _submit(self, requests: Sequence[Request]) -> None:
        self.adapters.require(requests)
        if self._link is not None:
            self._link.send(wire.Submit(list(requests)))

    def _abort(self, request_id: str) -> None:
        if self._link is not None and self._ready:  # else it never had the request
            self._link.send(wire.Abort(request_id))

    def _hold(self, request_id: str, held: bool) -> None:
        if self._link is not None and self._ready:
            self._link.send(wire.Hold(request_id, held))


def _journal(ready: wire.Ready) -> Journal:
    return Journal(len(ready.stats.cache.groups), ready.setup.layout.block_size)


def _error_of(message: wire.FromEngine | None) -> RidgelineError:
    """Return the error that a process reported instead of getting ready."""
    if not isinstance(message, wire.Failed):
        return EngineError("the engine's process died while it loaded the model; its log says why")
    return getattr(errors, message.kind, EngineError)(message.message)
