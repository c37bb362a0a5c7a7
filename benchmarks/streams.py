"""What HTTP adds to a token of many streams, and the longest that any of them waits for its next one; loopback.

usage: python -m benchmarks.streams [--other ENV/bin/python] [--model python-1m] [--streams 64 500] [--tokens 256]
           [--pairs 3] [--profile PY-SPY] [--out DIR]

For each build and number of streams: the engine alone, in a process without a server, and then a server with as many
slots, one thread computing in both. The client looks every few milliseconds which sockets have bytes, and counts them:
it costs next to nothing, and wakes nobody. What counts is the time from where half of the streams have begun to where
the first has ended; a gap is the time between two looks that found something of a stream. With `--profile` py-spy
samples the server and its engine meanwhile (`pip install py-spy`, which may need root), and what they take of a token
is divided by where they were.
"""

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks import Server
from benchmarks.common import option_parser, save
from benchmarks.engine_process import body

from ridgeline.bench.report import Report

LOOK_S = 0.002
ENGINE = "engine.process.child"  # what the command of an engine's process has in it
AREAS = {  # by process: where a sample is, by what its innermost function has in its name or file; the first that fits
    "server": {
        "bytes to sockets": ("_SelectorSocketTransport.write",),
        "waiting for sockets": ("selectors.py",),
        "the event loop and its tasks": ("asyncio/", "_asyncio"),
        "frames from the engine: read, msgpack": ("engine/process/",),
        "outputs to their readers": ("engine/streams.py",),
        "text, JSON, events": ("server/openai/", "server/sse.py", "uuid.py", "text/"),
        "HTTP": ("server/transport.py", "uvicorn/", "starlette/", "server/boundary.py"),
        "metrics": ("prometheus_client/", "server/metrics.py"),
    },
    "engine": {
        "the model, with sampling": ("backends/",),
        "frames to the server: msgpack, a write": (
            "EngineProcess._deliver",
            "EngineProcess._send",
            "wire.py",
        ),
        "text": ("engine/render.py", "text/"),
        "planning, taking in, journal": ("engine/", "cache/", "decoding/", "<string>", "core/"),
    },
}
ALONE = """
import json, sys, time
from ridgeline import LLM, SamplingParams
model, size, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(model, max_num_seqs=size, max_num_batched_tokens=max(512, size), num_threads=1)
def run(count, first):
    prompts = [[first, 5 + i % 64, 5 + i // 64] * 2 for i in range(size)]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s
run(8, 5)
short, long = run(8, 6), run(tokens, 7)
print(json.dumps([(after - before) / (size * (tokens - 8)) * 1e6 for before, after in zip(short, long)]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Microseconds of a token on one build, by the clock and of processors, and gaps of all streams."""

    build: str
    num_streams: int
    alone_us: float
    alone_cpu_us: float
    served_us: float
    server_cpu_us: float  # of the process that clients speak to
    engine_cpu_us: float  # of the engine's own, where it has one
    gap_p50_ms: float
    gap_p999_ms: float
    max_gap_ms: float
    max_gap_at_s: float  # where it ended, after all were asked for
    first_end_at_s: float
    first_token_max_ms: float

    @property
    def http_us(self) -> float:
        return self.served_us - self.alone_us

    @property
    def http_cpu_us(self) -> float:
        return self.server_cpu_us + self.engine_cpu_us - self.alone_cpu_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsReport(Report):
    """All runs, and where processor time goes, in microseconds of a token: by build, process and area."""

    model: str
    num_tokens: int
    runs: list[Run]
    profile: dict[str, dict[str, dict[str, float]]]
    send_us: float  # of processor time, the system's alone, for an event to one of many sockets


def alone(python: str, model: str, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """Return the microseconds of a token without a server, by the clock and of processors."""
    command = [python, "-c", ALONE, model, str(num_streams), str(num_tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    wall_us, cpu_us = json.loads(done.stdout.splitlines()[-1])
    return wall_us, cpu_us


def cpu_s(process: int) -> float:
    """Return the processor time of all threads of a process so far."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{process}/task").glob("*/schedstat")) / 1e9


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


class Streams:
    """Streams that are all asked for at once, and when each was last heard of."""

    def __init__(self, server: Server, num_streams: int, num_tokens: int, first: int) -> None:
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        for number in range(num_streams):
            prompt = [first, 5 + number % 64, 5 + number // 64] * 2
            connection = server.connect(body(prompt=prompt, max_tokens=num_tokens))
            connection.setblocking(False)
            self._sockets[connection.fileno()] = connection
            self._poll.register(connection.fileno(), select.EPOLLIN)
        self.began_s = time.perf_counter()
        self.last_began_s = self.began_s
        self.heard_s: dict[int, float] = {}
        self.gaps_s: list[tuple[float, float]] = []  # with when it ended
        self.first_end_s = 0.0
        self.num_tokens = 0
        self.num_done = 0

    def look(self) -> None:
        """Take in what has come."""
        time.sleep(LOOK_S)
        now_s = time.perf_counter()
        for number, _ in self._poll.poll(0):
            data = self._sockets[number].recv(2**20)
            if not data:
                self._poll.unregister(number)
                self._sockets.pop(number).close()
                continue
            self.num_tokens += data.count(b"data: {")
            if b"data: [DONE]" in data:
                self.num_done += 1
                self.first_end_s = self.first_end_s or now_s - self.began_s
            if number in self.heard_s:
                self.gaps_s.append((now_s - self.heard_s[number], now_s - self.began_s))
            else:
                self.last_began_s = now_s
            self.heard_s[number] = now_s

    def finish(self) -> None:
        while self._sockets:
            self.look()
        self._poll.close()


def streamed(server: Server, num_streams: int, num_tokens: int, first: int) -> dict[str, float]:
    """Return what is measured of one round of streams, by the field of Run."""
    streams = Streams(server, num_streams, num_tokens, first)
    while len(streams.heard_s) < num_streams / 2:
        streams.look()
    processes = [server.process.pid, *children(server.process.pid)]
    before_s, before, begun = [cpu_s(process) for process in processes], time.perf_counter(), streams.num_tokens
    assert not streams.num_done, "the first stream ended before half of them began: more --tokens"
    while not streams.num_done:
        streams.look()
    wall_s, count = time.perf_counter() - before, streams.num_tokens - begun
    cpus_us = [(cpu_s(process) - cpu) / count * 1e6 for process, cpu in zip(processes, before_s)]
    streams.finish()
    gaps_ms = sorted(gap_s * 1e3 for gap_s, _ in streams.gaps_s)
    assert streams.num_done == num_streams
    return {
        "served_us": wall_s / count * 1e6,
        "server_cpu_us": cpus_us[0],
        "engine_cpu_us": sum(cpus_us[1:]),
        "gap_p50_ms": statistics.median(gaps_ms),
        "gap_p999_ms": gaps_ms[int(0.999 * len(gaps_ms))],
        "max_gap_ms": gaps_ms[-1],
        "max_gap_at_s": max(streams.gaps_s)[1],
        "first_end_at_s": streams.first_end_s,
        "first_token_max_ms": (streams.last_began_s - streams.began_s) * 1e3,
    }


def send_us(num_sockets: int, num_rounds: int = 200) -> float:
    """Return the processor time of a write of as many bytes as an event has, to each of many connections in turn."""
    piece, taken_s = b"x" * 230, []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=num_sockets))
        pairs: list[tuple[socket.socket, socket.socket]] = []
        for _ in range(num_sockets):
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            pairs.append((client, stack.enter_context(listener.accept()[0])))
            pairs[-1][1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_rounds):
            began_s = time.thread_time()
            for _, server in pairs:
                server.send(piece)
            taken_s.append(time.thread_time() - began_s)
            for client, _ in pairs:
                client.recv(len(piece))
    return statistics.median(taken_s) / num_sockets * 1e6


def area_of(frames: list[str]) -> tuple[str, str] | None:
    """Return the process and the area of a stack, None for a thread that waits, for work or for the core."""
    process = "engine" if any(ENGINE in frame for frame in frames) else "server"
    place = frames[-1]
    if place.startswith(("_worker ", *(f"EngineProcess.{name} " for name in ("_beat", "_listen", "_deliver")))):
        return None
    areas = AREAS[process].items()
    return process, next((area for area, names in areas if any(name in place for name in names)), "else")


def profiled(
    py_spy: str, server: Server, num_streams: int, num_tokens: int, cpu_us: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Divide `cpu_us` of a token, by process, by the samples of each area while streams run."""
    with tempfile.NamedTemporaryFile(mode="r") as out:
        record = [py_spy, "record", "--rate", "400", "--format", "raw", "--subprocesses", "--output", out.name]
        record += ["--duration", "600"]
        with subprocess.Popen([*record, "--pid", str(server.process.pid)], stdout=subprocess.DEVNULL) as sampler:
            time.sleep(1)
            for first in range(200, 206):
                Streams(server, num_streams, num_tokens, first).finish()
            sampler.send_signal(2)
            sampler.wait(30)
        found: dict[str, Counter[str]] = {process: Counter() for process in AREAS}
        for line in out:
            stack, _, count = line.rpartition(" ")
            if (place := area_of(stack.split(";"))) is not None:
                found[place[0]][place[1]] += int(count)
    return {
        process: {area: count / areas.total() * cpu_us[process] for area, count in areas.most_common()}
        for process, areas in found.items()
    }


def serve(python: str, options: argparse.Namespace, num_streams: int) -> Server:
    slots = ("--max-num-seqs", str(num_streams), "--max-num-batched-tokens", str(max(512, num_streams)))
    return Server(python, options.model, "--log-level", "warning", "--num-threads", "1", *slots)


def measure(options: argparse.Namespace, builds: dict[str, str]) -> StreamsReport:
    runs: list[Run] = []
    profile: dict[str, dict[str, dict[str, float]]] = {}
    for num_streams in options.streams:
        with ExitStack() as stack:
            servers = {build: serve(python, options, num_streams) for build, python in builds.items()}
            for server in servers.values():
                stack.callback(server.close)
            for pair in range(options.pairs + 1):
                for build, python in builds.items():
                    found = streamed(servers[build], num_streams, options.tokens, 5 + pair)
                    if pair:  # the first is to warm up
                        wall_us, cpu_us = alone(python, options.model, num_streams, options.tokens)
                        alone_us = {"alone_us": wall_us, "alone_cpu_us": cpu_us}
                        runs.append(Run(build=build, num_streams=num_streams, **alone_us, **found))
                        show(runs[-1])
            if options.profile and num_streams == options.streams[0]:
                for build, server in servers.items():
                    own = [run for run in runs if run.build == build]
                    cpu_us = {
                        "server": statistics.median(run.server_cpu_us for run in own),
                        "engine": statistics.median(run.engine_cpu_us for run in own),
                    }
                    profile[build] = profiled(options.profile, server, num_streams, options.tokens, cpu_us)
    sizes = {"model": options.model, "num_tokens": options.tokens, "send_us": send_us(options.streams[0])}
    return StreamsReport(name="streams", runs=runs, profile=profile, **sizes)


def show(run: Run) -> None:
    print(
        f"{run.build}, {run.num_streams} streams: {run.served_us:.1f} us a token, {run.alone_us:.1f} alone, "
        f"HTTP {run.http_us:+.1f}; CPU: server {run.server_cpu_us:.1f}, engine {run.engine_cpu_us:.1f}, "
        f"alone {run.alone_cpu_us:.1f}, HTTP {run.http_cpu_us:+.1f}; gaps p50 {run.gap_p50_ms:.1f} ms, "
        f"p99.9 {run.gap_p999_ms:.1f}, max {run.max_gap_ms:.1f} at {run.max_gap_at_s:.2f} s; "
        f"last first token {run.first_token_max_ms:.0f} ms, first end {run.first_end_at_s:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--other", help="Python of an environment with another build, to be measured too")
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 500])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--profile", metavar="PY-SPY", help="sample the servers with this py-spy")
    options = parser.parse_args()
    builds = {"other": options.other} if options.other else {}
    builds["this"] = sys.executable
    report = measure(options, builds)
    print(f"a write to a socket takes the system {report.send_us:.2f} us")
    for build, processes in report.profile.items():
        for process, areas in processes.items():
            print(f"{build}, {process}: {sum(areas.values()):.1f} us of processor time a token")
            for area, taken_us in areas.items():
                print(f"  {taken_us:5.2f}  {area}")
    save(options.out, report)


if __name__ == "__main__":
    main()
