"""Intake: prompt and parameters -> Request, with every bound checked before anything is queued.

Called by every front end in its own thread; holds nothing that the engine's loop writes.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ridgeline.core.clock import Clock
from ridgeline.core.errors import ContextLengthError, RequestError
from ridgeline.core.params import MAX_INT, RECOMMENDED, DiffusionParams, PoolingParams, SamplingParams
from ridgeline.decoding.request import Request
from ridgeline.engine.client import EngineInfo
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import GenerationDefaults

Prompt = str | Sequence[int]


class Intake:
    """Checks and completes requests for the engine that `info` describes; `clock` is that engine's.

    That of a server compiles no grammars: its engine's does that with the requests that lack theirs.
    """

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer | None, clock: Clock, *, compiles_grammars: bool = False
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._eos_ids = frozenset(info.generation.eos_token_ids)
        self._clock = clock
        self._seeds = np.random.default_rng(info.seed)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None
        if compiles_grammars and tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, info.vocab_size, self._eos_ids)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Raises RequestError for text without a tokenizer and ids outside the vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: give the prompt as token ids", param="prompt")
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = list(prompt)
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise RequestError(f"a prompt of token ids must hold integers, got {token_id!r}", param="prompt")
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if min(token_ids) < 0 or max(token_ids) >= self.info.vocab_size:
            raise RequestError(f"prompt token ids must be from 0 to {self.info.vocab_size - 1}", param="prompt")
        return token_ids

    def encode_pair(self, text: str, other: str, most: int | None = None) -> list[int]:
        """Return the token ids, `most` or fewer, of two texts that a classifier reads together. Raises as `encode`."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, without which it cannot compare texts", param="prompt")
        found, highest = self.tokenizer.encoding(text, other, most=most), self.info.num_types - 1
        kinds = (min(kind, highest) for kind in found.type_ids)
        return [token_id + kind * self.info.vocab_size for token_id, kind in zip(self.encode(found.ids), kinds)]

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        adapter: str | None = None,
        prediction: str | None = None,
        shown: Sequence[str] = (),
    ) -> Request:
        """Build a Request for the scheduler. `deadline_s` is seconds from now, `adapter` the name of a loaded one,
        `prediction` a text that the output is expected to be, mostly; `shown` are special tokens that its text keeps.

        Raises ContextLengthError if prompt plus max_tokens exceeds the context, RequestError for ids or counts
        that this model or engine does not have.
        """
        if self.info.embeds:
            raise RequestError("this model was loaded to embed: load it without task=embed to generate", param="task")
        self._check(params)
        self._check_diffusion(len(prompt_ids), params)
        params = replace(params, bad_word_ids=self._bad_word_ids(params.bad_words)) if params.bad_words else params
        number_of_adapter = self._number_of(adapter)
        room = self.info.max_model_len - len(prompt_ids)
        wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if wanted > room:
            asked = f"the prompt has {len(prompt_ids)} and max_tokens asks for {wanted} more"
            fix = "shorten the prompt or lower max_tokens"
            raise ContextLengthError(
                f"this model's maximum context length is {self.info.max_model_len} tokens; {asked}: {fix}"
            )
        stops = frozenset(params.stop_token_ids)
        request = replace(
            self._begun(prompt_ids, params, request_id, priority, deadline_s),
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_ids=stops if params.ignore_eos else stops | self._eos_ids,
            adapter=number_of_adapter,
            shown_ids=self._ids_of(shown),
            salt=f"adapter {number_of_adapter}" if number_of_adapter else "",
            prediction_ids=self._prediction_ids(prediction),
        )
        return self.with_grammar(request)

    def embedding(
        self,
        prompt_ids: Sequence[int],
        pooling: PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Request:
        """Return a Request for the vector of a prompt. `deadline_s` is seconds from now.

        Raises RequestError for a model loaded to generate, ContextLengthError for a prompt that is too long.
        """
        if not self.info.embeds:
            raise RequestError("this model was loaded to generate: load it with task=embed", param="task")
        num_tokens, context, room = len(prompt_ids), self.info.max_model_len, self.info.max_unchunked_prompt
        if num_tokens > context:
            raise ContextLengthError(
                f"this model's maximum context length is {context} tokens; the prompt has {num_tokens}"
            )
        if room is not None and num_tokens > room:
            needs = f"{num_tokens} tokens, and a step has {room}; raise max_num_batched_tokens"
            raise ContextLengthError(f"this model sees a text as a whole: {needs}")
        params = SamplingParams(max_tokens=1, seed=0)
        return replace(self._begun(prompt_ids, params, request_id, priority, deadline_s), pooling=pooling)

    def with_grammar(self, request: Request) -> Request:
        """Return a request with the grammar that its parameters ask for. Raises RequestError."""
        asked = request.params.structured_outputs
        if asked is None or request.grammar is not None or self._grammars is None:
            return request
        return replace(request, grammar=self._grammars.compile(asked))

    def _begun(
        self, ids: Sequence[int], params: SamplingParams, name: str | None, priority: int, deadline_s: float | None
    ) -> Request:
        """Return a request of its parameters alone, numbered, seeded and timed: for one token, with no end but that."""
        if abs(priority) > MAX_INT:
            raise RequestError(f"priority must be between -{MAX_INT} and {MAX_INT}, got {priority}", param="priority")
        with self._lock:
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed % 2**64
            number = next(self._numbers)
        now_s = self._clock()
        return Request(
            request_id=name or f"request-{number}",
            prompt_ids=tuple(ids),
            params=params,
            arrival_s=now_s,
            seed=seed,
            max_tokens=1,
            stop_ids=frozenset(),
            priority=priority,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
        )

    def _prediction_ids(self, text: str | None) -> tuple[int, ...]:
        """Return the tokens of a prediction, as many as an output may have."""
        if not text:
            return ()
        if self.tokenizer is None:
            raise RequestError("a prediction needs a tokenizer, which this model lacks", param="prediction")
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)[: self.info.max_model_len])

    def _bad_word_ids(self, words: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of texts as a text begins with them and, where it is another token, behind a space."""
        if self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, which this model lacks", param="bad_words")
        found: list[Sequence[int]] = []
        for word in words:
            alone, behind = (
                tuple(self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
            )
            found += [alone] * bool(alone)
            if behind and len(behind) == len(alone) and behind[0] != alone[0]:
                found.append(behind)
        return tuple(found)

    def _ids_of(self, tokens: Sequence[str]) -> frozenset[int]:
        if self.tokenizer is None:
            return frozenset()
        return frozenset(token_id for token in tokens if (token_id := self.tokenizer.token_id(token)) is not None)

    def _number_of(self, adapter: str | None) -> int:
        if adapter is None:
            return 0
        if adapter not in self.info.adapters:
            known = ", ".join(self.info.adapters) or "none"
            raise RequestError(f"no adapter {adapter[:200]!r} is loaded; there is {known}", param="adapter")
        return self.info.adapters[adapter]

    def _check(self, params: SamplingParams) -> None:
        most, vocab_size = self.info.max_num_seqs, self.info.vocab_size
        if params.n > most:
            raise RequestError(f"n={params.n} exceeds the {most} sequences this engine runs", param="n")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model lacks", param="stop")
        if params.structured_outputs is not None and (
            self.tokenizer is None or self.info.max_unchunked_prompt is not None
        ):
            lacks = "needs a tokenizer, which this model lacks"
            why = (
                lacks if self.tokenizer is None else "is for models that decode left to right; this one fills in masks"
            )
            raise RequestError(f"structured output {why}", param="structured_outputs")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(params, name)
            if ids and max(ids) >= vocab_size:
                raise RequestError(f"{name}: token ids must be below {vocab_size}, got {max(ids)}", param=name)

    def _check_diffusion(self, num_prompt: int, params: SamplingParams) -> None:
        room = self.info.max_unchunked_prompt
        if room is None:
            if params.diffusion is not None:
                why = "is for models that fill in masks; this one continues text"
                raise RequestError(f"diffusion {why}", param="diffusion")
            return
        if params.prompt_logprobs is not None:
            raise RequestError("a masked diffusion model has no prompt_logprobs", param="prompt_logprobs")
        if params.bad_words:
            raise RequestError("bad_words are for models that decode left to right", param="bad_words")
        block_length = (params.diffusion or DiffusionParams()).block_length
        for what, needed in (("prompt", num_prompt), ("pair of blocks", 2 * block_length)):
            if needed > room:
                field = "prompt" if what == "prompt" else "diffusion"
                why = f"{needed} tokens, and a step has {room}; raise max_num_batched_tokens"
                raise RequestError(f"this model sees a {what} as a whole: {why}", param=field)


def default_params(generation: GenerationDefaults, **overrides: object) -> SamplingParams:
    """Return the SamplingParams of generation_config.json; `overrides` that are not None win. Raises RequestError."""
    values: dict[str, object] = {name: getattr(generation, name) for name in RECOMMENDED}
    values["max_tokens"] = generation.max_new_tokens
    values.update({name: value for name, value in overrides.items() if value is not None})
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})  # pyright: ignore[reportArgumentType]
