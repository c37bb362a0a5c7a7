"""From engine requests to deltas with the bookkeeping of the server: usage, metrics, and ends that are errors."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import EngineError, OverloadedError, RequestError
from ridgeline.decoding.request import Request
from ridgeline.engine.outputs import Finish, OutputDelta, RequestOutput
from ridgeline.engine.request import FinishReason, Timings
from ridgeline.server.openai.logprobs import TokenNames
from ridgeline.server.openai.protocol import Choice, CompletionBody, ObjectName, TimingsBody, UsageBody, UsageChunks
from ridgeline.server.openai.structured import blamed_on
from ridgeline.server.service import RequestNote, Service
from ridgeline.server.sse import DONE, EventStream, WholeResponse, event, while_connected
from ridgeline.text.outputs import OutputFormat, ReasoningTokens

SHORT_TOKENS = 256  # of a response: it is written in less time than the way to a thread and back takes
MARK = "\x00text"  # stands for a text that comes


@dataclass(frozen=True, slots=True)
class Reply:
    """Streams what comes of the requests that are made of one HTTP request: one for each prompt."""

    service: Service
    note: RequestNote
    response_id: str
    model: str
    requests: Sequence[Request]
    usage_chunks: UsageChunks
    form: OutputFormat = field(default_factory=OutputFormat)  # what the outputs may hold
    constraint: str = "structured_outputs"  # the field of the body that says what they must be
    explains: bool = False  # where their time went, in the last message
    frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict[int, tuple[bytes, bytes]])  # of `text_event`
    created_unix_s: int = field(default_factory=lambda: int(time.time()))

    async def deltas(self, *, whole: bool = False) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yield (prompt index, delta that says something) until all outputs have ended; closing it aborts the others.

        `whole`: all of them are held until then.
        Raises OverloadedError if the queue is full or the deadline passed, EngineError if a step failed.
        """
        metrics = self.service.metrics
        indices = {request.request_id: index for index, request in enumerate(self.requests)}
        started: set[int] = set()
        told: dict[tuple[int, int], tuple[float, int]] = {}  # by output, when its last tokens came, and how many so far
        reasoning: dict[tuple[int, int], ReasoningTokens] = defaultdict(lambda: ReasoningTokens(self.form))
        names = TokenNames(self.service.tokenizer)
        admitted = self.service.admit(self.note, self.requests, whole=whole)
        async with aclosing(self.service.engine.stream(*admitted, whole=whole)) as stream:
            async for delta in stream:
                index = indices[delta.request_id]
                if delta.token_ids and index not in started:
                    started.add(index)
                    metrics.prompt_tokens.inc(len(self.requests[index].prompt_ids))
                    self.note.prompt_tokens += len(self.requests[index].prompt_ids)
                output, num_new, now_s = (index, delta.index), len(delta.token_ids), delta.came_s
                before_s, num_before = told.get(output, (now_s, 0))
                if num_new:
                    told[output] = now_s, num_before + num_new
                    metrics.generation_tokens.inc(num_new)
                    self.note.completion_tokens += num_new
                    if self.form.reasoning is not None:
                        self.note.reasoning_tokens += reasoning[output].count(map(names.raw, delta.token_ids))
                if num_new and num_before:
                    metrics.itl.observe(now_s - before_s)
                if delta.finish is not None:
                    self._ended(index, delta.index, num_before + num_new, delta.finish)
                if delta.token_ids or delta.prompt_logprobs or delta.finish is not None:
                    yield index, delta

    async def outputs(self) -> list[RequestOutput]:
        """Return all outputs, whole."""
        outputs = [RequestOutput.begun(request) for request in self.requests]
        async with aclosing(self.deltas(whole=True)) as deltas:
            async for index, delta in deltas:
                outputs[index].extend(delta)
        return outputs

    @property
    def usage(self) -> UsageBody:
        """The counts so far; whole once the deltas have ended."""
        note = self.note
        total = note.prompt_tokens + note.completion_tokens
        details = {"reasoning_tokens": note.reasoning_tokens}
        if any(request.prediction_ids for request in self.requests):
            accepted = note.accepted_prediction_tokens
            rejected = note.predicted_tokens - accepted
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        cached = {"cached_tokens": note.cached_tokens}
        return UsageBody(note.prompt_tokens, note.completion_tokens, total, cached, details)

    async def explain(self) -> None:
        """Find out where the time of the outputs went, which have ended: the next message says so, where asked for."""
        if self.explains:
            try:
                found = await self.service.explained.of(self.note.client, self.response_id)
            except (HTTPException, RequestError, OverloadedError) as error:
                found = msgspec.json.encode({"error": str(error)})
            self.note.explained = msgspec.Raw(found)

    def whole(self, kind: ObjectName, choices: Sequence[Choice]) -> CompletionBody:
        """Return the whole response."""
        return self._message(kind, choices, self.usage)

    def chunk(self, kind: ObjectName, *choices: Choice) -> CompletionBody:
        """Return a message of a stream; the one without choices has the token counts, and says where time went."""
        no_usage = None if self.usage_chunks else UNSET
        counted = not choices or self.usage_chunks == "each"
        return self._message(kind, choices, self.usage if counted else no_usage)

    def text_event(self, kind: ObjectName, index: int, text: str, choice: Callable[[str], Choice]) -> bytes:
        """Return a chunk that adds nothing but text to an output: what is around that is encoded once."""
        frame = self.frames.get(index)
        if frame is None:
            begin, _, end = event(self.chunk(kind, choice(MARK))).rpartition(msgspec.json.encode(MARK))
            frame = self.frames[index] = begin, end
        return b"%b%b%b" % (frame[0], msgspec.json.encode(text), frame[1])

    def _message(
        self, kind: ObjectName, choices: Sequence[Choice], usage: UsageBody | UnsetType | None
    ) -> CompletionBody:
        return CompletionBody(
            id=self.response_id,
            object=kind,
            created=self.created_unix_s,
            model=self.model,
            choices=choices,
            system_fingerprint=self.service.fingerprint,
            service_tier=UNSET if kind == "text_completion" else "default",
            usage=usage,
            explain=self.note.explained,
        )

    def check(self, finish: Finish) -> None:
        """Raise what an end is that is no output's."""
        match finish.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                pass
            case FinishReason.DEADLINE:
                raise OverloadedError(
                    f"the request did not end within {self.service.settings.request_timeout_s:g} s; "
                    "ask for fewer tokens, or retry when the server is less busy"
                )
            case FinishReason.REFUSED:
                raise RequestError(finish.error or "", param="structured_outputs", code="grammar_gave_up")
            case FinishReason.ERROR | FinishReason.ABORT:
                raise EngineError(finish.error or "the request was ended by the engine")

    def _ended(self, index: int, output: int, num_tokens: int, finish: Finish) -> None:
        """Count an output of `num_tokens`. Raises as `check` does."""
        self.check(finish)
        drafted = finish.timings.drafted
        self.note.predicted_tokens += drafted.predicted
        self.note.accepted_prediction_tokens += drafted.predicted_accepted
        if output == 0:
            self.note.cached_tokens += finish.num_cached_tokens
            self.service.metrics.cached_tokens.inc(finish.num_cached_tokens)
        if self.service.spans is not None:
            self.note.ended.append((self.response_id, self.model, self.requests[index], finish))
        self.service.explained.ended(self.note.request_id, self.note.client, self.response_id, finish.seq_id)
        self.service.metrics.finished(self.requests[index], num_tokens, finish)
        if self.service.canary is not None:
            self.service.canary.offer(self.requests[index].prompt_ids)
        timings, worst_s = finish.timings, self.note.worst_s
        for name, value_s in (("ttft", timings.ttft_s), ("tpot", timings.tpot_s), ("e2el", timings.latency_s)):
            worst_s[name] = max(worst_s.get(name, 0.0), value_s or 0.0)


class ResponseBody(Protocol):
    """How an endpoint writes what the engine gives."""

    @property
    def reply(self) -> Reply: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


async def respond(body: ResponseBody, http: HttpRequest, *, stream: bool, done: bytes = DONE) -> Response:
    """Return the whole response, or a stream that is opened once its first message is there, with `done` at its end.

    Raises what errors.py maps: until then, an error is a status of its own.
    """
    reply = body.reply
    if (asked := reply.requests[0].params.structured_outputs) is not None:  # the same for all of them
        with blamed_on(reply.constraint):
            await while_connected(http.receive, reply.service.require_grammar(asked))
    service, note, stall_timeout_s = reply.service, reply.note, reply.service.settings.stall_timeout_s
    if not stream:
        outputs = await while_connected(http.receive, reply.outputs())
        await while_connected(http.receive, reply.explain())
        is_short = note.completion_tokens <= SHORT_TOKENS and reply.requests[0].params.logprobs is None
        content = body.whole(outputs) if is_short else await asyncio.to_thread(body.whole, outputs)
        return WholeResponse(content, stall_timeout_s)
    events = body.events()
    first = await while_connected(http.receive, anext(events))
    return EventStream(first, events, lambda e: service.explain(e, note), stall_timeout_s, done)


def end(choice: Choice, reason: str | None, stop_reason: str | int | None, timings: Timings | None) -> None:
    """Write on a choice how its output ended, which it did normally, in OpenAI's words."""
    assert reason in ("stop", "length"), f"{reason} is an error and never reaches an output"
    assert timings is not None
    choice.finish_reason = "stop" if reason == "stop" else "length"
    choice.stop_reason = UNSET if stop_reason is None else stop_reason
    choice.timings = _timings(timings)


def _timings(timings: Timings) -> TimingsBody:
    """Convert seconds to milliseconds."""
    return TimingsBody(
        queue_ms=_ms(timings.queue_s),
        ttft_ms=None if timings.ttft_s is None else _ms(timings.ttft_s),
        tpot_ms=None if timings.tpot_s is None else _ms(timings.tpot_s),
        latency_ms=_ms(timings.latency_s),
        num_preemptions=timings.num_preemptions,
        draft_n=timings.drafted.verified or UNSET,
        draft_n_accepted=timings.drafted.accepted if timings.drafted.verified else UNSET,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
