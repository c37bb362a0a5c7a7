"""GET /openapi.json: every endpoint of the app, with the types by which bodies are decoded and encoded."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.core.options import table
from ridgeline.core.params import SamplingParams
from ridgeline.server.anthropic.protocol import MessagesRequest, PromptFields
from ridgeline.server.batch.batches import BatchRequest
from ridgeline.server.batch.files import FILE_FORM
from ridgeline.server.errors import ErrorBody
from ridgeline.server.openai.chat import CHAT_BODY
from ridgeline.server.openai.completions import COMPLETION_BODY
from ridgeline.server.openai.embeddings import EmbeddingRequest
from ridgeline.server.openai.items import RESPONSES_BODY
from ridgeline.server.openai.protocol import ChatChoice, CompletionBody, CompletionChoice, SamplingFields
from ridgeline.server.openai.scores import ClassifyRequest, RerankRequest, ScoreRequest
from ridgeline.server.openai.tokens import DetokenizeRequest, TokenizeRequest

_REF, _TEXT = "#/components/schemas/{name}", {"schema": {"type": "string"}}
_REFUSALS = (400, 401, 403, 404, 408, 413, 415, 421, 429, 431, 500, 503, 529)
_STREAMS = ("/completions", "/chat/completions", "/responses", "/messages")
_BODIES: Mapping[str, Any] = {  # by path, less /v1
    "/completions": COMPLETION_BODY,
    "/chat/completions": CHAT_BODY,
    "/responses": RESPONSES_BODY,
    "/embeddings": EmbeddingRequest,
    "/batches": BatchRequest,
    "/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/score": ScoreRequest,
    "/classify": ClassifyRequest,
    "/messages": MessagesRequest,
    "/messages/count_tokens": PromptFields,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/explain/plan": list[str],
}


async def openapi(http: Request) -> Response:
    """Serve /openapi.json, OpenAPI 3.1: all but the pages."""
    kinds = [*_BODIES.values(), ErrorBody, CompletionChoice, ChatChoice, CompletionBody]
    (*bodies, error, text, chat, reply), schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas["CompletionBody"]["properties"]["choices"]["items"] = {"anyOf": [text, chat]}
    for kind in (COMPLETION_BODY, CHAT_BODY, RESPONSES_BODY):
        _narrow(schemas[kind.__name__]["properties"], kind)
    del schemas["ResponsesRequest"]["additionalProperties"]  # it ignores what it does not know
    taken = {path: {"requestBody": {"required": True, **_content(body)}} for path, body in zip(_BODIES, bodies)}
    taken["/files"] = {"requestBody": {"required": True, **_content(FILE_FORM, "multipart/form-data")}}
    paths: dict[str, Any] = {}
    for route in http.app.routes:
        if isinstance(route, Route) and not route.path.startswith("/ui"):
            path, methods = route.path_format.removeprefix("/v1"), (route.methods or set()) - {"HEAD"}
            operation = _operation(route, path, reply if path.endswith("completions") else {})
            operation |= taken.get(path, {}) if "POST" in methods else {}
            paths.setdefault(route.path_format, {}).update({method.lower(): operation for method in methods})
    told = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    refusals = {"Error": {"description": "", **_content(told)}, "AnthropicError": {"description": "", **_content({})}}
    components, about = (
        {"schemas": schemas, "responses": refusals},
        {"title": "Ridgeline", "version": version("ridgeline")},
    )
    document = {"openapi": "3.1.0", "info": about, "paths": paths, "components": components}
    return Response(msgspec.json.encode(document), media_type="application/json")


def _operation(route: Route, path: str, reply: object) -> dict[str, Any]:
    other = {"/metrics": "text/plain", "/files/{file_id}/content": "application/jsonl"}
    content = _content(reply, other.get(path, "application/json"))["content"]
    content |= {"text/event-stream": {}} if path in _STREAMS else {}
    refused = {"$ref": f"#/components/responses/{'Anthropic' if path.startswith('/messages') else ''}Error"}
    parameters = [{"name": name, "in": "path", "required": True, **_TEXT} for name in route.param_convertors]
    responses = {"200": {"description": "", "content": content}, **dict.fromkeys(map(str, _REFUSALS), refused)}
    return {"parameters": parameters, "responses": responses}


def _content(schema: object, media_type: str = "application/json") -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


def _narrow(properties: dict[str, Any], kind: type[SamplingFields]) -> None:
    """Say what numbers SamplingParams allows, and which values of a field ask for nothing that is not there."""
    for row in table(SamplingParams):
        bounds = {"minimum": row.option.low, "maximum": row.option.high, "exclusiveMinimum": row.option.above}
        if row.part is None and "anyOf" in properties.get(row.field, ()):
            properties[row.field]["anyOf"][0] |= {name: bound for name, bound in bounds.items() if bound is not None}
    properties |= {name: {"enum": [None, *values]} for name, values in kind.NEUTRAL.items()}
