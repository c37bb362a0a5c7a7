"""POST /rerank, in the shapes of Jina and of Cohere, and /score: how close texts are; /classify: which label fits one.

A model with a head of one label reads two texts together, and its logit's sigmoid is the score; of a model that embeds
it is the cosine of their vectors.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ridgeline.core.errors import RequestError
from ridgeline.server.openai.embeddings import MAX_TEXTS, embedded, pooled
from ridgeline.server.openai.fields import max_prompt_tokens
from ridgeline.server.service import Service, note_of
from ridgeline.text.tokenizer import Tokenizer

T = TypeVar("T")


class Document(msgspec.Struct):
    """A text as Jina's clients send it."""

    text: str


class PooledRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Has the fields of all bodies here. `use_activation` false: logits instead of scores.

    `truncate_prompt_tokens`: of each text, or of a pair that is read together, as for embeddings.
    """

    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    user: str | None = None
    priority: int | None = None


class RerankRequest(PooledRequest, kw_only=True):
    """POST /rerank. `top_n`: this many of the closest documents; without it, or with 0, all.

    A document is cut to `max_tokens_per_doc`.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ScoreRequest(PooledRequest, kw_only=True):
    """POST /score. A text is compared with each of the other side; two lists, of the same length, in pairs."""

    text_1: str | list[str]
    text_2: str | list[str]


class ClassifyRequest(PooledRequest, kw_only=True):
    """POST /classify: texts, or their token ids."""

    input: str | list[str | int | list[int]]


async def rerank(service: Service, http: HttpRequest, body: RerankRequest) -> Response:
    """Sort documents by how close they are to a query. Raises what errors.py maps."""
    is_cohere = http.scope["path"] == "/v2/rerank"
    model, top_n = service.require_model(body.model), len(body.documents) if not body.top_n else body.top_n
    if not body.documents or top_n < 0:
        wrong = "documents" if not body.documents else "top_n"
        raise RequestError("documents must be one or more, and top_n not negative", param=wrong)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    read = texts
    if (most := body.max_tokens_per_doc) is not None and (tokenizer := service.tokenizer) is not None:
        read = await asyncio.to_thread(lambda: [_beginning(tokenizer, text, most) for text in texts])
    scores = await _scores(service, http, [body.query], read, body, "documents")
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]:
        shown = body.return_documents is not False and not is_cohere
        document = {"document": {"text": texts[index]}} if shown else {}
        results.append({"index": index, "relevance_score": scores[index], **document})
    if is_cohere:
        tokens = {"input_tokens": note_of(http).prompt_tokens}
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens}
        return JSONResponse({"id": str(uuid.uuid4()), "results": results, "meta": meta})
    return _response(http, f"rerank-{uuid.uuid4().hex}", model, results=results)


async def score(service: Service, http: HttpRequest, body: ScoreRequest) -> Response:
    """Return the scores of pairs of texts. Raises what errors.py maps."""
    model = service.require_model(body.model)
    first, second = ([side] if isinstance(side, str) else side for side in (body.text_1, body.text_2))
    if not first or not second or (len(first) != len(second) and 1 not in (len(first), len(second))):
        words = (
            f"text_1 has {len(first)} and text_2 {len(second)}: give one text, or as many as there are on both sides"
        )
        raise RequestError(words, param="text_2")
    scores = await _scores(service, http, first, second, body, "text_1")
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    return _response(http, f"score-{uuid.uuid4().hex}", model, object="list", created=int(time.time()), data=data)


async def classify(service: Service, http: HttpRequest, body: ClassifyRequest) -> Response:
    """Return of each text how likely each label is: softmax, of one label the sigmoid. Raises what errors.py maps."""
    model, labels = service.require_model(body.model), service.info.labels
    if not labels:
        raise RequestError("this model has no labels: /classify is for checkpoints that classify", param="model")
    data: list[dict[str, Any]] = []
    most = max_prompt_tokens(body.truncate_prompt_tokens, service, 0)
    for index, logits_L in enumerate(await embedded(service, http, body.input, body.priority, "input", most)):
        odds_L = np.exp(logits_L - logits_L.max())
        probs_L = odds_L / odds_L.sum() if len(labels) > 1 else [_sigmoid(logits_L[0])]
        shown = [float(x) for x in (logits_L if body.use_activation is False else probs_L)]
        likeliest = labels[int(logits_L.argmax())]
        data.append({"index": index, "label": likeliest, "probs": shown, "num_classes": len(labels)})
    return _response(http, f"classify-{uuid.uuid4().hex}", model, object="list", created=int(time.time()), data=data)


def _sigmoid(logit: float) -> float:
    return 0.5 + 0.5 * math.tanh(0.5 * float(logit))


def _beginning(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    places = tokenizer.encoding(text, add_special_tokens=False).offsets
    return text if len(places) <= num_tokens else text[: places[num_tokens - 1][1]]


async def _scores(
    service: Service, http: HttpRequest, first: list[str], second: list[str], body: PooledRequest, field: str
) -> list[float]:
    """Return the scores of pairs; a side of one text stands in each of them. Raises what errors.py maps."""
    num_labels, count = len(service.info.labels), max(len(first), len(second))

    def paired(lefts: list[T], rights: list[T]) -> Iterable[tuple[T, T]]:
        return zip(lefts * (count // len(lefts)), rights * (count // len(rights)))

    if count > (limit := max(MAX_TEXTS, service.settings.max_prompts)):
        raise RequestError(f"at most {limit} pairs in one request, got {count}", param=field)
    most = max_prompt_tokens(body.truncate_prompt_tokens, service, 0)
    if not num_labels:
        texts: list[str | int | list[int]] = [*first, *second]
        vectors = await embedded(service, http, texts, body.priority, field, most, len(texts))
        return [float(np.dot(*pair)) for pair in paired(vectors[: len(first)], vectors[len(first) :])]
    if num_labels > 1:
        raise RequestError(f"this model tells {num_labels} labels apart: a score needs a head of one", param="model")
    service.reserve_texts(note_of(http), count)

    def encoded() -> list[list[int]]:
        return [service.encode_pair(*pair, most) for pair in paired(first, second)]

    logits = await pooled(service, http, encoded, body.priority, field)
    return [float(x) if body.use_activation is False else _sigmoid(x) for (x,) in logits]


def _response(http: HttpRequest, name: str, model: str, **fields: object) -> Response:
    num_tokens = note_of(http).prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse({"id": name, "model": model, **fields, "usage": usage})
