"""The pages at /ui, and what they ask for that no other endpoint has: what is served, the engine's last steps, and what
commands say of them.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ridgeline.core.errors import RequestError
from ridgeline.engine.journal import WAIT_REASONS, Records
from ridgeline.server.service import Service, note_of

MAX_RECORDS = 8192  # of one ring in one response
PLAN = re.compile(  # a line each; none of them reads a file or fetches anything
    r"((\w[\w.-]{0,63}\n)?--hardware=(?!this\n)\w[\w.-]*(:\d+)?\n)?--workload=fixed:num_requests=\d{1,3},"
    r"input_tokens=\d{1,5},output_tokens=\d{1,4}\n--concurrency=\d{1,3}(\n--slo=[\w:.=, ]+)?(\n--allow=[\w,-]+)?",
    re.ASCII,
)
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
    """Return the journal's last records, of each ring from the number on that the query names; -1: none.

    Numbers behind the last record are of an engine that died: a new one counts from 0. Raises RequestError.
    """
    _require_one_client(service)
    names = ("steps", "spans", "decisions", *(["outputs"] if "outputs" in http.query_params else ()))
    try:
        since = {name: int(http.query_params.get(name, "0")) for name in names}
    except ValueError:
        raise RequestError("steps, spans, decisions and outputs must be integers: numbers of records") from None
    journal = service.engine.journal

    def recent() -> bytes:
        ends = {name: journal.rings[name].num_written for name in since}
        asked = {name: ends[name] if number < 0 else number for name, number in since.items()}
        starts = {name: max(asked[name] if asked[name] <= end else 0, end - MAX_RECORDS) for name, end in ends.items()}
        found = {name: journal.rings[name].read(start) for name, start in starts.items()}
        return msgspec.json.encode(told(found, journal.cache_reasons))

    return Response(await asyncio.to_thread(recent), headers=JSON)


async def diagnose(service: Service, http: Request) -> Response:
    """Return what `ridgeline doctor` says of the last steps, or of a `request` in them. Raises as `Explained.say`."""
    _require_one_client(service)
    number = http.query_params.get("request")
    said = await service.explained.doctor([] if number is None else [f"--request={number}"])
    if number is None:
        service.metrics.diagnosed(msgspec.json.decode(said["found"])["findings"])
    return Response(msgspec.json.encode(said), headers=JSON)


async def plan(service: Service, http: Request, arguments: list[str]) -> Response:
    """Return what `ridgeline plan` says, of the served model where no other is named. Raises as `diagnose`."""
    _require_one_client(service)
    if not PLAN.fullmatch("\n".join(arguments)):
        raise RequestError("a plan here is [MODEL --hardware] --workload --concurrency [--slo] [--allow], in order")
    served = [service.info.model_path] if arguments[0].startswith("--") else []
    return Response(msgspec.json.encode(await service.explained.say("plan", *served, *arguments)), headers=JSON)


async def explain_request(service: Service, http: Request) -> Response:
    """Return where the time of a client's own request went. Raises HTTPException, and what `Explained.of` does."""
    if not service.settings.explain:
        raise HTTPException(403, "this server was started with --no-explain")
    found = await service.explained.of(note_of(http).client, http.path_params["request_id"])
    return Response(found, headers=JSON)


def _require_one_client(service: Service) -> None:
    if service.settings.api_key_file is not None:
        raise HTTPException(403, "this shows what all clients do: it is not served with --api-key-file")


def told(rings: Mapping[str, tuple[int, Records]], cache_reasons: Sequence[str]) -> Mapping[str, object]:
    """Return records as plain data, those of each ring with the number of the first."""
    found: dict[str, object] = {"wait_reasons": WAIT_REASONS, "cache_reasons": cache_reasons}
    for name, (first, records) in rings.items():
        found[name] = {"first": first, "fields": records.dtype.names, "rows": records.tolist()}
    return found
