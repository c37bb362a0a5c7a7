"""POST /v1/completions: prompts as text or token ids, one or many, whole or streamed."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ridgeline.core.errors import ContextLengthError, RequestError
from ridgeline.core.params import MAX_N
from ridgeline.core.step import TokenLogprob
from ridgeline.decoding.request import Request
from ridgeline.engine.intake import Prompt
from ridgeline.engine.outputs import RequestOutput
from ridgeline.server.openai.beams import beam_penalty
from ridgeline.server.openai.fields import (
    explains,
    max_prompt_tokens,
    refuse_unsupported,
    sampling_params,
    usage_chunks,
    with_parameters,
)
from ridgeline.server.openai.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs
from ridgeline.server.openai.protocol import CompletionChoice, CompletionRequest
from ridgeline.server.openai.reply import Reply, end, respond
from ridgeline.server.openai.structured import blamed_on, field_of
from ridgeline.server.service import RequestNote, Service, note_of
from ridgeline.server.sse import event

DEFAULT_MAX_TOKENS = 16
COMPLETION_BODY = with_parameters(CompletionRequest)


async def create_completion(service: Service, http: HttpRequest, body: CompletionRequest) -> Response:
    """Serve /v1/completions. Raises what errors.py maps."""
    note = note_of(http)
    service.reserve(note, num_prompts(body.prompt) * max(body.n or 1, body.best_of or 1), body.cache_salt)
    completion = await asyncio.to_thread(_prepare, service, note, body)
    return await respond(completion, http, stream=bool(body.stream))


def num_prompts(prompt: str | list[str | int | list[int]]) -> int:
    """Return how many prompts there will be, without a look at each."""
    return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


def split_prompts(prompt: str | list[str | int | list[int]], service: Service, least: int = 0) -> list[Prompt]:
    """Return one prompt per output: a text and a list of ids are one, a list of either is many. Raises RequestError.

    `least`: so many may always be asked for. Ids that are too many to be encoded are not all looked at.
    """
    if isinstance(prompt, str):
        return [prompt]
    limit = max(service.settings.max_prompts, least)
    kinds = set(map(type, prompt[: max(limit, service.info.max_model_len) + 1]))
    if len(kinds) != 1:
        raise RequestError(
            "prompt must be a text, a list of token ids, or a list with one or more of only one of these",
            param="prompt",
        )
    if int in kinds:
        return [cast("list[int]", prompt)]
    if len(prompt) > limit:
        raise RequestError(f"at most {limit} prompts in one request, got {len(prompt)}", param="prompt")
    return cast("list[Prompt]", prompt)


def _prepare(service: Service, note: RequestNote, body: CompletionRequest) -> "_Completion":
    """Check everything and compute the prompts' tokens, in a worker thread. Raises RequestError."""
    model = service.require_model(body.model)
    refuse_unsupported(body)
    wanted = 1 if body.n is None else body.n
    num_outputs = wanted if body.best_of is None else body.best_of
    if not wanted <= num_outputs <= (wanted if body.stream else max(MAX_N, wanted)):
        raise RequestError(f"best_of must be from n to {MAX_N}, and in a stream equal to n", param="best_of")
    usage = usage_chunks(body)
    params = sampling_params(
        body,
        service,
        n=num_outputs,
        max_tokens=1 if _scores_only(body) else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if num_outputs > wanted and body.logprobs is None else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
    )
    prompts = split_prompts(body.prompt, service)
    if len(prompts) * params.n > service.settings.max_outputs:
        raise RequestError(
            f"{len(prompts)} prompts with n={params.n} make more than {service.settings.max_outputs} outputs", param="n"
        )
    last = max_prompt_tokens(body.truncate_prompt_tokens, service, params.max_tokens)
    if body.suffix and last is not None:
        raise RequestError("truncate_prompt_tokens goes without suffix", param="truncate_prompt_tokens")
    completion_id = f"cmpl-{uuid.uuid4().hex}"
    try:
        with blamed_on(field_of(body)):
            requests = [
                service.intake.request(
                    service.encode_between(prompt, body.suffix) if body.suffix else service.encode(prompt, last=last),
                    params,
                    request_id=f"{completion_id}-{index}",
                    priority=body.priority or 0,
                    deadline_s=service.settings.request_timeout_s,
                    adapter=service.adapter_of(model),
                )
                for index, prompt in enumerate(prompts)
            ]
    except ContextLengthError as error:
        raise ContextLengthError(str(error), param="prompt") from error
    echoed = zip(prompts, requests) if body.echo else ()
    echoes = [_echo(service, *each, cut=last is not None) for each in echoed] if body.echo else None
    if (penalty := beam_penalty(body, params)) is not None:
        requests = [replace(request, length_penalty=penalty) for request in requests]
    of = service, note, completion_id, model, requests, usage
    reply = Reply(*of, constraint=field_of(body), explains=explains(body, service))
    return _Completion(reply, body, echoes, TokenNames(service.tokenizer, as_ids=body.return_tokens_as_token_ids))


def _scores_only(body: CompletionRequest) -> bool:
    """Tell whether only the prompt is asked for; the engine ends no output without a token."""
    return bool(body.echo) and body.max_tokens == 0


def _echo(service: Service, prompt: Prompt, request: Request, *, cut: bool) -> str:
    if isinstance(prompt, str) and not cut:
        return prompt
    skip = request.params.skip_special_tokens
    return service.require_tokenizer("echo").decode(request.prompt_ids, skip_special_tokens=skip)


@dataclass(frozen=True, slots=True)
class _Completion:
    """A checked request, and how its outputs are written. `echoes` are the texts of the prompts, if asked for."""

    reply: Reply
    body: CompletionRequest
    echoes: Sequence[str] | None
    names: TokenNames

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the response."""
        # Outputs of one prompt stand together, as in OpenAI's API.
        choices = [choice for index, output in enumerate(outputs) for choice in self._choices(index, output)]
        return msgspec.json.encode(self.reply.whole("text_completion", choices))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream, one for each delta with tokens."""
        writers: dict[int, _ChoiceWriter] = {}
        scores: list[list[TokenLogprob | None]] = [[None] for _ in self.reply.requests]
        only_text = self.body.logprobs is None and not self.body.return_token_ids and self.reply.usage_chunks != "each"
        async with aclosing(self.reply.deltas()) as deltas:
            async for index, delta in deltas:
                scores[index].extend(delta.prompt_logprobs)
                if not delta.token_ids and delta.finish is None:
                    continue
                number = index * self.reply.requests[0].params.n + delta.index
                writer = writers.get(number)
                if writer is None:
                    writer = writers[number] = _ChoiceWriter(self, index, scores[index])
                elif only_text and delta.finish is None:
                    choice_of = partial(_text_choice, number)
                    yield self.reply.text_event("text_completion", number, delta.text, choice_of)
                    continue
                choice = writer.choice(number, delta.text, delta.token_ids, delta.logprobs)
                if delta.finish is not None:
                    end(choice, delta.finish.reason, delta.finish.stop_reason, delta.finish.timings)
                yield event(self.reply.chunk("text_completion", choice))
        await self.reply.explain()
        if self.reply.usage_chunks or self.reply.explains:
            yield event(self.reply.chunk("text_completion"))

    def _choices(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        scores = output.prompt_logprobs or [None]
        choices: list[CompletionChoice] = []
        shown, wanted = output.outputs, self.body.n or 1
        if len(shown) > wanted:  # best_of
            shown = sorted(shown, key=lambda one: (one.cumulative_logprob or 0.0) / max(1, len(one.token_ids)))[::-1]
        for number, completion in enumerate(shown[:wanted], index * wanted):
            writer = _ChoiceWriter(self, index, scores)
            choice = writer.choice(number, completion.text, completion.token_ids, completion.logprobs or [])
            end(choice, completion.finish_reason, completion.stop_reason, completion.timings)
            if self.body.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(self.names, scores)
            choices.append(choice)
        return choices


def _text_choice(number: int, text: str) -> CompletionChoice:
    return CompletionChoice(index=number, text=text)


class _ChoiceWriter:
    """Writes one output, at once or chunk by chunk; the echo of its prompt comes before the first token."""

    def __init__(self, completion: _Completion, prompt: int, scores: Sequence[TokenLogprob | None]) -> None:
        request = completion.reply.requests[prompt]
        self._prompt_ids = request.prompt_ids
        self._scores = scores
        self._echo = None if completion.echoes is None else completion.echoes[prompt]
        self._scores_only = _scores_only(completion.body)
        self._with_ids = bool(completion.body.return_token_ids)
        self._first = True
        self._logprobs: CompletionLogprobsWriter | None = None
        if (num_top := completion.body.logprobs) is not None:
            skip = request.params.skip_special_tokens
            self._logprobs = CompletionLogprobsWriter(completion.names, with_top=num_top > 0, skip_special=skip)

    def choice(
        self, number: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionChoice:
        """Return the next tokens of the output, as choice `number`."""
        first, self._first = self._first, False
        if self._scores_only:
            text, token_ids, logprobs = "", (), ()
        tokens: list[tuple[int, TokenLogprob | None]] = list(zip(token_ids, logprobs))
        if first and self._echo is not None:
            text = self._echo + text
            tokens = [*zip(self._prompt_ids, self._scores), *tokens]
        if first and self._logprobs is not None:
            self._logprobs.start(text, (token_id for token_id, _ in tokens))
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=None if self._logprobs is None else self._logprobs.write(tokens),
            prompt_token_ids=list(self._prompt_ids) if first and self._with_ids else UNSET,
            token_ids=list(token_ids) if self._with_ids else UNSET,
        )
