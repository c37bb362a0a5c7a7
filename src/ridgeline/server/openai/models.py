"""GET /v1/models and /v1/models/{id}."""

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.server.body import json_response
from ridgeline.server.openai.protocol import ModelBody, ModelList
from ridgeline.server.service import Service


async def list_models(service: Service, http: Request) -> Response:
    """List every name under which the model is served."""
    return json_response(ModelList(data=[_model(service, name) for name in service.model_names]))


async def retrieve_model(service: Service, http: Request) -> Response:
    """Return one of the served models. Raises ModelNotFoundError."""
    return json_response(_model(service, service.require_model(str(http.path_params["model_id"]))))


def _model(service: Service, name: str) -> ModelBody:
    return ModelBody(id=name, created=service.created_unix_s, max_model_len=service.info.max_model_len)
