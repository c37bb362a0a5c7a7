"""The clients of a soak: everything that clients do, and what they expect of each response. See soak.py."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx

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


@dataclass
class Clients:
    """The clients of one server, and what they counted."""

    port: int
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
    num_at_work: int = 1  # of those who work, the first ones; the others wait
    go: asyncio.Event = field(default_factory=asyncio.Event)
    ends: bool = False

    def client(self) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.port}"
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
            if number >= self.num_at_work and self.go.is_set():
                await asyncio.sleep(0.05)
                continue
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
        found = await self.stream(client, body | {"logprobs": 2})
        self.num_ended += found is not None  # read behind the wait, during which others count too

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
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**10)
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
                if choice["finish_reason"] == "tool_calls" and not fits(json.loads(call["function"]["arguments"])):
                    self.problem(f"a call with other arguments: {call}")

    async def schema(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        found = await self.post(
            client, "/v1/chat/completions", messages=chat(rng), response_format=form, max_tokens=100, seed=3
        )
        if found is not None:
            self.num_ended += 1
            (choice,) = found["choices"]
            if choice["finish_reason"] == "stop" and not fits(json.loads(choice["message"]["content"])):
                self.problem(f"an output against its schema: {choice['message']['content']!r}")

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


def greedy(prompt: list[int]) -> dict[str, object]:
    return {
        "prompt": prompt,
        "max_tokens": FIXED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def fits(value: dict[str, object]) -> bool:
    """Tell whether a value is as SCHEMA says; it may have more properties."""
    return isinstance(value.get("a"), int) and value.get("b") in ("x", "y")


def chat(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * rng.randrange(1, 200)}]


def batch_of(file: str, url: str) -> dict[str, str]:
    return {"input_file_id": file, "endpoint": url, "completion_window": "24h"}
