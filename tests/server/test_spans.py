"""Spans of requests: names of the conventions, the caller's trace, times in order, no text, and none unasked."""

import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from live_server import LiveServer, eventually, new_engine, serving

from ridgeline.core.errors import ConfigError
from ridgeline.server import explained, service, spans

export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="SPANS ARE NOT TESTED: no opentelemetry-sdk")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "Once upon a time"


@pytest.fixture(scope="module")
def exporter():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def live(chat_model: Path, exporter) -> Iterator[LiveServer]:
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    real, service.open_spans = service.open_spans, lambda endpoint: spans.Spans(provider)
    try:
        with serving(
            new_engine(chat_model), served_model_names=("m",), otlp_traces_endpoint="http://127.0.0.1:1"
        ) as server:
            yield server
    finally:
        service.open_spans = real


def span_of(exporter, live, path, headers=None, **body):
    exporter.clear()
    done = live.client.post(path, json=body, headers=headers or {})
    eventually(lambda: len(exporter.get_finished_spans()) > 0)
    (span,) = exporter.get_finished_spans()
    return span, done


def test_a_completion_is_a_span_in_its_caller_s_trace(exporter, live: LiveServer, monkeypatch) -> None:
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes, http_attributes
    from opentelemetry.trace import SpanKind

    record = b'{"provenance": "prior", "waits": {"slots": 2.5}, "decoding": {"alone": 1.5}}'
    said = {"command": "", "found": msgspec.Raw(b"[" + record + b"," + record + b"]")}
    monkeypatch.setattr(
        explained, "reply_of", lambda *arguments: said
    )  # tests/server/test_explained.py has the real one
    asked = {"model": "m", "prompt": SECRET, "max_tokens": 6, "temperature": 0.5, "seed": 3, "n": 2, "explain": True}
    span, done = span_of(exporter, live, "/v1/completions", {"traceparent": PARENT}, **asked)
    assert (span.name, span.kind) == ("text_completion m", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    found, usage = dict(span.attributes), done.json()["usage"]
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.response.id"] == done.json()["id"]
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.seed"]) == (0.5, 3)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.choice.count"]) == (6, 2)
    latency = {name: value for name, value in found.items() if name.startswith("gen_ai.latency.")}
    parts = (latency[f"gen_ai.latency.time_in_{part}"] for part in ("queue", "model_prefill", "model_decode"))
    assert sum(parts) == pytest.approx(latency["gen_ai.latency.e2e"])
    assert (found["ridgeline.waits.slots_ms"], found["ridgeline.decoding.alone_ms"]) == (2.5, 1.5)
    assert found["ridgeline.provenance"] == "prior"
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    own = {name for name in found if name.startswith(("ridgeline.", "gen_ai.latency."))}
    newer = {"gen_ai.response.time_to_first_chunk", "gen_ai.usage.cache_read.input_tokens"}  # than the oldest package
    assert found.keys() - own - newer <= known | {"http.response.status_code"}
    assert SECRET not in span.to_json()
    assert done.json()["choices"][0]["text"] not in span.to_json()
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert [event.name for event in span.events] == ["queued", "admitted", "first token"]
    assert times == sorted(times)


def test_chats_and_errors_are_spans_too(exporter, live: LiveServer) -> None:
    messages = [{"role": "user", "content": SECRET}]
    span, _ = span_of(exporter, live, "/v1/chat/completions", messages=messages, max_tokens=2, stream=True)
    assert span.name == "chat m"
    assert span.parent is None
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    span, done = span_of(exporter, live, "/v1/completions", {"traceparent": "nonsense"}, prompt=SECRET, max_tokens=-1)
    assert done.status_code == 400
    assert (span.name, span.attributes["error.type"], span.parent) == ("text_completion", "400", None)
    exporter.clear()
    live.client.get("/v1/models")
    assert exporter.get_finished_spans() == ()


def test_nothing_is_loaded_or_made_unasked(chat_model: Path) -> None:
    code = "import sys, ridgeline.server.app; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
    with serving(new_engine(chat_model)) as server:
        assert server.server._service.spans is None


def test_without_its_packages_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'ridgeline\[otel\]'"):
        spans.open_spans("http://127.0.0.1:1")


@pytest.mark.parametrize("endpoint", ["", "collector", "localhost:4318", "ftp://host/v1/traces"])
def test_an_address_that_is_none_is_refused_at_the_start(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL"):
        spans.open_spans(endpoint)


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    def do_POST(self) -> None:
        said = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, self.headers["content-type"], said))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_spans_reach_the_collector_at_the_address_and_one_that_is_away_harms_nobody(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "open_spans", spans.open_spans)  # whatever the other tests have instead
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.got = []
        Thread(target=collector.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{collector.server_port}/collect/traces"
        with serving(new_engine(chat_model), served_model_names=("m",), otlp_traces_endpoint=address) as server:
            server.complete(model="m", prompt=SECRET, max_tokens=2, seed=97)
            opened = server.server._service.spans
            eventually(lambda: opened._provider.force_flush() and len(collector.got) > 0)
        (path, kind, said), *_ = collector.got
        collector.shutdown()
    assert (path, kind) == ("/collect/traces", "application/x-protobuf")
    assert b"text_completion m" in said and b"gen_ai.request.seed" in said and SECRET.encode() not in said
    with serving(new_engine(chat_model), otlp_traces_endpoint=address) as server:  # nobody is there any more
        assert server.complete(prompt=SECRET, max_tokens=2)["usage"]["completion_tokens"] == 2
