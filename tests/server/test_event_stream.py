"""EventStream on its own: framing, and how a stream ends when something or somebody fails."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest
from live_server import PATIENCE_S
from starlette.requests import ClientDisconnect

from ridgeline.core.errors import EngineError
from ridgeline.server.errors import reply_to
from ridgeline.server.sse import WRITE, EventStream, event


class Text(msgspec.Struct):
    text: str


class Client:
    """An ASGI client that takes `num_taken` messages and then stops reading, or hangs up when told."""

    def __init__(self, num_taken: int = 1000) -> None:
        self.messages: list[dict] = []
        self.gone = asyncio.Event()
        self._num_taken = num_taken

    async def send(self, message: dict) -> None:
        if len(self.messages) >= self._num_taken:
            await asyncio.Event().wait()
        self.messages.append(message)

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


class Source:
    """Events `1`, `2`, `3`; fails or waits forever after `num_events`."""

    def __init__(self, num_events: int = 3, failure: Exception | None = None, hangs: bool = False) -> None:
        self.closed = False
        self._num_events, self._failure, self._hangs = num_events, failure, hangs

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(1, self._num_events + 1):
                yield event(Text(f"{number}\r\n\u2028"))
            if self._failure is not None:
                raise self._failure
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def play(client: Client, source: Source, stall_timeout_s: float = 30.0) -> None:
    stream = EventStream(b"data: 0\n\n", source.events(), reply_to, stall_timeout_s)
    await stream({"type": "http"}, client.receive, client.send)


def test_framing() -> None:
    async def main() -> None:
        client, source = Client(), Source(2)
        await play(client, source)
        assert client.messages[0]["status"] == 200
        assert dict(client.messages[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        texts = [f'{{"text":"{number}\\r\\n\u2028"}}' for number in (1, 2)]
        assert client.body.decode() == "".join(f"data: {data}\n\n" for data in ("0", *texts, "[DONE]"))
        assert [message["more_body"] for message in client.messages[1:]] == [True, True, True, False]
        assert source.closed

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_failure_is_the_last_event() -> None:
    async def main() -> None:
        client, source = Client(), Source(1, EngineError("inner detail"))
        await play(client, source)
        assert client.body.count(b"\n\n") == 3
        assert client.body.split(b"\n\n")[-2].startswith(b'event: error\ndata: {"error":{"message":')
        assert b"[DONE]" not in client.body and b"inner detail" not in client.body
        assert client.messages[-1]["more_body"] is False
        assert source.closed

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_client_that_hangs_up_closes_the_source() -> None:
    async def main() -> None:
        client, source = Client(), Source(3, hangs=True)
        playing = asyncio.ensure_future(play(client, source))
        while len(client.messages) < 5:
            await asyncio.sleep(0)
        client.gone.set()
        with pytest.raises(ClientDisconnect):
            await playing
        assert source.closed

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_client_that_stops_reading_is_given_up() -> None:
    async def main() -> None:
        client, source = Client(num_taken=3), Source(3, hangs=True)
        with pytest.raises(ClientDisconnect):
            await play(client, source, stall_timeout_s=0.01)
        assert len(client.messages) == 3
        assert source.closed

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_pieces_go_past_the_layers_as_long_as_the_client_keeps_up() -> None:
    """The first two events are taken at once, the third has to be awaited; all arrive in order, and once."""

    async def main() -> None:
        client, source, written = Client(), Source(3), list[int]()

        def write(piece: bytes) -> bool:
            if len(written) == 2:
                return False
            written.append(len(client.messages))
            client.messages.append({"body": piece, "more_body": True})
            return True

        stream = EventStream(b"data: 0\n\n", source.events(), reply_to, 30.0)
        await stream({"type": "http", "state": {WRITE: write}}, client.receive, client.send)
        assert written == [2, 3], "behind the head and the first event"
        lines = [line for line in client.body.decode().split("\n") if line]
        assert [line[:16] for line in lines] == [
            "data: 0",
            *(f'data: {{"text":"{n}' for n in (1, 2, 3)),
            "data: [DONE]",
        ]
        assert source.closed

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
