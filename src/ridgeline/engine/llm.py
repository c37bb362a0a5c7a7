"""The offline Python API, LLM: the loop runs in the calling thread."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from ridgeline.core.config import EngineConfig, EngineOptions
from ridgeline.core.errors import EngineError, RequestError
from ridgeline.core.options import table
from ridgeline.core.params import PoolingKind, PoolingParams, SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.build import build_engine
from ridgeline.engine.intake import default_params
from ridgeline.engine.outputs import EmbeddingOutput, OutputDelta, RequestOutput
from ridgeline.engine.progress import progress_bar
from ridgeline.engine.replace_weights import replace_weights
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.save import write_checkpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ridgeline.core.step import Vectors
    from ridgeline.text.chat import ChatTemplate

Prompt = str | Sequence[int] | Mapping[str, object]  # text, token ids, or {"prompt_token_ids": [...]}
Message = Mapping[str, object]
T = TypeVar("T")
AHEAD = 4  # prompts of an iterator for each sequence that runs: begun, and not yet yielded


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
        self._config = config
        self._inboxes: dict[str, list[OutputDelta]] = {}  # by request, of those that somebody reads
        self.engine = build_engine(config, self._deliver)

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, None if its folder has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json asks for, else the defaults of SamplingParams."""
        return default_params(self.engine.info.generation)

    @overload
    def generate(
        self, prompts: Iterator[Prompt], sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        prediction: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        prediction: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Return one RequestOutput per prompt, in order. `adapter` names a loaded one, for all prompts or for each,
        `prediction` is text that the output is expected to be, mostly: drafts follow it.

        Raises RequestError before anything runs if any prompt is wrong. An iterator of prompts gives one of outputs,
        with the same parameters for all: it draws a few ahead of what is read, and raises at the prompt that is wrong.
        """
        if isinstance(prompts, Iterator):
            if isinstance(sampling_params, Sequence) or not isinstance(adapter, str | None):
                raise RequestError("an iterator of prompts has one sampling_params and one adapter for all of them")
            return self._each(prompts, sampling_params or self.get_default_sampling_params(), adapter)
        encoded = [self._encode(prompt) for prompt in _as_batch(prompts)]
        return self._run(encoded, sampling_params, adapter, use_tqdm, prediction, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        chat_template: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the reply to one conversation or several, through the model's chat template or another in Jinja.

        `adapter` as in `generate`. Raises RequestError for messages that the template refuses or a model without one.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self.chat_template(chat_template)
        texts = [template.render(conversation) for conversation in conversations]  # pyright: ignore[reportArgumentType]
        encoded = [(text, self.engine.intake.encode(text, add_special_tokens=False)) for text in texts]
        return self._run(encoded, sampling_params, adapter, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[OutputDelta]:
        """Yield deltas of one prompt as they are generated. Leaving the iterator early frees the request."""
        _, token_ids = self._encode(prompt)
        params = sampling_params or self.get_default_sampling_params()
        yield from self._deltas([self.engine.intake.request(token_ids, params, adapter=adapter)])

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: PoolingKind | None = None, normalize: bool = True
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, in order, of length 1 unless `normalize` is off.

        `pooling`: which tokens' outputs it is made of; None: what the model's files say, else the last token's of a
        decoder and the mean of an encoder. Raises RequestError for a model loaded to generate, or a prompt too long.
        """
        if self.engine.info.labels:
            raise RequestError("this model has a head that classifies, and gives no vectors", param="task")
        chosen = PoolingParams(pooling=pooling or self.engine.info.pooling, normalize=normalize)
        encoded = [self._encode(prompt) for prompt in _as_batch(prompts)]
        requests = [self.engine.intake.embedding(token_ids, chosen) for _, token_ids in encoded]
        vectors: dict[str, Vectors] = {}
        for delta in self._deltas(requests):
            if delta.vector_H is not None:
                vectors[delta.request_id] = delta.vector_H
            elif delta.finish is not None and delta.request_id not in vectors:
                raise EngineError(delta.finish.error or "the engine stopped before the vector was complete")
        found = [vectors[request.request_id] for request in requests]
        return [EmbeddingOutput(*prompt, vector_H) for prompt, vector_H in zip(encoded, found, strict=True)]

    def update_weights(self, weights: "str | Mapping[str, NDArray[Any]]") -> None:
        """Compute with other weights from now on: those of a folder, or tensors by their names in the checkpoint.

        Nothing else of the model may differ, nor may outputs be under way. No prefix of the old weights is used again.
        Memory never has both; tensors go through a temporary file. Raises as the constructor does, ConfigError for
        another model, RequestError where outputs are under way, and the old weights stay: all is checked before.
        """
        if self._inboxes:
            raise RequestError("outputs are under way: read them to their end, or close them, before weights change")
        info = self.engine.info
        while self.engine.loop.step():  # what was planned before its outputs ended
            pass
        with TemporaryDirectory() as scratch:
            if not isinstance(weights, str):
                write_checkpoint(Path(info.model_path), weights, Path(scratch))
                weights = scratch
            model = replace(self._config.model, model=weights, max_model_len=info.max_model_len)
            replace_weights(self.engine, replace(self._config, model=model))

    def chat_template(self, source: str | None = None) -> "ChatTemplate":
        """Compile `source`, Jinja text, or the model's own chat template. Raises RequestError if there is neither."""
        from ridgeline.text.chat import GIVE_ONE, ChatTemplate  # with jinja2, for those who chat

        tokenizer = self.engine.tokenizer
        template = None if tokenizer is None else ChatTemplate.from_tokenizer(tokenizer, source)
        if template is None:
            lacks = "tokenizer" if tokenizer is None else "chat template, which makes a prompt of messages"
            fix = f"chat_template=, on the command line {GIVE_ONE}; or use generate with a plain prompt"
            raise RequestError(f"this model has no {lacks}: give {fix}", param="messages")
        return template

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, where it is one, and its token ids."""
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            prompt = ids if isinstance(ids, Sequence) else str(prompt.get("prompt", ""))  # pyright: ignore[reportUnknownVariableType]
        return prompt if isinstance(prompt, str) else None, self.engine.intake.encode(prompt)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        progress: bool,
        prediction: str | Sequence[str | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Check every prompt, with its token ids, before anything is queued; then run them all."""
        count = len(prompts)
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if priority is not None and len(priority) != count:
            raise RequestError(f"{count} prompts but {len(priority)} priorities: give one for each prompt")
        each_params, names = _for_each("sampling_params", chosen, count), _for_each("adapters", adapter, count)
        texts = _for_each("predictions", prediction, count)
        given = zip(prompts, each_params, priority or [0] * count, names, texts)
        requests = [
            self.engine.intake.request(token_ids, params, priority=order, adapter=name, prediction=text)
            for (_, token_ids), params, order, name, text in given
        ]
        begun = [RequestOutput.begun(request, text) for request, (text, _) in zip(requests, prompts)]
        outputs = {output.request_id: output for output in begun}
        total = sum(len(output.outputs) for output in outputs.values())
        num_done = num_tokens = 0
        with progress_bar(total, self.engine.loop.clock, show=progress) as show:
            for delta in self._deltas(requests):
                outputs[delta.request_id].extend(delta)
                num_tokens += len(delta.token_ids)
                num_done += delta.finish is not None
                show(num_done, num_tokens)
        return list(outputs.values())

    def _each(self, prompts: Iterator[Prompt], params: SamplingParams, adapter: str | None) -> Iterator[RequestOutput]:
        """Yield the outputs in the order of their prompts, of which a bounded number is begun and not yielded."""
        begun: dict[str, RequestOutput] = {}

        def requests() -> Iterator[Request]:
            for text, token_ids in map(self._encode, prompts):
                request = self.engine.intake.request(token_ids, params, adapter=adapter)
                begun[request.request_id] = RequestOutput.begun(request, text)
                yield request

        most = AHEAD * self.engine.info.max_num_seqs
        with closing(self._deltas(requests(), lambda: len(begun) < most)) as deltas:
            for delta in deltas:
                begun[delta.request_id].extend(delta)
                while begun and (first := next(iter(begun.values()))).finished:
                    yield begun.pop(first.request_id)

    def _deltas(
        self, requests: Iterable[Request], has_room: Callable[[], bool] = lambda: True
    ) -> Generator[OutputDelta, None, None]:
        """Run steps until every output of `requests` has ended, yielding their deltas. Leaving early frees them all.

        Requests are drawn while there is room.
        """
        unfinished: dict[str, int] = {}  # outputs
        inbox, source = list[OutputDelta](), iter(requests)
        try:
            while True:
                while has_room() and (request := next(source, None)) is not None:
                    unfinished[request.request_id] = request.params.n
                    self._inboxes[request.request_id] = inbox
                    self.engine.loop.submit(request)
                if not unfinished:
                    return
                self.engine.loop.step()
                deltas = inbox.copy()
                inbox.clear()
                for delta in deltas:
                    if delta.finish is not None:
                        unfinished[delta.request_id] -= 1
                        if not unfinished[delta.request_id]:
                            del unfinished[delta.request_id], self._inboxes[delta.request_id]
                    yield delta
        finally:  # nobody reads what is unfinished any more; its blocks are free on return
            for request_id in unfinished:
                del self._inboxes[request_id]
                self.engine.loop.abort(request_id)
            self.engine.loop.process_input_queue()

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if (inbox := self._inboxes.get(delta.request_id)) is not None:
                inbox.append(delta)


_PLACED = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "model")]
_OPTIONS = [Parameter(row.name, Parameter.KEYWORD_ONLY, default=row.default) for row in table(EngineConfig)]
LLM.__init__.__signature__ = Signature(_PLACED + _OPTIONS)  # pyright: ignore[reportFunctionMemberAccess] `help(LLM)`


def _for_each(what: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """Return one item for each prompt, given one for all or one for each. Raises RequestError for another count."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count  # pyright: ignore[reportReturnType] a text is one item
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
