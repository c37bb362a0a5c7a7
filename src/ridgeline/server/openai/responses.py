"""/v1/responses: chats as OpenAI's newer API has them, whole or as typed events, stored for a while."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ridgeline.core.errors import ContextLengthError, RequestError
from ridgeline.core.step import TokenLogprob
from ridgeline.engine.outputs import RequestOutput
from ridgeline.server.body import converted, naming_ignored
from ridgeline.server.openai.chat import prepared
from ridgeline.server.openai.dialogue import num_prompt_tokens
from ridgeline.server.openai.fields import refuse_unsupported, sampling_params
from ridgeline.server.openai.items import (
    CALLED,
    COUNT_BODY,
    LOGPROBS,
    RESPONSES_BODY,
    Item,
    ResponsesRequest,
    chat_of,
    ignored_tools,
    listed,
)
from ridgeline.server.openai.logprobs import ContentLogprobs, TokenNames
from ridgeline.server.openai.paging import page
from ridgeline.server.openai.reply import Reply, respond
from ridgeline.server.openai.store import ResponseStore, Stored
from ridgeline.server.service import RequestNote, Service, note_of
from ridgeline.server.sse import named_event
from ridgeline.text.outputs import BlockReader, Step

_TAKEN = (  # fields that change nothing here, and need not be named
    *("client_metadata", "context_management", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier"),
)
_BODY = msgspec.json.Decoder(dict[str, Any])
_ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
_KINDS: Mapping[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {  # of items, and of their parts
    "content": ("message", "msg", {"role": "assistant", "content": []}, {"type": "output_text", "annotations": []}),
    "reasoning": ("reasoning", "rs", {"summary": [], "content": []}, {"type": "reasoning_text"}),
    "call": ("function_call", "fc", {"arguments": ""}, {"type": "function_call_arguments"}),
    "custom": ("custom_tool_call", "ctc", {"input": ""}, {"type": "custom_tool_call_input"}),
}
_FAILED = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of OpenAI's codes, which have no others that fit
_WORDS = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
_PARTS: Mapping[str, Mapping[str, object]] = {
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
}
_REPEATED: Mapping[str, object] = {  # in a response; here with what is meant where the request does not say
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "top_logprobs")),
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
    store = service.stored[note.client.salt]
    made = await asyncio.to_thread(_prepare, service, note, body, values, store)
    with _in_its_words():
        response = await respond(made, http, stream=bool(body.stream), done=b"")
    if not body.stream:
        made.keep()
    return naming_ignored(response, _ignored(body, values))


async def count_input_tokens(service: Service, http: HttpRequest, values: dict[str, Any]) -> Response:
    """Serve POST /v1/responses/input_tokens. Raises what errors.py maps."""
    body, store = await asyncio.to_thread(converted, values, COUNT_BODY), service.stored[note_of(http).client.salt]

    def count() -> int:
        refuse_unsupported(body)
        earlier, new = _conversation(body, values, store)
        with _in_its_words():
            chat = chat_of(body, msgspec.convert([*earlier, *new], list[Item]))
            sampling_params(chat, service, logprobs=None)  # counts nothing, and refuses what a response would
            return num_prompt_tokens(service, chat)

    counted = {"object": "response.input_tokens", "input_tokens": await asyncio.to_thread(count)}
    return naming_ignored(JSONResponse(counted), _ignored(body, values))


def _ignored(body: ResponsesRequest, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what a body has that changes nothing although it should."""
    yield from (name for name in values if name not in {*body.__struct_fields__, *_TAKEN})
    yield from ignored_tools(body)
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        yield "top_logprobs"


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
    service: Service, note: RequestNote, body: ResponsesRequest, values: Mapping[str, Any], store: ResponseStore
) -> "_Response":
    """Check everything and compute the prompt's tokens, in a worker thread. Raises RequestError naming the field."""
    refuse_unsupported(body)
    earlier, new = _conversation(body, values, store)
    items = [*earlier, *new]
    with _in_its_words():
        reply = _fitted(service, note, body, msgspec.convert(items, list[Item]))
    scores = ContentLogprobs(TokenNames(service.tokenizer), reply.form, reply.requests[0].shown_ids)
    custom = frozenset(tool.name for tool in body.tools or () if tool.type == "custom")
    new_ids = [str(item["id"]) for item in new]
    return _Response(reply, BlockReader(reply.form), scores, custom, values, msgspec.json.encode(items), new_ids)


def _conversation(
    body: ResponsesRequest, values: Mapping[str, Any], store: ResponseStore
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the items of an earlier response, and those of the input. Raises RequestError for what is not stored."""
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        try:
            earlier = _items_of(store.get(body.previous_response_id))
        except HTTPException as error:
            message, code = f"Previous r{error.detail[1:]}", "previous_response_not_found"
            raise RequestError(message, param="previous_response_id", code=code) from error
    given, known = values.get("input") or [], dict[str, dict[str, Any]]()
    if not isinstance(given, str):
        given = [_resolved(item, f"input[{index}]", known, store) for index, item in enumerate(given)]
    return earlier, list(listed(given))


def _resolved(
    item: dict[str, Any], where: str, known: dict[str, dict[str, Any]], store: ResponseStore
) -> dict[str, Any]:
    """Return an item, which is stored if it has no more than an id; `known` are some that are, by their ids."""
    is_only_id = "id" in item and "role" not in item and item.get("type") is None
    if item.get("type") != "item_reference" and not is_only_id:
        return item
    name = str(item.get("id"))
    if name not in known and (home := store.home_of(name)) is not None:
        known |= {str(each["id"]): each for each in _items_of(home)}
    if name not in known:
        raise RequestError(f"Item with id '{name[:100]}' not found.", param=where, code="item_not_found")
    return known[name]


def _items_of(stored: Stored) -> list[dict[str, Any]]:
    """Return the items that a response was made of, and its output."""
    return _ITEMS.decode(stored[1]) + _BODY.decode(stored[0])["output"]


def _fitted(service: Service, note: RequestNote, body: ResponsesRequest, items: Sequence[Item]) -> Reply:
    """Return the reply to a conversation; truncation=auto: without half of its turns, the first, until it has room."""
    most = service.info.generation.max_new_tokens if body.max_output_tokens is None else body.max_output_tokens
    if LOGPROBS in (body.include or ()):  # they are held until the end, in a stream too
        held = service.settings.max_response_logprobs // (1 + (body.top_logprobs or 0))
        if body.max_output_tokens is not None and body.max_output_tokens > held:
            problem = f"max_output_tokens must be at most {held} where so many log-probabilities are held for each"
            raise RequestError(problem, param="max_output_tokens")
        most = held if most is None else min(most, held)

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
    scores: ContentLogprobs
    custom: frozenset[str]  # names of tools that take a text
    values: Mapping[str, Any]  # of the body
    items: bytes  # that it replies to
    new_ids: Sequence[str]  # of those that came with it
    output: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    response: dict[str, Any] = field(default_factory=dict[str, Any])  # as it is now
    num_events: int = 0
    kind: str = ""  # of the item that is open

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (completion,) = outputs[0].outputs
        self._written(completion.text, completion.logprobs or (), completion.finish_reason)
        return msgspec.json.encode(self.response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events. An error in a stream that has begun is the last of them."""
        try:
            async with aclosing(self.reply.deltas()) as deltas:
                async for _, delta in deltas:
                    begun = b"" if self.response else self._now("created", "in_progress") + self._now("in_progress")
                    reason = None if delta.finish is None else delta.finish.reason
                    if events := begun + self._written(delta.text, delta.logprobs, reason):
                        if reason is not None:
                            self.keep()
                        yield events
        except Exception as error:
            if not self.response:
                raise
            why = self.reply.service.explain(error, self.reply.note)
            code = _FAILED.get(why.status, "server_error")
            yield self._now("failed", error={"code": code, "message": why.body.message})

    def keep(self) -> None:
        """Keep the response, if it may be: before its end is told, so that its id is found."""
        if self.response["store"]:
            stored = (msgspec.json.encode(self.response), self.items)
            ids = [*self.new_ids, *(item["id"] for item in self.output)]
            self.reply.service.stored[self.reply.note.client.salt].put(self.reply.response_id, stored, ids)

    def _written(self, text: str, logprobs: Iterable[TokenLogprob], reason: str | None) -> bytes:
        """Take in more text of the output; return its events. `reason`: why it ended."""
        self.scores.feed(logprobs, last=reason is not None)
        ending = "" if reason is None else "incomplete" if reason == "length" else "completed"
        steps = list(self.blocks.feed(text, last=bool(ending)))
        told = [self._step(step, "completed") for step in steps[:-1]]
        told += [self._step(step, ending) for step in steps[-1:]]
        return b"".join(told) + (self._end(ending) if ending else b"")

    def _step(self, step: Step, status: str) -> bytes:
        """Take in a step of the output; return its events. `status` is of its item, where that ends."""
        is_call = step.kind == "call"
        if step.what == "begin":
            self.kind = "custom" if is_call and step.text in self.custom else step.kind
        kind, prefix, own, part = _KINDS[self.kind]
        name = part["type"]
        if step.what == "begin":
            own = {"call_id": step.call_id, "name": step.text, **own} if is_call else own
            self.output.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **own})
        item, index = self.output[-1], len(self.output) - 1
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index} | ({} if is_call else {"content_index": 0})
        scores = self.scores.of(step) if step.kind == "content" else None
        logprobs: dict[str, object] = {} if scores is None else {"logprobs": scores}
        part = {**part, **logprobs, "text": "" if step.what == "begin" else step.text}
        if step.what == "begin":
            added = self._event("output_item.added", output_index=index, item=item)
            return added if is_call else added + self._event("content_part.added", **at, part=part)
        if step.what == "more":
            is_held = self.kind == "custom"  # JSON of a text, until it is whole
            return b"" if is_held else self._event(f"{name}.delta", **at, delta=step.text, **logprobs)
        if is_call:
            (value,) = own
            text = _input_of(step.text) if self.kind == "custom" else step.text
            done = self._event(f"{name}.delta", **at, delta=text) if self.kind == "custom" else b""
            item |= {"status": status, value: text}
            done += self._event(f"{name}.done", **at, name=item["name"], **{value: text})
        else:
            item |= {"status": status, "content": [part]}
            done = self._event(f"{name}.done", **at, text=step.text, **logprobs)
            done += self._event("content_part.done", **at, part=part)
        return done + self._event("output_item.done", output_index=index, item=item)

    def _event(self, what: str, **fields: object) -> bytes:
        self.num_events += 1
        return named_event(f"response.{what}", sequence_number=self.num_events - 1, **fields)

    def _end(self, status: str) -> bytes:
        """Write how the response ended; return the last event."""
        note = self.reply.note
        usage = {
            "input_tokens": note.prompt_tokens,
            "input_tokens_details": {"cached_tokens": note.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": note.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": note.reasoning_tokens},
            "total_tokens": note.prompt_tokens + note.completion_tokens,
        }
        if status == "completed":
            return self._now(status, usage=usage, completed_at=int(time.time()))
        return self._now(status, usage=usage, incomplete_details={"reason": "max_output_tokens"})

    def _now(self, what: str, status: str = "", **own: object) -> bytes:
        """Write the response as it is now, with what was asked for; return the event that tells of it."""
        reply, params = self.reply, self.reply.requests[0].params
        names = {*_REPEATED, "user"}  # which is no null
        asked = {key: value for key, value in self.values.items() if key in names and value is not None}
        asked |= {key: {**part, **asked[key]} for key, part in _PARTS.items() if key in asked}
        if (form := asked.get("text", {}).get("format") or {}).get("type") == "json_schema":
            asked["text"]["format"] = {"name": "schema", "schema": {}, **form}
        if tools := asked.get("tools"):
            unsaid = {"function": {"strict": False, "parameters": None}, "custom": {}}
            asked["tools"] = [{**unsaid[tool["type"]], **tool} for tool in tools if tool["type"] in CALLED]
        about = {"id": reply.response_id, "object": "response", "created_at": reply.created_unix_s}
        sampled = {"model": reply.model, "temperature": params.temperature, "top_p": params.top_p}
        ending = dict.fromkeys(("completed_at", "error", "incomplete_details"))
        state = {"status": status or what, "output": self.output, "service_tier": "default"}
        self.response = {**about, **state, **sampled, **_REPEATED, **asked, **ending, **own}
        return self._event(what, response=self.response)


def _input_of(arguments: str) -> str:
    """Return the text that a call of a custom tool holds; of a call that was cut off, what there is of its JSON."""
    with suppress(msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(arguments, type=dict[str, str]).get("input", arguments)
    return arguments
