"""Link: one engine process from its start to its end, and the stream to it. On one event loop once it is attached."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ridgeline.core.config import EngineConfig
from ridgeline.core.log import in_use
from ridgeline.engine.process import wire

RECEIVE_BYTES = 2**18
LAST_WORDS_S = 1.0  # for the stacks of a process that hangs


class Link(asyncio.Protocol):
    """A child process, which loads `config` at once. On Linux it also ends with the thread that makes it.

    Raises OSError where the machine has no room for another process.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ridgeline.engine.process.child", str(number)],
                    pass_fds=(number,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # a terminal's Ctrl-C is for the server
                )
            except OSError:
                self._socket.close()
                raise
        self.loop: asyncio.AbstractEventLoop | None = None
        self._frames = wire.Frames()
        self._transport: asyncio.WriteTransport | None = None
        self._early: list[bytes] = []  # what was sent before there was one
        self._on_message: Callable[[wire.FromEngine], None] = lambda message: None
        self._on_end: Callable[[], None] = lambda: None
        self._hangs = False
        begin = wire.Begin(config, *in_use())
        with suppress(OSError):  # it died at once, which reading tells
            self._socket.sendall(wire.encode(begin))

    def first(self) -> wire.FromEngine | None:
        """Wait for the first message; None where the process ended without one. Call it before `attach`."""
        with suppress(ConnectionError):
            while data := self._socket.recv(RECEIVE_BYTES):
                for frame in self._frames.feed(data):
                    return wire.decode_from_engine(frame)  # what may come with it is a beat
        return None

    async def attach(self, on_message: Callable[[wire.FromEngine], None], on_end: Callable[[], None]) -> None:
        """Hand messages to `on_message` from now on, and tell the end once."""
        self._on_message, self._on_end = on_message, on_end
        self.loop = asyncio.get_running_loop()
        await self.loop.create_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._on_message(wire.decode_from_engine(frame))
        except (msgspec.DecodeError, ValueError):  # nothing that follows can be understood
            self.process.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, message: wire.ToEngine) -> None:
        """Send a message, on the event loop."""
        frame = wire.encode(message)
        if self._transport is None:
            self._early.append(frame)
        else:
            self._transport.write(frame)

    def end(self, wait_s: float) -> None:
        """Let the process end after its current step, and wait until it has; from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._transport is None:
            self._socket.close()

    def kill_with_stacks(self) -> None:
        """End the process after it had the time to write the stacks of its threads; nothing more is heard of it."""
        self._on_message, self._on_end = lambda message: None, lambda: None
        self._hangs = True
        for number in (signal.SIGUSR1, signal.SIGCONT):  # one that was stopped may write too
            self.process.send_signal(number)
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self.process.kill)

    @property
    def cause(self) -> str:
        """Say which of CAUSES the end of the process had, which has ended."""
        code = self.process.returncode
        return "hang" if self._hangs else "exit" if code >= 0 else "killed" if code == -signal.SIGKILL else "crash"

    @property
    def fate(self) -> str | None:
        """Say how the process ended; None: not yet."""
        code = self.process.poll()
        if code is None or code >= 0:
            return None if code is None else f"ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-code, f'signal {-code}')}"
