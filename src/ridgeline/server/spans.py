"""A span for each request that computes, by OpenTelemetry's conventions for generative AI, for those who ask for it.

Names are those of the conventions, and of vLLM for times that these do not name. Never a prompt, never an output.
"""

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.engine.request import Timings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.datastructures import Headers

    from ridgeline.server.service import RequestNote

OPERATIONS = {"completions": "text_completion", "responses": "chat", "messages": "chat"}  # by the path's end, else that
PARAMETERS = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "max_tokens")


class Spans:
    """Makes the spans of requests that have ended; `provider` sends them."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ridgeline", version("ridgeline"))
        self._context_of = TraceContextTextMapPropagator().extract

    def ended(self, path: str, headers: "Headers", note: "RequestNote") -> None:
        """Make the span of a request, a child of the one that its `traceparent` names."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns, taken_s = time.time_ns(), time.monotonic() - note.started_s
        begin_ns = end_ns - round(1e9 * taken_s)
        last = path.rpartition("/")[2]
        operation = "chat" if path.endswith("chat/completions") else OPERATIONS.get(last, last)
        about = attributes(operation, note)
        context = self._context_of({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        name = f"{operation} {about.get('gen_ai.request.model', '')}".rstrip()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, about, start_time=begin_ns)
        for event, seconds in _events(note).items():
            span.add_event(event, timestamp=begin_ns + round(1e9 * seconds))
        if note.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def attributes(operation: str, note: "RequestNote") -> dict[str, Any]:
    """Return what a span says of a request."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ridgeline",
        "gen_ai.usage.input_tokens": note.prompt_tokens,
        "gen_ai.usage.output_tokens": note.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": note.cached_tokens,
        "http.response.status_code": note.status,
        "ridgeline.request.id": note.request_id,
    }
    if note.status >= 400:
        found["error.type"] = str(note.status)
    if note.ended:
        response_id, model, request, finish = note.ended[0]
        params, timings = request.params, finish.timings
        found |= {"gen_ai.request.model": model, "gen_ai.response.model": model, "gen_ai.response.id": response_id}
        found["gen_ai.response.finish_reasons"] = [str(finish.reason) for _, _, _, finish in note.ended]
        asked = {name: getattr(params, name) for name in PARAMETERS} | {"choice.count": params.n}
        found |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
        found |= {name: value for name, value in _times(timings).items() if value is not None}
        found["ridgeline.preemptions"] = timings.num_preemptions
    return found | _explained(note)


def _times(timings: Timings) -> Mapping[str, float | None]:
    first_s, queue_s = timings.ttft_s, timings.queue_s
    return {
        "gen_ai.response.time_to_first_chunk": first_s,
        "gen_ai.latency.time_to_first_token": first_s,
        "gen_ai.latency.e2e": timings.latency_s,
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_in_model_prefill": None if first_s is None else first_s - queue_s,
        "gen_ai.latency.time_in_model_decode": None if first_s is None else timings.latency_s - first_s,
    }


def _explained(note: "RequestNote") -> dict[str, Any]:
    """Return the explain record of the first output, where the request asked for it."""
    if not isinstance(note.explained, msgspec.Raw):
        return {}
    record = next(iter(msgspec.json.decode(note.explained).get("outputs", ())), {})
    parts = (("waits", "waits"), ("decoding", "decoding"))
    times = {f"ridgeline.{name}.{part}_ms": ms for key, name in parts for part, ms in record.get(key, {}).items()}
    return times | {f"ridgeline.{key}": record[key] for key in ("provenance",) if key in record}


def _events(note: "RequestNote") -> Mapping[str, float]:
    """Return what happened to the first output, by seconds since its request came."""
    if not note.ended:
        return {}
    _, _, request, finish = note.ended[0]
    arrived_s, timings = request.arrival_s - note.started_s, finish.timings
    happened = {"queued": 0.0, "admitted": timings.queue_s, "first token": timings.ttft_s}
    return {name: arrived_s + seconds for name, seconds in happened.items() if seconds is not None}


def open_spans(endpoint: str) -> Spans:
    """Return what sends spans to a collector's `endpoint`. Raises ConfigError without its packages, or an address."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_traces_endpoint must be a URL, such as http://host:4318/v1/traces, got {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'ridgeline[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "ridgeline"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Spans(provider)
