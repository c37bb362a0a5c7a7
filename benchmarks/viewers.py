"""What those who watch cost a server: tokens per second of its streams with some viewers of the pages and without.

usage: python -m benchmarks.viewers [--model python-9m] [--streams 16] [--viewers 3] [--seconds 3] [--pairs 10]
           [--threads N] [--out DIR]

One server and streams that never end. Each pair is so many seconds with viewers and as many without, in changing order.
A viewer asks for what Live shows once a second, as that page does; viewers are in a process of their own, on the same
cores.
"""

import argparse
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.attacks import Server
from benchmarks.callers import Manners, call
from benchmarks.common import option_parser, save, spread
from benchmarks.itl import WARM_S, Streams

from ridgeline.bench.report import Report

EVERY_S = 1.0
GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewersReport(Report):
    """Tokens per second of each pair, and how long viewers waited."""

    model: str
    num_threads: int
    num_streams: int
    num_viewers: int
    seconds: float
    watched_per_s: list[float]
    alone_per_s: list[float]
    reply_p50_ms: float


def watch(port: int, seconds: float, num_viewers: int) -> list[float]:
    """Be the viewers; return the seconds of each reply."""
    waits = call(port, seconds, [Manners(GET, pause_s=EVERY_S, start_within_s=EVERY_S)] * num_viewers)
    assert all(status == 200 for each in waits for status, _, _ in each), "a viewer was refused"
    return [wait_s for each in waits for _, wait_s, _ in each]


def measure(options: argparse.Namespace, viewers: ProcessPoolExecutor) -> ViewersReport:
    server = Server(sys.executable, options.model, "--log-level", "warning", "--num-threads", str(options.threads))
    streams, replies_s = Streams(server), list[float]()
    per_s: dict[bool, list[float]] = {True: [], False: []}
    try:
        for _ in range(options.streams):
            streams.begin()
        streams.listen(WARM_S)
        for pair in range(options.pairs):
            for is_watched in (pair % 2 == 0, pair % 2 == 1):
                if is_watched:
                    watching = viewers.submit(watch, server.port, options.seconds + EVERY_S, options.viewers)
                    streams.listen(EVERY_S)  # all have begun
                per_s[is_watched].append(len(streams.listen(options.seconds)) / options.seconds)
                if is_watched:
                    replies_s += watching.result()
    finally:
        streams.close()
        server.close()
    return ViewersReport(
        name="viewers",
        model=options.model,
        num_threads=options.threads,
        num_streams=options.streams,
        num_viewers=options.viewers,
        seconds=options.seconds,
        watched_per_s=per_s[True],
        alone_per_s=per_s[False],
        reply_p50_ms=statistics.median(replies_s) * 1000,
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as viewers:
        viewers.submit(statistics.median, [0.0]).result()  # it is there
        report = measure(options, viewers)
    ratios = [watched / alone for watched, alone in zip(report.watched_per_s, report.alone_per_s)]
    print(f"{report.num_streams} streams of {report.model}: {spread(report.alone_per_s, '.0f')} tokens/s")
    print(f"  with {report.num_viewers} viewers, over without: {spread(ratios, '.3f')}")
    print(f"  a viewer's reply: {report.reply_p50_ms:.1f} ms", flush=True)
    save(options.out, report)


if __name__ == "__main__":
    main()
