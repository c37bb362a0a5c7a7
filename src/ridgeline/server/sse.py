"""Server-sent events, and what every response needs: to notice that the client has gone, or reads no more."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ridgeline.server.errors import ErrorReply

DONE = b"data: [DONE]\n\n"
PIECE_BYTES = 64 * 2**10  # of a whole response: what is behind it waits for the client to read
WRITE = "write"  # in the scope's state: sends a piece of a body that has begun; False where it must be awaited

T = TypeVar("T")
Explain = Callable[[Exception], ErrorReply]


def event(data: msgspec.Struct) -> bytes:
    """Encode one message. JSON holds no raw line break, so one data line is enough."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, /, **fields: object) -> bytes:
    """Encode one message of a stream that has its name twice, as Anthropic's and those of Responses."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def error_event(reply: ErrorReply) -> bytes:
    """Encode the last message of a stream that failed; no [DONE] follows it."""
    return b"event: error\ndata: " + reply.json + b"\n\n"


class WholeResponse(Response):
    """Sends JSON in pieces; a client that reads nothing for `stall_timeout_s` has left: ClientDisconnect."""

    media_type = "application/json"

    def __init__(self, content: bytes, stall_timeout_s: float) -> None:
        super().__init__(content)
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for begin in range(0, len(content), PIECE_BYTES):
            end = begin + PIECE_BYTES
            await _write(send, bytes(content[begin:end]), self._stall_timeout_s, more=end < len(content))


class FileContent(FileResponse):
    """Sends a file; a client that reads nothing for `stall_timeout_s` has left: ClientDisconnect."""

    stall_timeout_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, lambda message: _send(send, message, self.stall_timeout_s))


class EventStream(Response):
    """Sends `first` and then `events`, and `done` if nothing went wrong.

    An exception becomes an error event by way of `explain`; a client that leaves, or reads nothing for
    `stall_timeout_s`, closes `events` and raises ClientDisconnect.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes], explain: Explain, stall_timeout_s: float, done: bytes = DONE
    ) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._events = events
        self._explain = explain
        self._stall_timeout_s = stall_timeout_s
        self._done = done
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = scope.get("state", {}).get(WRITE, _never)
        async with aclosing(self._events):
            await while_connected(receive, self._send_all(send, write))

    async def _send_all(self, send: Send, write: Callable[[bytes], bool]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _write(send, self._first, self._stall_timeout_s)
        last = self._done
        try:
            async for data in self._events:
                if not write(data):
                    await _write(send, data, self._stall_timeout_s)
        except ClientDisconnect:
            raise
        except Exception as error:
            last = error_event(self._explain(error))
        await _write(send, last, self._stall_timeout_s, more=False)


def _never(data: bytes) -> bool:
    return False


async def _write(send: Send, data: bytes, stall_timeout_s: float, *, more: bool = True) -> None:
    """Send a piece of a body, as `_send` does."""
    await _send(send, {"type": "http.response.body", "body": data, "more_body": more}, stall_timeout_s)


async def _send(send: Send, message: Message, stall_timeout_s: float) -> None:
    """Send a message. Raises ClientDisconnect where the client has not read what came before."""
    try:
        async with asyncio.timeout(stall_timeout_s):
            await send(message)
    except (TimeoutError, OSError) as error:
        raise ClientDisconnect from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a client that leaves first cancels it. Raises ClientDisconnect. The body must have been read."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
