"""Fault points of the engine's process: a fault strikes while a file of its name is in the folder RIDGELINE_FAULTS.

The name is a place and an action, as `step.raise`. A number in the file is the first token of a prompt, or a token that
is written: it alone is struck. Without the variable nothing imports this module. docs/reliability.md lists the places.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from ridgeline.core.config import EngineConfig
from ridgeline.core.step import StepPlan
from ridgeline.engine.build import build_engine
from ridgeline.engine.engine import Engine
from ridgeline.engine.executor import StepTimes
from ridgeline.engine.loop import Deliver

VARIABLE = "RIDGELINE_FAULTS"


def _fail(kind: type[Exception]) -> NoReturn:
    raise kind("a fault was asked for")


_ACTIONS: dict[str, Callable[[], object]] = {
    "raise": lambda: _fail(RuntimeError),
    "memory": lambda: _fail(MemoryError),
    "slow": lambda: time.sleep(0.05),
    "hang": lambda: time.sleep(1e6),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class FaultySocket(socket.socket):
    """The stream to a server, whose messages may be late, no messages, or cut off."""

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        _strike("send")
        super().sendall(b"\xff" * len(data) if _is_asked("send.garbage") else data, flags)
        if _is_asked("send.cut"):
            super().sendall(data[: len(data) // 2])
            self.shutdown(socket.SHUT_RDWR)


class _Computed:
    """Fails a step that has been computed, before its result is taken in."""

    times_ops = False

    def __init__(self, engine: Engine) -> None:
        self._running = engine.loop.scheduler.running

    def observe(self, plan: StepPlan, times: StepTimes) -> None:
        members = {span.seq_id for span in plan.spans}
        _strike("step", {seq.request.prompt_ids[0] for seq in self._running() if seq.seq_id in members})


def build_faulty(config: EngineConfig, deliver: Deliver) -> Engine:
    """Do as `build_engine`; what is computed and written is struck where that is asked for."""
    _strike("load")
    engine = build_engine(config, deliver)
    engine.executor.observer = _Computed(engine)
    if (tokenizer := engine.tokenizer) is not None:
        plain = tokenizer.piece

        def piece(token_id: int) -> str | bytes:
            _strike("write", (token_id,))
            return plain(token_id)

        tokenizer.piece = piece
    return engine


def _is_asked(name: str, tokens: Collection[int] = ()) -> bool:
    try:
        only = Path(os.environ[VARIABLE], name).read_text().strip()
    except FileNotFoundError:
        return False
    return not only or int(only) in tokens


def _strike(place: str, tokens: Collection[int] = ()) -> None:
    for action, act in _ACTIONS.items():
        if _is_asked(f"{place}.{action}", tokens):
            act()
