"""What a flood of requests does to the clients beside it: refusals, /health, and a polite client; loopback, bounded.

usage: python -m benchmarks.overload [--other ENV/bin/python] [--model python-1m] [--clients 64 256 1024]
           [--seconds 8] [--queue 1024 32] [--slots N] [--threads 1] [--pairs 3] [--patient] [--floor SECONDS]
           [--out DIR]

The flood asks again at once, whatever it gets, or with `--patient` when Retry-After says; its clients start within a
second. The polite client asks for one token at a time, and comes from another address (127.0.0.2), as the /health
client does; both are in a process of their own, so that they do not wait for the flood, and both are measured alone
first. Goodput is the flood's completions. The `--other` environment's build is measured in turn with this one.

With `--floor` the same flood also meets a server that does nothing but refuse, with that Retry-After, beside a process
that computes: what is measured of it is the clients' and the machine's own.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.attacks import Server
from benchmarks.callers import Manners, Waits, call, post
from benchmarks.common import option_parser, save
from benchmarks.streams import children, cpu_s

from ridgeline.bench.report import Report

FLOOR = "refuses only"
START_WITHIN_S = 1.0
CONNECTED_S = 2.0  # when a flood has connected, and had its first replies
FILES = 8192
FLOOD = post("/v1/completions", prompt=[5] * 32, max_tokens=32, ignore_eos=True)
POLITE = post("/v1/completions", prompt=[6, 7], max_tokens=1)
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
WATCHERS = {"polite": Manners(POLITE, "127.0.0.2", 0.02), "/health": Manners(HEALTH, "127.0.0.2", 0.02)}


class Refusing(Server):
    """The server of `refusing_server.py`, in place of one that serves."""

    START = ("-m", "benchmarks.refusing_server")


def watch(port: int, seconds: float) -> tuple[dict[str, Waits], float]:
    """Be the polite client and that of /health, in a process of their own; return that one's processor time too."""
    began_s = time.process_time()
    waits = dict(zip(WATCHERS, call(port, seconds, list(WATCHERS.values()))))
    return waits, time.process_time() - began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """How many replies of a status some clients got, and how long those took."""

    clients: str
    status: int
    count: int
    p50_ms: float
    p99_ms: float
    p99_connected_ms: float  # of those that came when all had connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What came of a flood of `num_clients` on one build whose queue has `max_queued_requests` places."""

    build: str
    max_num_seqs: int | None
    max_queued_requests: int
    num_clients: int
    patient: bool
    seconds: float
    goodput_per_s: float
    replies: list[Replies]
    cores: dict[str, float]  # that each process took


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadReport(Report):
    """Every flood on every build, in the order in which they ran."""

    model: str
    num_threads: int
    floods: list[Flood]


def replies(clients: str, waits: Waits) -> list[Replies]:
    """Sum up (status, seconds) by status."""
    by_status: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for status, seconds, at_s in sorted(waits):
        by_status[status].append((seconds * 1000, at_s))
    return [
        Replies(
            clients=clients,
            status=status,
            count=len(found),
            p50_ms=statistics.median(wait_ms for wait_ms, _ in found),
            p99_ms=p99([wait_ms for wait_ms, _ in found]),
            p99_connected_ms=p99([wait_ms for wait_ms, at_s in found if at_s > CONNECTED_S]),
        )
        for status, found in by_status.items()
    ]


def p99(sorted_values: list[float]) -> float:
    return sorted_values[int(0.99 * (len(sorted_values) - 1))] if sorted_values else math.nan


def measure(
    server: Server, watchers: ProcessPoolExecutor, options: argparse.Namespace, num_clients: int
) -> tuple[dict[str, Waits], dict[str, float]]:
    """Return the replies of a flood and of those beside it, of as many seconds, and the cores of each process."""
    manners = Manners(FLOOD, "127.0.0.1", start_within_s=START_WITHIN_S, patient=options.patient)
    names = dict(zip((server.process.pid, *children(server.process.pid)), ("server", "engine")))
    before_s, began_s = {name: cpu_s(process) for process, name in names.items()}, time.process_time()
    watching = watchers.submit(watch, server.port, options.seconds)
    flood = call(server.port, options.seconds, [manners] * num_clients)
    used_s = {"flood": time.process_time() - began_s}
    waits, used_s["watchers"] = watching.result()
    used_s |= {name: cpu_s(process) - before_s[name] for process, name in names.items()}
    cores = {name: used / options.seconds for name, used in used_s.items()}
    return {"flood": [wait for each in flood for wait in each], **waits}, cores


def flooded(build: str, python: str, options: argparse.Namespace, queue: int) -> list[Flood]:
    """Measure a server of its own, alone and then flooded."""
    if build == FLOOR:
        server: Server = Refusing(python, str(options.floor), files=FILES)
    else:
        slots = () if options.slots is None else ("--max-num-seqs", str(options.slots))
        more = (
            "--log-level",
            "warning",
            "--num-threads",
            str(options.threads),
            "--max-queued-requests",
            str(queue),
            *slots,
        )
        server = Server(python, options.model, *more, files=FILES)
    floods = []
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as watchers:
            watchers.submit(watch, server.port, 0.5).result()  # everything is warm afterwards
            for size in (0, *options.clients):
                waits, cores = measure(server, watchers, options, size)
                rows = [row for name, found in waits.items() for row in replies(name, found)]
                num_good = sum(row.count for row in rows if (row.clients, row.status) == ("flood", 200))
                floods.append(
                    Flood(
                        build=build,
                        max_num_seqs=options.slots,
                        max_queued_requests=queue,
                        num_clients=size,
                        patient=options.patient,
                        seconds=options.seconds,
                        goodput_per_s=num_good / options.seconds,
                        replies=rows,
                        cores=cores,
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
        words += f", {row.p99_connected_ms:.1f} ms once all have connected"
        print(f"  {row.clients}: {words}", flush=True)
    print("  cores: " + ", ".join(f"{name} {number:.2f}" for name, number in flood.cores.items()), flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--other", help="Python of an environment with another build, to be flooded too")
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--queue", type=int, nargs="+", default=[1024, 32], help="--max-queued-requests of the servers")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--slots", type=int, help="--max-num-seqs of the servers")
    parser.set_defaults(threads=1)
    parser.add_argument("--floor", type=int, metavar="SECONDS", help="flood a server that only refuses, for so long")
    parser.add_argument("--patient", action="store_true", help="the flood waits as Retry-After says")
    options = parser.parse_args()
    builds = {"other": options.other} if options.other else {}
    builds["this"] = sys.executable
    if options.floor is not None:
        builds[FLOOR] = sys.executable
    floods = [
        flood
        for queue in options.queue
        for _ in range(options.pairs)
        for build, python in builds.items()
        for flood in flooded(build, python, options, queue)
    ]
    save(options.out, OverloadReport(name="overload", model=options.model, num_threads=options.threads, floods=floods))


if __name__ == "__main__":
    main()
