"""GET /openapi.json: every endpoint of the app, with the types by which bodies are decoded and encoded."""

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.core.options import table
from ridgeline.core.params import SamplingParams
from ridgeline.server.batch.files import FILE_FORM
from ridgeline.server.body import Post
from ridgeline.server.errors import ErrorBody
from ridgeline.server.openai.protocol import ChatChoice, CompletionBody, CompletionChoice, SamplingFields

_REF, _TEXT = "#/components/schemas/{name}", {"schema": {"type": "string"}}
_REFUSALS = (400, 401, 403, 404, 408, 413, 415, 421, 429, 431, 500, 503, 529)
_STREAMS = ("/completions", "/chat/completions", "/responses", "/messages")


async def openapi(http: Request) -> Response:
    """Serve /openapi.json, OpenAPI 3.1: all but the pages."""
    routes = [route for route in http.app.routes if isinstance(route, Route) and not route.path.startswith("/ui")]
    posts = {route.path: route.body for route in routes if isinstance(route, Post)}
    kinds = [*posts.values(), ErrorBody, CompletionChoice, ChatChoice, CompletionBody]
    (*bodies, error, text, chat, reply), schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas["CompletionBody"]["properties"]["choices"]["items"] = {"anyOf": [text, chat]}
    for kind in posts.values():
        if isinstance(kind, type) and issubclass(kind, SamplingFields):
            _narrow(schemas[kind.__name__]["properties"], kind)
    taken = {path: {"requestBody": {"required": True, **_content(body)}} for path, body in zip(posts, bodies)}
    taken["/v1/files"] = {"requestBody": {"required": True, **_content(FILE_FORM, "multipart/form-data")}}
    paths: dict[str, Any] = {}
    for route in routes:
        path, methods = route.path_format.removeprefix("/v1"), (route.methods or set()) - {"HEAD"}
        operation = _operation(route, path, reply if path.endswith("completions") else {})
        operation |= taken.get(route.path, {}) if "POST" in methods else {}
        paths.setdefault(route.path_format, {}).update({method.lower(): operation for method in methods})
    told = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    refusals = {"Error": {"description": "", **_content(told)}, "AnthropicError": {"description": "", **_content({})}}
    components = {"schemas": schemas, "responses": refusals}
    about = {"title": "Ridgeline", "version": version("ridgeline")}
    document = {"openapi": "3.1.0", "info": about, "paths": paths, "components": components}
    return Response(msgspec.json.encode(document), media_type="application/json")


def _operation(route: Route, path: str, reply: object) -> dict[str, Any]:
    other = {"/metrics": "text/plain", "/files/{file_id}/content": "application/jsonl"}
    other |= {"/load_lora_adapter": "text/plain", "/unload_lora_adapter": "text/plain"}
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
