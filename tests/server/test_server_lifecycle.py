"""Clients that leave, steps that fail, deadlines, overload and shutdown: what is promised when things go wrong."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import openai
import pytest
from live_server import (
    PATIENCE_S,
    FailingExecutor,
    GatedExecutor,
    LiveServer,
    eventually,
    gated_serving,
    new_engine,
    put_in_front,
    serving,
)

from children import Child

LONG = {"prompt": [1], "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def gated(chat_model: Path) -> Iterator[tuple[LiveServer, GatedExecutor]]:
    """Two requests may wait, and a shutdown waits for none."""
    with gated_serving(chat_model, max_queued_requests=2, shutdown_timeout_s=0.0) as server_and_gate:
        yield server_and_gate


def post_in_background(pool: ThreadPoolExecutor, live: LiveServer, **body: object):
    return pool.submit(lambda: httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S))


def send_raw(live: LiveServer, body: dict) -> socket.socket:
    """A connection with a request on its way, for the test to hang up."""
    host, port = live.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(
    gated: tuple[LiveServer, GatedExecutor], stream: bool
) -> None:
    live, gate = gated
    loop = live.engine.engine.loop
    with send_raw(live, LONG | {"stream": stream}) as connection:
        gate.release(4)
        eventually(lambda: gate.num_started == 5)  # four steps done, the fifth waits at the gate
        if stream:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
    eventually(lambda: live.metric("ridgeline_requests_aborted_total") == 1)
    assert loop.stats().cache.groups[0].used > 0  # the step under way still has them
    gate.release(2)
    eventually(lambda: loop.stats().num_running == 0)
    assert gate.num_started <= 6
    live.assert_idle()


def test_64_streams_with_random_disconnects(live: LiveServer, golden: dict) -> None:
    rng = random.Random(5)
    leaves_after = [rng.choice([None, rng.randrange(0, 60)]) for _ in range(64)]
    aborted = live.metric("ridgeline_requests_aborted_total")

    async def one(client: httpx.AsyncClient, num_chunks: int | None) -> list[int] | None:
        body = {"prompt": [1], "max_tokens": 80, "temperature": 0, "stream": True, "return_token_ids": True}
        ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if num_chunks is not None and len(ids) >= num_chunks:
                    return None
                if line.startswith("data: {"):
                    ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return ids

    async def everyone() -> list[list[int] | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(one(client, num_chunks) for num_chunks in leaves_after))

    survivors = [ids for ids in asyncio.run(everyone()) if ids is not None]
    assert len(survivors) == leaves_after.count(None) > 20
    assert all(ids == golden["ids"][:80] for ids in survivors)
    live.assert_idle()
    assert live.metric("ridgeline_requests_aborted_total") - aborted <= 64 - len(survivors)
    assert live.metric('ridgeline_requests_rejected_total{reason="internal_error"}') == 0


def test_a_failed_step_is_a_500_that_tells_nothing_and_the_engine_lives(chat_model: Path) -> None:
    engine = new_engine(chat_model)
    executor = put_in_front(engine, FailingExecutor)
    with serving(engine) as live:
        executor.broken = True
        response = live.post("completions", **LONG)
        streamed = live.post("completions", **LONG, stream=True)  # fails before its first token
        executor.broken = False
        for failed in (response, streamed):
            assert failed.status_code == 500
            assert failed.headers["x-should-retry"] == "false"
            assert failed.json()["error"]["code"] == "internal_error"
            assert "secret" not in failed.text and "RuntimeError" not in failed.text
        assert live.complete(**LONG)["usage"]["completion_tokens"] == 300
        live.assert_idle()


def test_a_stream_that_fails_ends_with_an_error_event(chat_model: Path) -> None:
    engine = new_engine(chat_model)
    executor = put_in_front(engine, FailingExecutor)
    with (
        serving(engine) as live,
        live.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as completion,
    ):
        text = ""
        for piece in completion.iter_text():
            text += piece
            executor.broken = executor.broken or text.count("data: ") >= 3
        last = text.rstrip("\n").split("\n\n")[-1]
        name, data = last.split("\n")
        assert name == "event: error"
        assert set(json.loads(data.removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in text
        executor.broken = False
        live.assert_idle()
        body = LONG | {"model": "stories-chat"}
        del body["ignore_eos"]
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(**body, stream=True)
            with pytest.raises(openai.APIError):
                for number, _ in enumerate(stream):
                    executor.broken = number > 2


def test_a_dead_engine_thread_ends_its_requests_and_the_server(chat_model: Path) -> None:
    with gated_serving(chat_model) as (live, gate), ThreadPoolExecutor() as pool:
        completion = post_in_background(pool, live, **LONG)
        eventually(lambda: gate.num_started == 1)
        live.engine.engine.loop._renderer = None  # a bug of ours, in a part that nothing guards
        gate.open()
        response = completion.result()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "server_is_overloaded"
        live.client.close()
        live.thread.join(PATIENCE_S)
        assert not live.thread.is_alive() and live.server.exit_code == 5


def test_a_step_that_hangs_ends_the_server(chat_model: Path, capfd: pytest.CaptureFixture) -> None:
    with gated_serving(chat_model, step_timeout_s=0.3) as (live, _), ThreadPoolExecutor() as pool:
        whole = post_in_background(pool, live, **LONG)
        streamed = post_in_background(pool, live, **LONG, stream=True)
        assert whole.result().status_code == streamed.result().status_code == 503
        live.client.close()
        live.thread.join(PATIENCE_S)
        assert not live.thread.is_alive() and live.server.exit_code == 5
        assert "in collect" in capfd.readouterr().err  # where it hangs


def test_a_shutdown_that_runs_out_of_time_tells_clients_to_retry(gated: tuple[LiveServer, GatedExecutor]) -> None:
    live, gate = gated
    with ThreadPoolExecutor() as pool:
        whole = post_in_background(pool, live, **LONG)
        eventually(lambda: gate.num_started == 1)
        begin_shutdown(live)
        live.client.close()
        while not whole.done():
            gate.release()
            wait([whole], timeout=0.05)
        response = whole.result()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "x-should-retry" not in response.headers


def test_a_deadline_is_a_503_with_retry_after(chat_model: Path) -> None:
    with gated_serving(chat_model, request_timeout_s=0.05) as (live, gate), ThreadPoolExecutor() as pool:
        completion = post_in_background(pool, live, **LONG)
        eventually(lambda: gate.num_started == 1)
        threading.Event().wait(0.1)  # the deadline passes while the first step is at the gate
        gate.open()
        response = completion.result()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        live.assert_idle()


def test_a_full_queue_is_a_503_at_once(gated: tuple[LiveServer, GatedExecutor]) -> None:
    live, gate = gated  # two run, two wait
    with ThreadPoolExecutor() as pool:
        taken = [post_in_background(pool, live, prompt=[1], max_tokens=2) for _ in range(4)]
        eventually(lambda: live.engine.num_unfinished == 4)
        response = live.post("completions", prompt=[1], max_tokens=2)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "server_is_overloaded"
        assert live.post("completions", prompt=[[1]] * 3, max_tokens=2).status_code == 503
        gate.open()
        assert [completion.result().status_code for completion in taken] == [200] * 4
    live.assert_idle()


def begin_shutdown(live: LiveServer) -> None:
    live.server.handle_exit(signal.SIGTERM, None)
    eventually(lambda: not live.engine.accepting)


def test_shutdown_lets_requests_end_and_refuses_new_ones(chat_model: Path) -> None:
    with gated_serving(chat_model) as (live, gate), ThreadPoolExecutor() as pool:
        whole = post_in_background(pool, live, **LONG)
        streamed = post_in_background(pool, live, **LONG, stream=True)
        eventually(lambda: live.engine.num_unfinished == 2)
        begin_shutdown(live)
        refused = httpx.post(f"{live.url}/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        body, host = json.dumps(LONG).encode(), b"Host: a\r\nContent-Type: application/json\r\n"
        with socket.create_connection(live._listener.getsockname(), PATIENCE_S) as kept:  # in one piece: none is unread
            kept.sendall(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (host, len(body), body))
            assert b"\r\nconnection: close\r\n" in kept.recv(2**16)
        assert live.client.get("/ready").status_code == 503
        assert live.client.get("/health").status_code == 200
        live.client.close()
        gate.open()
        assert whole.result().json()["usage"]["completion_tokens"] == 300
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        live.thread.join(PATIENCE_S)
        assert live.server.exit_code == 0


def test_shutdown_tells_streams_that_it_cuts_off(gated: tuple[LiveServer, GatedExecutor]) -> None:
    live, gate = gated
    with ThreadPoolExecutor() as pool:
        streamed = post_in_background(pool, live, **LONG, stream=True)
        eventually(lambda: gate.num_started == 1)
        gate.release(5)
        eventually(lambda: gate.num_started == 6)
        begin_shutdown(live)
        live.client.close()
        while not streamed.done():  # a step may begin before the engine sees that it must stop: it ends too
            gate.release()
            wait([streamed], timeout=0.05)
        text = streamed.result().text
    assert text.count("data: ") >= 6
    assert "event: error" in text.rstrip("\n").split("\n\n")[-1]
    assert "[DONE]" not in text
    live.thread.join(PATIENCE_S)
    assert live.server.exit_code == 1


@pytest.fixture
def command() -> list[str]:
    """`ridgeline serve`, of which this machine may have no installed script."""
    return [sys.executable, "-c", "from ridgeline.cli import main; main()", "serve"]


def test_sighup_reads_keys_again_and_sigterm_ends_the_process_with_0(
    command: list[str], chat_model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "old"\n')
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    arguments = [*command, str(chat_model), "--port", "0", "--num-threads", "1", "--log-level", "warning"]
    arguments += ["--api-key-file", str(keys)]
    old, new = ({"authorization": f"Bearer {key}"} for key in ("old", "new"))
    with Child(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        ready = process.stdout.readline()
        assert ready.startswith("Ridgeline serves stories-chat at http://127.0.0.1:")
        url = ready.split()[-1]
        body = {"json": LONG | {"stream": True}, "headers": old, "timeout": PATIENCE_S}
        with httpx.stream("POST", f"{url}/completions", **body) as completion:
            lines = completion.iter_lines()
            next(lines)
            keys.write_text('[alice]\nkey = "new"\n')
            process.send_signal(signal.SIGHUP)
            eventually(lambda: httpx.get(f"{url}/models", headers=new).status_code == 200)
            assert httpx.get(f"{url}/models", headers=old).status_code == 401
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(PATIENCE_S) == 0


def test_no_memory_for_the_model_is_one_line(command: list[str], chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "load.memory").touch()
    arguments = [*command, str(chat_model), "--port", "0", "--engine-process", "--log-level", "warning"]
    environment = os.environ | {"RIDGELINE_FAULTS": str(tmp_path)}
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1 and ended.stderr.startswith("ridgeline: out of memory"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_server_that_loads_its_model_ends_on_sigterm_alone(
    command: list[str], chat_model: Path, tmp_path: Path
) -> None:
    """And not on SIGHUP, which asks for a reload. A container's first process ignores SIGTERM without a handler."""
    (tmp_path / "load.hang").touch()
    environment = os.environ | {"RIDGELINE_FAULTS": str(tmp_path)}
    arguments = [*command, str(chat_model), "--port", "0", "--engine-process"]
    with Child(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: children.read_text())
        (engine,) = children.read_text().split()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "Traceback" not in process.stderr.read()
        eventually(lambda: not Path(f"/proc/{engine}").exists())


@pytest.mark.parametrize("form", ["json", "text"])
def test_all_lines_of_the_log_are_as_asked(command: list[str], chat_model: Path, form: str) -> None:
    """Of the server's process and the engine's, as the command line sets them up."""
    arguments = [*command, str(chat_model), "--port", "0", "--num-threads", "1", "--log-format", form]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Child(arguments, text=True, env=environment, **pipes) as process:
        url = process.stdout.readline().split()[-1]
        asked = {"json": {"prompt": "Once upon", "max_tokens": 2}, "headers": {"x-request-id": "mine"}}
        assert httpx.post(f"{url}/completions", timeout=PATIENCE_S, **asked).status_code == 200
        process.send_signal(signal.SIGTERM)
        lines = process.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert "Once upon" not in "".join(lines)
    if form == "text":
        assert [
            line for line in lines if not re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ridgeline", line)
        ] == []
        return
    facts = [json.loads(line) for line in lines]
    assert {"ridgeline.build", "ridgeline.server", "ridgeline.server.access"} <= {each["logger"] for each in facts}
    (access,) = (each for each in facts if each["logger"] == "ridgeline.server.access")
    assert (access["request_id"], access["status"], access["output"]) == ("mine", 200, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["/nowhere/at/all", "--port", "0"], 3, "neither an existing folder"),
        (["MODEL", "--port", "0", "--host", "0.0.0.0"], 2, "--insecure-no-auth"),
        (["MODEL", "--port", "BUSY"], 4, "cannot listen"),
        (["MODEL", "--port", "0", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["MODEL", "--port", "0", "--kv-cache-bytes", "1000000000000"], 2, "kv_cache_bytes must be at most"),
        (["MODEL", "--port", "0", "--no-engine-process", "--kv-cache-bytes", "1000000000000"], 2, "at most"),
    ],
)
def test_start_failures_are_one_line_and_a_code(
    command: list[str], chat_model: Path, arguments: list[str], code: int, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        values = {"MODEL": str(chat_model), "BUSY": str(busy.getsockname()[1])}
        filled = [values.get(argument, argument) for argument in arguments]
        ended = subprocess.run([*command, *filled, "--log-level", "warning"], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
