"""What a process of its own costs the engine, and what kill -9 and SIGSTOP of it do to a server; loopback.

usage: python -m benchmarks.engine_process [--model python-9m] [--pairs 15] [--kills 20] [--streams 64]
           [--tokens 512] [--stops 20] [--busy 0] [--out DIR]

Price: two servers, with the engine in a thread and in a process, are asked in turns for one token at a time (TTFT) and
by 64 streams at once, of so many tokens that most steps have all of them (tokens/s). Kills: while 64 streams run, the
engine's process is killed, and each stream's last words are counted, and then what is still taken; a server ends itself
at its fifth death within ten minutes, so it is replaced before. Stops: beside 64 streams and as many busy processes as
--busy says, /ready is asked for a while, and must not say 503; then the engine is stopped, often, and it must.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks import Server
from benchmarks.common import option_parser, save, spread

from ridgeline.bench.report import Report

KILLS_A_SERVER = 4
PROMPT = [5, 6, 7, 8] * 8
TAKEN = tuple(
    f"ridgeline_{name} "
    for name in ("num_requests_running", "num_requests_waiting", "queue_tokens", 'kv_blocks{group="0",state="used"}')
)
ENDS = {b"data: [DONE]": "whole", b"event: error": "error event", b" 503 ": "503"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One round: the engine in a thread, and in a process."""

    thread_ttft_ms: float
    process_ttft_ms: float
    thread_tokens_per_s: float
    process_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill -9 of the engine: how the streams ended, by their last words, and when the last of them and /ready.

    `start_s`: the server's own, which loads the same model.
    """

    start_s: float
    ends: dict[str, int]
    last_end_s: float
    ready_s: float
    health: int
    taken: float  # cache blocks, queued tokens, requests: of nobody
    num_descriptors: int  # of the server, idle again


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Beside busy processes: how often /ready was 503 while the engine worked, and when after each SIGSTOP."""

    num_busy: int
    num_asked: int
    num_wrong: int
    unready_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport(Report):
    """All rounds, kills and stops."""

    model: str
    num_streams: int
    max_tokens: int
    pairs: list[Pair]
    kills: list[Kill]
    stops: Stops | None


def body(**more: object) -> bytes:
    content = json.dumps({"temperature": 0, "ignore_eos": True, "stream": True} | more).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def ask(port: int, data: bytes) -> bytes:
    """Return all that a server says, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


async def status(port: int, path: str) -> int:
    return int((await ask(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()))[9:12])


async def ttft_ms(port: int, count: int = 40) -> float:
    """Return the median milliseconds to the whole of a one-token stream."""
    waits = []
    for _ in range(count):
        began = time.perf_counter()
        await ask(port, body(prompt=PROMPT, max_tokens=1))
        waits.append(time.perf_counter() - began)
    return statistics.median(waits) * 1000


async def tokens_per_s(port: int, num_streams: int, max_tokens: int) -> float:
    began = time.perf_counter()
    data = body(prompt=PROMPT, max_tokens=max_tokens)
    texts = await asyncio.gather(*(ask(port, data) for _ in range(num_streams)))
    assert all(text.rstrip().endswith((b"[DONE]", b"0")) for text in texts), texts[0][-200:]
    return num_streams * max_tokens / (time.perf_counter() - began)


def measure_price(options: argparse.Namespace) -> list[Pair]:
    kinds = {"thread": "--no-engine-process", "process": "--engine-process"}
    more = ("--log-level", "warning", "--num-threads", str(options.threads))
    servers = {name: Server(sys.executable, options.model, *more, flag) for name, flag in kinds.items()}
    pairs = []
    try:
        for number in range(options.pairs + 1):
            found: dict[str, float] = {}
            for name in kinds if number % 2 else reversed(kinds):
                found[f"{name}_ttft_ms"] = asyncio.run(ttft_ms(servers[name].port))
                speed = asyncio.run(tokens_per_s(servers[name].port, options.streams, options.tokens))
                found[f"{name}_tokens_per_s"] = speed
            if number:  # the first is to warm up
                pairs.append(Pair(**found))
    finally:
        for server in servers.values():
            server.close()
    return pairs


def engine_of(server: Server) -> int:
    """Return the process id of a server's engine."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(children[0])


async def kill_once(server: Server, start_s: float, number: int, num_streams: int) -> Kill:
    prompts = [[number + 1, stream + 1, *PROMPT] for stream in range(num_streams)]  # of which none is a suspect
    streams = [asyncio.create_task(ask(server.port, body(prompt=prompt, max_tokens=900))) for prompt in prompts]
    await asyncio.sleep(0.3)
    os.kill(engine_of(server), signal.SIGKILL)
    began = time.perf_counter()
    texts = await asyncio.wait_for(asyncio.gather(*streams), 60)
    last_end_s = time.perf_counter() - began
    ends: dict[str, int] = {}
    for text in texts:
        word = next((word for mark, word in ENDS.items() if mark in text), "cut off")
        ends[word] = ends.get(word, 0) + 1
    health = await status(server.port, "/health")
    while await status(server.port, "/ready") != 200:
        await asyncio.sleep(0.02)
    ready_s = time.perf_counter() - began
    assert (await ask(server.port, body(prompt=PROMPT, max_tokens=2))).rstrip().endswith((b"[DONE]", b"0"))
    text = (await ask(server.port, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")).decode()
    taken = sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(TAKEN))
    num_descriptors = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    times = {"start_s": start_s, "last_end_s": last_end_s, "ready_s": ready_s}
    return Kill(**times, ends=ends, health=health, taken=taken, num_descriptors=num_descriptors)


def measure_kills(options: argparse.Namespace) -> list[Kill]:
    kills: list[Kill] = []
    while len(kills) < options.kills:
        began = time.perf_counter()
        server = Server(sys.executable, options.model, "--log-level", "error", "--engine-process")
        start_s = time.perf_counter() - began
        try:
            for _ in range(min(KILLS_A_SERVER, options.kills - len(kills))):
                kills.append(asyncio.run(kill_once(server, start_s, len(kills), options.streams)))
        finally:
            server.close()
    return kills


async def stop_often(server: Server, options: argparse.Namespace) -> Stops:
    streams = [asyncio.create_task(keep_asking(server.port, stream)) for stream in range(options.streams)]
    asked = []
    for _ in range(50 * options.stops):
        asked.append(await status(server.port, "/ready"))
        await asyncio.sleep(0.02)
    engine, unready_s = engine_of(server), []
    for _ in range(options.stops):
        os.kill(engine, signal.SIGSTOP)
        began = time.perf_counter()
        while await status(server.port, "/ready") == 200:
            await asyncio.sleep(0.005)
        unready_s.append(time.perf_counter() - began)
        os.kill(engine, signal.SIGCONT)
        while await status(server.port, "/ready") != 200:
            await asyncio.sleep(0.02)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    return Stops(
        num_busy=options.busy, num_asked=len(asked), num_wrong=len(asked) - asked.count(200), unready_s=unready_s
    )


async def keep_asking(port: int, stream: int) -> None:
    while True:
        await ask(port, body(prompt=[stream + 1, *PROMPT], max_tokens=900))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep as many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_stops(options: argparse.Namespace) -> Stops:
    server = Server(sys.executable, options.model, "--log-level", "error", "--engine-process")
    try:
        with busy(options.busy):
            return asyncio.run(stop_often(server, options))
    finally:
        server.close()


def show(report: ProcessReport) -> None:
    if pairs := report.pairs:
        more_ms = [pair.process_ttft_ms - pair.thread_ttft_ms for pair in pairs]
        share = [pair.process_tokens_per_s / pair.thread_tokens_per_s for pair in pairs]
        print(f"TTFT in a thread {spread([pair.thread_ttft_ms for pair in pairs], '.2f')} ms")
        print(f"TTFT in a process, more: {spread(more_ms, '+.2f')} ms")
        print(f"throughput of {report.num_streams} streams, process over thread: {spread(share, '.3f')}")
    if kills := report.kills:
        ends = {word: sum(kill.ends.get(word, 0) for kill in kills) for word in (*ENDS.values(), "cut off")}
        print(f"{len(kills)} x kill -9: {ends}, /health {sorted({kill.health for kill in kills})}")
        descriptors = sorted({kill.num_descriptors for kill in kills})
        print(f"still taken: {sum(kill.taken for kill in kills):g}; descriptors afterwards: {descriptors}")
        print(f"last reply after {spread([kill.last_end_s for kill in kills], '.3f')} s")
        more_s = [kill.ready_s - kill.start_s for kill in kills]
        print(f"ready again after {spread([kill.ready_s for kill in kills], '.2f')} s")
        print(f"which is longer than its server's start by {spread(more_s, '+.2f')} s")
    if stops := report.stops:
        print(f"beside {stops.num_busy} busy processes: {stops.num_wrong} of {stops.num_asked} x /ready were wrong")
        print(f"not ready {spread(stops.unready_s, '.2f')} s after SIGSTOP")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of each stream")
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    report = ProcessReport(
        name="engine-process",
        model=options.model,
        num_streams=options.streams,
        max_tokens=options.tokens,
        pairs=measure_price(options) if options.pairs else [],
        kills=measure_kills(options),
        stops=measure_stops(options) if options.stops else None,
    )
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
