"""Connections: uvicorn's HTTP/1.1 over llhttp, within limits, and with OpenAI's error body for all they refuse.

uvicorn bounds neither the number of connections, nor a head's size, nor the time that one takes to arrive.
"""

import asyncio
import resource
import sys
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.exceptions import HTTPException
from uvicorn import Config
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ridgeline.core.errors import OverloadedError, RequestError
from ridgeline.core.log import get_logger
from ridgeline.server.service import RequestNote, Service, new_request_id
from ridgeline.server.sse import WRITE

log = get_logger("server")

MAX_HEADERS = 100
MAX_PIPELINED = 64
LINGER_S = 1.0  # a connection that is closed on unread bytes at once is reset, and the reply may be lost with it
RESERVED_FILES = 256  # descriptors that are no connections: model files, the log, connections not yet counted
WARN_EVERY_S = 60.0
REFUSALS_PER_S = 2000  # more than these make their connections rest
MAX_REST_S = 1.0  # no longer than the shortest Retry-After
RETRY_STATUSES = frozenset({429, 503, 529})


def room_for_connections(wanted: int) -> int:
    """Raise this process's limit of open files as far as `wanted` needs it; return how many connections it allows."""
    unlimited = resource.RLIM_INFINITY
    soft, hard = (sys.maxsize if n == unlimited else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < wanted + RESERVED_FILES:
        soft = min(wanted + RESERVED_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, unlimited if hard == sys.maxsize else hard))
    room = min(wanted, max(1, soft - RESERVED_FILES))
    if room < wanted:
        log.warning("the limit of %d open files leaves room for %d connections; raise `ulimit -n`", soft, room)
    return room


class Limiter:
    """Holds what connections share: the service, the bound on their number, a log that no client can fill."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.max_connections = room_for_connections(service.settings.max_connections)
        self._warned_s = -WARN_EVERY_S
        self._next_s = 0.0  # when another client that was refused may ask again

    def full(self, now_s: float) -> Exception:
        """Return the error of a connection too many, and log one of them a minute."""
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.warning("all %d connections are taken: more are refused", self.max_connections)
        return OverloadedError(f"all {self.max_connections} connections of this server are taken; retry later")

    def rest_s(self, now_s: float) -> float:
        """Return for how long a connection whose request was refused is not read.

        One that asks again at once, whatever it was told, must not take the time of those who are served.
        """
        self._next_s = min(max(self._next_s, now_s) + 1 / REFUSALS_PER_S, now_s + MAX_REST_S)
        return self._next_s - now_s


class Connection(HttpToolsProtocol):
    """Keeps one connection within limits: its head arrives in time and size, or it gets an error and ends."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], limiter: Limiter) -> None:
        super().__init__(config, server_state, app_state)
        self._limiter = limiter
        self._settings = limiter.service.settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_unparsed_bytes = 0  # arrived since the last head, piece of a body or message was complete
        self._num_head_bytes = 0  # of the names and values of this head
        self._refused = False  # what arrives now is thrown away

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        if len(self.connections) > self._limiter.max_connections:
            self._refuse(self._limiter.full(self.loop.time()), linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._num_unparsed_bytes += len(data)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(_reason(error))
            return
        if not self._num_unparsed_bytes:
            self._stop_head_timer()
        elif self._num_unparsed_bytes > self._settings.max_header_bytes:
            self._refuse(self._too_large())
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._late)

    def _parse(self, data: bytes) -> bytes:
        """Parse data; return what follows a request to upgrade, which a server may ignore."""
        assert self.parser is not None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return data[upgrade.args[0] :]
        return b""

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose client has not read the last reply would wait for that for ever."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    # ---- of the parser

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self.cycle and self.cycle.scope is self.scope:
            return  # a trailer: no header may follow the check of the headers
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unparsed_bytes = 0
        assert self.parser is not None
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HTTPException(505, f"HTTP/{version} is not spoken here: use HTTP/1.1")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise _bad_http(f"one Host header is needed, got {num_hosts}")
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding").strip().lower()
        if codings.endswith(b"chunked") and codings != b"chunked":  # where the last is another, the parser fails
            raise HTTPException(501, "of transfer codings only 'chunked' is understood: compress nothing")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _bad_http(f"more than {MAX_PIPELINED} requests sent ahead of their replies")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed_bytes = 0
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._settings.max_header_bytes or len(self.headers) >= MAX_HEADERS:
            raise self._too_large()

    # ---- of uvicorn's protocol

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        super()._start_asgi_task(cycle, partial(self._run, app, cycle))

    async def _run(
        self,
        app: ASGI3Application,
        cycle: RequestResponseCycle,
        scope: Scope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        """Run the app, with two corrections to what it sends, and a shorter way for the pieces of a stream.

        HTTP/1.0 has no chunks: the end of the connection is the end of the body. A request that is answered before its
        body was read ends its connection, slowly enough for the reply to arrive.
        """
        without_chunks = cycle.scope["http_version"] == "1.0"
        status = 0

        def write(piece: bytes) -> bool:
            """Send a piece of a body that has begun, if that takes no waiting, past all layers: they see the head."""
            if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
                return False
            if cycle.transport.is_closing():  # a write failed, of which the protocol hears next: asyncio logs others
                return True
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            return True

        async def corrected(message: ASGISendEvent) -> None:
            nonlocal status
            unread = message["type"] == "http.response.start" and cycle.more_body
            if message["type"] == "http.response.start":
                status = message["status"]
                if without_chunks:
                    cycle.chunked_encoding = False
            elif without_chunks and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            if unread:
                cycle.keep_alive = False
            await send(message)
            if unread and not without_chunks:
                cycle.keep_alive = True  # else uvicorn closes at once: `on_response_complete` does
            if status in RETRY_STATUSES and cycle.response_complete:
                self._rest()

        state = cycle.scope.setdefault("state", {})
        state[WRITE] = write
        try:
            await app(scope, receive, corrected)
        finally:
            del state[WRITE]  # which holds the scope: only the collector would free the request
        if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
            cycle.disconnected = True  # its client does not read: an end that waits for that never comes
            cycle.transport.abort()

    def _rest(self) -> None:
        """Read no more of a client that was told to retry, for as long as its turn takes to come."""
        self.flow.pause_reading()
        self.loop.call_later(self._limiter.rest_s(self.loop.time()), self._resume)

    def _resume(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self.cycle.more_body and not self._refused:  # nobody will read the rest
            self._refused = True
            self._linger()

    # ---- ends

    def _refuse(self, error: Exception, *, linger: bool = True) -> None:
        """Send an error and close. A response under way is left whole: the connection ends after it."""
        self._refused = True
        self._stop_head_timer()
        cycle = self.cycle
        if cycle and not cycle.response_complete:
            if self.pipeline or cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
        note = RequestNote(new_request_id())
        reply = self._limiter.service.explain(error, note)
        about = {"content-type": "application/json", "content-length": str(len(reply.json))}
        headers = {**reply.headers, **about, "x-request-id": note.request_id, "connection": "close"}
        lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + reply.json)
        if linger:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close when the client has, or a moment later."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _late(self) -> None:
        seconds = self._settings.header_timeout_s
        self._refuse(HTTPException(408, f"the head of the request did not arrive within {seconds:g} s"))

    def _too_large(self) -> HTTPException:
        limit = self._settings.max_header_bytes
        return HTTPException(431, f"request line and headers exceed {limit} bytes or {MAX_HEADERS} headers")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _bad_http(what: str) -> RequestError:
    return RequestError(what, code="invalid_http")


def _reason(error: httptools.HttpParserError) -> Exception:
    """Return a check's own error where it was one that stopped the parser."""
    if isinstance(error.__context__, (RequestError, HTTPException)):
        return error.__context__
    what = "the target cannot be read" if error.__context__ is not None else str(error)
    return _bad_http(f"this is no valid HTTP/1.1 request: {what}")
