"""Grammars: what an output may be -> which tokens may come next, by llguidance.

A request's StructuredOutputsParams are compiled to a Grammar, in the caller's thread. Each output has a GrammarState of
it, in the engine's thread: the scheduler tells it the tokens that were gained, and rows to sample ask it for masks.
llguidance is imported by the first request that needs it (0.3 s), and so is its form of the tokenizer (1.1 s for 150k
tokens). Must not import torch.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.core.errors import EngineError, RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.core.step import Mask
from ridgeline.text.json_schema import followed_schema
from ridgeline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 64 * 2**10
MAX_REGEX_CHARS = 4 * 2**10
MAX_CHOICES = 1000
MAX_CACHED = 256
MAX_MASKED = 32  # masks behind a wrong guess
FEW_SHARE = 1 / 64  # of all tokens
MAX_EXPECTED = 4  # masks that allow many, each of less work than a list and a mask, until few are no longer expected
_ALL = np.uint64(2**64 - 1)
WHITESPACE = r"( |\n[ \t]{0,32})"  # between the tokens of JSON; without a bound a model may pad until max_tokens
MAX_MESSAGE_CHARS = 300
ANY_TEXT = "(?s:.)+"  # tokens that are whole characters: a mask that allows them all need not look at each


class GrammarState:
    """Follows one output through its grammar. What it tells depends on the grammar and the tokens alone."""

    def __init__(self, grammar: "Grammar", *, guesses: bool = False) -> None:
        self._matcher: LLMatcher = grammar.matcher.deep_copy()
        self._few_behind = grammar.few_behind  # tokens behind which few are expected to be allowed: so many masks more
        self._last: int | None = None  # token
        self.guesses = guesses  # that the token of the largest logit is allowed, and looks at it when it is known
        self._num_missed = self._num_masked = 0  # guesses in a row that were wrong; masks to go until the next one
        self._error: Exception | None = None
        self._num_bytes = -(-grammar.vocab_size // 32) * 4
        self._eos_ids = grammar.eos_ids
        self.allowed: Mask = np.zeros(-(-grammar.vocab_size // 64), dtype=np.uint64)  # what `mask` returned last
        self._address = self.allowed.ctypes.data
        self._is_current = False
        self._looks = self.is_open = False  # at tokens, as `allowed` is not the mask; see `Checker`

    def prepare(self) -> None:
        """Write `allowed`: `mask`, or that all tokens are, where `allows` will look at the one that is sampled."""
        if not self.guesses:
            self.mask()
            return
        # Where it forces what comes, it allows one spelling alone, which a token by itself does not tell.
        expected = self._few_behind.get(self._last, 0)
        may_look = not (self._num_masked or self._is_current or expected)
        self._looks = may_look and not self._matcher.compute_ff_tokens()
        if not self._looks:
            self.mask()
            if expected and not self._allows_few:
                self._few_behind[self._last] = expected - 1
        elif not self.is_open:
            self.allowed.fill(_ALL)
            self.is_open = True

    def allows(self, token_id: int) -> bool:
        """Tell whether a token may follow, behind `prepare`; True where `allowed` is the mask."""
        if not self._looks:
            return True
        if is_allowed := self._matcher.validate_tokens([token_id]) > 0:
            self._num_missed = 0
        return is_allowed

    def first_allowed(self, likeliest: Iterable[int]) -> int | None:
        """Return the first of the tokens that may follow, behind `allows`; None where none may: see `Checker`."""
        try:
            for each in likeliest:
                if self._matcher.validate_tokens([each]):
                    self._num_missed = 0
                    return each
            self.mask()
        except Exception as error:  # for `accept` to raise: here, it would end the whole step
            self._error = error
            return 0
        if self._allows_few:  # as between the strings of JSON
            self._few_behind[self._last] = MAX_EXPECTED
            return None
        self._num_missed += 1
        self._num_masked = min((1 << self._num_missed) - 2, MAX_MASKED)  # a single one costs no mask
        return None

    @property
    def _allows_few(self) -> bool:
        return int(np.bitwise_count(self.allowed).sum()) <= FEW_SHARE * 64 * len(self.allowed)

    def mask(self) -> Mask:
        """Return `allowed`, written anew: which tokens may follow the known ones. Raises RequestError."""
        if not self._is_current:
            self.is_open = False
            self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
            self._require_sound()
            self._is_current = True
        return self.allowed

    def fitting(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the first of the tokens, up to where the grammar forbids one or the output would end."""
        end = next((i for i, token_id in enumerate(token_ids) if token_id in self._eos_ids), len(token_ids))
        return token_ids[: self._matcher.validate_tokens(list(token_ids[:end]))]

    def forced(self) -> Sequence[int]:
        """Return the next tokens as far as each alone is allowed."""
        return self._matcher.compute_ff_tokens()

    def masks(self, draft: Sequence[int]) -> list[Mask]:
        """Return what may follow the known tokens, and what each of `draft` behind them, all of which fit."""
        masks = [self.mask()]
        for count, token_id in enumerate(draft, 1):
            self._consume(token_id)
            mask = np.zeros_like(self.allowed)
            if self._matcher.is_stopped():  # nothing is sampled behind the end
                masks.extend(~mask for _ in range(len(draft) - count + 1))
                self._matcher.rollback(count)
                return masks
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._num_bytes)
            self._require_sound()
            masks.append(mask)
        self._matcher.rollback(len(draft))
        return masks

    def accept(self, token_id: int) -> bool:
        """Take in a token; return whether the output is complete with it. Raises RequestError as `mask`."""
        if self._error is not None:
            raise self._error
        self._consume(token_id)
        self._is_current, self._last = False, token_id
        if self._num_masked:
            self._num_masked -= 1
        if is_stopped := self._matcher.is_stopped():
            self._require_sound()  # one that gave up is stopped too
        return is_stopped

    def _consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self._require_sound()
            raise EngineError(f"the grammar does not allow token {token_id}")

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            why = _in_one_line(self._matcher.get_error())
            raise RequestError(f"the grammar gave up, make it simpler: {why}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; `start` gives every output a state of its own, all in one thread."""

    matcher: Any  # an LLMatcher: what reads the hints of a request need not import llguidance
    vocab_size: int
    eos_ids: frozenset[int]
    few_behind: dict[int | None, int] = field(default_factory=dict[int | None, int])  # the tokens that they share

    def start(self, *, guesses: bool = False) -> GrammarState:
        """Return the state of a new output; it `guesses` where each token is the one of the largest logit."""
        return GrammarState(self, guesses=guesses)


class GrammarCompiler:
    """Compiles for one model; from any thread. `vocab_size` is the width of its logits, `eos_ids` all that end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._own: LLTokenizer | None = None
        self._compiled = lru_cache(MAX_CACHED)(self._compile)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a request's grammar, known or new. Raises RequestError for one too large, wrong, or not supported."""
        name, text = grammar_text(params)
        try:
            return self._compiled(text)
        except RequestError as error:
            raise error if error.param else refused(name, str(error)) from error

    def _compile(self, text: str) -> Grammar:
        with self._lock:
            if self._own is None:
                self._own = open_tokenizer(self._tokenizer.to_json(), self._vocab_size, sorted(self._eos_ids))
        return compiled(self._own, text, self._vocab_size, self._eos_ids)


def open_tokenizer(tokenizer: str, vocab_size: int, eos_ids: list[int]) -> "LLTokenizer":
    """Return llguidance's form of a tokenizer.json's text. Raises RequestError for kinds that it does not know."""
    from llguidance import LLTokenizer

    try:
        slices = [*LLTokenizer.general_slices(), ANY_TEXT]
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids, slices=slices)
    except ValueError as error:
        message = f"structured output does not know this model's kind of tokenizer: {str(error)[:200]}"
        raise RequestError(message, param="structured_outputs") from error


def compiled(tokenizer: "LLTokenizer", text: str, vocab_size: int, eos_ids: frozenset[int]) -> Grammar:
    """Compile a grammar as `grammar_text` gives it. Raises RequestError, which says why."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)  # verbose ones quote what was generated
    grammar = Grammar(LLMatcher(tokenizer, text, log_level=0, limits=limits), vocab_size, eos_ids)
    if grammar.matcher.is_error():
        raise RequestError(_in_one_line(grammar.matcher.get_error()))
    grammar.start().mask()  # some grammars fail only here, or take their time
    return grammar


def grammar_text(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the name of what constrains, and the grammar in a form that llguidance reads. Raises RequestError."""
    name, text = _output_text(params)
    if params.preamble:
        (output,) = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        text = json.dumps({"grammars": [{"lark_grammar": params.preamble}, {**output, "name": "output"}]})
    return name, text


def _output_text(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the same, without what stands before."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if params.json is not None or params.json_object:
        pattern = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
        options: JsonCompileOptions = {
            "whitespace_pattern": "" if params.disable_any_whitespace else pattern,
            "lenient": False,
            "coerce_one_of": False,
        }
        try:
            schema = {"type": "object"} if params.json is None else followed_schema(params.json)
            return "json", LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except (RequestError, ValueError) as error:  # ValueError: of a text that is no Unicode
            raise refused("json", str(error)) from error
    if params.regex is not None:
        _require_size("regex", params.regex, MAX_REGEX_CHARS)
        return "regex", LLMatcher.grammar_from_regex(params.regex)
    if params.choice:
        if len(params.choice) > MAX_CHOICES:
            raise RequestError(f"at most {MAX_CHOICES} choices, got {len(params.choice)}", param="choice")
        _require_size("choice", "".join(params.choice), MAX_GRAMMAR_CHARS)
        literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return "choice", LLMatcher.grammar_from_lark(f"start: {literals}")
    assert params.grammar is not None
    _require_size("grammar", params.grammar, MAX_GRAMMAR_CHARS)
    try:
        return "grammar", LLMatcher.grammar_from_lark(any_to_lark(params.grammar))
    except Exception as error:  # the reader of GBNF raises nothing more special
        raise refused("grammar", str(error)) from error


def _require_size(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise refused(name, f"it has {len(text)} characters, and may have {limit}")


def refused(name: str, why: str) -> RequestError:
    code = "unsupported_schema" if name == "json" else "unsupported_grammar"
    return RequestError(f"{name} cannot be followed: {why[:MAX_MESSAGE_CHARS]}", param=name, code=code)


def _in_one_line(text: str) -> str:
    """Return the first line of an error, and the one that says what it is; never what was generated."""
    lines = [line.strip() for line in text.strip().splitlines()]
    said = [line for at, line in enumerate(lines) if at == 0 or line.startswith("error: ")]
    return " ".join(said) or "it cannot be satisfied"
