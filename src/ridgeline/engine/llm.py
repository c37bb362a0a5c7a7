"""LLM: the offline Python API. The loop runs in the calling thread."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.core.config import (
    BackendConfig,
    BackendName,
    CacheConfig,
    Dtype,
    EngineConfig,
    InputBits,
    KvDtype,
    ModelConfig,
    QuantizationScheme,
    QuantizeConfig,
    SchedulerConfig,
    SchedulingPolicy,
    Task,
)
from ridgeline.core.errors import ContextLengthError, RequestError
from ridgeline.core.params import SamplingParams
from ridgeline.engine.build import Engine, build_engine
from ridgeline.engine.embedding import Pooling
from ridgeline.engine.intake import default_params
from ridgeline.engine.outputs import CompletionOutput, EmbeddingOutput, OutputDelta, RequestOutput
from ridgeline.engine.request import Request
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.pooling import PoolingKind

Prompt = str | Sequence[int] | Mapping[str, object]  # text, token ids, or {"prompt_token_ids": [...]}
Message = Mapping[str, object]
SHOW_S = 0.1  # between two looks of the progress bar: it costs more than the rest of a small model's loop


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt with its token ids and parameters, checked, before anything of the batch is queued."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams


class LLM:
    """A model in this process: `generate`, `chat` and `stream`, or with task=embed and for encoders `embed`.

    `model` is a folder, a .gguf file, a hub id or a bundled model's name; `adapters` are folders of LoRA adapters by
    name. Options left at None are chosen by the engine, and `engine.choices` says why. Raises ConfigError for settings
    that cannot be honoured, ModelLoadError for bad files.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: Dtype = "auto",
        task: Task = "auto",
        revision: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        scheduling_policy: SchedulingPolicy = "fcfs",
        block_size: int = 32,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        kv_dtype: KvDtype = "auto",
        quantize: QuantizationScheme | None = None,
        quantize_group_size: int = 128,
        quantize_zero_points: bool = False,
        quantize_inputs: InputBits = "int16",
        quantize_embeddings: bool = True,
        backend: BackendName = "auto",
        isa: str | None = None,
        deterministic: bool = False,
        pack_cache: bool = True,
        num_threads: int | None = None,
        seed: int = 0,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(model=model, revision=revision, dtype=dtype, task=task, max_model_len=max_model_len),
            cache=CacheConfig(
                block_size=block_size,
                kv_cache_bytes=kv_cache_bytes,
                prefix_caching=enable_prefix_caching,
                kv_dtype=kv_dtype,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, policy=scheduling_policy
            ),
            quantize=QuantizeConfig(
                scheme=quantize,
                group_size=quantize_group_size,
                zero_points=quantize_zero_points,
                inputs=quantize_inputs,
                embeddings=quantize_embeddings,
            ),
            backend=BackendConfig(backend=backend, isa=isa, deterministic=deterministic, pack_cache=pack_cache),
            num_threads=num_threads,
            seed=seed,
            adapters=dict(adapters or {}),
        )
        self._read_ids: set[str] = set()  # requests that somebody reads
        self._unread: dict[str, list[OutputDelta]] = {}  # by request, of those
        self.engine: Engine = build_engine(config, self._deliver)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if its folder has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, else the defaults of SamplingParams."""
        return default_params(self.engine.generation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. `adapter` is the name of a loaded one, for all prompts or for each.

        Raises RequestError before anything runs if any prompt is wrong.
        """
        batch = _as_batch(prompts)
        jobs = [self._job(p, params) for p, params in zip(batch, self._params(sampling_params, len(batch)))]
        return self._run(jobs, priority, use_tqdm, _for_each("adapters", adapter, len(jobs)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template; `adapter` as in `generate`.

        Raises RequestError for messages that the template refuses or a model without one.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self.chat_template()
        texts = [template.render(conversation) for conversation in conversations]  # pyright: ignore[reportArgumentType]
        jobs = [
            _Job(text, self.engine.intake.encode(text, add_special_tokens=False), params)
            for text, params in zip(texts, self._params(sampling_params, len(texts)))
        ]
        return self._run(jobs, None, use_tqdm, _for_each("adapters", adapter, len(jobs)))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[OutputDelta]:
        """Deltas of one prompt as they are generated. Leaving the iterator early frees the request."""
        self._require_head()
        job = self._job(prompt, self._params(sampling_params, 1)[0])
        request = self.engine.intake.request(job.token_ids, job.params, adapter=adapter)
        self._submit([request])
        unfinished = job.params.n
        try:
            while unfinished:
                self.engine.loop.step()
                for delta in self._read(request.request_id):
                    unfinished -= delta.finish is not None
                    yield delta
        finally:
            self._forget([request])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool = True,
    ) -> list[EmbeddingOutput]:
        """A vector for each prompt, in order, of length 1 unless `normalize` is off.

        `pooling`: which tokens' outputs it is made of; None: what the model's files say, else the last token's of a
        decoder and the mean of an encoder. Raises RequestError for a model loaded to generate, or a prompt too long.
        """
        embedder = self.engine.embedder
        if embedder is None:
            raise RequestError("this model was loaded to generate: load it with task=embed", param="task")
        jobs = [self._job(prompt, SamplingParams(max_tokens=1)) for prompt in _as_batch(prompts)]
        for job in jobs:
            if len(job.token_ids) > self.engine.intake.max_model_len:
                raise ContextLengthError(
                    f"this model's context is {self.engine.intake.max_model_len} tokens; "
                    f"the prompt has {len(job.token_ids)}"
                )
        chosen = Pooling(pooling or self.engine.pooling, normalize)
        vectors = embedder.embed([job.token_ids for job in jobs], chosen)
        return [EmbeddingOutput(job.text, job.token_ids, vector) for job, vector in zip(jobs, vectors)]

    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises RequestError if it has none."""
        template = None if self.engine.tokenizer is None else ChatTemplate.from_tokenizer(self.engine.tokenizer)
        if template is None:
            raise RequestError("this model has no chat template: use generate with a plain prompt", param="messages")
        return template

    def _require_head(self) -> None:
        if self.engine.embedder is not None:
            raise RequestError("this model was loaded to embed: load it without task=embed to generate", param="task")

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
        self._require_head()
        if priority is not None and len(priority) != len(jobs):
            raise RequestError(f"{len(jobs)} prompts but {len(priority)} priorities: give one for each prompt")
        requests = [
            self.engine.intake.request(
                job.token_ids, job.params, priority=priority[i] if priority else 0, adapter=adapters[i]
            )
            for i, job in enumerate(jobs)
        ]
        outputs = {
            request.request_id: RequestOutput(
                request.request_id, job.text, job.token_ids, [CompletionOutput(i) for i in range(job.params.n)]
            )
            for request, job in zip(requests, jobs)
        }
        self._submit(requests)
        try:
            self._until_finished(outputs, progress)
        finally:
            self._forget(requests)
        return list(outputs.values())

    def _until_finished(self, outputs: Mapping[str, RequestOutput], progress: bool) -> None:
        """Steps until every answer has ended, showing requests done and tokens per second."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        total = unfinished = sum(len(output.outputs) for output in outputs.values())
        num_tokens, started_s = 0, time.monotonic()
        shown_s = started_s
        with Progress(*columns, transient=True, disable=not progress) as bar:
            task = bar.add_task("generating", total=total, rate="")
            while unfinished:
                self.engine.loop.step()
                for request_id in outputs.keys() & self._unread.keys():
                    for delta in self._read(request_id):
                        outputs[request_id].extend(delta)
                        num_tokens += len(delta.token_ids)
                        unfinished -= delta.finish is not None
                now_s = time.monotonic()
                if progress and (now_s - shown_s > SHOW_S or not unfinished):
                    rate = f"{num_tokens / (now_s - started_s):.1f} tokens/s"
                    bar.update(task, completed=total - unfinished, rate=rate)
                    shown_s = now_s

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._read_ids.add(request.request_id)
            self.engine.loop.submit(request)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.request_id in self._read_ids:
                self._unread.setdefault(delta.request_id, []).append(delta)

    def _read(self, request_id: str) -> list[OutputDelta]:
        return self._unread.pop(request_id, [])

    def _forget(self, requests: Sequence[Request]) -> None:
        """Nobody reads these any more: what is unfinished is aborted, and its blocks are free on return."""
        for request in requests:
            self._read_ids.remove(request.request_id)
            self._unread.pop(request.request_id, None)
            self.engine.loop.abort(request.request_id)
        self.engine.loop.settle()


def _for_each(what: str, given: str | Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    """One for all prompts, or one for each. Raises RequestError where they are fewer or more."""
    if given is None or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{count} prompts but {len(given)} {what}: give one, or one for each prompt")
    return given


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text, one list of ids and one mapping are single prompts; any other sequence is a batch."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]
