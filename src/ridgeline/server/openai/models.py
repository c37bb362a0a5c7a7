"""List models, in Anthropic's shape too, and load and unload adapters, as in vLLM."""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError
from ridgeline.server.service import Service, note_of


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Names an adapter; the number, which vLLM takes beside the name, says nothing here."""

    lora_name: str
    lora_int_id: int | None = None


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Names a folder of the server's machine; `load_inplace`: also in place of the adapter of that name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


async def list_models(service: Service, http: Request) -> Response:
    """List every name under which the model is served."""
    names = service.model_names
    data = [_model(service, http, name) for name in names]
    paged = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return JSONResponse({"data": data, **(paged if note_of(http).anthropic else {"object": "list"})})


async def retrieve_model(service: Service, http: Request) -> Response:
    """Return one of the served models. Raises ModelNotFoundError."""
    return JSONResponse(_model(service, http, service.require_model(str(http.path_params["model_id"]))))


async def change_adapters(service: Service, http: Request, body: LoadAdapterRequest | UnloadAdapterRequest) -> Response:
    """Load or unload an adapter, for the operator alone. Raises what errors.py maps."""
    name, adapters = body.lora_name, service.engine.adapters
    if note_of(http).client.salt:
        raise HTTPException(403, "adapters are the operator's: send the key of --api-key, not one of --api-key-file")
    if isinstance(body, UnloadAdapterRequest):
        adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
    if not name.strip() or name in service.own_names:
        raise RequestError(f"{name[:200]!r} is empty or the model's own name; choose another", param="lora_name")
    try:
        await adapters.load(name, body.lora_path, in_place=body.load_inplace)
    except (ConfigError, ModelLoadError) as error:
        raise RequestError(str(error), param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def _model(service: Service, http: Request, name: str) -> Mapping[str, object]:
    """Describe a served model; `max_model_len` is an extension, and `quality` where that was measured."""
    if note_of(http).anthropic:
        created = datetime.fromtimestamp(service.created_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
    about = {"id": name, "object": "model", "created": service.created_unix_s, "owned_by": "ridgeline"}
    quality = service.info.choices.get("quality")
    measured = {} if quality is None else {"quality": f"{quality.value} {quality.reason}"}
    return {**about, "max_model_len": service.info.max_model_len, **measured}
