"""The service that every endpoint works with, and the note that each request carries through the server."""

import asyncio
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from ridgeline.core.errors import ContextLengthError, ModelNotFoundError
from ridgeline.core.log import get_logger
from ridgeline.engine.client import EngineClient
from ridgeline.engine.intake import Intake, Prompt
from ridgeline.server.errors import ErrorReply, reply_to
from ridgeline.server.metrics import Metrics
from ridgeline.server.settings import ServerSettings
from ridgeline.text.chat import ChatTemplate, read_template
from ridgeline.text.reasoning import chosen_reasoning
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.formats import chosen_format

log = get_logger("server")


def new_request_id() -> str:
    """Make an id for a request that brought none."""
    return f"req-{uuid.uuid4().hex}"


@dataclass(slots=True)
class RequestNote:
    """One HTTP request: its id, and what its log line tells. Never a prompt, never an output."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    predicted_tokens: int = 0  # of the request's prediction, verified
    accepted_prediction_tokens: int = 0


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
        self.settings = settings
        self.metrics = Metrics(engine)
        self.body_room_bytes = settings.max_bodies_bytes  # less those that have arrived and are not decoded yet
        source = None if settings.chat_template is None else read_template(Path(settings.chat_template))
        self.chat_template = None if tokenizer is None else ChatTemplate.from_tokenizer(tokenizer, source)
        template = "" if self.chat_template is None else self.chat_template.source
        self.calls = chosen_format(settings.tool_call_parser, template)
        self.reasoning = chosen_reasoning(settings.reasoning_parser, template)
        self._max_prompt_chars = _max_prompt_chars(tokenizer, self.info.max_model_len)
        self.model_names = (*(settings.served_model_names or (self.info.model_name,)), *self.info.adapters)
        self.created_unix_s = int(time.time())

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

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Raises RequestError; ContextLengthError before tokenizing a text that cannot fit."""
        if isinstance(prompt, str) and len(prompt) > self._max_prompt_chars:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} characters; this model's context has no room for more than "
                f"{self._max_prompt_chars}: shorten it"
            )
        return self.intake.encode(prompt, add_special_tokens=add_special_tokens)

    def explain(self, error: BaseException, request_id: str) -> ErrorReply:
        """Return the error as a reply, counted, and logged if it was not expected."""
        reply = reply_to(error)
        self.metrics.rejected.labels(reply.body.code or reply.body.type).inc()
        if reply.unexpected:
            log.error("request %s failed", request_id, exc_info=error)
        return reply

    async def drain(self) -> bool:
        """Let open requests finish within the shutdown timeout, then stop the engine; return True if all did."""
        drained = await self.engine.drain(self.settings.shutdown_timeout_s)
        await asyncio.to_thread(self.engine.stop)
        return drained


def _max_prompt_chars(tokenizer: Tokenizer | None, max_model_len: int) -> int:
    """Return the number of characters of a context full of the longest token."""
    if tokenizer is None:  # text is refused by the intake, whatever its length
        return sys.maxsize
    longest = max((len(tokenizer.token(token_id) or "") for token_id in range(tokenizer.vocab_size)), default=1)
    return max_model_len * longest
