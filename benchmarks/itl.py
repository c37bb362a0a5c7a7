"""What prompts cost the streams beside them: the time between tokens, for each --max-itl-ratio; loopback.

usage: python -m benchmarks.itl [--model python-9m] [--ratios 0 3] [--streams 4] [--clients 16] [--prompt 1000]
           [--stream-tokens 900] [--seconds 8] [--pairs 3] [--speculate off] [--threads N] [--out DIR]

Each round starts a server for each ratio in turn, without prefix caching; the prompts come by themselves first, so that
the memory of the cache has been in use. Some streams decode, and begin again when they end, behind the prompts that
wait: first alone, whose mean time between tokens is the step's, then beside clients that send prompts, one after the
other, each for one token, then alone again: contexts grow, and so do steps. The clients are a process of their own.
Throughput is that of the streams and that of the prompts; a stream's first token counts as no gap. What a bound costs
is told by how long the work of a second would take apart: its prompts where nothing bounds them, and its streams'
tokens alone.
"""

import argparse
import multiprocessing
import select
import socket
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.attacks import Server
from benchmarks.callers import Manners, call, post
from benchmarks.common import option_parser, save, spread
from benchmarks.engine_process import body

from ridgeline.bench.report import Report

WARM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One server: the time between tokens of its streams, alone and beside prompts, and tokens/s of both."""

    max_itl_ratio: float
    num_gaps: int  # beside prompts
    step_ms: float  # the mean alone: tokens that come together have gaps of 0
    alone_p50_ms: float
    alone_p99_ms: float
    alone_tokens_per_s: float
    beside_p50_ms: float
    beside_p99_ms: float
    beside_max_ms: float
    beside_tokens_per_s: float
    prompt_tokens_per_s: float
    prompt_p50_ms: float  # until the reply

    @property
    def beside_share(self) -> float:
        """Return the seconds that a second's tokens of streams take alone."""
        return self.beside_tokens_per_s / self.alone_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ItlReport(Report):
    """All runs, in the order in which they ran."""

    model: str
    speculate: str = "off"
    num_threads: int
    num_streams: int
    num_clients: int
    prompt_tokens: int
    stream_tokens: int = 900
    runs: list[Run]


@dataclass(slots=True)
class Streams:
    """Streams that never end, and the seconds between their tokens."""

    server: Server
    num_tokens: int
    poll: select.epoll = field(default_factory=select.epoll)
    connections: dict[int, socket.socket] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Ask for one more."""
        connection = self.server.connect(body(prompt=[5, 6, 7], max_tokens=self.num_tokens))
        self.connections[connection.fileno()] = connection
        self.poll.register(connection.fileno(), select.EPOLLIN)

    def listen(self, seconds: float) -> list[float]:
        """Take in what comes for so long; return the sorted gaps in milliseconds."""
        self.gaps_s = []
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            for number, _ in self.poll.poll(left_s):
                self._hear(number, time.perf_counter())
        return sorted(gap_s * 1000 for gap_s in self.gaps_s)

    def _hear(self, number: int, now_s: float) -> None:
        data = self.connections[number].recv(2**20)
        if not data:
            self.poll.unregister(number)
            self.connections.pop(number).close()
            self.heard_s.pop(number, None)
            self.begin()
        elif count := data.count(b"data: {"):
            if number in self.heard_s:
                self.gaps_s.append(now_s - self.heard_s[number])
            self.gaps_s += [0.0] * (count - 1)  # of tokens that came together
            self.heard_s[number] = now_s

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.poll.close()


def ask_prompts(port: int, seconds: float, num_clients: int, num_tokens: int) -> list[float]:
    """Be the clients that send prompts; return the seconds of each reply."""
    prompts = [[(5 + client + 7 * token) % 500 + 4 for token in range(num_tokens)] for client in range(num_clients)]
    asked = [Manners(post("/v1/completions", prompt=prompt, max_tokens=1)) for prompt in prompts]
    replies = [reply for waits in call(port, seconds, asked) for reply in waits]
    assert all(status == 200 for status, _, _ in replies), "a prompt was refused"
    return [wait_s for _, wait_s, _ in replies]


def measure(options: argparse.Namespace, ratio: float, clients: ProcessPoolExecutor) -> Run:
    """Measure a server of its own."""
    more = ("--max-itl-ratio", str(ratio), "--num-threads", str(options.threads), "--no-prefix-caching")
    more = ["--speculate", options.speculate, *more]
    server = Server(sys.executable, options.model, "--log-level", "warning", *more)
    streams = Streams(server, options.stream_tokens)
    about = server.port, options.seconds + 2 * WARM_S, options.clients, options.prompt
    try:
        clients.submit(ask_prompts, server.port, WARM_S, options.clients, options.prompt).result()
        for _ in range(options.streams):
            streams.begin()
        streams.listen(WARM_S)
        alone_ms = streams.listen(options.seconds)
        asking = clients.submit(ask_prompts, *about)
        streams.listen(WARM_S)  # all have begun, and the server knows what a token of a prompt takes
        beside_ms = streams.listen(options.seconds)
        streams.listen(WARM_S)
        waits_s = asking.result()
        streams.listen(WARM_S)  # what came while nobody listened is no gap of theirs
        alone_ms = sorted([*alone_ms, *streams.listen(options.seconds)])
        assert alone_ms and beside_ms, "no stream was running: give them more --stream-tokens"
    finally:
        streams.close()
        server.close()
    return Run(
        max_itl_ratio=ratio,
        num_gaps=len(beside_ms),
        step_ms=statistics.mean(alone_ms),
        alone_p50_ms=statistics.median(alone_ms),
        alone_p99_ms=p99(alone_ms),
        alone_tokens_per_s=len(alone_ms) / (2 * options.seconds),
        beside_p50_ms=statistics.median(beside_ms),
        beside_p99_ms=p99(beside_ms),
        beside_max_ms=beside_ms[-1],
        beside_tokens_per_s=len(beside_ms) / options.seconds,
        prompt_tokens_per_s=len(waits_s) * options.prompt / (options.seconds + 2 * WARM_S),
        prompt_p50_ms=statistics.median(waits_s) * 1000,
    )


def p99(sorted_values: list[float]) -> float:
    return sorted_values[int(0.99 * (len(sorted_values) - 1))]


def show(report: ItlReport) -> None:
    for ratio in sorted({run.max_itl_ratio for run in report.runs}):
        runs = [run for run in report.runs if run.max_itl_ratio == ratio]
        print(f"--max-itl-ratio {ratio:g}, {report.num_streams} streams beside {report.num_clients} clients:")
        print(f"  a step without prompts: {spread([run.step_ms for run in runs], '.2f')} ms")
        for name in ("alone_p50_ms", "alone_p99_ms", "beside_p50_ms", "beside_p99_ms", "beside_max_ms"):
            steps = spread([getattr(run, name) / run.step_ms for run in runs], ".1f")
            print(f"  {name.removesuffix('_ms').replace('_', ', ')}: {steps} steps")
        for name in ("alone_tokens_per_s", "beside_tokens_per_s", "prompt_tokens_per_s"):
            words = (
                name.removesuffix("_tokens_per_s").replace("alone", "streams alone").replace("beside", "streams beside")
            )
            print(f"  {words}: {spread([getattr(run, name) for run in runs], '.0f')} tokens/s")
        print(f"  a prompt's reply: {spread([run.prompt_p50_ms for run in runs], '.0f')} ms", flush=True)
        if unbounded := [run for run in report.runs if run.max_itl_ratio == 0]:
            pairs = zip(runs, unbounded)
            work = [run.prompt_tokens_per_s / free.prompt_tokens_per_s + run.beside_share for run, free in pairs]
            print(f"  seconds that a second's work takes apart: {spread(work, '.2f')} s", flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m", help="with a context of 1,024 tokens or more")
    parser.add_argument("--speculate", default="off")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0, 3], help="--max-itl-ratio of the servers")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--stream-tokens", type=int, default=900, help="of an output, of a context of 1,024")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--seconds", type=float, default=8, help="alone, beside prompts, and alone again")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        runs = [measure(options, ratio, clients) for _ in range(options.pairs) for ratio in options.ratios]
    sizes = {"num_streams": options.streams, "num_clients": options.clients, "prompt_tokens": options.prompt}
    sizes["stream_tokens"] = options.stream_tokens
    report = ItlReport(name="itl", model=Path(options.model).name, num_threads=options.threads, **sizes, runs=runs)
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
