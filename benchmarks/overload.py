"""What a flood of requests does to the clients beside it: refusals, /health, and a polite client; loopback, bounded.

usage: python -m benchmarks.overload [--python ENV/bin/python] [--model python-1m] [--clients 256] [--seconds 8]

The flood asks again at once, whatever it gets; the polite client asks for one token at a time, and comes from another
address (127.0.0.2), as the /health client does. Both are measured alone first.
"""

import asyncio
import json
import statistics
import sys
import time
from collections import Counter

from benchmarks.attacks import Server
from benchmarks.common import option_parser


def request(**body: object) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


FLOOD = request(prompt=[5] * 32, max_tokens=32, ignore_eos=True)
POLITE = request(prompt=[6, 7], max_tokens=1)
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def client(port: int, data: bytes, address: str, pause_s: float, waits: list[tuple[int, float]]) -> None:
    """Ask until cancelled; append (status, seconds) of each reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        while True:
            began = time.perf_counter()
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            waits.append((int(head.split()[1]), time.perf_counter() - began))
            await asyncio.sleep(pause_s)
    finally:
        writer.close()


def words(name: str, waits: list[tuple[int, float]]) -> str:
    """Say how long replies took, by status."""
    parts = []
    for status, count in sorted(Counter(status for status, _ in waits).items()):
        seconds = sorted(wait for given, wait in waits if given == status)
        p50, p99 = statistics.median(seconds) * 1000, seconds[int(0.99 * (len(seconds) - 1))] * 1000
        parts.append(f"{count} x {status}, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return f"{name}: {'; '.join(parts) or 'no reply'}"


async def measure(port: int, num_clients: int, seconds: float) -> None:
    for flood_size in (0, num_clients):
        flood: list[tuple[int, float]] = []
        polite: list[tuple[int, float]] = []
        health: list[tuple[int, float]] = []
        tasks = [asyncio.create_task(client(port, FLOOD, "127.0.0.1", 0, flood)) for _ in range(flood_size)]
        tasks.append(asyncio.create_task(client(port, POLITE, "127.0.0.2", 0.02, polite)))
        tasks.append(asyncio.create_task(client(port, HEALTH, "127.0.0.2", 0.02, health)))
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(f"beside {flood_size}: " + " | ".join([words("polite", polite), words("/health", health)]))
        if flood_size:
            print(words("flood", flood))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--python", default=sys.executable, help="of the environment with the server to flood")
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--queue", type=int, default=1024, help="--max-queued-requests of the server")
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args()
    more = ("--log-level", "warning", "--num-threads", "1", "--max-queued-requests", str(options.queue))
    server = Server(options.python, options.model, *more)
    try:
        asyncio.run(measure(server.port, options.clients, options.seconds))
    finally:
        server.close()


if __name__ == "__main__":
    main()
