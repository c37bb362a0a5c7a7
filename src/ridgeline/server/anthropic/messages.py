"""POST /v1/messages and its count_tokens: chats as Anthropic's clients ask for them, whole or streamed."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ridgeline.engine.outputs import RequestOutput
from ridgeline.server.anthropic.convert import CALL_PREFIX, chat_of, ignored_names
from ridgeline.server.anthropic.protocol import MessagesRequest, PromptFields
from ridgeline.server.body import converted, naming_ignored
from ridgeline.server.openai.chat import prepared
from ridgeline.server.openai.dialogue import num_prompt_tokens
from ridgeline.server.openai.reply import Reply, respond
from ridgeline.server.service import RequestNote, Service, note_of
from ridgeline.server.sse import named_event
from ridgeline.text.outputs import BlockReader, OutputFormat, Step

PING_S = 15.0  # of silence, after which proxies may close a stream
_NAMES = {"content": ("text", "text"), "reasoning": ("thinking", "thinking"), "call": ("tool_use", "partial_json")}


async def create_message(service: Service, http: HttpRequest, values: dict[str, Any]) -> Response:
    """Serve /v1/messages. Raises what errors.py maps."""
    note = note_of(http)
    service.reserve(note, 1)
    body = await asyncio.to_thread(converted, values, MessagesRequest)
    message = await asyncio.to_thread(_prepare, service, note, body)
    response = await respond(message, http, stream=bool(body.stream), done=b"")
    return naming_ignored(response, ignored_names(values, body))


async def count_message_tokens(service: Service, http: HttpRequest, values: dict[str, Any]) -> Response:
    """Serve /v1/messages/count_tokens. Raises what errors.py maps."""
    body = await asyncio.to_thread(converted, values, PromptFields)
    num_tokens = await asyncio.to_thread(lambda: num_prompt_tokens(service, chat_of(body)))
    return naming_ignored(JSONResponse({"input_tokens": num_tokens}), ignored_names(values, body))


def _prepare(service: Service, note: RequestNote, body: MessagesRequest) -> "_Message":
    message_id = f"msg_{uuid.uuid4().hex}"
    reply = prepared(service, note, chat_of(body), message_id, lambda room: min(body.max_tokens, max(1, room)))
    return _Message(reply, body)


class ContentReader:
    """Takes the text of an output in pieces of any size -> its content blocks, and the events that tell of them."""

    def __init__(self, form: OutputFormat) -> None:
        self.content: list[dict[str, Any]] = []
        self._blocks = BlockReader(form)

    def feed(self, text: str, *, last: bool) -> bytes:
        """Return the events that are certain with this text; `last`: nothing follows."""
        return b"".join([self._events(step) for step in self._blocks.feed(text, last=last)])

    def _events(self, step: Step) -> bytes:
        kind, name = _NAMES[step.kind]
        if step.what == "begin":
            call = {"id": CALL_PREFIX + step.call_id, "name": step.text, "input": {}}
            own: dict[str, Any] = call if kind == "tool_use" else {name: ""}
            self.content.append({"type": kind} | own | ({"signature": ""} if kind == "thinking" else {}))
            return self._event("start", content_block=self.content[-1])
        if step.what == "more":
            return self._delta("input_json" if kind == "tool_use" else kind, name, step.text)
        block, signed = self.content[-1], b""
        if kind == "tool_use":
            with suppress(msgspec.DecodeError, RecursionError):  # it stays empty where the output was cut off within it
                block["input"] = msgspec.json.decode(step.text, type=dict[str, Any])
        else:
            block[name] = step.text
        if kind == "thinking":
            block["signature"] = hashlib.sha256(step.text.encode("utf-8", "surrogatepass")).hexdigest()
            signed = self._delta("signature", "signature", block["signature"])
        return signed + self._event("stop")

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return self._event("delta", delta={"type": f"{kind}_delta", name: text})

    def _event(self, what: str, **fields: object) -> bytes:
        return named_event(f"content_block_{what}", index=len(self.content) - 1, **fields)


@dataclass(frozen=True, slots=True)
class _Message:
    """A checked request, and how its output is written."""

    reply: Reply
    body: MessagesRequest

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (completion,) = outputs[0].outputs
        reader = ContentReader(self.reply.form)
        reader.feed(completion.text, last=True)
        ending = self._ending(reader, completion.finish_reason, completion.stop_reason)
        return msgspec.json.encode(self._message(reader.content, ending))

    def events(self) -> AsyncGenerator[bytes, None]:
        return with_pings(self._events(), PING_S)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        reader: ContentReader | None = None
        async with aclosing(self.reply.deltas()) as deltas:
            async for _, delta in deltas:
                events = b""
                if reader is None:
                    reader = ContentReader(self.reply.form)
                    message = self._message([], {"stop_reason": None, "stop_sequence": None})
                    events = named_event("message_start", message=message) + PING
                events += reader.feed(delta.text, last=delta.finish is not None)
                if (finish := delta.finish) is not None:
                    ending = self._ending(reader, finish.reason, finish.stop_reason)
                    events += named_event("message_delta", delta=ending, usage=self._usage) + STOP
                if events:
                    yield events

    @property
    def _usage(self) -> dict[str, int]:
        """The counts so far; whole once the output has ended."""
        note = self.reply.note
        cached = {"cache_read_input_tokens": note.cached_tokens, "cache_creation_input_tokens": 0}
        num_new = note.prompt_tokens - note.cached_tokens
        return {"input_tokens": num_new, "output_tokens": note.completion_tokens, **cached}

    def _message(self, content: list[dict[str, Any]], ending: Mapping[str, str | None]) -> dict[str, Any]:
        about = {"id": self.reply.response_id, "type": "message", "role": "assistant", "model": self.reply.model}
        return {**about, "content": content, **ending, "usage": self._usage}

    def _ending(self, reader: ContentReader, reason: str | None, stopped: str | int | None) -> dict[str, str | None]:
        """Return why the output ended, in Anthropic's words."""
        if isinstance(stopped, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
        why = "tool_use" if any(block["type"] == "tool_use" for block in reader.content) else "end_turn"
        if reason == "length":
            is_clipped = self.reply.requests[0].max_tokens < self.body.max_tokens
            why = "model_context_window_exceeded" if is_clipped else "max_tokens"
        return {"stop_reason": why, "stop_sequence": None}


PING, STOP = named_event("ping"), named_event("message_stop")


async def with_pings(events: AsyncGenerator[bytes, None], silence_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the events, and pings while none comes; not before the first, which may still be an error."""
    async with aclosing(events):
        yield await anext(events)
        while True:
            following = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait((following,), timeout=silence_s))[0]:
                    yield PING
                if (data := following.result()) is None:
                    return
                yield data
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
