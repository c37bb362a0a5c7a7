"""SamplingParams: how the tokens of one request are decided.

Built by every front end, read by the scheduler and the sampler.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.core.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BLOCK_LENGTH = 1024
GREEDY_TEMPERATURE = 1e-5  # at or below this, argmax: dividing by less overflows fp32 logits


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value!r}", param=name)


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionParams:
    """How a masked diffusion model fills in its blocks.

    A block of `block_length` tokens takes at most `steps` steps (None: one for each token). After a step the tokens of
    highest probability stay, or with `remasking="random"` any, as many as the steps that are left need; with a
    `threshold`, all whose probability reaches it. Raises RequestError, naming the field, for a value out of range.
    """

    block_length: int = 32
    steps: int | None = None
    remasking: Literal["confidence", "random"] = "confidence"
    threshold: float | None = None

    def __post_init__(self) -> None:
        _whole("block_length", self.block_length, 1, MAX_BLOCK_LENGTH)
        if self.steps is not None:
            _whole("steps", self.steps, 1, self.block_length)
        if self.remasking not in ("confidence", "random"):
            raise RequestError(f"remasking must be confidence or random, got {self.remasking!r}", param="remasking")
        if self.threshold is not None:
            _in_range("threshold", self.threshold, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; names and defaults as in vLLM.

    Raises RequestError, naming the field, for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely ones'
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    diffusion: DiffusionParams | None = None  # None: the defaults; only for masked diffusion models

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _whole("n", self.n, 1, MAX_N)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0; use temperature=0 for greedy decoding", param="top_p")
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens if self.max_tokens is not None else 2**31 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _whole(name, count, 0, MAX_LOGPROBS)
        self._check_stops(stop)
        self._check_bias()

    def _check_stops(self, stop: tuple[str, ...]) -> None:
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stop)}", param="stop")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids", param="stop_token_ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"at most {MAX_LOGIT_BIAS} logit_bias entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, 2**31 - 1)
            _in_range("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else (str(self.stop),)

    @property
    def needs_history(self) -> bool:
        """True when deciding a token takes the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
