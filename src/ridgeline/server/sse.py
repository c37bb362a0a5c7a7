"""Server-sent events, and what every response needs: to notice that the client has gone."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.server.errors import ErrorReply

DONE = b"data: [DONE]\n\n"

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
        async with aclosing(self._events):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._write(send, self._first)
        last = self._done
        try:
            async for data in self._events:
                await self._write(send, data)
        except ClientDisconnect:
            raise
        except Exception as error:
            last = error_event(self._explain(error))
        await self._write(send, last, more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
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
