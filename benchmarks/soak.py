"""A server under everything that clients do, for as long as it is let: what grows, what stays taken, what changes.

usage: python -m benchmarks.soak [--minutes 10] [--clients 12] [--kill-every 180] [--model python-1m] [--speculate off]
           [--out DIR]

Clients of one seed each send what they like: streams, whole responses, several outputs, tools, schemas, adapters, bad
requests, files and batches; they hang up, read slowly, and now and then the engine's process is killed. One of them,
some or all are at work. Once a minute all of them pause: then no slot, block or token may be taken, counts must agree
with those of the clients, and memory, descriptors and threads are noted. Greedy outputs of fixed prompts must have the
same tokens all along.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from benchmarks.attacks import Server
from benchmarks.common import option_parser, save
from benchmarks.soak_clients import FIXED, Clients, greedy
from safetensors.numpy import save_file

from ridgeline.bench.report import Report
from ridgeline.weights.folder import ModelFolder

OPTIONS = ("--deterministic", "--max-num-seqs", "16", "--kv-cache-bytes", "6000000", "--log-level", "warning")
TIDES = (1.0, 0.0, 0.3, 0.15, 0.7)  # of the clients, that are at work beside the first, in turn
TIDE_S = 1.5
IDLE_S = 20.0  # in which everything must have been given back
MAX_FRONT_BYTES_PER_MINUTE = 2 << 20  # of a server that has warmed up


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What one of the two processes holds."""

    process_id: int
    rss_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, process_id: int) -> "Process":
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process_id}/status").read_text().splitlines())
        return cls(
            process_id=process_id,
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
            num_descriptors=len(os.listdir(f"/proc/{process_id}/fd")),  # noqa: PTH208
            num_threads=int(status["Threads"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One look at the idle server."""

    at_s: float
    front: Process
    engine: Process
    num_requests: int
    num_restarts: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport(Report):
    """A whole run; slopes are of the second half, None where it has too few pauses."""

    model: str
    speculate: str
    minutes: float
    num_clients: int
    requests: dict[str, int]
    outcomes: dict[str, int]
    num_kills: int
    front_bytes_per_request: float | None
    pauses: list[Pause]
    problems: list[str]


def kill(clients: Clients, server: Server) -> None:
    clients.killed_s = time.monotonic()
    clients.num_unseen += 1000  # what the next look may not count exactly
    clients.num_kills += 1
    os.kill(engine_of(server), signal.SIGKILL)


async def look(clients: Clients, server: Server, began_s: float) -> Pause:
    """Look at the server once everything has been given back, or say what has not."""
    clients.go.clear()
    deadline_s = time.monotonic() + 2 * IDLE_S
    while clients.busy and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    if clients.busy:
        clients.problem(f"{clients.busy} requests do not end")
    deadline_s = time.monotonic() + IDLE_S
    taken, found = {"ready": 0.0}, dict[str, float]()
    async with clients.client() as client:
        while taken and time.monotonic() < deadline_s:
            await asyncio.sleep(0.3)
            if (await client.get("/ready")).status_code != 200:
                continue  # a process is being started
            found = samples((await client.get("/metrics")).text)
            names = (
                "num_requests_running",
                "num_requests_waiting",
                "queue_tokens",
                'kv_blocks{group="0",state="used"}',
            )
            taken = {name: found[f"ridgeline_{name}"] for name in names if found[f"ridgeline_{name}"]}
    if taken:
        clients.problem(f"still taken: {taken}")
    await asyncio.sleep(0.2)
    if found:
        compare(clients, found)
    return Pause(
        at_s=time.monotonic() - began_s,
        front=Process.of(server.process.pid),
        engine=Process.of(engine_of(server)),
        num_requests=clients.requests.total(),
        num_restarts=int(sum(n for name, n in found.items() if name.startswith("ridgeline_engine_restarts_total{"))),
        num_preemptions=int(found.get("ridgeline_num_preemptions_total", 0)),
    )


def compare(clients: Clients, found: Mapping[str, float]) -> None:
    """Compare the server's counts with those of its clients."""
    ended = sum(count for name, count in found.items() if name.startswith("ridgeline_request_success_total{"))
    refused = sum(count for name, count in found.items() if name.startswith("ridgeline_requests_rejected_total{"))
    if not clients.num_ended <= ended <= clients.num_ended + clients.num_unseen:
        clients.problem(f"{ended:g} outputs ended by the server's count, {clients.num_ended} by its clients'")
    if not clients.num_refused <= refused <= clients.num_refused + clients.num_unseen:
        clients.problem(f"{refused:g} requests refused by the server's count, {clients.num_refused} by its clients'")


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def engine_of(server: Server) -> int:
    """Return the process id of a server's engine; grammars are tried in children too."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return next(child for child, command in commands.items() if b"ridgeline.engine.process.child" in command)


def write_adapter(folder: Path, model: str) -> None:
    """Write a LoRA adapter for a model."""
    rng = np.random.default_rng(0)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    config = ModelFolder.open(model).config
    factors = (("A", (4, config["hidden_size"])), ("B", (config["num_attention_heads"] * config["head_dim"], 4)))
    layers = range(config["num_hidden_layers"])
    shapes = {name.format(layer, factor): shape for layer in layers for factor, shape in factors}
    save_file(
        {key: rng.normal(0, 0.05, shape).astype(np.float32) for key, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


async def drive(clients: Clients, server: Server, minutes: float, num_clients: int, kill_every_s: float) -> list[Pause]:
    """Let the clients do what they do; look once a minute, and twice at least."""
    async with clients.client() as client:
        for prompt in FIXED:
            found = (await client.post("/v1/completions", json=greedy(prompt))).json()
            clients.expected.append(found["choices"][0]["token_ids"])
            clients.num_ended += 1
    began_s = time.monotonic()
    period_s = min(60.0, 30.0 * minutes)
    kills_s = np.arange(kill_every_s / 2, 60 * minutes - 1, kill_every_s).tolist()
    workers = [asyncio.create_task(clients.work(number)) for number in range(num_clients)]
    pauses: list[Pause] = []
    while (now_s := time.monotonic() - began_s) < 60 * minutes:
        clients.go.set()
        end_s = time.monotonic() + period_s
        while (at_s := time.monotonic()) < end_s:
            clients.num_at_work = 1 + round(TIDES[int(at_s / TIDE_S) % len(TIDES)] * (num_clients - 1))
            await asyncio.sleep(0.1)
            if kills_s and time.monotonic() - began_s >= kills_s[0]:
                kills_s.pop(0)
                kill(clients, server)
        pauses.append(await look(clients, server, began_s))
        print(
            f"{now_s / 60 + period_s / 60:5.1f} min: {asdict(pauses[-1])}, {len(clients.problems)} problems", flush=True
        )
    clients.ends = True
    clients.go.set()
    await asyncio.gather(*workers)
    return pauses


def growth(pauses: list[Pause]) -> float | None:
    """Return by how many bytes the server's process grew with each request, in the second half."""
    later = pauses[len(pauses) // 2 :]
    if len(later) < 3:
        return None
    return float(np.polyfit([p.num_requests for p in later], [p.front.rss_bytes for p in later], 1)[0])


def compare_pauses(clients: Clients, pauses: list[Pause]) -> None:
    """Add what the pauses say together."""
    first, last = pauses[0], pauses[-1]
    if last.front.num_descriptors > first.front.num_descriptors + 4:
        clients.problem(f"descriptors grew from {first.front.num_descriptors} to {last.front.num_descriptors}")
    if last.front.num_threads > first.front.num_threads + 8:
        clients.problem(f"threads grew from {first.front.num_threads} to {last.front.num_threads}")
    if last.num_restarts != clients.num_kills:
        clients.problem(f"{last.num_restarts} restarts for {clients.num_kills} kills")
    later = pauses[len(pauses) // 2 :]
    if len(later) >= 4:
        per_minute = 60 * np.polyfit([p.at_s for p in later], [p.front.rss_bytes for p in later], 1)[0]
        if per_minute > MAX_FRONT_BYTES_PER_MINUTE:
            clients.problem(f"the server grows by {per_minute / 2**20:.1f} MiB a minute")


def measure(options: argparse.Namespace) -> SoakReport:
    with tempfile.TemporaryDirectory() as temporary:
        adapter, files, template = (Path(temporary) / name for name in ("adapter", "files", "chat.jinja"))
        adapter.mkdir()
        write_adapter(adapter, options.model)
        template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n")
        more = ["--lora", f"adapted={adapter}", "--files", str(files), "--chat-template", str(template)]
        more += ["--speculate", options.speculate]
        server = Server(sys.executable, options.model, *OPTIONS, *more, "--num-threads", str(options.threads))
        try:
            clients = Clients(server.port)
            pauses = asyncio.run(drive(clients, server, options.minutes, options.clients, options.kill_every))
            compare_pauses(clients, pauses)
            if "Traceback" in server.log:
                clients.problem(f"a traceback in the log: {server.log[server.log.index('Traceback') - 300 :][:2000]}")
        finally:
            server.close()
    return SoakReport(
        name="soak",
        model=options.model,
        speculate=options.speculate,
        minutes=options.minutes,
        num_clients=options.clients,
        requests=dict(clients.requests),
        outcomes=dict(clients.outcomes),
        num_kills=clients.num_kills,
        front_bytes_per_request=growth(pauses),
        pauses=pauses,
        problems=clients.problems,
    )


def show(report: SoakReport) -> None:
    print(f"{sum(report.requests.values()):,} requests: {report.requests}\noutcomes: {report.outcomes}")
    first, last = report.pauses[0], report.pauses[-1]
    for name in ("front", "engine"):
        before, after = getattr(first, name), getattr(last, name)
        print(
            f"{name}: {before.rss_bytes / 2**20:.1f} -> {after.rss_bytes / 2**20:.1f} MiB, descriptors "
            f"{before.num_descriptors} -> {after.num_descriptors}, threads {before.num_threads} -> {after.num_threads}"
        )
    print(f"bytes of the server for each request, second half: {report.front_bytes_per_request}")
    print(f"{report.num_kills} kills, {last.num_preemptions} preemptions; problems: {report.problems or 'none'}")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--speculate", default="off")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kill-every", type=float, default=180.0, help="seconds; a server ends at 5 in 10 minutes")
    options = parser.parse_args()
    report = measure(options)
    show(report)
    save(options.out, report)
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
