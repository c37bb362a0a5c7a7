"""The pages at /ui, and what they ask for that no other endpoint has: what is served, and the engine's last steps."""

import asyncio
from collections.abc import Mapping
from importlib import resources

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ridgeline.core.errors import RequestError
from ridgeline.engine.journal import WAIT_REASONS
from ridgeline.server.service import Service

MAX_RECORDS = 8192  # of one ring in one response
HEADERS = {  # nothing from elsewhere, nothing inline, in no other page
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "cache-control": "no-cache",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
JSON = HEADERS | {"content-type": "application/json"}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


async def page(http: Request) -> Response:
    """Return a file, by default the one that loads the others. They hold no data and need no key."""
    name = http.path_params.get("name")
    if name is None:
        return RedirectResponse("ui/", headers=HEADERS)
    file = resources.files("ridgeline.server") / "ui" / (name or "index.html")
    kind = TYPES.get(file.name.rpartition(".")[2])
    if "/" in name or "\\" in name or kind is None or not file.is_file():
        raise HTTPException(404)
    return Response(file.read_bytes(), headers=HEADERS | {"content-type": f"{kind}; charset=utf-8"})


async def describe_server(service: Service, http: Request) -> Response:
    """Say what is served, for what it can be used, and what was chosen for it and why."""
    info, template = service.info, service.chat_template
    talks = template is not None and "role" in template.source  # one that knows no roles makes no conversation
    use = "embed" if info.embeds else "chat" if talks else "completion"
    facts = {"use": use, "chat_template": template is not None, "models": service.model_names}
    facts |= {name: getattr(info, name) for name in ("max_model_len", "weight_bytes", "generation", "choices")}
    return Response(msgspec.json.encode(facts), headers=JSON)


async def recent_steps(service: Service, http: Request) -> Response:
    """Return the journal's last records, of each ring from the number on that the query names. Raises RequestError."""
    if service.settings.api_key_file is not None:
        raise HTTPException(403, "steps show what all clients do: they are not served with --api-key-file")
    try:
        since = {name: int(http.query_params.get(name, "0")) for name in ("steps", "spans", "decisions")}
    except ValueError:
        raise RequestError("steps, spans and decisions must be integers: numbers of records") from None
    return Response(await asyncio.to_thread(_records, service, since), headers=JSON)


def _records(service: Service, since: Mapping[str, int]) -> bytes:
    journal = service.engine.journal
    found: dict[str, object] = {"wait_reasons": WAIT_REASONS, "cache_reasons": journal.cache_reasons}
    for name, number in since.items():
        ring = journal.rings[name]
        first, records = ring.read(max(number, ring.num_written - MAX_RECORDS))
        found[name] = {"first": first, "fields": records.dtype.names, "rows": records.tolist()}
    return msgspec.json.encode(found)
