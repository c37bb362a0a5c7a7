"""POST /tokenize, /detokenize and GET /tokenizer_info, as in vLLM: token ids of texts, text of ids, special tokens."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import RequestError
from ridgeline.server.openai.dialogue import rendered
from ridgeline.server.openai.protocol import ChatMessage, Tool
from ridgeline.server.service import Service


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds a text (`content` is llama.cpp's name) or a conversation; special tokens: by default with a text."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def tokenize(service: Service, http: HttpRequest, body: TokenizeRequest) -> Response:
    """Serve /tokenize. Raises what errors.py maps."""
    return Response(await asyncio.to_thread(_tokens, service, body), media_type="application/json")


async def detokenize(service: Service, http: HttpRequest, body: DetokenizeRequest) -> Response:
    """Serve /detokenize. Raises what errors.py maps."""
    return Response(await asyncio.to_thread(_text, service, body), media_type="application/json")


async def tokenizer_info(service: Service, http: HttpRequest) -> Response:
    """Return what a client that renders conversations by itself needs. Raises RequestError without a tokenizer."""
    special = service.require_tokenizer("tokenizer_info").special_tokens
    template = None if service.chat_template is None else service.chat_template.source
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": service.info.max_model_len}
    return Response(msgspec.json.encode({**about, **special, "chat_template": template}), media_type="application/json")


def _text(service: Service, body: DetokenizeRequest) -> bytes:
    service.require_model(body.model)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < service.info.vocab_size:
        raise RequestError(f"tokens must be from 0 to {service.info.vocab_size - 1}", param="tokens")
    tokenizer = service.require_tokenizer("model")
    return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _tokens(service: Service, body: TokenizeRequest) -> bytes:
    service.require_model(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"give one of prompt and messages, got {' and '.join(given) or 'none'}", param="prompt")
    tokenizer = service.require_tokenizer("prompt")
    if body.messages is not None:
        tools = [msgspec.to_builtins(tool) for tool in body.tools or ()] or None
        of = body.add_generation_prompt, body.chat_template_kwargs, tools, body.continue_final_message
        text = rendered(service, body.messages, *of)
        special = bool(body.add_special_tokens)
    else:
        text = body.prompt if body.prompt is not None else str(body.content)
        special = body.add_special_tokens is not False
    ids = service.encode(text, add_special_tokens=special) if text or special else []
    names = [tokenizer.token(token_id) or "" for token_id in ids] if body.return_token_strs else None
    about = {"count": len(ids), "max_model_len": service.info.max_model_len}
    return msgspec.json.encode({**about, "tokens": ids, "token_strs": names})
