"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.server.openai.protocol import ModelBody, ModelList
from ridgeline.server.service import Service


async def list_models(service: Service, http: Request) -> Response:
    """List every name under which the model is served."""
    return _json(ModelList(data=[_model(service, name) for name in service.model_names]))


async def retrieve_model(service: Service, http: Request) -> Response:
    """Return one of the served models. Raises ModelNotFoundError."""
    return _json(_model(service, service.require_model(str(http.path_params["model_id"]))))


def _model(service: Service, name: str) -> ModelBody:
    return ModelBody(id=name, created=service.created_unix_s, max_model_len=service.info.max_model_len)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
