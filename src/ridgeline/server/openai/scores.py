"""POST /v1/rerank and /v1/score: how close texts are, by the cosine of their vectors."""

import time
import uuid
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ridgeline.core.errors import RequestError
from ridgeline.server.body import read_json
from ridgeline.server.openai.embeddings import embedded
from ridgeline.server.service import Service, note_of


class Document(msgspec.Struct):
    """A text as Jina's clients send it."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank. `top_n`: this many of the closest documents; without it, or with 0, all."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    user: str | None = None
    priority: int | None = None


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score. A text is compared with each of the other side; two lists, of the same length, in pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    user: str | None = None
    priority: int | None = None


_RERANK, _SCORE = msgspec.json.Decoder(RerankRequest), msgspec.json.Decoder(ScoreRequest)


async def rerank(service: Service, http: HttpRequest) -> Response:
    """Sort documents by how close they are to a query. Raises what errors.py maps."""
    body = await read_json(http, _RERANK)
    model, top_n = service.require_model(body.model), len(body.documents) if not body.top_n else body.top_n
    if not body.documents or top_n < 0:
        wrong = "documents" if not body.documents else "top_n"
        raise RequestError("documents must be one or more, and top_n not negative", param=wrong)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    vectors = await embedded(service, http, [body.query, *texts], body.priority, "documents")
    scores = [float(np.dot(vectors[0], each_H)) for each_H in vectors[1:]]
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]:
        document = {} if body.return_documents is False else {"document": {"text": texts[index]}}
        results.append({"index": index, "relevance_score": scores[index], **document})
    return _response(http, f"rerank-{uuid.uuid4().hex}", model, results=results)


async def score(service: Service, http: HttpRequest) -> Response:
    """Return the scores of pairs of texts. Raises what errors.py maps."""
    body = await read_json(http, _SCORE)
    model = service.require_model(body.model)
    first, second = ([side] if isinstance(side, str) else side for side in (body.text_1, body.text_2))
    if not first or not second or (len(first) != len(second) and 1 not in (len(first), len(second))):
        words = (
            f"text_1 has {len(first)} and text_2 {len(second)}: give one text, or as many as there are on both sides"
        )
        raise RequestError(words, param="text_2")
    vectors = await embedded(service, http, [*first, *second], body.priority, "text_1")
    lefts, rights = vectors[: len(first)], vectors[len(first) :]
    count = max(len(first), len(second))
    pairs = zip(lefts * (count // len(lefts)), rights * (count // len(rights)))
    scores = [float(np.dot(left_H, right_H)) for left_H, right_H in pairs]
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    return _response(http, f"score-{uuid.uuid4().hex}", model, object="list", created=int(time.time()), data=data)


def _response(http: HttpRequest, name: str, model: str, **fields: object) -> Response:
    num_tokens = note_of(http).prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse({"id": name, "model": model, **fields, "usage": usage})
