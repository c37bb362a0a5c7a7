"""What the memory of the server's process does over tens of thousands of requests, and who holds it; loopback.

usage: python -m benchmarks.front_memory [--model python-1m] [--rounds 12] [--seconds 6] [--trace N] [--out DIR]

Clients ask for everything that a server has, round after round; after each the idle process tells its resident memory,
what malloc has given out and what it holds free, the number of Python's blocks, and of objects in cycles that nothing
but the collector frees. What is alive grows with what is given out and with blocks; what the allocators keep does not.
With `--trace`, tracemalloc follows allocations through N frames, and the lines of code are shown that hold more than
after the first half: a traced server is four times as slow. Responses are stored within 100 KB, so that what is stored
on purpose is full after the first round.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.attacks import Server
from benchmarks.callers import Manners, call, post
from benchmarks.common import option_parser, save

from ridgeline.bench.report import Report

TELLING = """
import ctypes, gc, json, os, signal, sys, tracemalloc

names = "arena ordblks smblks hblks mapped usmblks fsmblks given free keepcost".split()
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
snapshots = []

def tell(*_):
    num_garbage = gc.collect()
    info = mallinfo()
    found = {"malloc_bytes": info.given + info.mapped, "free_bytes": info.free}
    found |= {"num_blocks": sys.getallocatedblocks(), "num_garbage": num_garbage}
    if tracemalloc.is_tracing():
        snapshots.append(tracemalloc.take_snapshot())
        lines = snapshots[-1].compare_to(snapshots[len(snapshots) // 2], "traceback")[:12]
        found["lines"] = [[line.size_diff, line.count_diff, *line.traceback.format()] for line in lines]
        for place in range(1, len(snapshots) // 2):
            snapshots[place] = None
    path = os.environ["FRONT_MEMORY"]
    with open(path + ".new", "w") as file:
        json.dump(found, file)
    os.rename(path + ".new", path)

signal.signal(signal.SIGUSR2, tell)
from ridgeline.cli import main
main()
"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
SAID = [{"role": "user", "content": "def f(x):"}]
KINDS = {
    "completion": post("/v1/completions", prompt=[5, 6, 7], max_tokens=8),
    "several": post("/v1/completions", prompt=[[5], [6]], n=2, max_tokens=4, logprobs=2),
    "stream": post("/v1/completions", prompt="def f", max_tokens=16, stream=True),
    "chat": post("/v1/chat/completions", messages=SAID, max_tokens=8, stream=True),
    "tool": post("/v1/chat/completions", messages=SAID, max_tokens=24, tools=[TOOL], tool_choice="required"),
    "schema": post("/v1/chat/completions", messages=SAID, max_tokens=24, response_format=FORM),
    "message": post("/v1/messages", messages=SAID, max_tokens=8),
    "response": post("/v1/responses", input="a", max_output_tokens=8),
    "tokens": post("/tokenize", prompt="def f(x):" * 9),
    "bad": post("/v1/completions", prompt=[10**9]),
    "nowhere": post("/v1/nowhere"),
    "metrics": b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}


class Telling(Server):
    """A server that tells what its process holds when it is asked by SIGUSR2."""

    START = ("-c", TELLING, "serve")

    def tell(self, path: Path) -> dict:
        path.unlink(missing_ok=True)
        os.kill(self.process.pid, signal.SIGUSR2)
        while not path.exists():
            time.sleep(0.05)
        return json.loads(path.read_text()) | {"rss_bytes": self.rss_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the idle process held after so many requests."""

    num_requests: int
    rss_bytes: int
    malloc_bytes: int
    free_bytes: int
    num_blocks: int
    num_garbage: int  # objects in cycles that nobody had looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(Report):
    """All looks, and what each request added in the second half."""

    model: str
    replies: dict[str, int]
    looks: list[Look]
    rss_bytes_per_request: float
    malloc_bytes_per_request: float
    blocks_per_request: float
    lines: list[list[object]]


def measure(options: argparse.Namespace) -> MemoryReport:
    kind: type[Telling] = Telling
    if options.trace:
        kind = type("Traced", (Telling,), {"START": ("-X", f"tracemalloc={options.trace}", *Telling.START)})
    looks: list[Look] = []
    replies: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        os.environ["FRONT_MEMORY"] = str(path)
        more = ("--log-level", "error", "--num-threads", "1", "--max-stored-bytes", "100000")
        template = Path(folder) / "chat.jinja"
        template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n")
        server = kind(sys.executable, options.model, *more, "--chat-template", str(template))
        found: dict = {}
        try:
            while len(looks) < options.rounds:
                waits = call(server.port, options.seconds, [Manners(data) for data in KINDS.values()] * 2)
                for status in (status for each in waits for status, _, _ in each):
                    replies[str(status)] = replies.get(str(status), 0) + 1
                time.sleep(0.5)
                found = server.tell(path)
                lines = found.pop("lines", [])
                looks.append(Look(num_requests=sum(replies.values()), **found))
                print(looks[-1], flush=True)
        finally:
            server.close()
    half = looks[len(looks) // 2 :]
    slopes = {
        name: float(np.polyfit([look.num_requests for look in half], [getattr(look, name) for look in half], 1)[0])
        for name in ("rss_bytes", "malloc_bytes", "num_blocks")
    }
    return MemoryReport(
        name="front-memory",
        model=options.model,
        replies=replies,
        looks=looks,
        rss_bytes_per_request=slopes["rss_bytes"],
        malloc_bytes_per_request=slopes["malloc_bytes"],
        blocks_per_request=slopes["num_blocks"],
        lines=lines,
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--trace", type=int, metavar="N", help="follow each allocation through N frames")
    options = parser.parse_args()
    report = measure(options)
    print(f"replies: {report.replies}")
    print(
        f"each request of the second half: {report.rss_bytes_per_request:+.1f} bytes resident, "
        f"{report.malloc_bytes_per_request:+.1f} of malloc, {report.blocks_per_request:+.4f} blocks of Python"
    )
    for size, count, *places in report.lines:
        print(f"{size:+} bytes in {count:+} blocks:", *places, sep="\n  ")
    save(options.out, report)


if __name__ == "__main__":
    main()
