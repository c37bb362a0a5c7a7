"""Intake: prompt and parameters -> Request, with every bound checked before anything is queued.

Called by every front end in its own thread; holds nothing that the engine's loop writes.
"""

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np

from ridgeline.core.errors import ContextLengthError, RequestError
from ridgeline.core.params import DiffusionParams, SamplingParams
from ridgeline.engine.request import Request
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import GenerationDefaults

Prompt = str | Sequence[int]


class Intake:
    """Checks and completes requests for one model.

    `eos_ids` end an answer unless it ignores them; `seed` starts the stream of seeds for requests without one.
    `adapters` are the names of the loaded ones.
    `whole_prompt_tokens`, of masked diffusion models alone: the most tokens that one step can compute together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
        whole_prompt_tokens: int | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._max_num_seqs = max_num_seqs
        self._whole_prompt_tokens = whole_prompt_tokens
        self._adapters = tuple(adapters)
        self._seeds = np.random.default_rng(seed)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self._adapters

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises RequestError for text without a tokenizer and ids outside the vocabulary."""
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
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise RequestError(f"prompt token ids must be from 0 to {self._vocab_size - 1}", param="prompt")
        return token_ids

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        adapter: str | None = None,
    ) -> Request:
        """A Request ready for the scheduler. `deadline_s` is seconds from now, `adapter` the name of a loaded one.

        Raises ContextLengthError if prompt plus max_tokens exceeds the context, RequestError for ids or counts
        that this model or engine does not have.
        """
        self._check(params)
        self._check_diffusion(len(prompt_ids), params)
        number_of_adapter = self._number_of(adapter)
        room = self.max_model_len - len(prompt_ids)
        wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise ContextLengthError(
                f"this model's context is {self.max_model_len} tokens; the prompt has {len(prompt_ids)} and "
                f"max_tokens asks for {wanted} more: shorten the prompt or lower max_tokens"
            )
        with self._lock:
            number = next(self._numbers)
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed % 2**64
        now = time.monotonic()
        stops = frozenset(params.stop_token_ids)
        return Request(
            request_id=request_id or f"request-{number}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            arrival_s=now,
            seed=seed,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_ids=stops if params.ignore_eos else stops | self._eos_ids,
            priority=priority,
            deadline_s=None if deadline_s is None else now + deadline_s,
            adapter=number_of_adapter,
            salt="" if adapter is None else f"adapter {adapter}",
        )

    def _number_of(self, adapter: str | None) -> int:
        if adapter is None:
            return 0
        if adapter not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"no adapter {adapter[:200]!r} is loaded; there is {known}", param="adapter")
        return self._adapters.index(adapter) + 1

    def _check(self, params: SamplingParams) -> None:
        if params.n > self._max_num_seqs:
            raise RequestError(f"n={params.n} exceeds the {self._max_num_seqs} sequences this engine runs", param="n")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model lacks", param="stop")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if ids and max(ids) >= self._vocab_size:
                raise RequestError(f"{name}: token ids must be below {self._vocab_size}, got {max(ids)}", param=name)

    def _check_diffusion(self, num_prompt: int, params: SamplingParams) -> None:
        room = self._whole_prompt_tokens
        if room is None:
            if params.diffusion is not None:
                raise RequestError(
                    "diffusion is for models that fill in masks; this one continues text", param="diffusion"
                )
            return
        if params.prompt_logprobs is not None:
            raise RequestError("a masked diffusion model has no prompt_logprobs", param="prompt_logprobs")
        block_length = (params.diffusion or DiffusionParams()).block_length
        for what, needed in (("prompt", num_prompt), ("pair of blocks", 2 * block_length)):
            if needed > room:
                raise RequestError(
                    f"this model sees a {what} as a whole: {needed} tokens, and a step has {room}; "
                    "raise max_num_batched_tokens",
                    param="prompt" if what == "prompt" else "diffusion",
                )


def default_params(generation: GenerationDefaults, **overrides: object) -> SamplingParams:
    """SamplingParams from generation_config.json; `overrides` that are not None win. Raises RequestError."""
    values: dict[str, object] = {
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "min_p": generation.min_p,
        "repetition_penalty": generation.repetition_penalty,
        "max_tokens": generation.max_new_tokens,
    }
    values.update({name: value for name, value in overrides.items() if value is not None})
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})  # pyright: ignore[reportArgumentType]
