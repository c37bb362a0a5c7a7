"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: the operator's, where there is max_loras."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError
from ridgeline.server.service import Service, note_of


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Names a folder of the server's machine; `load_inplace`: in place of the adapter that has the name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Names an adapter; the number, which vLLM's clients may send, says nothing here."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(service: Service, http: HttpRequest, body: LoadAdapterRequest) -> Response:
    """Serve /v1/load_lora_adapter. Raises what errors.py maps."""
    _require_operator(http)
    if not body.lora_name.strip() or body.lora_name in service.own_names:
        raise RequestError(
            f"lora_name {body.lora_name[:200]!r} is empty or the model's own; choose another", param="lora_name"
        )
    try:
        await service.engine.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    except (ConfigError, ModelLoadError) as error:
        raise RequestError(str(error), param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(service: Service, http: HttpRequest, body: UnloadAdapterRequest) -> Response:
    """Serve /v1/unload_lora_adapter. Raises what errors.py maps."""
    _require_operator(http)
    service.engine.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


ADAPTER_ROUTES = {
    "/v1/load_lora_adapter": (load_adapter, LoadAdapterRequest),
    "/v1/unload_lora_adapter": (unload_adapter, UnloadAdapterRequest),
}


def _require_operator(http: HttpRequest) -> None:
    if note_of(http).client.salt:
        raise HTTPException(403, "adapters are the operator's: send the key of --api-key, not one of --api-key-file")
