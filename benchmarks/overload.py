"""What a flood of requests does to the clients beside it: refusals, /health, and a polite client; loopback, bounded.

usage: python -m benchmarks.overload [--other ENV/bin/python] [--model python-1m] [--clients 256] [--seconds 8]
           [--queue 1024 32] [--pairs 3] [--out DIR]

The flood asks again at once, whatever it gets; the polite client asks for one token at a time, and comes from another
address (127.0.0.2), as the /health client does. Both are measured alone first. The `--other` environment's build is
measured in turn with this one.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.attacks import Server
from benchmarks.common import option_parser, save

from ridgeline.bench.report import Report


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """How many replies of a status some clients got, and how long those took."""

    clients: str
    status: int
    count: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What came of a flood of `num_clients` on one build whose queue has `max_queued_requests` places."""

    build: str
    max_queued_requests: int
    num_clients: int
    seconds: float
    replies: list[Replies]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadReport(Report):
    """Every flood on every build, in the order in which they ran."""

    model: str
    floods: list[Flood]


def replies(clients: str, waits: list[tuple[int, float]]) -> list[Replies]:
    """Sum up (status, seconds) by status."""
    by_status: defaultdict[int, list[float]] = defaultdict(list)
    for status, seconds in sorted(waits):
        by_status[status].append(seconds * 1000)
    return [
        Replies(
            clients=clients,
            status=status,
            count=len(waits_ms),
            p50_ms=statistics.median(waits_ms),
            p99_ms=waits_ms[int(0.99 * (len(waits_ms) - 1))],
        )
        for status, waits_ms in by_status.items()
    ]


async def measure(port: int, num_clients: int, seconds: float) -> list[Replies]:
    waits: dict[str, list[tuple[int, float]]] = {"flood": [], "polite": [], "/health": []}
    tasks = [asyncio.create_task(client(port, FLOOD, "127.0.0.1", 0, waits["flood"])) for _ in range(num_clients)]
    tasks.append(asyncio.create_task(client(port, POLITE, "127.0.0.2", 0.02, waits["polite"])))
    tasks.append(asyncio.create_task(client(port, HEALTH, "127.0.0.2", 0.02, waits["/health"])))
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [row for name, found in waits.items() for row in replies(name, found)]


def flooded(build: str, python: str, options: argparse.Namespace, queue: int) -> list[Flood]:
    """Measure a server of its own, alone and then flooded."""
    more = ("--log-level", "warning", "--num-threads", "1", "--max-queued-requests", str(queue))
    server = Server(python, options.model, *more)
    try:
        floods = [
            Flood(
                build=build,
                max_queued_requests=queue,
                num_clients=size,
                seconds=options.seconds,
                replies=asyncio.run(measure(server.port, size, options.seconds)),
            )
            for size in (0, options.clients)
        ]
    finally:
        server.close()
    for flood in floods:
        print(f"{build}, queue of {queue}, beside {flood.num_clients}:")
        for row in flood.replies:
            print(f"  {row.clients}: {row.count} x {row.status}, p50 {row.p50_ms:.1f} ms, p99 {row.p99_ms:.1f} ms")
    return floods


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--other", help="Python of an environment with another build, to be flooded too")
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--queue", type=int, nargs="+", default=[1024, 32], help="--max-queued-requests of the servers")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args()
    builds = {"other": options.other} if options.other else {}
    builds["this"] = sys.executable
    floods = [
        flood
        for queue in options.queue
        for _ in range(options.pairs)
        for build, python in builds.items()
        for flood in flooded(build, python, options, queue)
    ]
    save(options.out, OverloadReport(name="overload", model=options.model, floods=floods))


if __name__ == "__main__":
    main()
