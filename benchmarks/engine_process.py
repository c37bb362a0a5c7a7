"""What a process of its own costs the engine, and what 20 times kill -9 do to the clients of a server; loopback.

usage: python -m benchmarks.engine_process [--model python-9m] [--pairs 15] [--kills 20] [--streams 64] [--out DIR]

Price: two servers, with the engine in a thread and in a process, are asked in turns for one token at a time (TTFT) and
by 64 streams at once (tokens/s). Kills: while 64 streams run, the engine's process is killed, and each stream's last
words are counted; a server ends itself at its fifth death within ten minutes, so it is replaced before.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks import Server
from benchmarks.common import option_parser, save, spread

from ridgeline.bench.report import Report

KILLS_A_SERVER = 4
PROMPT = [5, 6, 7, 8] * 8
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
    """One kill -9 of the engine: how the streams ended, by their last words, and when the last of them and /ready."""

    ends: dict[str, int]
    last_end_s: float
    ready_s: float
    health: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport(Report):
    """All rounds and kills."""

    model: str
    num_streams: int
    pairs: list[Pair]
    kills: list[Kill]


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


async def tokens_per_s(port: int, num_streams: int, max_tokens: int = 128) -> float:
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
                found[f"{name}_tokens_per_s"] = asyncio.run(tokens_per_s(servers[name].port, options.streams))
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


async def kill_once(server: Server, number: int, num_streams: int) -> Kill:
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
    return Kill(ends=ends, last_end_s=last_end_s, ready_s=ready_s, health=health)


def measure_kills(options: argparse.Namespace) -> list[Kill]:
    kills: list[Kill] = []
    while len(kills) < options.kills:
        server = Server(sys.executable, options.model, "--log-level", "error", "--engine-process")
        try:
            for _ in range(min(KILLS_A_SERVER, options.kills - len(kills))):
                kills.append(asyncio.run(kill_once(server, len(kills), options.streams)))
        finally:
            server.close()
    return kills


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
        print(f"last reply after {spread([kill.last_end_s for kill in kills], '.3f')} s")
        print(f"ready again after {spread([kill.ready_s for kill in kills], '.2f')} s")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    report = ProcessReport(
        name="engine-process",
        model=options.model,
        num_streams=options.streams,
        pairs=measure_price(options) if options.pairs else [],
        kills=measure_kills(options),
    )
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
