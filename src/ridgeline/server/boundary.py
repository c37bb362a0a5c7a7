"""Put RequestBoundary around every route. Id, key, error mapping and the log line of each request."""

import asyncio
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.core.log import get_logger
from ridgeline.server.clients import Client
from ridgeline.server.service import RequestNote, Service, new_request_id

log = get_logger("server.access")

PUBLIC_PATHS = frozenset({"/health", "/ready", "/ui"})  # everything else asks for the key, if there is one
COMPUTING_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"}
    | {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify"}
)
UNLOGGED_PATHS = frozenset({"/health", "/ready", "/metrics", "/explain/steps"})
ANTHROPIC_HEADER = "anthropic-version"  # its clients send it, and expect its bodies
CLIENT_GONE_STATUS = 499
_PORT = re.compile(r":\d*$")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestBoundary:
    """ASGI middleware; every exception of the layers inside ends here, and so does every request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        anthropic = scope["path"].startswith("/v1/messages") or ANTHROPIC_HEADER in headers
        note = RequestNote(request_id_of(headers), anthropic=anthropic)
        scope.setdefault("state", {})["note"] = note

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = headers["request-id"] = note.request_id  # OpenAI's name and Anthropic's
                if note.status in (503, 529) and not self._service.engine.accepting:
                    headers["connection"] = "close"  # the next connection may lead to another server
            await send(message)

        try:
            self._require_host(headers)
            note.client = self._client(scope, headers)
            if scope["method"] == "POST" and scope["path"] in COMPUTING_PATHS:
                self._service.reserve(note, 0)  # a full server refuses before it looks at anything else
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect as gone:
            note.status = CLIENT_GONE_STATUS
            self._service.metrics.left(note, unread=isinstance(gone.__cause__, TimeoutError))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of Rust code is no Exception
            reply = self._service.explain(error, note)
            if note.status:  # too late for a reply: the connection must end without a proper end of the body
                raise
            await reply.response()(scope, receive, send_with_id)
            error.__traceback__ = None  # its frames hold the error, and with it the request
        finally:
            self._service.release(note)
            is_counted = note.status != CLIENT_GONE_STATUS
            has_slo = is_counted and scope["method"] == "POST" and scope["path"] in COMPUTING_PATHS
            self._service.metrics.ended(note, time.monotonic() - note.started_s, has_slo=has_slo)
            if scope["path"] not in UNLOGGED_PATHS:
                _log(scope, note)
            if self._service.spans is not None and scope["path"] in COMPUTING_PATHS:
                self._service.spans.ended(scope["path"], headers, note)

    def _require_host(self, headers: Headers) -> None:
        """Refuse names that are not this server's: a web page may have its own name point here (DNS rebinding)."""
        allowed = self._service.settings.allowed_hosts
        name = _PORT.sub("", headers.get("host", "")).lower()
        if allowed and name not in allowed:
            raise HTTPException(421, f"host {name[:100]!r} is not served here: start the server with --allowed-host")

    def _client(self, scope: Scope, headers: Headers) -> Client:
        """Return whose request it is, counted where it may be refused for their number. Raises HTTPException."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        address = scope["client"][0] if scope["client"] else ""
        key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        client = self._service.keys.client_of(key.strip(), address)
        if scope["path"] in PUBLIC_PATHS or scope["path"].startswith("/ui/"):
            return Client()
        if client is None:
            words = "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise HTTPException(401, words, {"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST":
            client.begin()
        return client


def request_id_of(headers: Headers) -> str:
    """Return the id that a request brought, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


def _log(scope: Scope, note: RequestNote) -> None:
    """Log one line. The path is quoted in ASCII, so that no client can write a line of its own."""
    facts = {
        "request_id": note.request_id,
        "method": scope["method"],
        "path": ascii(scope["path"][:200])[1:-1],
        "status": note.status,
        "prompt": note.prompt_tokens,
        "cached": note.cached_tokens,
        "output": note.completion_tokens,
        "ms": round((time.monotonic() - note.started_s) * 1000, 1),
    }
    line = "%(request_id)s %(method)s %(path)s " + " ".join(f"{name}=%({name})s" for name in list(facts)[3:])
    log.info(line, facts, extra={"facts": facts})
