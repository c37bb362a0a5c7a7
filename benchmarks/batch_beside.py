"""What a running batch costs the interactive requests beside it: TTFT with and without one, in turns; loopback.

usage: python -m benchmarks.batch_beside [--model python-9m] [--pairs 8] [--requests 30] [--out DIR]

One server. Without a batch, then while one of many lines runs (cancelled afterwards), requests for one token come one
after the other, each with a prompt that no cache has. The batch's lines keep half of the places, so steps are longer.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import httpx
from benchmarks.attacks import Server
from benchmarks.common import option_parser, save, spread
from benchmarks.engine_process import ask, body

from ridgeline.bench.report import Report

LINES, LINE_TOKENS, PROMPT_TOKENS = 4000, 200, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One round: TTFTs alone and beside a batch, the mean step beside it, and its lines done each second."""

    alone_ms: float
    alone_p99_ms: float
    beside_ms: float
    beside_p99_ms: float
    step_ms: float
    lines_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideReport(Report):
    """All rounds."""

    model: str
    pairs: list[Pair]


async def ttfts_ms(port: int, rng: random.Random, count: int) -> list[float]:
    waits = []
    for _ in range(count):
        data = body(prompt=[rng.randrange(5, 500) for _ in range(PROMPT_TOKENS)], max_tokens=1)
        began = time.perf_counter()
        await ask(port, data)
        waits.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(rng.uniform(0, 0.02))
    return waits


def begin(client: httpx.Client) -> str:
    """Begin a batch whose lines all run long; return its id once some of them run."""
    rng = random.Random(0)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": [rng.randrange(5, 500) for _ in range(PROMPT_TOKENS)],
                "max_tokens": LINE_TOKENS,
                "ignore_eos": True,
            },
        }
        for number in range(LINES)
    ]
    content = "\n".join(map(json.dumps, lines))
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()
    while num_done(client, batch["id"]) < 8:
        time.sleep(0.05)
    return batch["id"]


def num_done(client: httpx.Client, batch_id: str) -> int:
    return client.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"]


def steps_of(client: httpx.Client) -> tuple[float, float]:
    """Return how many steps there were, and the seconds of all."""
    name, lines = "ridgeline_step_duration_seconds", client.get("/metrics").text.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(name)}
    return found[f"{name}_count"], found[f"{name}_sum"]


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def measure(options: argparse.Namespace) -> list[Pair]:
    pairs, rng = [], random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        more = ("--files", folder, "--log-level", "warning", "--num-threads", str(options.threads))
        server = Server(sys.executable, options.model, *more)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
                for number in range(options.pairs + 1):
                    alone = asyncio.run(ttfts_ms(server.port, rng, options.requests))
                    batch_id = begin(client)
                    lines, steps, began = num_done(client, batch_id), steps_of(client), time.perf_counter()
                    beside = asyncio.run(ttfts_ms(server.port, rng, options.requests))
                    count, taken_s = (now - then for now, then in zip(steps_of(client), steps, strict=True))
                    speed = (num_done(client, batch_id) - lines) / (time.perf_counter() - began)
                    client.post(f"/v1/batches/{batch_id}/cancel")
                    while client.get(f"/v1/batches/{batch_id}").json()["status"] != "cancelled":
                        time.sleep(0.05)
                    found = (statistics.median(alone), p99(alone), statistics.median(beside), p99(beside))
                    if number:  # the first is to warm up
                        names = ("alone_ms", "alone_p99_ms", "beside_ms", "beside_p99_ms")
                        pairs.append(
                            Pair(
                                **dict(zip(names, found, strict=True)),
                                step_ms=taken_s / count * 1000,
                                lines_per_s=speed,
                            )
                        )
        finally:
            server.close()
    return pairs


def show(report: BesideReport) -> None:
    pairs = report.pairs
    print(f"TTFT alone: {spread([pair.alone_ms for pair in pairs], '.2f')} ms")
    print(f"TTFT beside a batch, more: {spread([pair.beside_ms - pair.alone_ms for pair in pairs], '+.2f')} ms")
    print(f"a step beside it: {spread([pair.step_ms for pair in pairs], '.2f')} ms")
    print(f"p99 beside over alone: {spread([pair.beside_p99_ms / pair.alone_p99_ms for pair in pairs], '.2f')}")
    print(f"the batch meanwhile: {spread([pair.lines_per_s for pair in pairs], '.1f')} lines/s")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=30)
    options = parser.parse_args()
    report = BesideReport(name="batch-beside", model=options.model, pairs=measure(options))
    show(report)
    save(options.out, report)


if __name__ == "__main__":
    main()
