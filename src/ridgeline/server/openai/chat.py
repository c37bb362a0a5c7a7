"""POST /v1/chat/completions: messages through the model's chat template, whole or streamed."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import RequestError
from ridgeline.core.params import MAX_LOGPROBS, StructuredOutputsParams
from ridgeline.core.step import TokenLogprob
from ridgeline.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from ridgeline.server.openai.beams import beam_penalty
from ridgeline.server.openai.dialogue import dialogue_of, text_of
from ridgeline.server.openai.fields import (
    explains,
    max_prompt_tokens,
    refuse_unsupported,
    sampling_params,
    usage_chunks,
    with_parameters,
)
from ridgeline.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from ridgeline.server.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    CompletionBody,
    FinishName,
    FunctionCall,
    ToolCall,
    ToolChoice,
)
from ridgeline.server.openai.reply import Reply, end, respond
from ridgeline.server.openai.structured import blamed_on, field_of, structured_outputs
from ridgeline.server.service import RequestNote, Service, note_of
from ridgeline.server.sse import event
from ridgeline.text.outputs import OutputReader
from ridgeline.text.tools.reader import Piece

CHAT_BODY = with_parameters(ChatRequest)


async def create_chat_completion(service: Service, http: HttpRequest, body: ChatRequest) -> Response:
    """Serve /v1/chat/completions. Raises what errors.py maps."""
    note = note_of(http)
    service.reserve(note, body.n or 1, body.cache_salt)
    chat = await asyncio.to_thread(_prepare, service, note, body)
    return await respond(chat, http, stream=bool(body.stream))


def _prepare(service: Service, note: RequestNote, body: ChatRequest) -> "_Chat":
    most = service.info.generation.max_new_tokens or service.info.max_model_len
    if not body.stream and (num_logprobs := _num_logprobs(body)) is not None:
        most = min(most, service.settings.max_response_logprobs // ((body.n or 1) * (1 + num_logprobs)))
    max_tokens = partial(_max_tokens, body, most)
    reply = prepared(service, note, body, f"chatcmpl-{uuid.uuid4().hex}", max_tokens)
    return _Chat(reply, body, TokenNames(service.tokenizer, as_ids=body.return_tokens_as_token_ids))


def prepared(
    service: Service, note: RequestNote, body: ChatRequest, chat_id: str, max_tokens: Callable[[int], int]
) -> Reply:
    """Check everything and compute the prompt's tokens, in a worker thread; `max_tokens` is told the room behind."""
    model = service.require_model(body.model)
    refuse_unsupported(body)
    usage = usage_chunks(body)
    own, named = structured_outputs(body), field_of(body)
    dialogue = dialogue_of(service, body, constrained=own is not None)
    last = max_prompt_tokens(body.truncate_prompt_tokens, service, body.max_completion_tokens or body.max_tokens)
    prompt_ids = service.encode(dialogue.prompt, add_special_tokens=False, last=last)
    params = sampling_params(
        body,
        service,
        max_tokens=max_tokens(service.info.max_model_len - len(prompt_ids)),
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    if dialogue.calls is not None:
        if own is not None and body.response_format is None:
            raise RequestError(f"{named} and tool_choice both say what the output must be", param="tool_choice")
        own, named = StructuredOutputsParams(grammar=dialogue.calls), "tools"
    if own is not None:
        params = replace(params, structured_outputs=replace(own, preamble=dialogue.preamble))
    with blamed_on(named):
        request = service.intake.request(
            prompt_ids,
            params,
            request_id=chat_id,
            priority=body.priority or 0,
            deadline_s=service.settings.request_timeout_s,
            adapter=service.adapter_of(model),
            prediction=None if body.prediction is None else text_of(body.prediction.content, "prediction.content"),
            shown=dialogue.form.markers,
        )
    request = replace(request, length_penalty=beam_penalty(body, params))
    of = service, note, chat_id, model, [request], usage, dialogue.form, named
    return Reply(*of, explains=explains(body, service))


def _max_tokens(body: ChatRequest, default: int, room: int) -> int:
    """Return what is asked for, else a default, as far as the context has room."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError("max_tokens is the old name of max_completion_tokens: give one", param="max_tokens")
    asked = old if new is None else new
    return asked if asked is not None else max(1, min(default, room))


def _num_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if not 0 <= (top or 0) <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", param="top_logprobs")
    return (top or 0) if body.logprobs else None


@dataclass(frozen=True, slots=True)
class _Chat:
    """A checked request, and how its outputs are written."""

    reply: Reply
    body: ChatRequest
    names: TokenNames

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the response."""
        (output,) = outputs
        message = self.reply.whole("chat.completion", [self._choice(completion) for completion in output.outputs])
        if self.body.return_token_ids:
            message.prompt_token_ids = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            message.prompt_logprobs = prompt_logprobs(self.names, output.prompt_logprobs or [None])
        return msgspec.json.encode(message)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream: each output's role once, then what each delta with tokens adds."""
        readers: dict[int, OutputReader] = {}
        only_text = not (self.body.logprobs or self.body.return_token_ids or self.reply.usage_chunks == "each")
        async with aclosing(self.reply.deltas()) as deltas:
            async for _, delta in deltas:
                opening = b""
                reader = readers.get(delta.index)
                if reader is None:
                    reader = readers[delta.index] = OutputReader(self.reply.form)
                    opening = event(self._opening(delta.index))
                pieces = reader.feed(delta.text, last=delta.finish is not None)
                if only_text and delta.finish is None and [piece.kind for piece in pieces] == ["content"]:
                    choice_of, text = partial(_text_choice, delta.index), pieces[0].text
                    yield opening + self.reply.text_event("chat.completion.chunk", delta.index, text, choice_of)
                    continue
                choices = self._added(delta, reader, pieces)
                if chunks := opening + b"".join(event(self._chunk(choice)) for choice in choices):
                    yield chunks
        await self.reply.explain()
        if self.reply.usage_chunks or self.reply.explains:
            yield event(self._chunk())

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        reader = OutputReader(self.reply.form)
        texts: dict[str, str] = {}
        calls: list[ToolCall] = []
        for piece in reader.feed(completion.text, last=True):
            if piece.kind == "call":
                calls.append(ToolCall(id=piece.call_id, type="function", function=FunctionCall(name=piece.text)))
            elif piece.kind == "arguments":
                calls[-1].function.arguments += piece.text
            else:
                texts[piece.kind] = texts.get(piece.kind, "") + piece.text
        choice = ChatChoice(
            index=completion.index,
            message=AssistantMessage(
                content=texts.get("content", None if calls or "reasoning" in texts else ""),
                reasoning_content=texts.get("reasoning", UNSET),
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(completion.logprobs or []),
            token_ids=completion.token_ids if self.body.return_token_ids else UNSET,
        )
        end(choice, completion.finish_reason, completion.stop_reason, completion.timings)
        choice.finish_reason = self._reason(choice, reader)
        return choice

    def _opening(self, index: int) -> CompletionBody:
        chunk = self._chunk(ChatChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        if self.body.return_token_ids:
            chunk.prompt_token_ids = list(self.reply.requests[0].prompt_ids)
        return chunk

    def _added(self, delta: OutputDelta, reader: OutputReader, pieces: Sequence[Piece]) -> list[ChatChoice]:
        """Return a part of the choice for each piece of its output; what belongs to the tokens is with the last."""
        if not pieces and delta.finish is None and not (self.body.logprobs or self.body.return_token_ids):
            return []  # what came may be a part of a mark
        parts = [_delta(piece) for piece in pieces] or [ChatDelta()]
        choices = [ChatChoice(index=delta.index, delta=part) for part in parts]
        last = choices[-1]
        last.logprobs = self._logprobs(delta.logprobs) if delta.token_ids else None
        last.token_ids = delta.token_ids if self.body.return_token_ids else UNSET
        if (finish := delta.finish) is not None:
            end(last, finish.reason, finish.stop_reason, finish.timings)
            last.finish_reason = self._reason(last, reader)
        return choices

    def _reason(self, choice: ChatChoice, reader: OutputReader) -> FinishName | None:
        """Return why the output ended: with calls, but as OpenAI says it, not where the caller named the tool."""
        asked = self.body.tool_choice
        is_named = isinstance(asked, ToolChoice) and asked.type == "function"
        calls = reader.num_calls and choice.finish_reason == "stop" and not is_named
        return "tool_calls" if calls else choice.finish_reason

    def _chunk(self, *choices: ChatChoice) -> CompletionBody:
        return self.reply.chunk("chat.completion.chunk", *choices)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self.names, logprobs) if self.body.logprobs else None


def _text_choice(index: int, text: str) -> ChatChoice:
    return ChatChoice(index=index, delta=ChatDelta(content=text))


def _delta(piece: Piece) -> ChatDelta:
    """Return what a piece of an output adds to the message."""
    match piece.kind:
        case "content":
            return ChatDelta(content=piece.text)
        case "reasoning":
            return ChatDelta(reasoning_content=piece.text)
        case "call":
            function = FunctionCall(name=piece.text)
            call = ToolCall(index=piece.call, id=piece.call_id, type="function", function=function)
        case "arguments":
            call = ToolCall(index=piece.call, function=FunctionCall(arguments=piece.text))
    return ChatDelta(tool_calls=[call])
