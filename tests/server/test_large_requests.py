"""Requests that are legal and large: each has a price and a bound, and a client that does not read holds nothing up."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import PATIENCE_S, LiveServer, eventually, gated_serving, new_engine, serving
from starlette.requests import ClientDisconnect

from ridgeline.server import sse
from ridgeline.server.sse import WholeResponse

MESSAGE = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def small(chat_model: Path) -> Iterator[LiveServer]:
    """A server with low bounds."""
    with serving(new_engine(chat_model), max_messages=4, max_response_logprobs=600, max_queued_tokens=1000) as server:
        yield server
        server.assert_idle()


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("chat/completions", {"messages": [MESSAGE] * 5}, "messages", "at most 4 turns in one conversation, got 5"),
        ("responses", {"input": [MESSAGE] * 5}, "input", "at most 4 turns"),
        ("tokenize", {"messages": [MESSAGE] * 5}, "messages", "at most 4 turns"),
        (
            "completions",
            {"prompt": [1] * 500_000},
            "prompt",
            "maximum context length is 512 tokens; the prompt has 500000",
        ),
        ("completions", {"prompt": ["a"], "prompt_logprobs": 20, "n": 30}, "logprobs", "this server holds 600"),
        ("completions", {"prompt": [1] * 30, "echo": True, "logprobs": 20}, "logprobs", "966 log-probabilities"),
        ("completions", {"prompt": [[1] * 30] * 4, "echo": True, "logprobs": 5, "max_tokens": 1}, "logprobs", "744"),
        ("completions", {"prompt": [1] * 30, "echo": True, "logprobs": 20, "stream": True}, "logprobs", "630"),
        (
            "chat/completions",
            {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 19, "max_tokens": 31},
            "logprobs",
            "620 log-probabilities in one response; this server holds 600: ask for fewer tokens",
        ),
        ("completions", {"prompt": "a", "metadata": {f"{i}": "" for i in range(17)}}, "metadata", "length <= 16"),
        (
            "completions",
            {"prompt": "a", "metadata": {f"{i}": "" for i in range(99_999)}},
            "metadata",
            "at most 16 keys",
        ),
        ("completions", {"prompt": [1] * 500_000 + ["a"]}, "prompt", "the prompt has 500001"),
        ("completions", {"prompt": ["a"] * 2 + [1]}, "prompt", "only one of these"),
        ("completions", {"prompt": "a", "metadata": {"a": "b" * 513}}, "metadata", "length <= 512"),
        ("chat/completions", {"messages": [MESSAGE], "metadata": {"a" * 65: "b"}}, "metadata", "length <= 64"),
    ],
)
def test_too_much_is_refused_by_its_name(small: LiveServer, path: str, body: dict, param: str, words: str) -> None:
    response = small.post(path, **{"max_tokens": 16, **body} if "completions" in path else body)
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"], error
    assert error["param"] == param or param == "metadata"


def test_all_that_metadata_may_hold_is_taken_however_it_is_escaped(small: LiveServer) -> None:
    metadata = {f"{number:x}" + "\U0001f600" * 63: "\U0001f600" * 512 for number in range(16)}
    content = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": metadata})
    assert len(content) > 100_000 and "\\ud83d" in content
    response = small.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text


def test_a_chat_with_logprobs_and_no_length_has_as_many_as_are_held(small: LiveServer) -> None:
    body = {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 19, "ignore_eos": True}
    (choice,) = small.post("chat/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["logprobs"]["content"]) == 600 // 20


def test_a_stream_with_logprobs_is_as_long_as_it_likes(small: LiveServer) -> None:
    """They are not held: what the client does not read is not computed."""
    body = {"prompt": "Once", "logprobs": 20, "max_tokens": 100, "ignore_eos": True, "stream": True}
    assert len(small.post("completions", **body).text.split("\n\n")) > 100


def test_what_is_held_for_others_leaves_less_room(chat_model: Path) -> None:
    """The price of a request is its tokens and the log-probabilities that are held for it."""
    body = {"prompt": [1] * 40, "prompt_logprobs": 19, "max_tokens": 1}
    with gated_serving(chat_model, max_queued_tokens=1000) as (server, gate), ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, prompt=[3] * 300, max_tokens=1)
        eventually(lambda: server.metric("ridgeline_queue_tokens") == 300)
        refused = server.post("completions", **body)
        assert refused.status_code == 503 and "300 prompt tokens and log-probabilities" in refused.text
        gate.open()
        first.result(PATIENCE_S)
        eventually(lambda: server.metric("ridgeline_queue_tokens") == 0)
        assert server.post("completions", **body).status_code == 200, "it fits where nothing else is"


def test_a_whole_response_is_sent_in_pieces() -> None:
    content = json.dumps(list(range(60_000))).encode()
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(WholeResponse(content, 1.0)({"type": "http"}, None, send))
    start, *pieces = sent
    assert dict(start["headers"])[b"content-length"] == str(len(content)).encode()
    assert b"".join(piece["body"] for piece in pieces) == content
    assert max(len(piece["body"]) for piece in pieces) == sse.PIECE_BYTES
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_a_whole_response_that_nobody_reads_is_given_up() -> None:
    async def send(message: dict) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    with pytest.raises(ClientDisconnect):
        asyncio.run(WholeResponse(b"a", 0.01)({"type": "http"}, None, send))


@pytest.fixture
def stalled(chat_model: Path) -> Iterator[tuple[LiveServer, socket.socket]]:
    """A server, and a client of 16 outputs that reads none of them."""
    engine = new_engine(chat_model, max_num_seqs=17)
    with serving(engine, stall_timeout_s=PATIENCE_S) as server:
        asked = {"prompt": "Once", "n": 16, "logprobs": 20, "max_tokens": 500, "ignore_eos": True, "stream": True}
        body = json.dumps(asked | {"seed": 1}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE_S)
            client.connect(server._listener.getsockname())
            head = "POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json"
            lines = "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""])
            client.sendall(lines.encode() + body)
            yield server, client


def test_a_client_that_does_not_read_is_not_computed_for(stalled: tuple[LiveServer, socket.socket]) -> None:
    """The engine rests and its blocks are free, others are served, and what is read later is all of it."""
    server, client = stalled
    scheduler = server.engine.engine.loop
    eventually(lambda: server.engine.num_unfinished == 1 and scheduler.stats().num_steps > 20)

    def rests() -> bool:
        before = scheduler.stats()
        time.sleep(0.05)
        return scheduler.stats().num_steps == before.num_steps and before.num_running == 0

    eventually(rests)
    assert server.engine.num_unfinished == 1 and scheduler.stats().cache.groups[0].used == 0
    reader = next(iter(server.engine._streams._open.values())).reader
    assert reader.num_bytes < 2 * reader.room_bytes
    assert server.complete(prompt="Once", max_tokens=5)["usage"]["completion_tokens"] == 5
    received = b""
    while b"data: [DONE]" not in received[-100:]:
        received += client.recv(2**20)
    chunks = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    ends = [choice for chunk in chunks for choice in json.loads(chunk)["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(16))
    whole = server.complete(prompt="Once", n=16, max_tokens=500, ignore_eos=True, seed=1)
    texts = [""] * 16
    for chunk in chunks:
        for choice in json.loads(chunk)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    server.assert_idle()
