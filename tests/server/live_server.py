"""A server on a free loopback port, in a thread of the test process, with its engine in reach."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

from ridgeline.core.config import EngineConfig, ModelConfig, SchedulerConfig
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.engine.executor import Executor
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server.app import create_app
from ridgeline.server.listen import bind, url_of
from ridgeline.server.run import DrainingServer
from ridgeline.server.settings import ServerSettings

E = TypeVar("E", bound=Executor)
PATIENCE_S = 60.0  # long enough for a starved machine; nothing measures it


class LiveServer:
    """`url`, `engine` and an httpx client of its own."""

    def __init__(self, engine: ThreadEngine, settings: ServerSettings, listener: socket.socket | None = None) -> None:
        self.engine = engine
        ready = threading.Event()
        self._listener = listener or bind("127.0.0.1", 0)
        self.server = DrainingServer(create_app(engine, engine.tokenizer, settings), ready.set)
        self.url = url_of(self._listener)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self.thread.start()
        assert ready.wait(PATIENCE_S), "the server did not start"

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.client.post(f"/v1/{path}", json=body)

    def complete(self, **body: object) -> dict:
        response = self.post("completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        """Sum of the samples of one metric, e.g. `ridgeline_requests_aborted_total`."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [line.rsplit(" ", 1) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(value) for _, value in values)

    def assert_idle(self) -> None:
        """Nothing runs or waits, and every cache block is free or cached."""
        eventually(lambda: self.engine.num_unfinished == 0)
        eventually(lambda: self.engine.engine.loop.stats().num_running == 0)
        stats = self.engine.engine.loop.stats()
        assert stats.num_waiting == 0
        for group in stats.cache.groups:
            assert group.used == 0
            assert group.free + group.cached == group.total

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self._listener.close()


class GatedExecutor:
    """Runs a step only when the test lets it: `release(n)` allows n more steps, `open` all that follow."""

    observer = None
    depth = 1

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.submit, self.hurry = inner.submit, inner.hurry
        self._permits = threading.Semaphore(0)
        self._open = False
        self.num_started = 0
        self.num_done = 0

    def collect(self) -> StepResult:
        self.num_started += 1
        if not self._open:
            self._permits.acquire()
        result = self._inner.collect()
        self.num_done += 1
        return result

    def compute(self, plan: StepPlan) -> StepResult:
        return self._inner.compute(plan)

    def release(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._open = True
        self._permits.release()


class FailingExecutor:
    """Fails the steps for which `broken` is set."""

    observer = None
    depth = 1

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.submit, self.hurry = inner.submit, inner.hurry
        self.broken = False

    def collect(self) -> StepResult:
        result = self._inner.collect()
        if self.broken:
            raise RuntimeError("secret detail of the machine")
        return result

    def compute(self, plan: StepPlan) -> StepResult:
        if self.broken:
            raise RuntimeError("secret detail of the machine")
        return self._inner.compute(plan)


def with_template(model: Path, folder: Path, template: str) -> Path:
    """Copy a model to `folder`, with another chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def new_engine(model: Path, speculation: SpeculationConfig | None = None, **scheduler: int) -> ThreadEngine:
    return ThreadEngine(
        EngineConfig(
            model=ModelConfig(model=str(model), dtype="float32"),
            scheduler=SchedulerConfig(**scheduler),
            speculation=speculation or SpeculationConfig(),
            num_threads=1,
        )
    )


def put_in_front(engine: ThreadEngine, executor: Callable[[Executor], E]) -> E:
    """Wraps the engine's executor; call it before the engine starts."""
    loop = engine.engine.loop
    loop._executor = executor(loop._executor)
    return loop._executor


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


@contextmanager
def serving(engine: ThreadEngine, listener: socket.socket | None = None, **settings: object) -> Iterator[LiveServer]:
    server = LiveServer(engine, ServerSettings(**settings), listener)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def gated_serving(model: Path, **settings: object) -> Iterator[tuple[LiveServer, GatedExecutor]]:
    """A server whose engine computes a step only when the test says so; the gate opens at the end, come what may."""
    engine = new_engine(model, max_num_seqs=2)
    gate = put_in_front(engine, GatedExecutor)
    with serving(engine, **settings) as server:
        try:
            yield server, gate
        finally:
            gate.open()
