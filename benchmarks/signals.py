"""What signals and a lack of memory do to a server, its engine and their open requests; loopback, bounded.

usage: python -m benchmarks.signals [--only NAME ...] [--streams 40] [--whole 10] [--out DIR]

Every case has a server of its own, with as many streams and whole responses open as are asked for. A request ends
whole, with an error event or a 503 that says to retry, or is cut off. After what a server survives, it has to give the
same tokens as before.
"""

import argparse
import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks import Server
from benchmarks.common import option_parser, save
from benchmarks.engine_process import ask, body, engine_of, status

from ridgeline.bench.report import Report

TOKENS = 900
SHORT = body(prompt=[5, 6, 7], max_tokens=16, stream=False)
ROOM_BYTES = 2**20  # of address space, beside what a process has
BOMB = body(prompt=[3] * 500, max_tokens=500, n=24, logprobs=5, stream=False)
CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the open requests ended, the server's exit code (None: it serves), and what else there is to tell."""

    name: str
    ends: dict[str, int]
    exit_code: int | None
    told: dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReport(Report):
    """All cases."""

    model: str
    cases: list[Case]


def end_of(reply: bytes) -> str:
    """Return how a response ended."""
    if (status := reply[9:12].decode()) not in ("", "200"):
        retries = b"retry-after" in reply.lower()
        return status if status != "503" or retries else "503 without Retry-After"
    if b"event: error" in reply:
        return "error event" if b"[DONE]" not in reply else "error event and [DONE]"
    is_whole = b"[DONE]" in reply if b"text/event-stream" in reply else reply.endswith(b"}")
    return "whole" if is_whole else "cut off"


async def held(server: Server, options: argparse.Namespace, act: Callable[[], Awaitable[None]]) -> dict[str, int]:
    """Return how the open requests ended that were there when `act` happened."""

    async def one(at: int) -> str:
        data = body(prompt=[at % 50 + 5, at // 50 + 5, 7], max_tokens=TOKENS, stream=at < options.streams)
        with suppress(OSError):
            return end_of(await ask(server.port, data))
        return "cut off"

    tasks = [asyncio.create_task(one(at)) for at in range(options.streams + options.whole)]
    await asyncio.sleep(0.3)
    await act()
    ends = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return {end: ends.count(end) for end in sorted(set(ends))}


async def until(is_so: Callable[[], Awaitable[bool]]) -> float:
    """Wait for something; return after how many seconds it was so."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < 60:
        with suppress(OSError, ValueError):
            if await is_so():
                break
        await asyncio.sleep(0.005)
    return round(time.perf_counter() - began_s, 3)


def tokens_of(reply: bytes) -> str:
    return reply.decode().partition('"text":')[2].partition(',"')[0]


async def serves_as(server: Server, before: bytes) -> str:
    """Wait until a server is ready; tell whether it gives the same tokens as before, on the same cache or a new one."""

    async def ready() -> bool:
        return await status(server.port, "/ready") == 200

    await until(ready)
    return "the same" if tokens_of(await ask(server.port, SHORT)) == tokens_of(before) != "" else "others"


async def drained(server: Server, options: argparse.Namespace) -> Case:
    """SIGTERM: what is open ends, who comes is told to come back, and the process ends with 0."""
    told: dict[str, float | str] = {}

    async def act() -> None:
        server.process.send_signal(signal.SIGTERM)

        async def unready() -> bool:
            return await status(server.port, "/ready") == 503

        told["ready_503_s"] = await until(unready)
        reply = await ask(server.port, SHORT)
        told["new"] = end_of(reply)
        told["new_closes"] = str(b"connection: close" in reply.lower())
        told["health"] = await status(server.port, "/health")

    ends = await held(server, options, act)
    return Case(name="SIGTERM", ends=ends, exit_code=server.process.wait(30), told=told)


async def cut_short(server: Server, options: argparse.Namespace) -> Case:
    """SIGTERM where the shutdown timeout passes: who is open is told to retry."""

    async def act() -> None:
        server.process.send_signal(signal.SIGTERM)

    ends = await held(server, options, act)
    told = {"log_lines": len(server.log.splitlines())}
    return Case(name="SIGTERM, timeout", ends=ends, exit_code=server.process.wait(30), told=dict(told))


async def interrupted(server: Server, options: argparse.Namespace) -> Case:
    """SIGINT, and again: the process ends at once, and its engine with it."""
    engine, ended_s = engine_of(server), 0.0

    async def act() -> None:
        nonlocal ended_s
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        server.process.send_signal(signal.SIGINT)
        ended_s = await gone(engine)

    ends = await held(server, options, act)
    return Case(name="SIGINT twice", ends=ends, exit_code=server.process.wait(30), told={"engine_gone_s": ended_s})


async def gone(process_id: int) -> float:
    """Wait for the end of a process; return after how many seconds it was."""

    async def ended() -> bool:
        with suppress(FileNotFoundError):
            return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    return await until(ended)


async def survived(
    server: Server, options: argparse.Namespace, name: str, act: Callable[[], Awaitable[dict[str, float | str]]]
) -> Case:
    """Return what `act` does to a server that serves on."""
    before, told = await ask(server.port, SHORT), dict[str, float | str]()

    async def acting() -> None:
        told.update(await act())

    ends = await held(server, options, acting)
    told["tokens_afterwards"] = await serves_as(server, before)
    return Case(name=name, ends=ends, exit_code=server.process.poll(), told=told)


async def hung_up(server: Server, options: argparse.Namespace) -> Case:
    async def act() -> dict[str, float | str]:
        server.process.send_signal(signal.SIGHUP)
        return {}

    return await survived(server, options, "SIGHUP", act)


async def stopped(server: Server, options: argparse.Namespace) -> Case:
    """SIGSTOP of the server for longer than an engine may be silent, then SIGCONT: nobody is blamed."""

    async def act() -> dict[str, float | str]:
        engine = engine_of(server)
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(7)
        server.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(1)
        return {"engine": "the same" if engine_of(server) == engine else "another"}

    return await survived(server, options, "SIGSTOP of the server, 7 s", act)


async def killed(server: Server, options: argparse.Namespace) -> Case:
    """SIGKILL of the server: its engine ends, and another server may have the port at once."""
    engine, told = engine_of(server), dict[str, float | str]()

    async def act() -> None:
        server.process.kill()
        told["engine_gone_s"] = await gone(engine)

    ends = await held(server, options, act)
    command = [sys.executable, *Server.START, options.model, "--port", str(server.port), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as again:
        assert again.stdout is not None
        told["port_again"] = "free" if again.stdout.readline().startswith("Ridgeline serves") else "taken"
        again.kill()
    return Case(name="SIGKILL of the server", ends=ends, exit_code=server.process.wait(30), told=told)


async def without_memory(server: Server, options: argparse.Namespace) -> Case:
    """No more address space for the engine, and a request that wants much; later it has room again."""

    async def act() -> dict[str, float | str]:
        engine = engine_of(server)
        size_bytes = 4096 * int(Path(f"/proc/{engine}/statm").read_text().split()[0])
        before = resource.prlimit(engine, resource.RLIMIT_AS, (size_bytes + ROOM_BYTES, resource.RLIM_INFINITY))
        bomb = end_of(await ask(server.port, BOMB))
        with suppress(ProcessLookupError):
            resource.prlimit(engine, resource.RLIMIT_AS, before)
        return {"bomb": bomb, "health": await status(server.port, "/health")}

    return await survived(server, options, "no address space", act)


async def out_of_memory(server: Server, options: argparse.Namespace) -> Case:
    """Let the kernel end the engine for the memory of its control group, which another process takes."""
    engine, group = engine_of(server), CGROUPS / f"ridgeline-{os.getpid()}"

    async def act() -> dict[str, float | str]:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(engine))
        limit = group / "memory.limit_in_bytes"
        command = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); b = bytearray(2**28); input()"
        limit.write_text(str(2**27))
        Path(f"/proc/{engine}/oom_score_adj").write_text("1000")
        with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE) as bomb:
            ended_s = await gone(engine)
            bomb.kill()
        return {"engine_gone_s": ended_s, "health": await status(server.port, "/health")}

    try:
        case = await survived(server, options, "the kernel's end of the engine", act)
    finally:
        with suppress(OSError):
            group.rmdir()
    return case


OPTIONS = {"cut_short": ("--shutdown-timeout", "0")}
CASES = {
    each.__name__: each
    for each in (drained, cut_short, interrupted, hung_up, stopped, killed, without_memory, out_of_memory)
}


def starts_without_memory(options: argparse.Namespace) -> list[Case]:
    """Start servers that the machine has no memory for: one line and a code, each."""
    command = [sys.executable, *Server.START, options.model, "--port", "0", "--log-level", "warning"]
    asked = {
        "start with 1 TB of cache": ("--kv-cache-bytes", str(10**12)),
        "start with 400 MB of address space": (),
    }
    cases = []
    for name, more in asked.items():
        limit = None if more else lambda: resource.setrlimit(resource.RLIMIT_AS, (400 * 2**20,) * 2)
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, preexec_fn=limit)
        lines = done.stderr.strip().splitlines()
        cases.append(Case(name=name, ends={}, exit_code=done.returncode, told={"lines": len(lines), "last": lines[-1]}))
    return cases


def measure(options: argparse.Namespace) -> list[Case]:
    cases = starts_without_memory(options) if not options.only else []
    for case in cases:
        print(told(case), flush=True)
    for name in options.only or CASES:
        if name == "out_of_memory" and not os.access(CGROUPS, os.W_OK):
            print(f"{name}: NOT TRIED, {CGROUPS} cannot be written")
            continue
        more = OPTIONS.get(name, ())
        server = Server(sys.executable, options.model, "--engine-process", "--log-level", "warning", *more)
        try:
            cases.append(asyncio.run(CASES[name](server, options)))
        finally:
            server.close()
        print(told(cases[-1]), flush=True)
    return cases


def told(case: Case) -> str:
    ended = "serves on" if case.exit_code is None else f"exit code {case.exit_code}"
    facts = ", ".join(f"{name} {value}" for name, value in case.told.items())
    return f"{case.name}: {case.ends}, {ended}; {facts}"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-9m")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--whole", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CASES, help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    save(options.out, SignalReport(name="signals", model=options.model, cases=measure(options)))


if __name__ == "__main__":
    main()
