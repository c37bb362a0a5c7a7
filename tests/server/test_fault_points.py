"""Fault points in the engine's process of a live server: what clients get, what neighbours get, and what is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from live_server import PATIENCE_S, LiveServer, eventually, serving
from test_engine_process import CONFIG, assert_told_to_retry, be_patient, kill, later_stats, ready

from ridgeline.engine.process import client
from ridgeline.engine.process.client import ProcessEngine

POISON, NEIGHBOURS = [7, 7, 7], ([8, 8, 8], [9, 8, 7], [10, 9])
OF_ONE = ("step.raise", "step.memory", "write.raise", "write.memory")
OF_ALL = ("step.kill", "write.kill", "send.cut", "send.garbage", "send.raise", "send.kill")
HARMLESS = ("step.slow", "write.slow", "send.slow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("faults")
        patch.setenv("RIDGELINE_FAULTS", str(path))
        yield path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(ProcessEngine(CONFIG), step_timeout_s=PATIENCE_S) as server:
        yield server


@pytest.fixture
def live(server: LiveServer) -> Iterator[LiveServer]:
    """A server that has forgotten all deaths, and leaks nothing in a test."""
    server.engine._deaths = client.Deaths(time.monotonic)
    server.engine._quarantine._deaths.clear()
    server.complete(prompt=[5], max_tokens=1)
    descriptors = num_descriptors()
    yield server
    eventually(lambda: ready(server))
    assert server.engine.num_unfinished == server.server._service.num_slots == 0
    eventually(lambda: later_stats(server).num_running == 0)
    assert all(group.used == 0 for group in later_stats(server).cache.groups)
    eventually(lambda: num_descriptors() <= descriptors)


def num_descriptors() -> int:
    """But for connections of clients that this process has itself, which come and go."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(not str(link).startswith("socket") for link in links)


@contextmanager
def fault(folder: Path, name: str, only: int | None = None) -> Iterator[None]:
    (folder / name).write_text("" if only is None else str(only))
    try:
        yield
    finally:
        (folder / name).unlink()


def ask(live: LiveServer, prompt: list[int], max_tokens: int = 60) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)


def ids_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def ask_together(live: LiveServer, *prompts: list[int], before: Callable[[], object] = int) -> list[httpx.Response]:
    """Ask while the engine is stopped, so that it computes all of them in the same steps."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        os.kill(live.engine.process_id, signal.SIGSTOP)
        asked = [pool.submit(ask, live, prompt) for prompt in prompts]
        eventually(lambda: live.engine.num_unfinished == len(prompts))
        before()
        os.kill(live.engine.process_id, signal.SIGCONT)
        return [each.result(PATIENCE_S) for each in asked]


@pytest.mark.parametrize("name", OF_ONE)
def test_a_fault_of_one_request_changes_no_token_of_another(
    live: LiveServer, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    poisoned, *expected = (ids_of(ask(live, prompt)) for prompt in (POISON, *NEIGHBOURS))
    own = next(token for token in poisoned if not any(token in ids for ids in expected))
    before = live.engine.process_id
    with fault(folder, name, POISON[0] if name.startswith("step") else own):
        failed, *others = ask_together(live, POISON, *NEIGHBOURS)
    assert (failed.status_code, failed.headers["x-should-retry"]) == (500, "false")
    assert failed.json()["error"]["code"] == "internal_error" and "fault" not in failed.text
    assert [ids_of(other) for other in others] == expected
    assert live.engine.process_id == before
    assert ids_of(ask(live, POISON)) == poisoned


@pytest.mark.parametrize("name", OF_ALL)
def test_a_fault_that_ends_the_process_tells_all_to_retry_and_the_next_gives_the_same(
    live: LiveServer, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    expected = [ids_of(ask(live, prompt)) for prompt in NEIGHBOURS]
    before, restarts = live.engine.process_id, live.engine.stats().num_restarts
    restart, may_restart = ProcessEngine._restart, []
    monkeypatch.setattr(ProcessEngine, "_restart", lambda self: may_restart and restart(self))
    with fault(folder, name):
        for response in ask_together(live, *NEIGHBOURS):
            assert_told_to_retry(response)
        assert not ready(live)
        assert live.client.get("/health").status_code == 200
    may_restart.append(True)
    eventually(lambda: ready(live))
    assert live.engine.process_id != before and live.engine.stats().num_restarts == restarts + 1
    assert [ids_of(ask(live, prompt)) for prompt in NEIGHBOURS] == expected


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_only_slow_changes_nothing(live: LiveServer, folder: Path, name: str) -> None:
    expected = ids_of(ask(live, POISON, 8))
    with fault(folder, name):
        assert ids_of(ask(live, POISON, 8)) == expected


def test_a_step_that_hangs_is_ended(live: LiveServer, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, settings = live.engine.process_id, live.server._service.settings
    live.server._service.settings = replace(settings, step_timeout_s=0.5)
    try:
        with fault(folder, "step.hang", POISON[0]):
            assert_told_to_retry(ask(live, POISON))
        eventually(lambda: ready(live))
    finally:
        live.server._service.settings = settings
    assert live.engine.process_id != before
    assert "a step has not ended within 0.5 s" in caplog.text


def test_an_engine_that_says_nothing_any_more_is_ended(
    live: LiveServer, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "QUIET_S", 0.5)
    monkeypatch.setattr(client, "SILENT_S", 1.5)
    before = live.engine.process_id
    with fault(folder, "send.hang"):
        eventually(lambda: not ready(live))
        eventually(lambda: live.engine.process_id != before)
    monkeypatch.undo()
    assert "it has not reacted for 1.5 s" in caplog.text
    eventually(lambda: ready(live))


@pytest.mark.parametrize("name", ["load.raise", "load.memory", "load.kill"])
def test_a_load_that_fails_is_tried_again(live: LiveServer, folder: Path, name: str) -> None:
    with fault(folder, name):
        kill(live)
        eventually(lambda: len(live.engine._deaths._last_s) >= 2)
        assert_told_to_retry(ask(live, POISON))
        assert live.client.get("/health").status_code == 200
    eventually(lambda: ready(live))
    assert len(ids_of(ask(live, POISON))) == 60


def test_a_load_that_hangs_is_ended(live: LiveServer, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    max_load_s, live.engine._max_load_s = live.engine._max_load_s, 2.0
    with fault(folder, "load.hang"):
        kill(live)
        eventually(lambda: "it has not loaded for 2 s" in caplog.text)
    live.engine._max_load_s = max_load_s
    eventually(lambda: ready(live))


def test_a_disk_that_is_full_ends_the_journal_and_nothing_else(capfd: pytest.CaptureFixture) -> None:
    with serving(ProcessEngine(replace(CONFIG, journal="/dev/full"))) as live:
        before = live.engine.process_id
        for _ in range(3):
            assert len(ids_of(ask(live, POISON))) == 60
        eventually(lambda: later_stats(live).num_running == 0)
        assert live.engine.process_id == before and live.engine.stats().num_restarts == 0
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "the journal /dev/full ends here" in line]) == 1


def test_nothing_asks_where_no_fault_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is not even imported."""
    monkeypatch.delenv("RIDGELINE_FAULTS", raising=False)
    program = """
import socket
import sys
from ridgeline.engine.process import child
class Process:
    def __init__(self, connection, build):
        assert build is child.build_engine and type(connection).__module__ == "socket"
        connection.detach()
    def run(self):
        assert "ridgeline.engine.process.faults" not in sys.modules
        return 0
child.EngineProcess = Process
ours, theirs = socket.socketpair()
sys.argv = ["child", str(theirs.fileno())]
child.main()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
