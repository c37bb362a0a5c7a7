"""Runs the app until a signal ends it: uvicorn, and a shutdown that loses no output.

Called by `ridgeline serve`. First SIGTERM or SIGINT: new requests get 503, open ones end, then the process. A second
one ends it at once. SIGHUP reads again what may change while it serves.
"""

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from random import Random
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ridgeline.core.collector import collect_rarely
from ridgeline.core.errors import ConfigError
from ridgeline.core.log import get_logger
from ridgeline.server.listen import Listener, load_certificate
from ridgeline.server.service import Service
from ridgeline.server.transport import RESERVED_FILES, Connection, Limiter

log = get_logger("server")

BACKLOG = 1024  # connections that wait for the event loop, in the kernel
ACCEPTED_AT_ONCE = 64  # each has a descriptor before it is counted
TICK_S = 0.1  # uvicorn's
LAST_WORDS_S = 5  # for error events and final chunks to leave, once the engine has stopped
UNFINISHED_EXIT = 1
ENGINE_EXIT = 5


def run(app: Starlette, listener: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serve until a signal or the engine's end; 0 if every open request ended. Call it in the main thread."""
    server = DrainingServer(app, on_ready)
    collect_rarely()
    server.run(sockets=[listener])
    if server.exit_code == ENGINE_EXIT:  # a thread that hangs in native code would keep the interpreter from ending
        logging.shutdown()
        os._exit(ENGINE_EXIT)
    return server.exit_code


class DrainingServer(uvicorn.Server):
    """uvicorn, except that a signal first drains the engine while connections are still taken and told to come back."""

    def __init__(self, app: Starlette, on_ready: Callable[[], None]) -> None:
        service = app.state.service
        assert isinstance(service, Service)
        # "auto" takes uvloop where it is installed: measured, 3 to 7 % less time, and other transports than asyncio's
        config = uvicorn.Config(app, loop="asyncio", lifespan="on", ws="none", log_config=None, access_log=False)
        config.server_header = config.proxy_headers = False
        config.timeout_keep_alive = service.settings.idle_timeout_s  # pyright: ignore[reportAttributeAccessIssue]
        config.timeout_graceful_shutdown = LAST_WORDS_S
        super().__init__(config)
        self._service = service
        self._limiter = Limiter(service)
        self._tls = None if service.settings.tls_cert is None else ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._read_certificate()
        self._on_ready = on_ready
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._signalled = False
        self._random = Random()
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        loop = asyncio.get_running_loop()
        connection = partial(Connection, self.config, self.server_state, self.lifespan.state, self._limiter)
        timeout_s = None if self._tls is None else self._service.settings.header_timeout_s
        for listener in sockets or ():
            if isinstance(listener, Listener):
                most = self._limiter.max_connections + RESERVED_FILES // 2  # so many are still told that all are taken
                listener.bound(most, lambda: self._limiter.full(loop.time()))
            server = await loop.create_server(
                connection, sock=listener, backlog=ACCEPTED_AT_ONCE, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
            listener.listen(BACKLOG)
            self.servers.append(server)
        self._event_loop = loop
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        if self.started and not self._signalled:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Look ten times a second whether the engine lives: without it the process ends, for a supervisor to see."""
        engine, loop = self._service.engine, asyncio.get_running_loop()
        # Not at the tick, which would keep step with requests that come and block the loop as regularly.
        due_s = loop.time() + self._random.uniform(0, TICK_S)
        loop.call_at(due_s, lambda: self._service.metrics.tick(max(0.0, loop.time() - due_s)))
        if self.exit_code != ENGINE_EXIT and (why := engine.watch(self._service.settings.step_timeout_s)) is not None:
            log.critical("%s: open requests are told to retry, and the server ends", why)
            self.exit_code = ENGINE_EXIT
            engine.give_up()
            self.should_exit = True
        return await super().on_tick(counter)

    def _read_certificate(self) -> None:
        """Read the certificate, if there is one. Raises ConfigError; the old one stays where the new one is broken."""
        settings = self._service.settings
        if self._tls is not None and settings.tls_cert is not None:
            load_certificate(self._tls, settings.tls_cert, settings.tls_key)

    def _reload(self) -> None:
        for read in (self._read_certificate, self._service.keys.read):
            try:
                read()
            except ConfigError as error:
                log.error("SIGHUP: this stays as it was: %s", error)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, between two instructions; uvicorn's own would stop listening first."""
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        if self._event_loop is None:
            self.should_exit = True
        else:
            self._event_loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        log.info("%s: %d open requests may end, new ones are refused", name, self._service.engine.num_unfinished)
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        try:
            if not await self._service.drain():
                log.warning("the shutdown timeout passed before all requests had ended; the others were told")
                self.exit_code = UNFINISHED_EXIT
        finally:
            self.should_exit = True
