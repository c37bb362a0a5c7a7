"""POST /v1/chat/completions: messages through the model's chat template, whole or streamed."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import RequestError
from ridgeline.core.params import MAX_LOGPROBS
from ridgeline.core.step import TokenLogprob
from ridgeline.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from ridgeline.engine.request import Request
from ridgeline.server.body import read_json
from ridgeline.server.openai.fields import include_usage, refuse_unsupported, sampling_params, with_parameters
from ridgeline.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from ridgeline.server.openai.protocol import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
)
from ridgeline.server.openai.responses import Reply, end, respond
from ridgeline.server.openai.structured import blamed_on, field_of
from ridgeline.server.service import Service, note_of
from ridgeline.server.sse import event

_DECODER = msgspec.json.Decoder(with_parameters(ChatRequest))


async def create_chat_completion(service: Service, http: HttpRequest) -> Response:
    """Serve /v1/chat/completions. Raises what errors.py maps."""
    service.engine.require_room()
    body = await read_json(http, _DECODER, service.settings.max_body_bytes)
    chat = await asyncio.to_thread(_prepare, service, body)
    return await respond(chat, Reply(service, [chat.request], note_of(http)), http, stream=bool(body.stream))


def _prepare(service: Service, body: ChatRequest) -> "_Chat":
    """Check everything and compute the prompt's tokens, in a worker thread. Raises RequestError."""
    model = service.require_model(body.model)
    refuse_unsupported(body)
    usage_chunk = include_usage(body)
    text = rendered(service, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    generation = service.info.generation
    prompt_ids = service.encode(text, add_special_tokens=False)
    params = sampling_params(
        body,
        generation,
        max_tokens=_max_tokens(body, generation.max_new_tokens, service.info.max_model_len - len(prompt_ids)),
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    chat_id = f"chatcmpl-{uuid.uuid4().hex}"
    with blamed_on(field_of(body)):
        request = service.intake.request(
            prompt_ids,
            params,
            request_id=chat_id,
            priority=body.priority or 0,
            deadline_s=service.settings.request_timeout_s,
            adapter=service.adapter_of(model),
            prediction=None if body.prediction is None else _text(body.prediction.content, "prediction.content"),
        )
    return _Chat(model, int(time.time()), body, request, TokenNames(service.tokenizer), usage_chunk)


def rendered(
    service: Service,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    variables: Mapping[str, object] | None,
) -> str:
    """Return the prompt that the model's chat template makes of a conversation. Raises RequestError."""
    if service.chat_template is None:
        raise RequestError(
            "this model has no chat template: start the server with --chat-template FILE, or use /v1/completions",
            param="messages",
        )
    if not messages:
        raise RequestError("messages is empty: give at least one", param="messages")
    return service.chat_template.render(
        [_message(message, f"messages[{index}].") for index, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt is not False,
        variables=variables,
    )


def _message(message: ChatMessage, where: str) -> Mapping[str, object]:
    """Convert a message for templates: text content, and `system` for what OpenAI now calls `developer`."""
    refuse_unsupported(message, where)
    if message.role in ("tool", "function"):
        raise RequestError(f"{where}role {message.role!r} is not supported: there are no tools", param=f"{where}role")
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}content is missing", param=f"{where}content")
    role = "system" if message.role == "developer" else message.role
    content = {"role": role, "content": _text(message.content or "", f"{where}content")}
    return content if message.name is None else content | {"name": message.name}


def _text(content: str | list[dict[str, object]], where: str) -> str:
    """Join text parts by line breaks, as other servers do for templates that take plain text."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text")
        if part.get("type") != "text":
            kind = str(part.get("type"))[:40]
            raise RequestError(f"{where}: a part of type {kind!r} is not supported, only text", param=where)
        if not isinstance(text, str):
            raise RequestError(f"{where}: a text part has a type and a text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _max_tokens(body: ChatRequest, default: int | None, room: int) -> int:
    """Return what is asked for, else the model's own default, as far as the context has room."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError("max_tokens is the old name of max_completion_tokens: give one", param="max_tokens")
    asked = old if new is None else new
    return asked if asked is not None else max(1, room if default is None else min(default, room))


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}", param="top_logprobs"
        )
    return (body.top_logprobs or 0) if body.logprobs else None


@dataclass(frozen=True, slots=True)
class _Chat:
    """A checked request, and how its outputs are written."""

    model: str
    created_unix_s: int
    body: ChatRequest
    request: Request
    names: TokenNames
    usage_chunk: bool

    def whole(self, reply: Reply, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the response."""
        (output,) = outputs
        message = ChatBody(
            id=self.request.request_id,
            created=self.created_unix_s,
            model=self.model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=reply.usage,
        )
        if self.body.return_token_ids:
            message.prompt_token_ids = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            message.prompt_logprobs = prompt_logprobs(self.names, output.prompt_logprobs or [None])
        return msgspec.json.encode(message)

    async def events(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream: each output's role once, then one for each delta with tokens."""
        opened: set[int] = set()
        async with aclosing(reply.deltas()) as deltas:
            async for _, delta in deltas:
                if not delta.token_ids and delta.finish is None:
                    continue
                opening = b""
                if delta.index not in opened:
                    opened.add(delta.index)
                    opening = event(self._opening(delta.index))
                yield opening + event(self._chunk([self._chunk_choice(delta)]))
        if self.usage_chunk:
            message = self._chunk([])
            message.usage = reply.usage
            yield event(message)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        choice = ChatChoice(
            index=completion.index,
            message=AssistantMessage(content=completion.text),
            logprobs=self._logprobs(completion.logprobs or []),
            token_ids=completion.token_ids if self.body.return_token_ids else UNSET,
        )
        end(choice, completion.finish_reason, completion.stop_reason, completion.timings)
        return choice

    def _opening(self, index: int) -> ChatChunk:
        chunk = self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))])
        if self.body.return_token_ids:
            chunk.prompt_token_ids = list(self.request.prompt_ids)
        return chunk

    def _chunk_choice(self, delta: OutputDelta) -> ChatChunkChoice:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text) if delta.text or delta.finish is None else ChatDelta(),
            logprobs=self._logprobs(delta.logprobs) if delta.token_ids else None,
            token_ids=delta.token_ids if self.body.return_token_ids else UNSET,
        )
        if delta.finish is not None:
            end(choice, delta.finish.reason, delta.finish.stop_reason, delta.finish.timings)
        return choice

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.request.request_id,
            created=self.created_unix_s,
            model=self.model,
            choices=choices,
            usage=None if self.usage_chunk else UNSET,
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self.names, logprobs) if self.body.logprobs else None
