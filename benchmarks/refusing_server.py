"""A server that does nothing but refuse, beside a process that computes: the floor of what a flood of clients measures.

usage: python -m benchmarks.refusing_server RETRY-AFTER

Replies are ready as bytes: any request whose first line has /health gets 200, others 503 with Retry-After, in seconds.
The other process takes a core all along, as an engine does. Prints the port like `ridgeline serve`.
"""

import asyncio
import json
import multiprocessing
import os
import sys

ERROR = {"message": "the queue is full (96 outputs); retry later", "type": "service_unavailable", "param": None}


class Refusing(asyncio.Protocol):
    """Replies to each piece of data that arrives: it is one request."""

    def __init__(self, retry_after_s: int) -> None:
        self._replies = {
            True: reply(200, "OK", {"status": "ok"}),
            False: reply(
                503,
                f"Service Unavailable\r\nRetry-After: {retry_after_s}",
                {"error": {**ERROR, "code": "server_is_overloaded"}},
            ),
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._replies[data.startswith(b"GET /health")])


def reply(status: int, words: str, content: object) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} {words}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def compute(parent: int) -> None:
    """Compute for as long as the parent lives, which may be killed."""
    while os.getppid() == parent:
        sum(range(10_000))


async def serve(retry_after_s: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Refusing(retry_after_s), "127.0.0.1", 0, backlog=1024)
    print(f"refuses at http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    multiprocessing.Process(target=compute, args=(os.getpid(),), daemon=True).start()
    asyncio.run(serve(int(sys.argv[1])))
