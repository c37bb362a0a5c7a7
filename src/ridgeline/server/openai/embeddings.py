"""POST /v1/embeddings: a vector for each text or list of token ids, of a model that was loaded to embed."""

import asyncio
import base64
import uuid
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import RequestError
from ridgeline.core.params import PoolingParams
from ridgeline.core.step import Vectors
from ridgeline.decoding.request import Request
from ridgeline.engine.client import embed
from ridgeline.server.openai.completions import num_prompts, split_prompts
from ridgeline.server.openai.fields import max_prompt_tokens
from ridgeline.server.service import Service, note_of
from ridgeline.server.sse import while_connected

MAX_TEXTS = 2048  # of a request, as OpenAI has it


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. `dimensions`: this many of the first ones, for models that were trained for it.

    `truncate_prompt_tokens`: this many of each input, its first, special tokens with them; -1: as the context has room.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    user: str | None = None
    priority: int | None = None


async def create_embedding(service: Service, http: HttpRequest, body: EmbeddingRequest) -> Response:
    """Serve /v1/embeddings. Raises what errors.py maps."""
    if service.info.labels:
        raise RequestError("this model classifies texts: use /classify, /v1/score or /v1/rerank", param="model")
    _require_dimensions(service, body.dimensions)
    most = max_prompt_tokens(body.truncate_prompt_tokens, service, 0)
    vectors = await embedded(service, http, body.input, body.priority, "input", most, MAX_TEXTS)
    model, num_tokens = service.require_model(body.model), note_of(http).prompt_tokens
    return Response(await asyncio.to_thread(_write, body, model, vectors, num_tokens), media_type="application/json")


async def embedded(
    service: Service,
    http: HttpRequest,
    prompts: str | list[str | int | list[int]],
    priority: int | None,
    field: str,
    most: int | None = None,
    least: int = 0,
) -> list[Vectors]:
    """Return a vector for each prompt of a request, which has them in `field`. Raises what errors.py maps.

    `most`: tokens of each, the first remain; `least`: so many prompts may always be asked for.
    """
    service.reserve_texts(note_of(http), num_prompts(prompts))

    def encoded() -> list[list[int]]:
        return [service.encode_first(text, most) for text in split_prompts(prompts, service, least)]

    return await pooled(service, http, encoded, priority, field)


async def pooled(
    service: Service, http: HttpRequest, encoded: Callable[[], list[list[int]]], priority: int | None, field: str
) -> list[Vectors]:
    """Return a vector for each of what `encoded` returns, in a worker thread. Raises what errors.py maps."""
    note = note_of(http)
    requests = await asyncio.to_thread(_requests, service, encoded, priority or 0, field)
    vectors = await while_connected(http.receive, embed(service.engine, *service.admit(note, requests, whole=True)))
    note.prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    service.metrics.prompt_tokens.inc(note.prompt_tokens)
    return vectors


def _requests(service: Service, encoded: Callable[[], list[list[int]]], priority: int, field: str) -> list[Request]:
    """Check everything and compute the tokens, in a worker thread. Raises RequestError."""
    if not service.info.embeds:
        raise RequestError(
            "this model was loaded to generate: start the server with --task embed for embeddings", param="model"
        )
    pooling = PoolingParams(pooling=service.info.pooling, normalize=not service.info.labels)
    try:
        return [
            service.intake.embedding(
                token_ids,
                pooling,
                priority=priority,
                deadline_s=service.settings.request_timeout_s,
                request_id=f"embd-{uuid.uuid4().hex}",
            )
            for token_ids in encoded()
        ]
    except RequestError as error:
        if error.param not in ("prompt", "messages"):
            raise
        raise RequestError(str(error).replace("prompt", field), param=field, code=error.code) from error


def _write(body: EmbeddingRequest, model: str, vectors: list[Vectors], num_tokens: int) -> bytes:
    encoded = [_encoded(_shortened(v_H, body.dimensions), body.encoding_format) for v_H in vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _require_dimensions(service: Service, asked: int | None) -> None:
    """Raise RequestError for less dimensions than a model's first ones mean something by themselves."""
    if asked is None:
        return
    if asked < 1:
        raise RequestError(f"dimensions must be at least 1, got {asked}", param="dimensions")
    if (known := service.info.dimensions) is None:
        why = "this model's config.json does not say that its first dimensions mean something by themselves"
        fix = 'leave dimensions out; if it was trained so, add "is_matryoshka": true there'
        raise RequestError(f"{why}: {fix}", param="dimensions")
    if known and asked not in known:
        raise RequestError(f"dimensions must be one of {', '.join(map(str, known))}, got {asked}", param="dimensions")


def _shortened(vector_H: Vectors, dimensions: int | None) -> Vectors:
    """Return the first dimensions, again of length 1."""
    if dimensions is None:
        return vector_H
    if dimensions > len(vector_H):
        raise RequestError(
            f"dimensions must be at most {len(vector_H)}, the size of this model's vectors, got {dimensions}",
            param="dimensions",
        )
    cut_D = vector_H[:dimensions]
    return cut_D / max(float(np.linalg.norm(cut_D)), 1e-12)


def _encoded(vector_D: Vectors, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
    return vector_D.tolist()
