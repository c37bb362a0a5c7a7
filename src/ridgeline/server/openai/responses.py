"""/v1/responses: chats as OpenAI's newer API has them, whole or as typed events, stored for a while."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ridgeline.core.errors import ContextLengthError, RequestError
from ridgeline.engine.outputs import RequestOutput
from ridgeline.server.body import converted, naming_ignored
from ridgeline.server.openai.chat import prepared
from ridgeline.server.openai.fields import refuse_unsupported
from ridgeline.server.openai.items import RESPONSES_BODY, Item, ResponsesRequest, chat_of, listed
from ridgeline.server.openai.logprobs import TokenNames
from ridgeline.server.openai.paging import page
from ridgeline.server.openai.reply import Reply, respond
from ridgeline.server.openai.store import Stored
from ridgeline.server.service import RequestNote, Service, note_of
from ridgeline.server.sse import named_event
from ridgeline.text.outputs import BlockReader, Step, num_reasoning_tokens

_TAKEN = (  # fields that change nothing here, and need not be named
    *("client_metadata", "context_management", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier"),
)
_BODY = msgspec.json.Decoder(dict[str, Any])
_ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
_KINDS: Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {  # of items, and of their parts
    "content": ("message", "msg", {"role": "assistant", "content": []}, {"type": "output_text", "annotations": []}),
    "reasoning": ("reasoning", "rs", {"summary": [], "content": []}, {"type": "reasoning_text"}),
    "call": ("function_call", "fc", {}, {"type": "function_call_arguments"}),
}
_WORDS = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
_PARTS: Mapping[str, Mapping[str, object]] = {
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
}
_REPEATED: Mapping[str, object] = {  # in a response; here with what is meant where the request does not say
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "user")),
    "metadata": {},
    "parallel_tool_calls": True,
    "store": True,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    **_PARTS,
}


async def create_response(service: Service, http: HttpRequest, values: dict[str, Any]) -> Response:
    """Serve POST /v1/responses. Raises what errors.py maps."""
    note = note_of(http)
    body = await asyncio.to_thread(converted, values, RESPONSES_BODY)
    service.reserve(note, 1, body.cache_salt)
    before = None
    if body.previous_response_id is not None:
        try:
            before = service.stored[note.client.salt].get(body.previous_response_id)
        except HTTPException as error:
            message, code = f"Previous r{error.detail[1:]}", "previous_response_not_found"
            raise RequestError(message, param="previous_response_id", code=code) from error
    made = await asyncio.to_thread(_prepare, service, note, body, values, before)
    with _in_its_words():
        response = await respond(made, http, stream=bool(body.stream), done=b"")
    if not body.stream:
        made.keep()
    return naming_ignored(response, [name for name in values if name not in {*body.__struct_fields__, *_TAKEN}])


async def stored_response(service: Service, http: HttpRequest) -> Response:
    """Serve what is asked about a response that is stored. Raises RequestError, HTTPException."""
    store, response_id = service.stored[note_of(http).client.salt], str(http.path_params["response_id"])
    stored, items = store.get(response_id)
    if http.method == "DELETE":
        store.forget(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
    if http.method == "POST":
        raise RequestError("only a response of background=true can be cancelled, and none is; close its stream instead")
    if http.url.path.endswith("/input_items"):
        return page([(str(item["id"]), item) for item in _ITEMS.decode(items)], http.query_params)
    if http.query_params.get("stream") == "true":
        raise RequestError("a response that is stored is not streamed again: leave stream out", param="stream")
    return Response(stored, media_type="application/json")


@contextmanager
def _in_its_words() -> Generator[None]:
    """Name the fields of a body in errors as this API does."""
    try:
        yield
    except RequestError as error:
        name = (error.param or "").partition("[")[0]
        if name not in _WORDS:
            raise
        raise RequestError(str(error).replace(name, _WORDS[name]), param=_WORDS[name], code=error.code) from error


def _prepare(
    service: Service, note: RequestNote, body: ResponsesRequest, values: Mapping[str, Any], before: Stored | None
) -> "_Response":
    """Check everything and compute the prompt's tokens, in a worker thread. Raises RequestError naming the field."""
    refuse_unsupported(body)
    earlier = [] if before is None else _ITEMS.decode(before[1]) + _BODY.decode(before[0])["output"]
    new = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    items = [*msgspec.convert(earlier, list[Item]), *new]
    with _in_its_words():
        reply = _fitted(service, note, body, items)
    return _Response(reply, BlockReader(reply.form), values, msgspec.json.encode([*earlier, *listed(values["input"])]))


def _fitted(service: Service, note: RequestNote, body: ResponsesRequest, items: Sequence[Item]) -> Reply:
    """Return the reply to a conversation; truncation=auto: without half of its turns, the first, until it has room."""
    most = service.info.generation.max_new_tokens if body.max_output_tokens is None else body.max_output_tokens

    def max_tokens(room: int) -> int:
        return max(1, room) if most is None else min(most, max(1, room))

    while True:
        try:
            return prepared(service, note, chat_of(body, items), f"resp_{uuid.uuid4().hex}", max_tokens)
        except ContextLengthError:
            later = [index for index, item in enumerate(items) if index and item.role == "user"]
            if body.truncation != "auto" or not later:
                raise
            items = items[later[len(later) // 2] :]


@dataclass
class _Response:
    """A checked request, and how its output is written: as items, and as the events that tell of them."""

    reply: Reply
    blocks: BlockReader
    values: Mapping[str, Any]  # of the body
    items: bytes  # that it replies to
    output: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    response: dict[str, Any] = field(default_factory=dict[str, Any])  # as it is now
    num_events: int = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (completion,) = outputs[0].outputs
        self._written(completion.text, completion.token_ids, completion.finish_reason)
        return msgspec.json.encode(self.response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events. An error in a stream that has begun is the last of them."""
        token_ids: list[int] = []
        try:
            async with aclosing(self.reply.deltas()) as deltas:
                async for _, delta in deltas:
                    begun = b"" if self.response else self._now("created", "in_progress") + self._now("in_progress")
                    token_ids += delta.token_ids
                    reason = None if delta.finish is None else delta.finish.reason
                    if events := begun + self._written(delta.text, token_ids, reason):
                        if reason is not None:
                            self.keep()
                        yield events
        except Exception as error:
            if not self.response:
                raise
            why = self.reply.service.explain(error, self.reply.note).body
            yield self._now("failed", error={"code": why.code or why.type, "message": why.message})

    def keep(self) -> None:
        """Keep the response, if it may be: before its end is told, so that its id is found."""
        if self.response["store"]:
            stored = (msgspec.json.encode(self.response), self.items)
            self.reply.service.stored[self.reply.note.client.salt].put(self.reply.response_id, stored)

    def _written(self, text: str, token_ids: Sequence[int], reason: str | None) -> bytes:
        """Take in more text of the output; return its events. `reason`: why it ended, with all of its tokens."""
        ending = "" if reason is None else "incomplete" if reason == "length" else "completed"
        steps = list(self.blocks.feed(text, last=bool(ending)))
        told = [self._step(step, "completed") for step in steps[:-1]]
        told += [self._step(step, ending) for step in steps[-1:]]
        return b"".join(told) + (self._end(ending, token_ids) if ending else b"")

    def _step(self, step: Step, status: str) -> bytes:
        """Take in a step of the output; return its events. `status` is of its item, where that ends."""
        kind, prefix, own, part = _KINDS[step.kind]
        is_call, name = step.kind == "call", part["type"]
        if step.what == "begin":
            own = {"call_id": step.call_id, "name": step.text, "arguments": ""} if is_call else own
            self.output.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **own})
        item, index = self.output[-1], len(self.output) - 1
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index} | ({} if is_call else {"content_index": 0})
        logprobs: dict[str, object] = {"logprobs": []} if step.kind == "content" else {}
        part = {**part, **logprobs, "text": "" if step.what == "begin" else step.text}
        if step.what == "begin":
            added = self._event("output_item.added", output_index=index, item=item)
            return added if is_call else added + self._event("content_part.added", **at, part=part)
        if step.what == "more":
            return self._event(f"{name}.delta", **at, delta=step.text, **logprobs)
        if is_call:
            item |= {"status": status, "arguments": step.text}
            done = self._event(f"{name}.done", **at, name=item["name"], arguments=step.text)
        else:
            item |= {"status": status, "content": [part]}
            done = self._event(f"{name}.done", **at, text=step.text, **logprobs)
            done += self._event("content_part.done", **at, part=part)
        return done + self._event("output_item.done", output_index=index, item=item)

    def _event(self, what: str, **fields: object) -> bytes:
        self.num_events += 1
        return named_event(f"response.{what}", sequence_number=self.num_events - 1, **fields)

    def _end(self, status: str, token_ids: Sequence[int]) -> bytes:
        """Write how the response ended; return the last event."""
        note, names = self.reply.note, TokenNames(self.reply.service.tokenizer)
        num_reasoning = num_reasoning_tokens(self.reply.form, map(names.raw, token_ids))
        usage = {
            "input_tokens": note.prompt_tokens,
            "input_tokens_details": {"cached_tokens": note.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": note.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": note.prompt_tokens + note.completion_tokens,
        }
        if status == "completed":
            return self._now(status, usage=usage, completed_at=int(time.time()))
        return self._now(status, usage=usage, incomplete_details={"reason": "max_output_tokens"})

    def _now(self, what: str, status: str = "", **own: object) -> bytes:
        """Write the response as it is now, with what was asked for; return the event that tells of it."""
        reply, params = self.reply, self.reply.requests[0].params
        asked = {key: value for key, value in self.values.items() if key in _REPEATED and value is not None}
        asked |= {key: {**part, **asked[key]} for key, part in _PARTS.items() if key in asked}
        if tools := asked.get("tools"):
            asked["tools"] = [{"strict": False, "parameters": None, **tool} for tool in tools]
        about = {"id": reply.response_id, "object": "response", "created_at": reply.created_unix_s}
        sampled = {"model": reply.model, "temperature": params.temperature, "top_p": params.top_p}
        ending = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        state = {"status": status or what, "output": self.output, "service_tier": "default"}
        self.response = {**about, **state, **sampled, **_REPEATED, **asked, **ending, **own}
        return self._event(what, response=self.response)
