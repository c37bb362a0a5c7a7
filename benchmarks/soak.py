"""A server under everything that clients do, for as long as it is let: what grows, what stays taken, what changes.

usage: python -m benchmarks.soak [--minutes 10] [--clients 12] [--kill-every 180] [--model python-1m] [--out DIR]

Clients of one seed each send what they like: streams, whole responses, several outputs, tools, schemas, adapters, bad
requests, files and batches; they hang up, read slowly, and now and then the engine's process is killed. Once a minute
all of them pause: then no slot, block or token may be taken, counts must agree with those of the clients, and memory,
descriptors and threads are noted. Greedy outputs of fixed prompts must have the same tokens all along.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import numpy as np
from benchmarks.attacks import Server
from benchmarks.common import option_parser, save
from safetensors.numpy import save_file

from ridgeline.bench.report import Report

OPTIONS = ("--deterministic", "--max-num-seqs", "16", "--kv-cache-bytes", "6000000", "--log-level", "warning")
FIXED = [[5, 6, 7], [1000, 17, 300, 4], list(range(100, 180)), [9]]
FIXED_TOKENS = 48
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
BAD = (
    {"prompt": [5], "max_tokens": -1},
    {"prompt": "a" * 100_000},
    {"prompt": [10**9], "max_tokens": 1},
    {"model": "nobody's", "prompt": [5]},
    {"prompt": [5], "max_tokens": 5, "structured_outputs": {"regex": "("}},
)
DOWN_S = 20.0  # after a kill, in which replies may be to retry
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
    minutes: float
    num_clients: int
    requests: dict[str, int]
    outcomes: dict[str, int]
    num_kills: int
    front_bytes_per_request: float | None
    pauses: list[Pause]
    problems: list[str]


@dataclass
class Soak:
    """The clients of one server."""

    server: Server
    problems: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0  # outputs that clients saw the end of
    num_unseen: int = 0  # outputs that may have ended, or been refused, without their client
    num_refused: int = 0
    expected: list[list[int]] = field(default_factory=list)
    killed_s: float = -DOWN_S
    num_kills: int = 0
    busy: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    ends: bool = False

    def client(self) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.server.port}"
        return httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)

    def problem(self, what: str) -> None:
        print(f"problem: {what}", flush=True)
        if len(self.problems) < 50:
            self.problems.append(what)

    # ---- what clients do

    async def work(self, number: int) -> None:
        """Do one thing after the other, until the soak ends; a pause waits for the end of each."""
        rng, client, sent = random.Random(number), self.client(), 0
        kinds = [self.fixed] * 6 + [self.sampled, self.hangs_up, self.hangs_up, self.several, self.tools]
        kinds += [self.schema, self.bad, self.slow, self.adapted, self.messages, self.responses, self.tokens]
        kinds += [self.batch] if number == 0 else []
        while not self.ends:
            if not self.go.is_set():
                await client.aclose()
                await self.go.wait()
                client = self.client()
            do: Callable[[httpx.AsyncClient, random.Random], Awaitable[None]] = rng.choice(kinds)
            do = kinds[(sent * 7 + number) % len(kinds)] if sent < len(kinds) else do  # each of them early on
            sent += 1
            self.busy += 1
            self.requests[do.__name__] += 1
            try:
                await do(client, rng)
            except (httpx.TransportError, OSError) as error:
                self.problem(f"{do.__name__}: {type(error).__name__} {error}")
            except Exception as error:
                self.problem(f"{do.__name__}: what came is no response: {type(error).__name__} {error}")
            self.busy -= 1
        await client.aclose()

    async def post(self, client: httpx.AsyncClient, path: str, wanted: int = 200, **body: object) -> dict | None:
        """Return the body of a response; None of one that says to retry after a kill."""
        response = await client.post(path, json=body)
        return self.told(path, response.status_code, response.json(), wanted)

    def told(self, path: str, status: int, body: dict, wanted: int = 200) -> dict | None:
        self.outcomes[str(status)] += 1
        self.num_refused += status >= 400
        if status == wanted:
            return body
        if not (status in (503, 529) and time.monotonic() - self.killed_s < DOWN_S):
            self.problem(f"{path}: {status} {json.dumps(body)[:300]}")
        return None

    async def fixed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        number = rng.randrange(len(FIXED))
        body = greedy(FIXED[number])
        if rng.random() < 0.5:
            found = await self.post(client, "/v1/completions", **body)
            ids = None if found is None else found["choices"][0]["token_ids"]
        else:
            found = await self.stream(client, body)
            ids = None if found is None else [i for chunk in found for i in chunk["choices"][0]["token_ids"]]
        if ids is not None:
            self.num_ended += 1
            if ids != self.expected[number]:
                self.problem(f"prompt {number} has other tokens: {ids}")

    async def stream(self, client: httpx.AsyncClient, body: Mapping[str, object]) -> list[dict] | None:
        """Return the chunks of a stream; None where it ended with an error that says to retry."""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                self.told("stream", response.status_code, response.json())
                return None
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] == "data: [DONE]":
            self.outcomes["stream"] += 1
            return [json.loads(line[6:]) for line in lines[:-1]]
        if lines[-2:-1] != ["event: error"]:
            self.problem(f"a stream was cut off: {lines[-1][:200]}")
        else:
            code = json.loads(lines[-1][6:])["error"]["code"]
            self.told("stream", 503 if code == "server_is_overloaded" else 500, {"code": code})
        return None

    async def sampled(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        prompt = [rng.randrange(1, 4000) for _ in range(rng.choice((1, 20, 400)))]
        body = {"prompt": prompt, "max_tokens": rng.randrange(1, 120), "temperature": 1.0, "seed": rng.randrange(9)}
        self.num_ended += await self.stream(client, body | {"logprobs": 2}) is not None

    async def several(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        prompts = [[rng.randrange(1, 4000), 7] for _ in range(3)]
        found = await self.post(client, "/v1/completions", prompt=prompts, n=2, max_tokens=30, stop=["\n"], logprobs=1)
        self.num_ended += 0 if found is None else len(found["choices"])

    async def hangs_up(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        self.num_unseen += 1
        body = {"prompt": [rng.randrange(1, 4000)], "max_tokens": 300, "ignore_eos": True, "stream": rng.random() < 0.7}
        after_s = rng.choice((0.0, 0.005, 0.05, 0.2))
        connection = asyncio.ensure_future(client.post("/v1/completions", json=body))
        done, _ = await asyncio.wait([connection], timeout=after_s)
        connection.cancel()
        await asyncio.wait([connection])
        if done and connection.exception() is None and connection.result().status_code >= 400:
            self.told("hangs up", connection.result().status_code, {})
        self.outcomes["hung up"] += not done

    async def slow(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = {
            "prompt": [rng.randrange(1, 4000)],
            "max_tokens": 400,
            "ignore_eos": True,
            "logprobs": 5,
            "stream": True,
        }
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=2**10)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        text = bytearray()
        while piece := await reader.read(2**12):
            text += piece
            await asyncio.sleep(0.01)
        writer.close()
        if b"[DONE]" in text:
            self.num_ended += 1
            self.outcomes["stream"] += 1
        else:
            retry = b"server_is_overloaded" in text
            self.told("slow", 503 if retry else 500, {"text": text[-300:].decode(errors="replace")})

    async def tools(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "messages": chat(rng)}
        if (found := await self.post(client, "/v1/chat/completions", **body)) is not None:
            self.num_ended += 1
            (choice,) = found["choices"]
            for call in choice["message"].get("tool_calls") or ():
                if choice["finish_reason"] == "tool_calls" and set(json.loads(call["function"]["arguments"])) != {
                    "a",
                    "b",
                }:
                    self.problem(f"a call with other arguments: {call}")

    async def schema(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        found = await self.post(
            client, "/v1/chat/completions", messages=chat(rng), response_format=form, max_tokens=100, seed=3
        )
        if found is not None:
            self.num_ended += 1
            (choice,) = found["choices"]
            if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"a", "b"}:
                self.problem(f"an output against its schema: {choice['message']['content']}")

    async def adapted(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        found = await self.post(client, "/v1/completions", model="adapted", prompt=[5, 6], max_tokens=20)
        self.num_ended += found is not None

    async def messages(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        found = await self.post(client, "/v1/messages", messages=chat(rng), max_tokens=20)
        self.num_ended += found is not None

    async def responses(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        found = await self.post(client, "/v1/responses", input="a", max_output_tokens=20, store=rng.random() < 0.5)
        self.num_ended += found is not None

    async def tokens(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        found = await self.post(client, "/tokenize", prompt="def f(x):" * rng.randrange(1, 40))
        if found is not None:
            await self.post(client, "/detokenize", tokens=found["tokens"])

    async def bad(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        response = await client.post("/v1/completions", json=rng.choice(BAD))
        status = response.status_code
        self.told("bad", status, response.json(), wanted=status if 400 <= status < 500 else 400)

    async def batch(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """Upload a file, run it, read what came of it, delete both; lines of fixed prompts have the same tokens."""
        url = "/v1/completions"
        lines = [
            {"custom_id": str(n), "method": "POST", "url": url, "body": greedy(FIXED[n % len(FIXED)])}
            for n in range(12)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        sent = await client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
        file = sent.json()["id"]
        begun = await client.post("/v1/batches", json=batch_of(file, url))
        about = begun.json()
        while about["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.1)
            about = (await client.get(f"/v1/batches/{about['id']}")).json()
        if about["status"] != "completed" or about["request_counts"]["completed"] != len(lines):
            self.problem(f"a batch did not complete: {about}")
            return
        text = (await client.get(f"/v1/files/{about['output_file_id']}/content")).text
        for line in map(json.loads, text.splitlines()):
            self.num_ended += 1
            ids = line["response"]["body"]["choices"][0]["token_ids"]
            if ids != self.expected[int(line["custom_id"]) % len(FIXED)]:
                self.problem(f"a line of a batch has other tokens: {ids}")
        for name in (file, about["output_file_id"]):
            await client.delete(f"/v1/files/{name}")

    # ---- what is looked at

    def kill(self) -> None:
        self.killed_s = time.monotonic()
        self.num_unseen += 1000  # what the next look may not count exactly
        self.num_kills += 1
        os.kill(engine_of(self.server), signal.SIGKILL)

    async def look(self, began_s: float) -> Pause:
        """Look at the server once everything has been given back, or say what has not."""
        self.go.clear()
        deadline_s = time.monotonic() + 2 * IDLE_S
        while self.busy and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        if self.busy:
            self.problem(f"{self.busy} requests do not end")
        deadline_s = time.monotonic() + IDLE_S
        taken, found = {"ready": 0.0}, dict[str, float]()
        async with self.client() as client:
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
            self.problem(f"still taken: {taken}")
        await asyncio.sleep(0.2)
        if found:
            self.compare(found)
        return Pause(
            at_s=time.monotonic() - began_s,
            front=Process.of(self.server.process.pid),
            engine=Process.of(engine_of(self.server)),
            num_requests=self.requests.total(),
            num_restarts=int(found.get("ridgeline_engine_restarts_total", 0)),
            num_preemptions=int(found.get("ridgeline_num_preemptions_total", 0)),
        )

    def compare(self, found: Mapping[str, float]) -> None:
        """Compare the server's counts with those of its clients."""
        ended = sum(count for name, count in found.items() if name.startswith("ridgeline_request_success_total{"))
        refused = sum(count for name, count in found.items() if name.startswith("ridgeline_requests_rejected_total{"))
        if not self.num_ended <= ended <= self.num_ended + self.num_unseen:
            self.problem(f"{ended:g} outputs ended by the server's count, {self.num_ended} by its clients'")
        if not self.num_refused <= refused <= self.num_refused + self.num_unseen:
            self.problem(f"{refused:g} requests refused by the server's count, {self.num_refused} by its clients'")


def greedy(prompt: list[int]) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": FIXED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def chat(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * rng.randrange(1, 200)}]


def batch_of(file: str, url: str) -> dict[str, str]:
    return {"input_file_id": file, "endpoint": url, "completion_window": "24h"}


def samples(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def engine_of(server: Server) -> int:
    """Return the process id of a server's engine; grammars are tried in children too."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return next(child for child, command in commands.items() if b"ridgeline.engine.process.child" in command)


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter for the bundled 1M model."""
    rng = np.random.default_rng(0)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {
        name.format(layer, factor): shape for layer in range(3) for factor, shape in (("A", (4, 128)), ("B", (128, 4)))
    }
    save_file(
        {key: rng.normal(0, 0.05, shape).astype(np.float32) for key, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


async def drive(soak: Soak, minutes: float, num_clients: int, kill_every_s: float) -> list[Pause]:
    """Let the clients do what they do; look once a minute, and twice at least."""
    async with soak.client() as client:
        for prompt in FIXED:
            found = (await client.post("/v1/completions", json=greedy(prompt))).json()
            soak.expected.append(found["choices"][0]["token_ids"])
            soak.num_ended += 1
    began_s = time.monotonic()
    period_s = min(60.0, 30.0 * minutes)
    kills_s = np.arange(kill_every_s / 2, 60 * minutes - 1, kill_every_s).tolist()
    workers = [asyncio.create_task(soak.work(number)) for number in range(num_clients)]
    pauses: list[Pause] = []
    while (now_s := time.monotonic() - began_s) < 60 * minutes:
        soak.go.set()
        end_s = time.monotonic() + period_s
        while time.monotonic() < end_s:
            await asyncio.sleep(0.1)
            if kills_s and time.monotonic() - began_s >= kills_s[0]:
                kills_s.pop(0)
                soak.kill()
        pauses.append(await soak.look(began_s))
        print(f"{now_s / 60 + period_s / 60:5.1f} min: {asdict(pauses[-1])}, {len(soak.problems)} problems", flush=True)
    soak.ends = True
    soak.go.set()
    await asyncio.gather(*workers)
    return pauses


def growth(pauses: list[Pause]) -> float | None:
    """Return by how many bytes the server's process grew with each request, in the second half."""
    later = pauses[len(pauses) // 2 :]
    if len(later) < 3:
        return None
    return float(np.polyfit([p.num_requests for p in later], [p.front.rss_bytes for p in later], 1)[0])


def judge(soak: Soak, pauses: list[Pause]) -> None:
    """Add what the pauses say together."""
    first, last = pauses[0], pauses[-1]
    if last.front.num_descriptors > first.front.num_descriptors + 4:
        soak.problem(f"descriptors grew from {first.front.num_descriptors} to {last.front.num_descriptors}")
    if last.front.num_threads > first.front.num_threads + 8:
        soak.problem(f"threads grew from {first.front.num_threads} to {last.front.num_threads}")
    if last.num_restarts != soak.num_kills:
        soak.problem(f"{last.num_restarts} restarts for {soak.num_kills} kills")
    later = pauses[len(pauses) // 2 :]
    if len(later) >= 4:
        per_minute = 60 * np.polyfit([p.at_s for p in later], [p.front.rss_bytes for p in later], 1)[0]
        if per_minute > MAX_FRONT_BYTES_PER_MINUTE:
            soak.problem(f"the server grows by {per_minute / 2**20:.1f} MiB a minute")


def measure(options: argparse.Namespace) -> SoakReport:
    with tempfile.TemporaryDirectory() as temporary:
        adapter, files, template = (Path(temporary) / name for name in ("adapter", "files", "chat.jinja"))
        adapter.mkdir()
        write_adapter(adapter)
        template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n")
        more = ["--lora", f"adapted={adapter}", "--files", str(files), "--chat-template", str(template)]
        server = Server(sys.executable, options.model, *OPTIONS, *more, "--num-threads", str(options.threads))
        try:
            soak = Soak(server)
            pauses = asyncio.run(drive(soak, options.minutes, options.clients, options.kill_every))
            judge(soak, pauses)
            if "Traceback" in server.log:
                soak.problem(f"a traceback in the log: {server.log[server.log.index('Traceback') - 300 :][:2000]}")
        finally:
            server.close()
    return SoakReport(
        name="soak",
        model=options.model,
        minutes=options.minutes,
        num_clients=options.clients,
        requests=dict(soak.requests),
        outcomes=dict(soak.outcomes),
        num_kills=soak.num_kills,
        front_bytes_per_request=growth(pauses),
        pauses=pauses,
        problems=soak.problems,
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
