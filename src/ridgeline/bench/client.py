"""The load generator: sends requests to an OpenAI-compatible server and keeps the time of every streamed chunk.

It talks to the URL it is given and to nothing else: no proxies, no redirects. Imports no torch.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from ridgeline.bench.load import Load
from ridgeline.bench.record import RequestRecord, RunLog
from ridgeline.bench.sse import SSEEvent, SSEParser
from ridgeline.bench.workload import BenchRequest
from ridgeline.core.errors import ConfigError

MAX_ERROR_CHARS = 200
# Below the 5 s after which uvicorn drops an idle connection, so no request is sent into a closing one.
KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 10.0
T = TypeVar("T")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def carries_token(self) -> bool:
        """Return False for a chunk that only names the role or only says why the output ended.

        A chunk with empty text and neither of those is a token whose text is empty, such as half a character.
        """
        delta = self.delta or _Delta()
        if self.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
            return True
        return self.finish_reason is None and delta.role is None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None  # an object or a text; only its presence is read


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _RequestFailedError(Exception):
    """Ends one request; the message becomes its record's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to send, and as what. `base_url` with or without `/v1`. Raises ConfigError for an unfit URL."""

    base_url: str
    model: str
    api: Literal["completions", "chat"] = "completions"
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _api_root(self.base_url)

    @property
    def url(self) -> str:
        """The address that requests are posted to."""
        path = "completions" if self.api == "completions" else "chat/completions"
        return f"{_api_root(self.base_url)}/{path}"

    def body(self, request: BenchRequest) -> bytes:
        """Return the JSON body. Raises ConfigError for token ids on the chat API, which takes text only."""
        content: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "completions":
            content["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            content["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            raise ConfigError(
                "this workload's prompts are token ids, which the chat API does not take; use completions"
            )
        if request.ignore_eos:
            content["ignore_eos"] = True
        return msgspec.json.encode(content)


def discover_model(base_url: str, api_key: str | None = None) -> str:
    """Return the first model that the server lists. Raises ConfigError when it cannot be asked or lists none."""
    models = fetched(url := f"{_api_root(base_url)}/models", _ModelList, api_key).data
    if not models:
        raise ConfigError(f"{url} lists no model; name one")
    return models[0].id


def fetched(url: str, kind: type[T], api_key: str | None = None, timeout_s: float = CONNECT_TIMEOUT_S) -> T:
    """Return what a server has at an address. Raises ConfigError when it cannot be asked or has nothing of the kind."""
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as http:
            response = http.get(url, headers=_headers(api_key))
        if response.is_error:
            raise ConfigError(f"{url} sent {response.status_code}: {' '.join(response.text.split())[:200]}")
        return msgspec.json.decode(response.content, type=kind)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {url}: {error}; is the server up, and is this its address?") from None


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    load: Load,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> RunLog:
    """Send every request when `load` says so, and wait for all of them.

    A request that fails is a record with its error and stops no other. `on_record` hears of each as it ends.
    Raises ConfigError, before anything is sent, for a workload that is empty or does not fit the API.
    """
    scheduled = load.schedule_requests(requests)
    bodies = [endpoint.body(request) for request in scheduled]
    slots = asyncio.Semaphore(load.max_concurrency or len(scheduled))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
    headers, timeout = _headers(endpoint.api_key), httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False) as http:
        start = time.monotonic()

        async def send(index: int) -> RequestRecord:
            try:
                exchange = _Exchange(start)
                error = await exchange.run(http, endpoint.url, bodies[index], load.request_timeout_s)
            finally:
                slots.release()
            record = exchange.record(index, scheduled[index], error)
            if on_record is not None:
                on_record(record)
            return record

        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(scheduled):
                if not await _turn_comes(start, request.arrival_s, load.time_limit_s, slots):
                    break
                tasks.append(group.create_task(send(index)))
    records = [task.result() for task in tasks]
    duration_s = max((record.end_s for record in records), default=0.0)
    return RunLog(records=records, duration_s=duration_s, unsent=len(scheduled) - len(records))


async def _turn_comes(start: float, arrival_s: float, time_limit_s: float, slots: asyncio.Semaphore) -> bool:
    """Wait for the arrival time and a free slot, and take the slot; False when the time limit comes first."""
    if arrival_s >= time_limit_s:
        return False
    await asyncio.sleep(max(0.0, start + arrival_s - time.monotonic()))
    try:
        async with asyncio.timeout(max(0.0, start + time_limit_s - time.monotonic())):
            await slots.acquire()
    except TimeoutError:
        return False
    return True


class _Exchange:
    """One request under way: what has been seen of its stream so far."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._sent_s = self._end_s = time.monotonic() - start
        self._chunk_times_s: list[float] = []
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None
        self._done = False

    async def run(self, http: httpx.AsyncClient, url: str, body: bytes, timeout_s: float) -> str | None:
        """Post and read to the end of the stream; the reason of failure, or None."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(http, url, body)
        except TimeoutError:
            failure = f"no end after {timeout_s:g} s"
        except _RequestFailedError as error:
            failure = str(error)
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, ValueError) as error:
            failure = f"malformed stream: {error}"
        else:
            return None
        self._end_s = time.monotonic() - self._start
        return _printable(failure)

    async def _stream(self, http: httpx.AsyncClient, url: str, body: bytes) -> None:
        self._sent_s = time.monotonic() - self._start
        async with http.stream("POST", url, content=body) as response:
            if response.status_code != 200:
                raise _RequestFailedError(f"HTTP {response.status_code}: {await _opening(response)}")
            parser = SSEParser()
            # Read past [DONE] to the end of the body: only then can the connection carry another request.
            async for data in response.aiter_bytes():
                now_s = time.monotonic() - self._start
                for event in parser.feed(data):
                    self._take(event, now_s)
        if not self._done:
            raise _RequestFailedError("the stream ended before [DONE]")
        if not self._chunk_times_s:
            raise _RequestFailedError("the stream held no token")

    def _take(self, event: SSEEvent, now_s: float) -> None:
        if event.data == "[DONE]":
            self._done = True
            return
        chunk = msgspec.json.decode(event.data, type=_Chunk)
        if event.name == "error" or chunk.error is not None:
            raise _RequestFailedError(f"error event: {event.data}")
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._end_s = now_s
            self._finish_reason = choice.finish_reason or self._finish_reason
            # An output of nothing but an end-of-text token shows only its finish: that is its first token.
            if choice.carries_token() or (choice.finish_reason is not None and not self._chunk_times_s):
                self._chunk_times_s.append(now_s)

    def record(self, index: int, request: BenchRequest, error: str | None) -> RequestRecord:
        """Return the finished record."""
        known_prompt = 0 if isinstance(request.prompt, str) else len(request.prompt)
        usage = self._usage or _Usage(prompt_tokens=known_prompt, completion_tokens=len(self._chunk_times_s))
        details = usage.prompt_tokens_details or _PromptDetails()
        return RequestRecord(
            index=index,
            arrival_s=request.arrival_s,
            sent_s=self._sent_s,
            end_s=self._end_s,
            chunk_times_s=tuple(self._chunk_times_s),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
            output_tokens=usage.completion_tokens,
            usage_reported=self._usage is not None,
            finish_reason=self._finish_reason,
            error=error,
        )


async def _opening(response: httpx.Response) -> str:
    """Return the first part of an error's body; a server that never stops talking is not listened to."""
    text = b""
    async for data in response.aiter_bytes():
        text += data
        if len(text) >= MAX_ERROR_CHARS:
            break
    return text.decode("utf-8", errors="replace")


def _printable(text: str) -> str:
    """Return one line without control characters, cut to MAX_ERROR_CHARS: a server's words end up on a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])


def _headers(api_key: str | None) -> dict[str, str]:
    plain = {"content-type": "application/json", "accept-encoding": "identity"}
    return plain if api_key is None else plain | {"authorization": f"Bearer {api_key}"}


def _api_root(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"base URL {base_url!r} cannot be read: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base URL {base_url!r} must be like http://127.0.0.1:8000")
    if url.userinfo:
        raise ConfigError("a base URL may not hold a password; give it as the API key")
    return f"{base_url.rstrip('/').removesuffix('/v1')}/v1"
