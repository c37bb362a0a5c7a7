"""The load generator against a small server on the loopback interface: what it counts, in what order, and how it fails.

No test here judges a time; they judge counts, orders, and what the server saw.
"""

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from ridgeline.bench.client import Endpoint, discover_model, run_load
from ridgeline.bench.load import Load
from ridgeline.bench.metrics import summarize
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.errors import ConfigError


def event(content):
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n"


def completion_chunk(text, finish_reason=None):
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


@dataclass
class FakeServer:
    """Answers each prompt by its name: `ok`, or the fault it is called."""

    delay_s: float = 0.001
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    running: int = 0
    peak: int = 0

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
            ]
        )

    async def models(self, request: Request):
        return JSONResponse({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    async def completions(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fault = body["prompt"]
        if fault == "500":
            return JSONResponse({"error": {"message": "\x1b[31mboom"}}, status_code=500)
        if fault == "flood":
            return StreamingResponse(self.flood(), status_code=500)
        if fault == "text":
            return PlainTextResponse("this is no event stream")
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def flood(self):
        while True:
            yield "x" * 4096
            await asyncio.sleep(0)

    async def stream(self, body):
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            async for part in self.response(body["prompt"], body["max_tokens"]):
                yield part
        finally:
            self.running -= 1

    async def response(self, fault, count):
        for at in range(count):
            await asyncio.sleep(self.delay_s)
            yield completion_chunk("x", "length" if at == count - 1 and fault != "late-finish" else None)
            if at == 0 and fault == "error-event":
                yield event({"error": {"message": "step failed", "code": 500}})
                return
            if at == 0 and fault == "named-error":
                yield "event: error\n" + event({"message": "step failed"})
                return
            if at == 0 and fault == "json":
                yield event("{not json")
            if at == 0 and fault == "no-done":
                return
            if at == 0 and fault == "hang":
                await asyncio.sleep(60)
        if fault == "late-finish":
            yield completion_chunk("", "length")
        if fault != "no-usage":
            details = {"cached_tokens": 2}
            usage = {"prompt_tokens": 7, "completion_tokens": 2 * count, "prompt_tokens_details": details}
            yield event({"choices": [], "usage": usage})
        yield event("[DONE]")

    async def chat(self, request: Request):
        self.bodies.append(await request.json())

        async def response():
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for delta in (
                {"reasoning_content": "hm"},
                {"content": "a"},
                {"content": ""},
                {"tool_calls": [{"index": 0}]},
            ):
                yield event({"choices": [{"delta": delta}]})
            yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            yield event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
            yield event("[DONE]")

        return StreamingResponse(response(), media_type="text/event-stream")


@contextlib.asynccontextmanager
async def serving(app):
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio turns Nagle's algorithm off only on sockets it made itself; left on, it delays the first chunk by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def requests_of(*prompts, max_tokens=3, **options):
    return [BenchRequest(prompt=prompt, max_tokens=max_tokens, **options) for prompt in prompts]


def run(server, requests, load=None, api="completions", on_record=None, **options):
    async def main():
        async with serving(server.app()) as url:
            endpoint = Endpoint(base_url=url, model="tiny", api=api, **options)
            return await run_load(endpoint, requests, load or Load(), on_record)

    return asyncio.run(main())


def test_one_answer_is_measured_chunk_by_chunk():
    server = FakeServer()
    prompt = [5, 6, 7]
    log = run(server, requests_of(prompt, max_tokens=4), api_key="secret", temperature=0.5)
    (record,) = log.records
    assert record.error is None
    assert len(record.chunk_times_s) == 4
    times = [record.sent_s, *record.chunk_times_s, record.end_s, log.duration_s]
    assert times == sorted(times)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 8, 2)  # as usage says
    assert record.finish_reason == "length"
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_without_usage_chunks_and_the_known_prompt_are_counted():
    log = run(FakeServer(), requests_of("no-usage", max_tokens=5, ignore_eos=False))
    (record,) = log.records
    assert (record.prompt_tokens, record.output_tokens, record.usage_reported) == (0, 5, False)
    assert summarize(log).requests_without_usage == 1


def test_a_chunk_that_only_ends_the_answer_is_no_token():
    (record,) = run(FakeServer(), requests_of("late-finish", max_tokens=3)).records
    assert record.error is None
    assert len(record.chunk_times_s) == 3
    assert record.finish_reason == "length"


def test_chat_counts_content_reasoning_and_tools_but_not_the_role():
    server = FakeServer()
    (record,) = run(server, requests_of("Hello", ignore_eos=False), api="chat").records
    assert record.error is None
    assert len(record.chunk_times_s) == 4
    assert record.output_tokens == 4
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert "ignore_eos" not in server.bodies[0]


def test_chat_refuses_token_ids_before_sending():
    server = FakeServer()
    with pytest.raises(ConfigError, match="token ids"):
        run(server, requests_of("fine", [1, 2]), api="chat")
    assert server.bodies == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("500", "HTTP 500: "),
        ("flood", "HTTP 500: xxx"),
        ("text", "the stream ended before [DONE]"),
        ("error-event", "step failed"),
        ("named-error", "step failed"),
        ("json", "malformed stream"),
        ("no-done", "the stream ended before [DONE]"),
        ("hang", "no end after 2 s"),
    ],
)
def test_a_failure_is_counted_and_hurts_no_other(fault, says):
    prompts = ["ok", fault, "ok", "ok", fault]
    heard = []
    log = run(
        FakeServer(),
        requests_of(*prompts),
        Load(request_timeout_s=2.0 if fault == "hang" else 60.0),
        on_record=heard.append,
    )
    assert [record.error is None for record in log.records] == [prompt == "ok" for prompt in prompts]
    assert all(says in record.error and record.error.isprintable() for record in log.records if record.error)
    assert sorted(record.index for record in heard) == [0, 1, 2, 3, 4]
    results = summarize(log)
    assert (results.completed, results.failed, results.output_tokens) == (3, 2, 18)
    assert sum(results.errors.values()) == 2


def test_a_connection_closed_mid_stream_is_a_failure():
    async def drop(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        part = completion_chunk("x").encode()
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + f"{len(part):x}\r\n".encode() + part)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def main():
        async with await asyncio.start_server(drop, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await run_load(
                Endpoint(base_url=f"http://127.0.0.1:{port}/v1/", model="m"), requests_of("ok"), Load()
            )

    (record,) = asyncio.run(main()).records
    assert "RemoteProtocolError" in record.error


def test_a_server_that_is_not_there_is_a_failure_of_every_request():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = asyncio.run(run_load(Endpoint(base_url=f"http://127.0.0.1:{port}", model="m"), requests_of("a", "b"), Load()))
    assert [record.error.partition(":")[0] for record in log.records] == ["ConnectError"] * 2
    with pytest.raises(ConfigError, match="is the server up"):
        discover_model(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_concurrency_and_never_exceeds_it(concurrency):
    server = FakeServer(delay_s=0.002)
    log = run(server, requests_of(*["ok"] * 12), Load(max_concurrency=concurrency))
    assert server.peak == concurrency
    assert summarize(log).peak_concurrency <= concurrency
    assert [record.error for record in log.records] == [None] * 12
    sent = [record.sent_s for record in log.records]
    assert sent == sorted(sent)


def test_an_open_loop_sends_in_order_and_never_early():
    server = FakeServer()
    requests = [
        BenchRequest(prompt=[at], max_tokens=2, arrival_s=time_s) for at, time_s in enumerate([0.08, 0.0, 0.04, 0.02])
    ]
    log = run(server, requests, Load(schedule="trace"))
    assert [body["prompt"] for body in server.bodies] == [[1], [3], [2], [0]]
    assert [record.arrival_s for record in log.records] == [0.0, 0.02, 0.04, 0.08]
    assert all(record.sent_s >= record.arrival_s for record in log.records)


def test_poisson_load_sends_everything_at_its_time():
    load = Load(schedule="poisson", request_rate_per_s=200.0, seed=3)
    log = run(FakeServer(), requests_of(*["ok"] * 20), load)
    assert len(log.records) == 20
    assert all(record.sent_s >= record.arrival_s > 0 for record in log.records)


def test_the_time_limit_stops_the_sending_and_waits_for_what_runs():
    requests = [BenchRequest(prompt="ok", max_tokens=2, arrival_s=time_s) for time_s in (0.0, 0.01, 500.0, 600.0)]
    log = run(FakeServer(), requests, Load(schedule="trace", time_limit_s=100.0))
    assert ([record.error for record in log.records], log.unsent) == ([None, None], 2)
    # one slot, held past the limit by the first request
    log = run(FakeServer(delay_s=0.1), requests_of("ok", "ok", "ok"), Load(max_concurrency=1, time_limit_s=0.05))
    assert ([record.error for record in log.records], log.unsent) == ([None], 2)


def test_discover_model():
    async def main():
        async with serving(FakeServer().app()) as url:
            return await asyncio.to_thread(discover_model, url)

    assert asyncio.run(main()) == "tiny"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://user:pass@host", "http://host:port"]
)
def test_bad_base_urls_are_refused(url):
    with pytest.raises(ConfigError, match="base URL"):
        Endpoint(base_url=url, model="m")


def test_the_key_is_not_shown():
    assert "secret" not in repr(Endpoint(base_url="http://h", model="m", api_key="secret"))
