"""What a flood of requests does to the clients beside it: refusals, /health, and a polite client; loopback, bounded.

usage: python -m benchmarks.overload [--other ENV/bin/python] [--model python-1m] [--clients 64 256 1024]
           [--seconds 8] [--queue 1024 32] [--pairs 3] [--patient] [--out DIR]

The flood asks again at once, whatever it gets, or with `--patient` when Retry-After says; its clients start within a
second. The polite client asks for one token at a time, and comes from another address (127.0.0.2), as the /health
client does; both are in a process of their own, so that they do not wait for the flood's own event loop, and both are
measured alone first. Goodput is the flood's completions. The `--other` environment's build is measured in turn with
this one.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.attacks import Server
from benchmarks.common import option_parser, save

from ridgeline.bench.report import Report

FILES = 8192
Waits = dict[str, list[tuple[int, float]]]  # by kind of client, (status, seconds) of each reply


def request(**body: object) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


FLOOD = request(prompt=[5] * 32, max_tokens=32, ignore_eos=True)
POLITE = request(prompt=[6, 7], max_tokens=1)
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Manners:
    """What a kind of client asks, from which address, and how long it pauses."""

    data: bytes
    address: str
    pause_s: float = 0.0
    start_within_s: float = 0.0
    patient: bool = False  # does what Retry-After says, give or take a half


WATCHERS = {"polite": Manners(POLITE, "127.0.0.2", 0.02), "/health": Manners(HEALTH, "127.0.0.2", 0.02)}


async def client(port: int, manners: Manners, waits: list[tuple[int, float]]) -> None:
    """Ask until cancelled; append (status, seconds) of each reply."""
    await asyncio.sleep(random.uniform(0, manners.start_within_s))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(manners.address, 0))
    try:
        while True:
            began = time.perf_counter()
            writer.write(manners.data)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            waits.append((int(head.split()[1]), time.perf_counter() - began))
            pause_s = manners.pause_s
            if manners.patient and b"retry-after: " in head:
                pause_s = int(head.split(b"retry-after: ")[1].split(b"\r\n")[0]) * random.uniform(0.5, 1.5)
            await asyncio.sleep(pause_s)
    finally:
        writer.close()


async def clients(port: int, seconds: float, all_manners: Sequence[Manners]) -> list[list[tuple[int, float]]]:
    waits: list[list[tuple[int, float]]] = [[] for _ in all_manners]
    tasks = [asyncio.create_task(client(port, manners, found)) for manners, found in zip(all_manners, waits)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            print(f"a client ended early: {ended!r}", flush=True)
    return waits


def watch(port: int, seconds: float) -> Waits:
    """Be the polite client and that of /health, in a process of their own."""
    return dict(zip(WATCHERS, asyncio.run(clients(port, seconds, list(WATCHERS.values())))))


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
    patient: bool
    seconds: float
    goodput_per_s: float
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


def measure(port: int, watchers: ProcessPoolExecutor, options: argparse.Namespace, num_clients: int) -> Waits:
    """Return the replies of a flood and of those beside it, of as many seconds."""
    manners = Manners(FLOOD, "127.0.0.1", start_within_s=1.0, patient=options.patient)
    watching = watchers.submit(watch, port, options.seconds)
    flood = asyncio.run(clients(port, options.seconds, [manners] * num_clients)) if num_clients else []
    return {"flood": [wait for each in flood for wait in each], **watching.result()}


def flooded(build: str, python: str, options: argparse.Namespace, queue: int) -> list[Flood]:
    """Measure a server of its own, alone and then flooded."""
    more = ("--log-level", "warning", "--num-threads", "1", "--max-queued-requests", str(queue))
    server = Server(python, options.model, *more, files=FILES)
    floods = []
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as watchers:
            watchers.submit(watch, server.port, 0.5).result()  # everything is warm afterwards
            for size in (0, *options.clients):
                waits = measure(server.port, watchers, options, size)
                rows = [row for name, found in waits.items() for row in replies(name, found)]
                num_good = sum(row.count for row in rows if (row.clients, row.status) == ("flood", 200))
                floods.append(
                    Flood(
                        build=build,
                        max_queued_requests=queue,
                        num_clients=size,
                        patient=options.patient,
                        seconds=options.seconds,
                        goodput_per_s=num_good / options.seconds,
                        replies=rows,
                    )
                )
                show(floods[-1])
    finally:
        server.close()
    return floods


def show(flood: Flood) -> None:
    kind = "patient clients" if flood.patient else "clients"
    about = f"{flood.build}, queue of {flood.max_queued_requests}, beside {flood.num_clients} {kind}"
    print(f"{about}: {flood.goodput_per_s:.0f} completions/s")
    for row in flood.replies:
        words = f"{row.count} x {row.status}, p50 {row.p50_ms:.1f} ms, p99 {row.p99_ms:.1f} ms"
        print(f"  {row.clients}: {words}", flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--other", help="Python of an environment with another build, to be flooded too")
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--queue", type=int, nargs="+", default=[1024, 32], help="--max-queued-requests of the servers")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--patient", action="store_true", help="the flood waits as Retry-After says")
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
