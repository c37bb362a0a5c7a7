"""The service that every endpoint works with, and the note that each request carries through the server."""

import asyncio
import itertools
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from ridgeline.core.errors import ContextLengthError, ModelNotFoundError, OverloadedError, RequestError
from ridgeline.core.log import get_logger
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.decoding.request import Request as EngineRequest
from ridgeline.engine.client import EngineClient
from ridgeline.engine.intake import Intake, Prompt
from ridgeline.engine.outputs import Finish
from ridgeline.server.clients import Client, Keys, Turns
from ridgeline.server.errors import ErrorReply, reply_to
from ridgeline.server.explained import Explained
from ridgeline.server.metrics import Metrics
from ridgeline.server.openai.store import ResponseStore
from ridgeline.server.settings import ServerSettings
from ridgeline.server.spans import open_spans
from ridgeline.text.chat import ChatTemplate, read_template
from ridgeline.text.grammar_trial import GrammarTrial
from ridgeline.text.infill import infill_ids
from ridgeline.text.reasoning import chosen_reasoning
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.formats import chosen_format

if TYPE_CHECKING:
    from ridgeline.server.batch.batches import Batches
    from ridgeline.server.canary import Canary

log = get_logger("server")

_NUMERICS = frozenset(("backend", "isa", "dtype", "kv_dtype", "quantize", "kernels"))  # choices that decide digits
MAX_TRIALS = 2  # grammars that are tried at once: each has a process, and none has more than its time


def new_request_id() -> str:
    """Make an id for a request that brought none."""
    return f"req-{uuid.uuid4().hex}"


@dataclass(slots=True)
class RequestNote:
    """One HTTP request: its id, and what its log line tells. Never a prompt, never an output."""

    request_id: str
    anthropic: bool = False  # errors and streams are worded as Anthropic's
    started_s: float = field(default_factory=time.monotonic)
    client: Client = field(default_factory=Client)
    line: str = ""  # the custom_id of a batch's line: it runs in the background, and has no deadline
    salt: str = ""  # prefixes are shared only among requests of equal salt
    slots: int = 0  # outputs that it may have at once, of those that the server takes
    queued_tokens: int = 0  # of its prompts, and log-probabilities that are held for it
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of those
    worst_s: dict[str, float] = field(default_factory=dict[str, float])  # by objective, of outputs that ended normally
    failed: bool = False  # by an error that is not the client's
    predicted_tokens: int = 0  # of the request's prediction, verified
    accepted_prediction_tokens: int = 0
    ended: list[tuple[str, str, EngineRequest, Finish]] = field(default_factory=list[Any])  # for spans: its outputs
    explained: msgspec.Raw | UnsetType = UNSET  # where the time of its outputs went, once that was found out


def note_of(request: Request) -> RequestNote:
    """Return the note that RequestBoundary attached."""
    note = request.state.note
    assert isinstance(note, RequestNote)
    return note


class Service:
    """An engine with all that a server has beside it: intake, chat template, settings and metrics.

    `tokenizer` is that of the engine's model. Raises ModelLoadError for a broken chat template, ConfigError for an
    unknown parser.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer | None, settings: ServerSettings) -> None:
        self.engine = engine
        self.info = engine.info()
        self.tokenizer = tokenizer
        self.intake = Intake(self.info, tokenizer, time.monotonic)
        of = self.info.vocab_size, frozenset(self.info.generation.eos_token_ids)
        self._trial = None if tokenizer is None else GrammarTrial(settings.grammar_timeout_s, tokenizer, *of)
        self._trials = ThreadPoolExecutor(MAX_TRIALS, "grammar")  # of their own: requests without a grammar do not wait
        self.settings = settings
        bounds = (settings.max_stored_bytes, settings.stored_response_age_s)
        self.stored: dict[str, ResponseStore] = defaultdict(lambda: ResponseStore(*bounds))  # by the salts of clients
        self.keys = Keys(settings.api_key, settings.api_key_file)
        self.batches: Batches | None = None  # where the operator has a folder for them
        self.canary: Canary | None = None  # where keys and values are rounded, and the operator asks for one
        self.explained = Explained(engine)
        endpoint = settings.otlp_traces_endpoint
        self.spans = None if endpoint is None else open_spans(endpoint)
        self.num_slots = 0  # taken
        self._slots_of: Counter[int] = Counter()  # by client
        self._turns = Turns(time.monotonic)
        self._calls = itertools.count(1)  # of several prompts
        self.num_queued_tokens = 0
        self.body_room_bytes = settings.max_bodies_bytes  # less those that have arrived and are not decoded yet
        source = None if settings.chat_template is None else read_template(settings.chat_template)
        self.chat_template = None if tokenizer is None else ChatTemplate.from_tokenizer(tokenizer, source)
        template = "" if self.chat_template is None else self.chat_template.source
        self.calls = chosen_format(settings.tool_call_parser, template)
        self.reasoning = chosen_reasoning(settings.reasoning_parser, template)
        self._max_prompt_chars = _max_prompt_chars(tokenizer, self.info.max_model_len)
        self.own_names = settings.served_model_names or (self.info.model_name,)
        self.metrics = Metrics(engine, self.own_names[0] if settings.metrics_compat == "vllm" else None, settings.slos)
        self.metrics.show("queue_tokens", lambda: self.num_queued_tokens)
        self.metrics.show("open_outputs", lambda: self.num_slots)
        self.created_unix_s = int(time.time())
        chosen = sorted(f"{name}={choice.value}" for name, choice in self.info.choices.items() if name in _NUMERICS)
        identity = repr((version("ridgeline"), self.info.model_name, self.info.weight_bytes, chosen))
        self.fingerprint = f"fp_{blake2b(identity.encode(), digest_size=5).hexdigest()}"

    def watch_with(self, canary: "Canary") -> None:
        """Let a canary score prompts, and show what it finds."""
        self.canary = canary
        self.metrics.show("kv_canary_kl_bits", lambda: canary.kl_bits)
        self.metrics.show("kv_canary_least_kl_bits", lambda: canary.least_kl_bits)
        self.metrics.show("kv_canary_prompts", lambda: canary.num_scored)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model, and those of its adapters."""
        return (*self.own_names, *self.info.adapters)

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter that a served name stands for; None: the model as it is."""
        return model if model in self.info.adapters else None

    def require_model(self, name: str | None) -> str:
        """Return the served name; a request that names none gets the first. Raises ModelNotFoundError."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFoundError(f"no model {name[:200]!r} is served here; there is {', '.join(self.model_names)}")
        return name

    def require_tokenizer(self, field: str) -> Tokenizer:
        """Return the model's tokenizer. Raises RequestError where it has none, for the field that needs it."""
        if self.tokenizer is None:
            raise RequestError(f"{field} needs a tokenizer, which this model lacks", param=field)
        return self.tokenizer

    def encode_first(self, prompt: Prompt, most: int | None) -> list[int]:
        """Return token ids, at most the first `most`, between special tokens. Raises as `encode` does."""
        if most is None:
            return self.encode(prompt)
        if not isinstance(prompt, str):
            return self.encode(prompt[:most])
        tokenizer = self.require_tokenizer("truncate_prompt_tokens")
        return tokenizer.encoding(prompt[: self._max_prompt_chars], most=most).ids

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True, last: int | None = None) -> list[int]:
        """Return token ids, at most the `last`. Raises RequestError; ContextLengthError for what cannot fit, unread."""
        most = f"{self.info.max_model_len} tokens"
        prompt = prompt if last is None or isinstance(prompt, str) else prompt[-last:]
        if len(prompt) > (self._max_prompt_chars if isinstance(prompt, str) else self.info.max_model_len):
            most += f", at most {self._max_prompt_chars} characters" if isinstance(prompt, str) else ""
            raise ContextLengthError(f"this model's maximum context length is {most}; the prompt has {len(prompt)}")
        ids = self.intake.encode(prompt, add_special_tokens=add_special_tokens)
        return ids if last is None else ids[-last:]

    async def require_grammar(self, asked: StructuredOutputsParams) -> None:
        """Raise RequestError for a grammar that cannot be compiled within its time."""
        if self._trial is not None:
            await asyncio.get_running_loop().run_in_executor(self._trials, self._trial.require, asked)

    def encode_pair(self, text: str, other: str, most: int | None) -> list[int]:
        """Return the token ids of two texts that a classifier reads together. Raises as `encode` does."""
        if most is None and len(text) + len(other) > self._max_prompt_chars:
            self.encode(text + other)
        return self.intake.encode_pair(text[: self._max_prompt_chars], other[: self._max_prompt_chars], most)

    def encode_between(self, prompt: Prompt, suffix: str) -> list[int]:
        """Return the token ids that ask for what stands between two texts. Raises as `encode` does."""
        if not isinstance(prompt, str):
            raise RequestError("suffix needs a prompt that is a text", param="suffix")
        if len(prompt) + len(suffix) > self._max_prompt_chars:
            self.encode(prompt + suffix)
        return self.encode(infill_ids(self.require_tokenizer("suffix"), prompt, suffix))

    def reserve_texts(self, note: RequestNote, num_texts: int) -> None:
        """Take the slots of texts that are embedded: of many, those of as many as another request may have prompts."""
        room = self.info.max_num_seqs + self.settings.max_queued_requests
        self.reserve(note, min(num_texts, self.settings.max_prompts, room))

    def reserve(self, note: RequestNote, num_outputs: int, cache_salt: str | None = None) -> None:
        """Take the slots of a request, before anything is computed for it; `release` gives them back.

        One client alone may take all of them. Several share an eighth more, and each may hold eight times what is left
        (dynamic thresholds, Choudhury and Hahne 1998): so no flood takes the last ones. Cached prefixes are shared
        among the client's requests of equal `cache_salt`.

        Raises OverloadedError where they are taken or the engine is stopping, RequestError for more than there are.
        """
        if not self.engine.accepting:
            raise OverloadedError("the engine is shutting down or has stopped; retry elsewhere")
        note.salt = f"{note.client.salt!r} {cache_salt!r}"  # quoted: no salt can pass for another client's
        if note.line:  # a batch has a bound of its own
            return
        room = self.info.max_num_seqs + self.settings.max_queued_requests
        if num_outputs > room:
            raise RequestError(f"{num_outputs} outputs in one request; this server takes {room} at once", param="n")
        num_outputs = max(0, num_outputs)  # n below 0 is refused when it is read
        client, wanted = note.client.number, max(1, num_outputs)
        if self._slots_of[client] + wanted + 8 * (self.num_slots + wanted) > 9 * room:
            raise OverloadedError(f"the queue is full ({room} outputs); retry later", self._turns.next_s(client))
        self.num_slots += num_outputs
        self._slots_of[client] += num_outputs
        note.slots += num_outputs

    def admit(self, note: RequestNote, requests: Sequence[EngineRequest], *, whole: bool) -> list[EngineRequest]:
        """Return the requests as their client's; `whole`: their outputs are held until the last has ended.

        A line of a batch samples by its name, where it brings no seed: the same whenever it runs. Raises RequestError
        for more log-probabilities than one may have, OverloadedError where too much is open.
        """
        num_logprobs = sum(_num_logprobs(request, whole=whole) for request in requests)
        if num_logprobs > (most := self.settings.max_response_logprobs):
            problem = f"{num_logprobs} log-probabilities in one response; this server holds {most}"
            fix = "ask for fewer tokens, prompts, outputs or logprobs" + (", or for a stream" if whole else "")
            raise RequestError(f"{problem}: {fix}", param="logprobs")
        client, call = note.client.number, next(self._calls) if len(requests) > 1 else 0
        salted = [replace(each, client=client, call=call, salt=f"{each.salt} {note.salt}") for each in requests]
        if note.line:
            return [
                in_background(request, f"{self.info.seed} {index} {note.line}") for index, request in enumerate(salted)
            ]
        num_tokens = num_logprobs + sum(len(request.prompt_ids) for request in requests)
        if self.num_queued_tokens and self.num_queued_tokens + num_tokens > self.settings.max_queued_tokens:
            open_ones = f"open requests have {self.num_queued_tokens} prompt tokens and log-probabilities"
            raise OverloadedError(f"{open_ones}; retry later", self._turns.next_s(note.client.number))
        self.num_queued_tokens += num_tokens
        note.queued_tokens += num_tokens
        return salted

    def release(self, note: RequestNote) -> None:
        """Give back what a request had taken, and count what it used."""
        if note.slots and note.completion_tokens:
            self._turns.ended(time.monotonic() - note.started_s, self.num_slots)
        self.num_slots -= note.slots
        self._slots_of[note.client.number] -= note.slots
        if not self._slots_of[note.client.number]:
            del self._slots_of[note.client.number]
        self.num_queued_tokens -= note.queued_tokens
        note.client.use("tokens", note.prompt_tokens + note.completion_tokens)

    def explain(self, error: BaseException, note: RequestNote) -> ErrorReply:
        """Return the error as a reply, counted, and logged if it was not expected."""
        reply = reply_to(error)
        self.metrics.rejected.labels(reply.body.code or reply.body.type).inc()
        note.failed = note.failed or reply.status >= 500
        if reply.unexpected:
            facts = {"request_id": note.request_id}
            log.error("request %s failed", note.request_id, exc_info=error, extra={"facts": facts})
        if not note.anthropic:
            return reply
        return replace(reply, status=529 if reply.status == 503 else reply.status, anthropic_id=note.request_id)

    async def drain(self) -> bool:
        """Let open requests finish within the shutdown timeout, then stop the engine; return True if all did.

        Batches stop where they are: the next server goes on with them.
        """
        if self.batches is not None:
            await self.batches.close()
        drained = await self.engine.drain(self.settings.shutdown_timeout_s)
        await asyncio.to_thread(self.engine.stop)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        return drained


def in_background(request: EngineRequest, name: str) -> EngineRequest:
    """Return a request that makes way for others, takes its time, and samples by `name` where it has no seed."""
    named = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    seed = named if request.params.seed is None else request.seed
    return replace(request, background=True, deadline_s=None, seed=seed)


def _num_logprobs(request: EngineRequest, *, whole: bool) -> int:
    """Return how many log-probabilities are held for a request: a prompt's until they are written with each output."""
    params = request.params
    of_prompt = 0 if params.prompt_logprobs is None else len(request.prompt_ids) * (1 + params.prompt_logprobs)
    of_output = 0 if params.logprobs is None or not whole else request.max_tokens * (1 + params.logprobs)
    return params.n * (of_prompt + of_output)


def _max_prompt_chars(tokenizer: Tokenizer | None, max_model_len: int) -> int:
    """Return the number of characters of a context full of the longest token."""
    if tokenizer is None:  # text is refused by the intake, whatever its length
        return sys.maxsize
    longest = max((len(tokenizer.token(token_id) or "") for token_id in range(tokenizer.vocab_size)), default=1)
    return max_model_len * longest
