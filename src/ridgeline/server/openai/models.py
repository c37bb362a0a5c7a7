"""GET /v1/models and /v1/models/{id}."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ridgeline.server.service import Service


async def list_models(service: Service, http: Request) -> Response:
    """List every name under which the model is served."""
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.model_names]})


async def retrieve_model(service: Service, http: Request) -> Response:
    """Return one of the served models. Raises ModelNotFoundError."""
    return JSONResponse(_model(service, service.require_model(str(http.path_params["model_id"]))))


def _model(service: Service, name: str) -> Mapping[str, object]:
    """Describe a served model; `max_model_len` is an extension."""
    about = {"id": name, "object": "model", "created": service.created_unix_s, "owned_by": "ridgeline"}
    return {**about, "max_model_len": service.info.max_model_len}
