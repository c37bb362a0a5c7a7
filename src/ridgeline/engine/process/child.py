"""Run an engine in this process: `python -m ridgeline.engine.process.child FD`, which `process/link.py` starts.

The main thread loads the model and computes, one thread listens, one tells every quarter of a second that all is well.
It ends with its stream, whoever closed it; signals are for the server, which says what they mean.
"""

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ridgeline.core.collector import collect_rarely, long_lived_imports
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import NO_MEMORY, EngineError, RidgelineError, WeightsLostError
from ridgeline.core.log import get_logger, set_up

with long_lived_imports():
    from ridgeline.engine.build import build_engine
    from ridgeline.engine.engine import Engine
    from ridgeline.engine.gate import Gate
    from ridgeline.engine.loop import Deliver
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.process import wire

log = get_logger("engine.process")

BEAT_S = 0.25
IDLE_WAIT_S = 0.5
LAST_STEP_S = 4.0  # what a step under way gets when the stream has ended
RECEIVE_BYTES = 2**18
PR_SET_PDEATHSIG = 1


class EngineProcess:
    """Runs one engine, made by `build`, for the server at the other end of `connection`."""

    def __init__(self, connection: socket.socket, build: Callable[[EngineConfig, Deliver], Engine]) -> None:
        self._connection, self._build = connection, build
        self._engine: Engine | None = None
        self._gate: Gate | None = None
        self._begun = threading.Event()
        self._begin: wire.Begin | None = None
        self._ended = False
        self._sending = threading.Lock()
        self._step_began_s: float | None = None

    def run(self) -> int:
        """Compute until the stream ends; return the exit code."""
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        self._begun.wait()
        assert self._begin is not None
        set_up(self._begin.log_format, self._begin.log_level)
        give_way()
        try:
            engine = self._build(self._begin.config, self._deliver)
        except RidgelineError as error:
            self._send(wire.Failed(type(error).__name__, str(error)))
            return 1
        except MemoryError:
            self._send(wire.Failed(EngineError.__name__, NO_MEMORY))
            return 1
        self._engine, self._gate = engine, Gate(engine, self._deliver)
        collect_rarely()
        self._send(wire.Ready(engine.info, engine.loop.stats(), engine.setup))
        threading.Thread(target=self._beat, args=(engine,), name="beat", daemon=True).start()
        try:
            while not self._ended:
                self._step_began_s = time.monotonic()
                worked = engine.loop.step()
                self._step_began_s = None
                if not worked:
                    engine.loop.wait(IDLE_WAIT_S)
        finally:
            engine.loop.close()
        return 0

    def _listen(self) -> None:
        frames = wire.Frames()
        try:
            while data := self._connection.recv(RECEIVE_BYTES):
                for frame in frames.feed(data):
                    self._take(wire.decode_to_engine(frame))
        except OSError as error:
            log.warning("the stream to the server broke: %s", error)
        except Exception:
            log.exception("the engine's process cannot go on listening")
        self._ended = True
        if self._engine is not None:
            self._engine.loop.wake()
            time.sleep(LAST_STEP_S)
        os._exit(0)  # a step hangs, or the model is still being loaded

    def _take(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Begin):
            self._begin = message
            self._begun.set()
            return
        engine, gate = self._engine, self._gate
        assert engine is not None and gate is not None, "nothing is asked for before the model is loaded"
        match message:
            case wire.Submit():
                for request in message.requests:
                    gate.submit(request)
            case wire.Abort():
                gate.abort(message.request_id)
            case wire.Hold():
                engine.loop.hold(message.request_id, message.held)
            case wire.LoadAdapter():
                threading.Thread(target=self._load_adapter, args=(engine, message), name="adapter", daemon=True).start()

    def _load_adapter(self, engine: Engine, message: wire.LoadAdapter) -> None:
        failed = None
        try:
            engine.load_adapter(message.number, message.name, message.folder)
        except Exception as error:
            log.warning("adapter %r was not loaded", message.name, exc_info=not isinstance(error, RidgelineError))
            failed = wire.Failed(type(error).__name__, str(error))
        self._send(wire.AdapterLoaded(message.number, failed))

    def _beat(self, engine: Engine) -> None:
        journal = engine.loop.journal
        told = dict.fromkeys(journal.rings, 0)
        while not self._ended:
            time.sleep(BEAT_S)
            began_s = self._step_began_s
            busy_s = 0.0 if began_s is None else time.monotonic() - began_s
            records: dict[str, tuple[int, bytes]] = {}
            for name, ring in journal.rings.items():  # what others point into is read later
                first, found = ring.read(told[name])
                if len(found):
                    told[name], records[name] = first + len(found), (first, found.tobytes())
            self._send(wire.Beat(engine.stats(), busy_s, records, list(journal.cache_reasons)))

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        if deltas:
            self._send(wire.Outputs(deltas))
            os.sched_yield()  # the server's turn now: taken amid the next step, all workers would wait for this core

    def _send(self, message: wire.FromEngine) -> None:
        frame = wire.encode(message)
        with self._sending:
            try:
                self._connection.sendall(frame)
            except OSError:  # nobody reads any more: the listening thread ends this process
                self._ended = True


def give_way() -> None:
    """Let this thread, and those that it starts, preempt nobody when they wake: neither the server nor its clients,
    which have little to do and are waited for. Their share of the time stays as it is."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prepare() -> None:
    """Prepare to live below a server, which gets the signals: a crash shows stacks, and dumps no prompts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux":  # beside the end of the stream, which a process in native code notices late
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run the process that inherited the descriptor of its first argument."""
    kind, build = socket.socket, build_engine
    if "RIDGELINE_FAULTS" in os.environ:
        from ridgeline.engine.process.faults import FaultySocket as kind
        from ridgeline.engine.process.faults import build_faulty as build
    try:
        code = EngineProcess(kind(fileno=int(sys.argv[1])), build).run()
    except Exception as error:
        log.error("the engine died: %s", error, exc_info=not isinstance(error, WeightsLostError))
        code = 1
    logging.shutdown()
    os._exit(code)  # the interpreter's end would meet the other threads, and take the model apart piece by piece


if __name__ == "__main__":
    prepare()
    main()
