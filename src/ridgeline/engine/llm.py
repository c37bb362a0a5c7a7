"""The offline Python API, LLM: the loop runs in the calling thread."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Self, Unpack

from ridgeline.core.config import EngineConfig, EngineOptions
from ridgeline.core.errors import EngineError, RequestError
from ridgeline.core.options import table
from ridgeline.core.params import PoolingKind, PoolingParams, SamplingParams
from ridgeline.engine.build import build_engine
from ridgeline.engine.intake import default_params
from ridgeline.engine.outputs import CompletionOutput, EmbeddingOutput, OutputDelta, RequestOutput
from ridgeline.engine.progress import progress_bar
from ridgeline.engine.request import Request
from ridgeline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ridgeline.core.step import Vectors
    from ridgeline.text.chat import ChatTemplate

Prompt = str | Sequence[int] | Mapping[str, object]  # text, token ids, or {"prompt_token_ids": [...]}
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt with its token ids and parameters, checked, before anything of the batch is queued."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    prediction: str | None = None


class LLM:
    """A model in this process: `generate`, `chat` and `stream`, or with task=embed and for encoders `embed`.

    `model` is a folder, a .gguf file, a hub id or a bundled model's name. The options are declared, with their defaults
    and ranges, in `core/config.py`; options left at None are chosen by the engine, and `engine.info.choices` says why.

    Raises ConfigError for unknown options and settings that cannot be honoured, ModelLoadError for bad files.
    """

    def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None:
        self._open(EngineConfig.of(model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Open the model of a configuration. Raises as the constructor does."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        self._inboxes: dict[str, list[OutputDelta]] = {}  # by request, of those that somebody reads
        self.engine = build_engine(config, self._deliver)

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, None if its folder has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json asks for, else the defaults of SamplingParams."""
        return default_params(self.engine.info.generation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        prediction: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one RequestOutput per prompt, in order. `adapter` names a loaded one, for all prompts or for each,
        `prediction` is text that the output is expected to be, mostly: drafts follow it.

        Raises RequestError before anything runs if any prompt is wrong.
        """
        batch = _as_batch(prompts)
        texts = _for_each("predictions", prediction, len(batch))
        jobs = [
            replace(self._job(p, params), prediction=text)
            for p, params, text in zip(batch, self._params(sampling_params, len(batch)), texts)
        ]
        return self._run(jobs, priority, use_tqdm, _for_each("adapters", adapter, len(jobs)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        chat_template: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the reply to one conversation or several, through the model's chat template; `adapter` as in
        `generate`.

        `chat_template` is the Jinja text of another template to use.

        Raises RequestError for messages that the template refuses or a model without one.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self.chat_template(chat_template)
        texts = [template.render(conversation) for conversation in conversations]  # pyright: ignore[reportArgumentType]
        jobs = [
            _Job(text, self.engine.intake.encode(text, add_special_tokens=False), params)
            for text, params in zip(texts, self._params(sampling_params, len(texts)))
        ]
        return self._run(jobs, None, use_tqdm, _for_each("adapters", adapter, len(jobs)))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[OutputDelta]:
        """Yield deltas of one prompt as they are generated. Leaving the iterator early frees the request."""
        job = self._job(prompt, self._params(sampling_params, 1)[0])
        yield from self._deltas([self.engine.intake.request(job.token_ids, job.params, adapter=adapter)])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool = True,
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, in order, of length 1 unless `normalize` is off.

        `pooling`: which tokens' outputs it is made of; None: what the model's files say, else the last token's of a
        decoder and the mean of an encoder. Raises RequestError for a model loaded to generate, or a prompt too long.
        """
        chosen = PoolingParams(pooling=pooling or self.engine.info.pooling, normalize=normalize)
        jobs = [self._job(prompt, SamplingParams(max_tokens=1)) for prompt in _as_batch(prompts)]
        requests = [self.engine.intake.embedding(job.token_ids, chosen) for job in jobs]
        vectors: dict[str, Vectors] = {}
        for delta in self._deltas(requests):
            if delta.vector_H is not None:
                vectors[delta.request_id] = delta.vector_H
            elif delta.finish is not None and delta.request_id not in vectors:
                raise EngineError(delta.finish.error or "the engine stopped before the vector was complete")
        return [
            EmbeddingOutput(job.text, job.token_ids, vectors[request.request_id])
            for job, request in zip(jobs, requests, strict=True)
        ]

    def chat_template(self, source: str | None = None) -> "ChatTemplate":
        """Compile `source`, Jinja text, or the model's own chat template. Raises RequestError if there is neither."""
        from ridgeline.text.chat import ChatTemplate  # with jinja2, for those who chat

        tokenizer = self.engine.tokenizer
        template = None if tokenizer is None else ChatTemplate.from_tokenizer(tokenizer, source)
        if template is None:
            lacks = "tokenizer" if tokenizer is None else "chat template, which makes a prompt of messages"
            raise RequestError(
                f"this model has no {lacks}: give one (chat_template=, on the command line --chat-template FILE), or "
                "use generate with a plain prompt",
                param="messages",
            )
        return template

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            prompt = ids if isinstance(ids, Sequence) else str(prompt.get("prompt", ""))  # pyright: ignore[reportUnknownVariableType]
        return _Job(prompt if isinstance(prompt, str) else None, self.engine.intake.encode(prompt), params)

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(f"{count} prompts but {len(given)} sampling_params: give one, or one for each prompt")
        return list(given)

    def _run(
        self, jobs: Sequence[_Job], priority: Sequence[int] | None, progress: bool, adapters: Sequence[str | None]
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(jobs):
            raise RequestError(f"{len(jobs)} prompts but {len(priority)} priorities: give one for each prompt")
        requests = [
            self.engine.intake.request(
                job.token_ids,
                job.params,
                priority=priority[i] if priority else 0,
                adapter=adapters[i],
                prediction=job.prediction,
            )
            for i, job in enumerate(jobs)
        ]
        outputs = {
            request.request_id: RequestOutput(
                request.request_id, job.text, job.token_ids, [CompletionOutput(i) for i in range(job.params.n)]
            )
            for request, job in zip(requests, jobs)
        }
        total = sum(len(output.outputs) for output in outputs.values())
        num_done = num_tokens = 0
        with progress_bar(total, self.engine.loop.clock, show=progress) as show:
            for delta in self._deltas(requests):
                outputs[delta.request_id].extend(delta)
                num_tokens += len(delta.token_ids)
                num_done += delta.finish is not None
                show(num_done, num_tokens)
        return list(outputs.values())

    def _deltas(self, requests: Sequence[Request]) -> Iterator[OutputDelta]:
        """Run steps until every output of `requests` has ended, yielding their deltas. Leaving early frees them all."""
        unfinished = sum(request.params.n for request in requests)
        inbox: list[OutputDelta] = []
        for request in requests:
            self._inboxes[request.request_id] = inbox
            self.engine.loop.submit(request)
        try:
            while unfinished:
                self.engine.loop.step()
                deltas = inbox.copy()
                inbox.clear()
                for delta in deltas:
                    unfinished -= delta.finish is not None
                    yield delta
        finally:  # nobody reads what is unfinished any more; its blocks are free on return
            for request in requests:
                del self._inboxes[request.request_id]
                self.engine.loop.abort(request.request_id)
            self.engine.loop.process_input_queue()

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if (inbox := self._inboxes.get(delta.request_id)) is not None:
                inbox.append(delta)


LLM.__init__.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess] what `help(LLM)` shows
    [
        *(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "model")),
        *(Parameter(row.name, Parameter.KEYWORD_ONLY, default=row.default) for row in table(EngineConfig)),
    ]
)


def _for_each(what: str, given: str | Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    """Return one item for each prompt, given one for all or one for each. Raises RequestError for another count."""
    if given is None or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{count} prompts but {len(given)} {what}: give one, or one for each prompt")
    return given


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: one text, list of ids or mapping is a single one, any other sequence a batch."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]
