"""Runs the app until a signal ends it: uvicorn, and a shutdown that loses no output.

Called by `ridgeline serve`. First SIGTERM or SIGINT: new requests get 503, open ones end, then the process. A second
one ends it at once.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ridgeline.core.log import get_logger
from ridgeline.server.service import Service

log = get_logger("server")

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none sends into a closing one
LAST_WORDS_S = 5  # for error events and final chunks to leave, once the engine has stopped
UNFINISHED_EXIT = 1


def run(app: Starlette, listener: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serve until a signal; the exit code is 0 if every open request ended. Call it in the main thread."""
    server = DrainingServer(app, on_ready)
    server.run(sockets=[listener])
    return server.exit_code


class DrainingServer(uvicorn.Server):
    """uvicorn, except that a signal first drains the engine while connections are still taken and told to come back."""

    def __init__(self, app: Starlette, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service
        self._on_ready = on_ready
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._signalled = False
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._event_loop = asyncio.get_running_loop()
        if self.started and not self._signalled:
            self._on_ready()

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
