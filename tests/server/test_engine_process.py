"""The engine in a process of its own: the same outputs, and what its deaths, hangs and culprits do to clients."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from live_server import PATIENCE_S, LiveServer, eventually, serving

from children import Child
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, OverloadedError
from ridgeline.engine.client import EngineStats
from ridgeline.engine.process import child, client, link
from ridgeline.engine.process.client import Deaths, ProcessEngine
from ridgeline.engine.process.quarantine import Quarantine
from ridgeline.engine.recording import read_recording
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server import run

CONFIG = EngineConfig.of("python-1m", num_threads=1, max_model_len=512, deterministic=True)
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
FRONT = """
import sys
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.server import app, run
loaded = [name for name in sys.modules if name.startswith(("torch", "ridgeline.backends", "ridgeline.engine.build"))]
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    """For tests after which the engine still runs."""
    with serving(ProcessEngine(CONFIG)) as server:
        yield server


@pytest.fixture
def live() -> Iterator[LiveServer]:
    with serving(ProcessEngine(CONFIG), shutdown_timeout_s=0.0) as server:
        yield server


def stream_of(live: LiveServer, prompt: list[int]) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/completions", json=LONG | {"prompt": prompt}, timeout=PATIENCE_S)


def assert_told_to_retry(response: httpx.Response) -> None:
    if response.status_code == 200:
        *_, last = response.text.rstrip().split("\n\n")
        assert last.startswith("event: error\n") and "server_is_overloaded" in last, last
    else:
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "x-should-retry" not in response.headers


def kill(live: LiveServer) -> None:
    os.kill(live.engine.process_id, signal.SIGKILL)
    eventually(lambda: live.engine.process_id is None or not live.engine.accepting)


def later_stats(live: LiveServer) -> EngineStats:
    """Counts of now: those that are known may be a beat old, and the next beat may have been counted before."""
    for _ in range(2):
        known = live.engine._stats
        eventually(lambda: live.engine._stats is not known)  # noqa: B023
    return live.engine.stats()


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes an engine that is stopped for one that works: clients take their time on a busy machine."""
    monkeypatch.setattr(client, "QUIET_S", PATIENCE_S)
    monkeypatch.setattr(client, "SILENT_S", PATIENCE_S)


def ready(live: LiveServer) -> bool:
    return live.client.get("/ready").status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such policy")
def test_the_engine_preempts_neither_server_nor_clients(shared: LiveServer) -> None:
    process_id = shared.engine.process_id
    assert process_id is not None
    policies = {os.sched_getscheduler(int(each.name)) for each in Path(f"/proc/{process_id}/task").iterdir()}
    assert os.sched_getscheduler(process_id) == os.SCHED_BATCH  # its main thread, which computes
    assert os.SCHED_OTHER in policies  # the one that listens
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_outputs_are_those_of_a_thread(shared: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    bodies = [
        {"prompt": "def f(", "max_tokens": 40, "temperature": 0},
        {"prompt": ["import ", "class A"], "max_tokens": 20, "n": 2, "seed": 7, "logprobs": 3},
        {
            "prompt": "for ",
            "max_tokens": 30,
            "seed": 3,
            "stop": ["\n"],
            "presence_penalty": 0.5,
            "logit_bias": {"9": 2},
        },
        {"prompt": "x = ", "max_tokens": 30, "seed": 1, "response_format": {"type": "json_object"}},
        {"prompt": "x = ", "max_tokens": 30, "seed": 1, "structured_outputs": {"json": schema}},
        {"prompt": list(range(5, 300)), "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "echo": True},
    ]
    with serving(ThreadEngine(CONFIG)) as thread:
        for body in bodies:
            one, other = shared.complete(**body), thread.complete(**body)
            for found in (one, other):
                del found["id"], found["created"]
                for choice in found["choices"]:
                    del choice["timings"]
            assert one == other
        streamed = [stream_of(server, [5, 6, 7]).text for server in (shared, thread)]
        texts = [
            [json.loads(event[6:])["choices"][0]["text"] for event in text.split("\n\n") if event.startswith("data: {")]
            for text in streamed
        ]
        assert "".join(texts[0]) == "".join(texts[1]) != ""


def test_the_pages_read_the_journal_of_the_process(shared: LiveServer, tmp_path: Path) -> None:
    before = later_stats(shared).num_steps
    shared.complete(prompt=[5, 6], max_tokens=3, temperature=0, ignore_eos=True)
    eventually(lambda: shared.engine.stats().num_steps == before + 3)
    steps = shared.client.get("/explain/steps").json()["steps"]
    assert steps["first"] + len(steps["rows"]) == before + 3 and "plan_s" in steps["fields"]
    shared.engine.write_journal(tmp_path / "recent.journal")
    assert (tmp_path / "recent.journal").stat().st_size > 0
    with pytest.raises(ConfigError, match="cannot be written"):
        shared.engine.write_journal(tmp_path / "missing" / "recent.journal")


def test_a_client_that_leaves_frees_its_blocks(shared: LiveServer) -> None:
    with shared.client.stream("POST", "/v1/completions", json=LONG | {"prompt": [9]}) as response:
        next(response.iter_bytes())
    before = shared.engine._stats  # beats come in the order of tokens: all later ones are of after the first token

    def is_free() -> bool:
        now = shared.engine._stats
        return now is not before and now.num_running == now.cache.groups[0].used == shared.engine.num_unfinished == 0

    eventually(is_free)


def test_a_killed_engine_ends_64_streams_and_serves_again(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    restart, may_restart = ProcessEngine._restart, []
    monkeypatch.setattr(ProcessEngine, "_restart", lambda self: may_restart and restart(self))
    with ThreadPoolExecutor(64) as pool:
        os.kill(live.engine.process_id, signal.SIGSTOP)  # or the first ends before the last is asked
        asked = [pool.submit(stream_of, live, [5, 6, number + 1]) for number in range(64)]
        eventually(lambda: live.engine.num_unfinished == 64)
        os.kill(live.engine.process_id, signal.SIGCONT)
        eventually(lambda: live.engine.stats().num_running > 0)
        kill(live)
        assert not ready(live)
        assert live.client.get("/health").status_code == 200
        for response in asked:
            assert_told_to_retry(response.result(PATIENCE_S))
    assert_told_to_retry(stream_of(live, [1]))  # nothing waits for the restart
    may_restart.append(True)
    eventually(lambda: ready(live))
    assert live.complete(prompt=[5], max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
    assert live.metric("ridgeline_engine_restarts_total") == 1
    assert live.engine.num_unfinished == 0


def test_a_request_at_two_deaths_is_refused_and_others_are_not(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    poison, neighbour = [7, 7, 7], [8, 8, 8]
    with ThreadPoolExecutor(2) as pool:
        for prompts in ([poison, neighbour], [poison]):
            os.kill(live.engine.process_id, signal.SIGSTOP)
            asked = [pool.submit(stream_of, live, prompt) for prompt in prompts]
            eventually(lambda: live.engine.num_unfinished == len(prompts))  # noqa: B023
            kill(live)
            for response in asked:
                assert_told_to_retry(response.result(PATIENCE_S))
            eventually(lambda: ready(live))
    refused = stream_of(live, poison)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (500, "false")
    assert refused.json()["error"]["code"] == "request_quarantined"
    assert "died 2 times" in refused.json()["error"]["message"]
    assert stream_of(live, neighbour).text.endswith("data: [DONE]\n\n")
    assert not live.engine._quarantine.suspects([]) and live.engine.num_unfinished == 0


def test_a_stopped_engine_is_ended_with_its_stacks_and_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(client, "QUIET_S", 0.5)
    monkeypatch.setattr(client, "SILENT_S", 1.5)
    monkeypatch.setattr(link, "LAST_WORDS_S", 3.0)  # a starved machine writes slowly
    with serving(ProcessEngine(CONFIG)) as live, ThreadPoolExecutor() as pool:
        before = live.engine.process_id
        os.kill(before, signal.SIGSTOP)
        asked = pool.submit(stream_of, live, [5, 6])
        eventually(lambda: not ready(live))
        assert live.engine.process_id == before  # not ready is not dead yet
        assert_told_to_retry(asked.result(PATIENCE_S))
        eventually(lambda: ready(live))
        assert live.engine.process_id != before
        assert "in _listen" in capfd.readouterr().err


def test_a_process_that_hangs_while_it_loads_is_ended_and_another_one_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopped: list[int] = []
    start = link.Link.__init__

    def started(self: link.Link, config: EngineConfig) -> None:
        start(self, config)
        if stopped:
            live.engine._max_load_s = PATIENCE_S
        else:
            os.kill(self.process.pid, signal.SIGSTOP)
            stopped.append(self.process.pid)

    with serving(ProcessEngine(CONFIG)) as live:
        live.engine._max_load_s = 3.0
        monkeypatch.setattr(link.Link, "__init__", started)
        kill(live)
        eventually(lambda: bool(stopped))
        eventually(lambda: live.engine.process_id not in (None, *stopped))
        eventually(lambda: ready(live))
        assert "it has not loaded for 3 s" in caplog.text
        assert live.engine.stats().num_restarts == 2


def test_a_step_that_takes_too_long_ends_the_process_alone(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ProcessEngine(CONFIG), step_timeout_s=1e-5) as live, ThreadPoolExecutor(16) as pool:
        before = live.engine.process_id
        asked = [pool.submit(stream_of, live, [number + 1, 6]) for number in range(16)]
        eventually(lambda: live.engine.process_id != before or not live.engine.num_unfinished)
        for response in asked:
            response.result(PATIENCE_S)
        eventually(lambda: live.engine.process_id not in (before, None) and ready(live))
        assert "a step has not ended within 1e-05 s" in caplog.text


def test_an_engine_that_dies_again_and_again_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_DEATHS", 2)
    with serving(ProcessEngine(CONFIG)) as live:
        kill(live)
        eventually(lambda: ready(live))
        kill(live)
        live.client.close()
        live.thread.join(PATIENCE_S)
        assert not live.thread.is_alive() and live.server.exit_code == 5


def test_who_served_starts_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 10 * PATIENCE_S)
    with serving(ProcessEngine(CONFIG)) as live:
        for number in range(1, client.MAX_DEATHS):
            kill(live)
            eventually(lambda: ready(live))
            assert live.engine.stats().num_restarts == number


def test_pauses_grow_while_no_start_gets_ready() -> None:
    now_s = [100.0]
    deaths = Deaths(lambda: now_s[0])

    def pause_s(served: bool) -> float:
        deaths.add(served=served)
        began_s = now_s[0]
        while not deaths.may_start:
            now_s[0] += 0.125
        return now_s[0] - began_s

    assert [pause_s(served) for served in (True, False, False, True)] == [0, 1, 2, 0]
    assert not deaths.too_many
    assert pause_s(served=False) == 1 and deaths.too_many
    now_s[0] = 100.0 + client.DEATHS_WITHIN_S  # the first of five is as long ago
    assert not deaths.too_many
    for _ in range(20):  # as often as one likes, if they are far enough apart
        now_s[0] += client.DEATHS_WITHIN_S / 4
        assert pause_s(served=True) == 0 and not deaths.too_many


def test_a_stopped_engine_is_not_ready_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second: what is lost by then is three beats at least, so that one late beat says nothing."""
    assert 3 * child.BEAT_S < client.QUIET_S <= 1.0 - run.TICK_S
    monkeypatch.setattr(client, "SILENT_S", PATIENCE_S)
    with serving(ProcessEngine(CONFIG)) as live:
        before = live.engine.process_id
        os.kill(before, signal.SIGSTOP)
        eventually(lambda: not ready(live))
        assert_told_to_retry(stream_of(live, [5, 6]))
        os.kill(before, signal.SIGCONT)
        eventually(lambda: ready(live))
        assert live.engine.process_id == before and live.engine.stats().num_restarts == 0


def test_deadlines_hold_while_the_engine_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "QUIET_S", 2 * PATIENCE_S)
    monkeypatch.setattr(client, "SILENT_S", 2 * PATIENCE_S)  # so that nothing else ends the request
    with serving(ProcessEngine(CONFIG), request_timeout_s=0.2, shutdown_timeout_s=0.0) as live:
        before = live.engine.process_id
        os.kill(before, signal.SIGSTOP)
        response = live.post("completions", prompt=[5], max_tokens=400, ignore_eos=True)
        assert_told_to_retry(response)
        assert "deadline" in response.json()["error"]["message"] and live.engine.process_id == before
        os.kill(before, signal.SIGCONT)


def num_outputs(journal: Path) -> int:
    try:
        return len(read_recording(journal).outputs)
    except ConfigError:
        return 0


def test_every_process_has_a_journal_that_outlives_it(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    with serving(ProcessEngine(replace(CONFIG, journal=str(path)))) as live:
        for number, expected in enumerate((path, tmp_path / "run.journal.1", tmp_path / "run.journal.2")):
            for _ in range(number + 1):
                live.complete(prompt=[5], max_tokens=3, ignore_eos=True)
            eventually(lambda: num_outputs(expected) == number + 1)  # noqa: B023
            if number < 2:
                kill(live)
                eventually(lambda: ready(live))
    assert [num_outputs(each) for each in sorted(tmp_path.iterdir())] == [1, 2, 3]


def test_a_machine_without_room_for_a_process_is_asked_again(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = client.Link, []

    def starting(config: EngineConfig) -> link.Link:
        if not refused:
            refused.append(True)
            raise BlockingIOError("Resource temporarily unavailable")
        return start(config)

    monkeypatch.setattr(client, "Link", starting)
    kill(live)
    eventually(lambda: ready(live))
    assert refused and live.complete(prompt=[5], max_tokens=4)["usage"]["completion_tokens"] > 0


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_with_its_server(number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from ridgeline.cli import main; main()", "serve", "python-1m", "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with Child(
        [*command, "--log-level", "error", "--engine-process"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    ) as server:
        assert server.stdout.readline().startswith("Ridgeline serves")
        (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.killpg(server.pid, number)
        assert server.wait(PATIENCE_S) == (-9 if number is signal.SIGKILL else 0)
        eventually(lambda: not is_alive(int(child)))
        assert server.stderr.read() == ""


def test_what_the_model_cannot_do_is_one_error_of_its_kind() -> None:
    config = replace(CONFIG, cache=replace(CONFIG.cache, kv_cache_bytes=1))
    with pytest.raises(ConfigError, match="of KV cache, but the budget is 1 bytes"):
        ProcessEngine(config)


def test_a_server_imports_nothing_that_computes() -> None:
    subprocess.run([sys.executable, "-c", FRONT], check=True)


def test_a_second_suspect_waits_for_the_first_token_of_the_first() -> None:
    order = []

    async def stream(name: str, gate: asyncio.Event):
        order.append(name)
        await gate.wait()
        yield name
        yield name

    async def scenario() -> None:
        quarantine = Quarantine(lambda: 0.0)
        gate = asyncio.Event()

        async def read(name: str) -> list[str]:
            return [delta async for delta in quarantine.tried(frozenset([name.encode()]), stream(name, gate), None)]

        tasks = [asyncio.create_task(read(name)) for name in "ab"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["a"]
        gate.set()
        assert await asyncio.gather(*tasks) == [["a", "a"], ["b", "b"]]

    asyncio.run(scenario())


def test_a_suspect_whose_deadline_passes_before_its_turn_is_told() -> None:
    async def waits():
        await asyncio.Event().wait()
        yield "never"

    async def scenario() -> None:
        quarantine = Quarantine(lambda: 5.0)
        first = asyncio.create_task(anext(quarantine.tried(frozenset([b"a"]), waits(), None)))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="deadline"):
            await anext(quarantine.tried(frozenset([b"b"]), waits(), 5.01))
        first.cancel()
        await asyncio.wait([first])
        assert not quarantine._turn.locked()

    asyncio.run(scenario())
