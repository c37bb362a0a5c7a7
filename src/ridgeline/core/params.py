"""SamplingParams: how a request's tokens are decided. Built by front ends, read by the scheduler and the sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from ridgeline.core.errors import RequestError
from ridgeline.core.options import check, option

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BIAS = 100.0
MAX_BLOCK_LENGTH = 1024
MAX_DRAFT_TOKENS = 64
MAX_INT = 2**31 - 1
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what a model's files may set instead
GREEDY_TEMPERATURE = 1e-5  # at or below this, argmax: dividing by less overflows fp32 logits


def _check(params: object) -> None:
    """Raise RequestError, naming the parameter, for a value that its declaration does not allow."""
    shown = DiffusionParams.PREFIX  # is the command line's alone
    check(params, lambda name, message: RequestError(message.removeprefix(shown), param=name.removeprefix(shown)))


def _check_token_id(name: str, token_id: int) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{name}: a token id must be an integer, got {token_id!r}", param=name)
    if not 0 <= token_id <= MAX_INT:
        raise RequestError(f"{name}: a token id must be between 0 and {MAX_INT}, got {token_id}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionParams:
    """How a masked diffusion model fills in its blocks. Raises RequestError for a value out of range.

    After a step the tokens of highest probability stay, or with `remasking="random"` any, as many as the steps that are
    left need; with a `threshold`, all whose probability reaches it.
    """

    PANEL: ClassVar[str] = "Sampling of masked diffusion models"
    PREFIX: ClassVar[str] = "diffusion_"

    block_length: int = option(32, "Number of tokens in a block.", low=1, high=MAX_BLOCK_LENGTH)
    steps: int | None = option(None, "Maximum number of steps per block. Default: one per token.", low=1)
    remasking: Literal["confidence", "random"] = option("confidence", "Keep a step's best tokens, or random ones.")
    threshold: float | None = option(None, "Keep all tokens whose probability reaches this.", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        _check(self)
        most = self.block_length
        if self.steps is not None and self.steps > most:
            raise RequestError(f"steps must be at most block_length ({most}), got {self.steps}", param="steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How one request is drafted for, within what the engine does. Raises RequestError for a value out of range."""

    enabled: bool = True
    num_speculative_tokens: int | None = None  # None: as many as the engine drafts
    pool: bool = True  # whether drafts may come from earlier outputs, and this output becomes one of them

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count is not None and not 0 <= count <= MAX_DRAFT_TOKENS:
            problem = f"num_speculative_tokens must be between 0 and {MAX_DRAFT_TOKENS}, got {count}"
            raise RequestError(f"speculation: {problem}", param="speculation")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Say what an output must be: one of `json` (a schema), `json_object`, `regex`, `choice` and `grammar`.

    The names are vLLM's. Raises RequestError for none or several of them.
    """

    PANEL: ClassVar[str] = "Structured output"

    json: str | Mapping[str, Any] | bool | None = option(
        None, "JSON schema that the output follows.", flag="--json-schema", aka="guided_json"
    )
    json_object: bool = option(False, "The output is a JSON object of any kind.")
    regex: str | None = option(
        None, "Regular expression, without look-around, that the whole output matches.", aka="guided_regex"
    )
    choice: Sequence[str] = option((), "The output is one of these texts; may be given several times.")
    grammar: str | None = option(None, "The output's grammar: GBNF or Lark with a rule `start`.", aka="guided_grammar")
    disable_any_whitespace: bool = option(False, "No white space between the tokens of JSON.")
    whitespace_pattern: str | None = option(None, "Regular expression of the white space between tokens of JSON.")
    preamble: str = ""  # the grammar of what stands before, in Lark, with @output for what is asked for

    KINDS: ClassVar[tuple[str, ...]] = ("json", "json_object", "regex", "choice", "grammar")

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "choice", () if isinstance(self.choice, str) else tuple(self.choice))
        if len(kinds := self.kinds) != 1:
            got = " and ".join(kinds) or "none"
            problem = f"takes exactly one of {', '.join(self.KINDS)}; got {got}"
            raise RequestError(f"structured_outputs {problem}", param="structured_outputs")
        if not all(isinstance(text, str) and text for text in self.choice):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("choice: each must be a text that is not empty", param="choice")

    @property
    def kinds(self) -> list[str]:
        """Return which of KINDS are given."""
        given = [name for name in self.KINDS if getattr(self, name) not in (None, False, ())]
        return ["json", *given] if self.json is False else given


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; names and defaults as in vLLM.

    Each parameter is declared here and nowhere else: the commands read this table, and the HTTP fields are checked
    against it. Raises RequestError, naming the field, for a value out of range.
    """

    PANEL: ClassVar[str] = "Sampling"

    max_tokens: int | None = option(
        16, "Maximum tokens to generate.", low=1, high=MAX_INT, short="-n", aka="predict n_predict max_new_tokens"
    )
    temperature: float = option(
        1.0, "Sharpen (below 1) or flatten the distribution; 0 is greedy decoding.", low=0.0, high=100.0, aka="temp"
    )
    top_p: float = option(1.0, "Sample among the most likely tokens that sum to this.", above=0.0, high=1.0)
    top_k: int = option(0, "Sample among this many most likely tokens; 0 or -1 is off.", low=-1, high=MAX_INT)
    min_p: float = option(0.0, "Drop tokens below this fraction of the most likely one's.", low=0.0, high=1.0)
    repetition_penalty: float = option(
        1.0, "Above 1, make tokens of prompt and output less likely.", low=0.01, high=100.0, aka="repeat_penalty"
    )
    presence_penalty: float = option(0.0, "Lower the logits of tokens in the output by this.", low=-2.0, high=2.0)
    frequency_penalty: float = option(0.0, "Lower them by this for each occurrence.", low=-2.0, high=2.0)
    logit_bias: Mapping[int, float] = option(
        factory=dict[int, float],
        help=f"Add {-MAX_BIAS:g} to {MAX_BIAS:g} to the logit of a token id; may be given several times.",
        metavar="ID=BIAS",
    )
    allowed_token_ids: Sequence[int] = option((), "Sample these token ids alone; may be given several times.")
    bad_words: Sequence[str] = option((), "Never write this text as its own tokens; may be given several times.")
    seed: int | None = option(None, "Seed of sampling, to repeat an output.", low=-(2**63), high=2**64 - 1)
    n: int = option(1, "Number of outputs to generate from the prompt.", low=1, high=MAX_N)
    stop: str | Sequence[str] = option((), "End the output before this text; may be given several times.")
    stop_token_ids: Sequence[int] = option((), "End the output at this token id; may be given several times.")
    min_tokens: int = option(0, "Do not end the output before this many tokens.", low=0, high=MAX_INT)
    ignore_eos: bool = option(False, "Go on after the end-of-sequence token.")
    include_stop_str_in_output: bool = option(False, "Show the stop text that ended the output.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    logprobs: int | None = option(
        None, "Return log-probabilities of the chosen token and this many likely ones.", low=0, high=MAX_LOGPROBS
    )
    prompt_logprobs: int | None = option(None, "Return the same for the prompt's tokens.", low=0, high=MAX_LOGPROBS)
    diffusion: DiffusionParams | None = None  # None: the defaults; only for masked diffusion models
    speculation: SpeculationParams | None = None  # None: what the engine does
    structured_outputs: StructuredOutputsParams | None = None  # None: any text
    bad_word_ids: Sequence[Sequence[int]] = ()  # the tokens of `bad_words`, in each way that they are written

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "bad_word_ids", tuple(map(tuple, self.bad_word_ids)))
        _check(self)
        least, most = self.min_tokens, self.max_tokens
        if most is not None and least > most:
            raise RequestError(f"min_tokens must be at most max_tokens ({most}), got {least}", param="min_tokens")
        self._check_stops(stop)
        self._check_bias()

    def _check_stops(self, stop: tuple[str, ...]) -> None:
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stop)}", param="stop")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        for name, most in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", MAX_ALLOWED_IDS)):
            if len(getattr(self, name)) > most:
                raise RequestError(f"at most {most} {name}", param=name)
            for token_id in getattr(self, name):
                _check_token_id(name, token_id)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"at most {MAX_BAD_WORDS} bad_words, got {len(self.bad_words)}", param="bad_words")
        for text in self.bad_words:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"a bad word must have 1 to {MAX_STOP_CHARS} characters", param="bad_words")

    def _check_bias(self) -> None:
        if (count := len(self.logit_bias)) > MAX_LOGIT_BIAS:
            raise RequestError(f"at most {MAX_LOGIT_BIAS} logit_bias entries, got {count}", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id)
            if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not abs(bias) <= MAX_BIAS:  # pyright: ignore[reportUnnecessaryIsInstance]
                between = f"between {-MAX_BIAS:g} and {MAX_BIAS:g}"
                raise RequestError(f"logit_bias must be {between}, got {bias!r}", param="logit_bias")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else (str(self.stop),)

    @property
    def takes_largest(self) -> bool:
        """True when each token is the one of the largest logit, of those that may follow."""
        return self.greedy and not (self.logit_bias or self.allowed_token_ids or self.needs_history or self.min_tokens)

    @property
    def needs_history(self) -> bool:
        """True when deciding a token takes the tokens before it."""
        penalized = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalized or bool(self.bad_words)


PoolingKind = Literal["last", "mean", "first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Pooling makes one vector of a text's tokens' outputs: the last, first or mean. Raises RequestError for others."""

    pooling: PoolingKind
    normalize: bool = True  # divided by its length

    def __post_init__(self) -> None:
        if self.pooling not in get_args(PoolingKind):
            known = ", ".join(get_args(PoolingKind))
            raise RequestError(f"pooling must be one of {known}, got {self.pooling!r}", param="pooling")
