"""What operators see of a server under stress: each case drives metrics from nothing to what it must have caused."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from live_server import (
    PATIENCE_S,
    FailingExecutor,
    LiveServer,
    eventually,
    gated_serving,
    new_engine,
    put_in_front,
    serving,
)
from test_lora_updates import write_adapter
from test_metrics_list import EqualCalibration, Scrape, priced_hardware

from ridgeline import SamplingParams
from ridgeline.backends.probe import this_machine
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.host import huge_page_bytes
from ridgeline.core.slo import parse_slos
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.engine import priced
from ridgeline.engine.build import build_engine
from ridgeline.engine.client import CAUSES, PricedSteps
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.engine.process.link import Link
from ridgeline.engine.recording import MemoryRecorder
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.explain import machine
from ridgeline.explain.diagnosis import doctor
from ridgeline.server import explained, metrics
from ridgeline.server.metrics import STAGES
from ridgeline.server.settings import ServerSettings
from ridgeline.server.step_counts import DRIFT_S, Drift

SAME = {"temperature": 0, "ignore_eos": True}


def config_of(**options: object) -> EngineConfig:
    return EngineConfig.of("python-1m", num_threads=1, max_model_len=512, **options)


def open_request(live: LiveServer, body: dict, missing: int = 0) -> socket.socket:
    """A connection that has sent a request, but for the last bytes of its body."""
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE_S)
    client.connect(live._listener.getsockname())
    head = "POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json"
    client.sendall("\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data[: len(data) - missing])
    return client


# ---- the cache and the queue


@pytest.fixture(scope="module")
def tight() -> Iterator[LiveServer]:
    """Two sequences, and a cache with room for little more than one of them."""
    config = config_of(max_num_seqs=2, block_size=16, kv_cache_bytes=400_000)
    began_s = time.monotonic()
    with serving(ThreadEngine(config)) as live:
        live.began_s = began_s
        yield live


def test_what_is_computed_is_what_was_asked_and_what_was_lost(tight: LiveServer) -> None:
    assert tight.metric("ridgeline_prompt_tokens_recomputed_total") == 0
    usage = tight.complete(prompt=[[5 + i] * 40 for i in range(4)], max_tokens=250, **SAME)[
        "usage"
    ]  # at once: of one body
    wanted = usage["total_tokens"] - 4 - usage["prompt_tokens_details"]["cached_tokens"]

    def scrape() -> Scrape:
        return Scrape.of(tight)

    eventually(lambda: scrape()("step_tokens_sum") >= wanted + scrape()("prompt_tokens_recomputed_total"))
    found = scrape()
    assert found("num_preemptions_total") > 0 and found("prompt_tokens_recomputed_total") > 0
    assert found("step_tokens_sum") == wanted + found("prompt_tokens_recomputed_total")


def test_blocks_that_make_room_are_counted(tight: LiveServer) -> None:
    before, group = Scrape.of(tight), tight.engine.engine.loop.stats().cache.groups[0]
    for first in range(100, 100 + 2 * group.total // 3):
        tight.complete(prompt=[first] * 60, max_tokens=1)
    found = Scrape.of(tight)
    blocks = found("kv_blocks", group="0", state="cached")
    published = 3 * (2 * group.total // 3)
    evicted = found("kv_blocks_evicted_total") - before("kv_blocks_evicted_total")
    assert evicted == before("kv_blocks", group="0", state="cached") + published - blocks > 0


def test_the_engine_rests_where_there_is_nothing_to_do(tight: LiveServer) -> None:
    before = Scrape.of(tight)("engine_idle_seconds_total")
    eventually(lambda: Scrape.of(tight)("engine_idle_seconds_total") > before)
    assert Scrape.of(tight)("engine_idle_seconds_total") < time.monotonic() - tight.began_s


def test_the_time_of_a_step_is_no_rest(chat_model: Path) -> None:
    with gated_serving(chat_model) as (live, gate), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.complete, prompt="a", max_tokens=2)
        eventually(lambda: gate.num_started == 1)
        before = Scrape.of(live)("engine_idle_seconds_total")
        time.sleep(1.2)  # more than an idle loop sleeps at once
        assert Scrape.of(live)("engine_idle_seconds_total") == before
        gate.open()
        asked.result(PATIENCE_S)


# ---- clients


def test_who_leaves_is_counted_where_it_was(chat_model: Path) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with gated_serving(chat_model) as (live, gate):

        def left() -> dict[str, float]:
            scrape = Scrape.of(live)
            return {stage: scrape("requests_aborted_total", stage=stage) for stage in STAGES}

        assert left() == dict.fromkeys(STAGES, 0)
        open_request(live, body, missing=3).close()
        eventually(lambda: left() == {"body": 1, "waiting": 0, "output": 0, "unread": 0})
        with open_request(live, body):
            eventually(lambda: live.metric("ridgeline_open_outputs") == 1)
        eventually(lambda: left() == {"body": 1, "waiting": 1, "output": 0, "unread": 0})
        gate.open()
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            next(response.iter_lines())
        eventually(lambda: left() == {"body": 1, "waiting": 1, "output": 1, "unread": 0})


def test_a_stream_that_nobody_reads_is_held_and_then_given_up(chat_model: Path) -> None:
    engine = new_engine(chat_model, max_num_seqs=17)
    asked = {"prompt": "Once", "n": 16, "logprobs": 20, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with serving(engine, stall_timeout_s=2.0) as live:
        assert live.metric("ridgeline_stream_stalls_total") == 0
        with open_request(live, asked):
            eventually(lambda: live.metric("ridgeline_stream_stalls_total") == 1)
            eventually(lambda: Scrape.of(live)("requests_aborted_total", stage="unread") == 1)
            connections = live.server.server_state.connections
            eventually(lambda: live.client.get("/health").is_success and len(connections) == 1)  # which asks that
        assert live.complete(prompt="Once", max_tokens=5)["usage"]["completion_tokens"] == 5
        assert live.metric("ridgeline_requests_aborted_total") == live.metric("ridgeline_stream_stalls_total") == 1


# ---- objectives


def met(live: LiveServer) -> dict[tuple[str, str], float]:
    scrape = Scrape.of(live)
    names = [(slo.metric, met) for slo in parse_slos(live.slo) for met in ("true", "false")]
    return {key: scrape("request_slo_total", slo=key[0], met=key[1]) for key in names}


def test_requests_count_by_each_objective_and_good_ones_by_all(chat_model: Path) -> None:
    slo = "ttft=100s,tpot=100s,e2el=0.001ms"
    with serving(new_engine(chat_model), slo=slo) as live:
        live.slo = slo
        assert set(met(live).values()) == {0} and Scrape.of(live)("goodput_requests_total") == 0
        live.complete(prompt=["a", "b"], n=2, max_tokens=3, ignore_eos=True)
        live.complete(prompt="a", max_tokens=1)
        assert live.post("completions", prompt="a", temperature=-1).status_code == 400
        assert live.client.get("/v1/models").status_code == 200
        expected = {("ttft", "true"): 2, ("tpot", "true"): 2, ("e2el", "false"): 2}
        eventually(lambda: {key: value for key, value in met(live).items() if value} == expected)
        assert Scrape.of(live)("goodput_requests_total") == 0


def test_a_request_that_fails_met_nothing_and_who_leaves_is_not_counted(chat_model: Path) -> None:
    slo, engine = "ttft=100s", new_engine(chat_model)
    broken = put_in_front(engine, FailingExecutor)
    with serving(engine, slo=slo) as live:
        live.slo = slo
        for stream in (False, True):
            live.post("completions", prompt="a", max_tokens=3, stream=stream)
        eventually(lambda: Scrape.of(live)("goodput_requests_total") == 2)
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            next(response.iter_lines())
        eventually(lambda: Scrape.of(live)("requests_aborted_total", stage="output") == 1)
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            next(lines := response.iter_lines())
            broken.broken = True
            assert "event: error" in "".join(lines)
        assert live.post("completions", prompt="a", max_tokens=3).status_code == 500
        eventually(lambda: met(live) == {("ttft", "true"): 2, ("ttft", "false"): 2})
        assert Scrape.of(live)("goodput_requests_total") == 2


def test_objectives_that_are_none_are_refused() -> None:
    for bad in ("", " , ", "ttft", "speed=1"):
        with pytest.raises(ConfigError, match="objective"):
            ServerSettings(slo=bad)


# ---- what was predicted


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_the_speed_of_a_machine_is_known_where_it_was_calibrated(
    is_calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priced, "PERIOD_S", 0.0)
    monkeypatch.setattr(priced, "load", priced_hardware)
    monkeypatch.setattr(priced, "load_calibration", lambda *_: EqualCalibration() if is_calibrated else None)
    with serving(ThreadEngine(config_of(dtype="float32")), slo="ttft=1s") as live:
        for _ in range(3):
            live.complete(prompt="def f(", max_tokens=8, **SAME)
            scrape = Scrape.of(live)
        assert scrape("ceiling_flops_per_second", inputs="f32") == 1e11
        speeds = {key[1]: value for key, value in scrape.values.items() if key[0] == "ridgeline_machine_speed_ratio"}
        assert bool(speeds) == is_calibrated and all(0 < value < 10 for value in speeds.values())
        assert {name for _, name in speeds} <= {"memory", "cache", "compute"}

        def drift() -> float:
            live.complete(prompt="def f(", max_tokens=2, **SAME)
            return Scrape.of(live).values.get(("ridgeline_plan_drift_ratio",), 0.0)

        eventually(lambda: drift() > 0)
    with serving(ThreadEngine(config_of(dtype="float32"))) as live:
        live.complete(prompt="def f(", max_tokens=8, **SAME)
        assert ("ridgeline_plan_drift_ratio",) not in Scrape.of(live).values, "nothing was planned"
        assert ("ridgeline_goodput_requests_total",) not in Scrape.of(live).values


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_are_priced_as_a_recording_tells_them(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured has what lies between two steps, as what is predicted has."""
    monkeypatch.setattr(priced, "PERIOD_S", 0.0)
    monkeypatch.setattr(priced, "load", priced_hardware)
    monkeypatch.setattr(priced, "load_calibration", lambda *_: EqualCalibration())
    engine = build_engine(replace(config_of(dtype="float32"), num_threads=threads), lambda deltas: None)
    for length in (8, 12):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.loop.submit(engine.intake.request([5, 6, 7] * length, params))
    looked = [engine.stats().priced for _ in iter(engine.loop.step, False)]
    recording = MemoryRecorder(engine.setup).recording(engine.loop.journal)
    told_s = [seconds for _, _, seconds in recording.timed()][1:-1]
    assert len(told_s) > 8 and looked[-1] is not None
    assert looked[-1].num_steps == len(told_s) and looked[-1].measured_s == pytest.approx(sum(told_s))


def sums(measured_s: float, predicted_s: float) -> PricedSteps:
    return PricedSteps({}, {}, measured_s=measured_s, predicted_s={"prior": predicted_s})


def test_drift_is_of_the_last_ten_minutes_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    drift, times = Drift(), iter(range(0, 10_000, 10))
    measured_s = predicted_s = 0.0
    drift.follow(next(times), None)
    assert drift.ratio is None
    for factor, minutes in ((1.1, 20), (1.5, 30), (1.0, 11), (0.5, 11)):
        for _ in range(6 * minutes):
            predicted_s += 1
            measured_s += factor
            drift.follow(next(times), sums(measured_s, predicted_s))
        assert drift.ratio == pytest.approx(factor)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "times the planned time" in told[0]
    drift.follow(9_999, sums(0.0, 0.0))  # another process
    drift.follow(10_000, sums(3.0, 2.0))
    assert drift.ratio == 1.5 and not drift.is_due(10_000.5) and drift.is_due(10_001)


def test_a_short_disturbance_is_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    drift = Drift()
    for second in range(int(DRIFT_S) - 10):
        drift.follow(second, sums(2.0 * second, second))
    assert drift.ratio == 2 and not caplog.records


# ---- drafts, adapters, the doctor


def test_what_drafts_gain_is_known_once_steps_without_them_were_seen() -> None:
    control = DraftControl()
    assert control.gain is None
    for _ in range(20):
        control.step(1, 0, 0, 1.0, None)
    assert control.gain == pytest.approx(1.0)
    for _ in range(600):
        control.step(1, 4, 2, 1.5, 0.0)  # three tokens in the time of one and a half
    assert control.gain == pytest.approx(2.0, rel=0.02)
    for _ in range(600):
        control.step(1, 4, 0, 1.5, 0.0)
    assert control.gain < 0.8


def test_a_server_that_drafts_tells_what_it_gains() -> None:
    with serving(ThreadEngine(config_of(speculate="ngram"))) as live:
        assert ("ridgeline_speculation_gain_ratio",) not in Scrape.of(live).values

        def gain() -> float:
            live.complete(prompt="x = 1\ny = 2\n" * 8, max_tokens=200, **SAME)
            return Scrape.of(live).values.get(("ridgeline_speculation_gain_ratio",), 0.0)

        eventually(lambda: gain() > 0)


@pytest.mark.parametrize("engine", [ThreadEngine, ProcessEngine])
def test_adapters_are_named_while_requests_run_and_wait(engine: type, tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")}
    config = config_of(dtype="float32", adapters=folders, max_loras=3, max_num_seqs=1)
    with serving(engine(config), metrics_compat="vllm") as live, ThreadPoolExecutor(41) as pool:

        def told(prefix: str = "ridgeline_") -> dict[str, str]:
            (sample,) = (key for key in Scrape.of(live).values if key[0] == f"{prefix}lora_requests_info")
            return dict(sample[1:])

        idle = {"max_lora": "3", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert told() == idle
        body = {"prompt": "import os", "max_tokens": 400, **SAME}
        asked = [pool.submit(live.complete, model=name, **body) for name in [*"a" * 40, "b"]]
        running = {"max_lora": "3", "running_lora_adapters": "a", "waiting_lora_adapters": "a,b"}
        eventually(lambda: told() == running or all(each.done() for each in asked))
        assert not all(each.done() for each in asked)
        assert told("vllm:").keys() == {*idle, "model_name", "engine"}
        assert all(each.result()["choices"] for each in asked)
        eventually(lambda: told() == idle)
        (value,) = (v for key, v in Scrape.of(live).values.items() if key[0] == "ridgeline_lora_requests_info")
        assert abs(value - time.time()) < 60


def test_what_the_doctor_found_is_shown_while_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def examined(command: str, path: str) -> dict[str, object]:
        return {"command": command, "found": msgspec.Raw(msgspec.json.encode(doctor(path).as_json()))}

    monkeypatch.setattr(explained, "reply_of", examined)  # here and now, not in a process that waits for all others
    monkeypatch.setattr(machine, "ceilings", lambda native, isa: priced_hardware(this_machine(native, isa)))
    with serving(ThreadEngine(config_of(max_num_seqs=1))) as live, ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda i: live.complete(prompt=f"x{i} = ", max_tokens=20, **SAME), range(24)))
        assert not live.metric("ridgeline_doctor_finding")
        reply = live.client.get("/explain/doctor")
        assert reply.status_code == 200, reply.text
        found = {(each["id"], each["severity"]): each["gain"] for each in reply.json()["found"]["findings"]}
        assert ("slots", "FIX") in found
        scrape = Scrape.of(live)
        for (name, severity), gain in found.items():
            assert scrape("doctor_finding", id=name, severity=severity) == pytest.approx(gain)
        monkeypatch.setattr(metrics, "FINDINGS_S", 0.0)
        assert not live.metric("ridgeline_doctor_finding")


def test_what_was_chosen_before_the_start_is_told_with_its_reason() -> None:
    config = replace(config_of(max_num_seqs=4), choices={"max_num_seqs": Choice("4", "--slo: why")})
    with serving(ProcessEngine(config)) as live:
        told = live.client.get("/explain/server").json()["choices"]["max_num_seqs"]
        assert told == {"value": "4", "reason": "--slo: why"}
        assert Scrape.of(live).values["ridgeline_choice_info", ("name", "max_num_seqs"), ("value", "4")] == 1


# ---- the process and the machine


def test_restarts_are_counted_by_cause() -> None:
    with serving(ProcessEngine(config_of())) as live:
        for num_done, (number, cause) in enumerate(((signal.SIGKILL, "killed"), (signal.SIGSEGV, "crash"))):
            os.kill(live.engine.process_id, number)
            eventually(lambda n=num_done: live.metric("ridgeline_engine_restarts_total") == n + 1)
            assert Scrape.of(live)("engine_restarts_total", cause=cause) == 1
            eventually(lambda: live.client.get("/ready").status_code == 200)
        assert live.engine.stats().num_restarts == 2


def test_each_end_of_a_process_has_its_cause() -> None:
    def ended(code: str, *, hangs: bool = False) -> str:
        link = Link.__new__(Link)
        link.process, link._hangs = subprocess.Popen([sys.executable, "-c", f"import os; {code}"]), hangs
        link.process.wait()
        return link.cause

    causes = [ended("os._exit(0)"), ended("os._exit(1)"), ended("os.kill(os.getpid(), 11)")]
    causes += [ended("os.kill(os.getpid(), 9)"), ended("os.kill(os.getpid(), 9)", hangs=True)]
    assert causes == ["exit", "exit", "crash", "killed", "hang"] and set(causes) == set(CAUSES)


def test_huge_pages_are_those_that_the_system_tells_of(tmp_path: Path) -> None:
    assert huge_page_bytes(None, tmp_path) is None
    for who, lines in (
        ("self", "Rss: 9 kB\n"),
        ("7", "AnonHugePages:    2048 kB\nFilePmdMapped:  4096 kB\nSwap: 5 kB\n"),
    ):
        (tmp_path / "proc" / who).mkdir(parents=True)
        (tmp_path / "proc" / who / "smaps_rollup").write_text(lines)
    assert huge_page_bytes(None, tmp_path) is None, "an old system tells nothing of them"
    assert huge_page_bytes(7, tmp_path) == 6 * 2**20


def test_huge_pages_of_the_engine_are_looked_at_once_a_minute(live: LiveServer, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(metrics, "huge_page_bytes", lambda process_id: told.append(process_id) or 3 * 2**21)
    live.server._service.metrics._engine._looked_s = -1e9
    assert [live.metric("ridgeline_host_huge_page_bytes") for _ in range(3)] == [3 * 2**21] * 3
    assert told == [live.engine.process_id]
