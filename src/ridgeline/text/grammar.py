"""Grammars: what an output may be -> which tokens may come next, by llguidance.

The intake compiles a request's StructuredOutputsParams, in its own thread, to a Grammar. Each output has a GrammarState
of it, in the engine's thread: the scheduler tells it the tokens that were gained, and rows to sample ask it for masks.
llguidance is imported by the first request that needs it (0.3 s), and so is its form of the tokenizer (1.1 s for 150k
tokens). Must not import torch.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ridgeline.core.errors import EngineError, RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.core.step import Mask
from ridgeline.text.grammar_trial import GrammarTrial
from ridgeline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 64 * 2**10
MAX_REGEX_CHARS = 4 * 2**10
MAX_CHOICES = 1000
MAX_SCHEMA_DEPTH = 64
MAX_PROPERTIES = 2000  # the time to compile grows with their square: 0.5 s here
MAX_CACHED = 256
WHITESPACE = r"( |\n[ \t]{0,32})"  # between the tokens of JSON; without a bound a model may pad until max_tokens
MAX_MESSAGE_CHARS = 300


class GrammarState:
    """Follows one output through its grammar. What it tells depends on the grammar and the tokens alone."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._num_bytes = -(-vocab_size // 32) * 4
        self._num_words = -(-vocab_size // 64)
        self._eos_ids = eos_ids
        self._mask: Mask = np.zeros(self._num_words, dtype=np.uint64)
        self._address = self._mask.ctypes.data
        self._is_current = False

    @property
    def is_sound(self) -> bool:
        """Tell whether `mask` raises nothing."""
        try:
            self.mask()
        except RequestError:
            return False
        return True

    def mask(self) -> Mask:
        """Return which tokens may follow the known ones; good until the next `accept`. Raises RequestError."""
        if not self._is_current:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
            self._require_sound()
            self._is_current = True
        return self._mask

    def fitting(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the first of the tokens, up to where the grammar forbids one or the output would end."""
        end = next((i for i, token_id in enumerate(token_ids) if token_id in self._eos_ids), len(token_ids))
        return token_ids[: self._matcher.validate_tokens(list(token_ids[:end]))]

    def masks(self, draft: Sequence[int]) -> list[Mask]:
        """Return what may follow the known tokens, and what each of `draft` behind them, all of which fit."""
        masks = [self.mask()]
        for count, token_id in enumerate(draft, 1):
            self._consume(token_id)
            mask: Mask = np.zeros(self._num_words, dtype=np.uint64)
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
        self._consume(token_id)
        self._is_current = False
        return self._matcher.is_stopped()

    def _consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self._require_sound()
            raise EngineError(f"the grammar does not allow token {token_id}")

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            why = _in_one_line(self._matcher.get_error())
            raise RequestError(f"the grammar gave up, make it simpler: {why}", param="structured_outputs")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; `start` gives every output a state of its own, all in one thread."""

    matcher: Any  # an LLMatcher: what reads the hints of a request need not import llguidance
    vocab_size: int
    eos_ids: frozenset[int]

    def start(self) -> GrammarState:
        return GrammarState(self.matcher.deep_copy(), self.vocab_size, self.eos_ids)


class GrammarCompiler:
    """Compiles for one model; from any thread. `vocab_size` is the width of its logits, `eos_ids` all that end.

    Requests that are not trusted have `timeout_s` for a grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int], timeout_s: float | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._own: LLTokenizer | None = None
        self._timeout_s = timeout_s
        self._trial: GrammarTrial | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a request's grammar, known or new. Raises RequestError for one too large, wrong, or not supported."""
        name, text = _grammar_text(params)
        if params.preamble:
            (output,) = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
            text = json.dumps({"grammars": [{"lark_grammar": params.preamble}, {**output, "name": "output"}]})
        with self._lock:
            if (known := self._compiled.get(text)) is not None:
                self._compiled.move_to_end(text)
                return known
            if self._own is None:
                self._own = self._open_tokenizer()
            if self._trial is None and self._timeout_s is not None:
                opened = self._tokenizer.to_json(), self._vocab_size, sorted(self._eos_ids)
                self._trial = GrammarTrial(self._timeout_s, *opened)
        # not under the lock: a schema that takes long delays no other request
        if self._trial is not None:
            try:
                self._trial.require(text)
            except RequestError as error:
                raise _refused(name, str(error)) from None
        grammar = Grammar(self._matcher(name, text, self._own), self._vocab_size, self._eos_ids)
        with self._lock:
            self._compiled[text] = grammar
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def _matcher(self, name: str, text: str, tokenizer: "LLTokenizer") -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)  # verbose ones quote what was generated
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            state = GrammarState(matcher.deep_copy(), self._vocab_size, self._eos_ids)
            try:
                state.mask()  # some grammars fail only here
            except RequestError as error:
                raise _refused(name, str(error)) from error
            return matcher
        raise _refused(name, _in_one_line(matcher.get_error()))

    def _open_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids))
        except ValueError as error:
            message = f"structured output does not know this model's kind of tokenizer: {str(error)[:200]}"
            raise RequestError(message, param="structured_outputs") from error


def _grammar_text(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the name of what constrains, and its grammar in a form that llguidance reads. Raises RequestError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if params.json is not None or params.json_object:
        options: JsonCompileOptions = {
            "whitespace_pattern": params.whitespace_pattern or WHITESPACE,
            "whitespace_flexible": not params.disable_any_whitespace,
            "lenient": False,
            "coerce_one_of": False,
        }
        schema = {"type": "object"} if params.json is None else checked_schema(params.json)
        try:
            return "json", LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:  # of a text that is no Unicode
            raise _refused("json", str(error)) from error
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
        raise _refused("grammar", str(error)) from error


def checked_schema(given: str | Mapping[str, Any] | bool) -> Any:
    """Return a JSON schema whose size can be compiled, as an object. Raises RequestError."""
    if isinstance(given, str):
        _require_size("json", given, MAX_GRAMMAR_CHARS)
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json: the schema is not valid JSON: {str(error)[:200]}", param="json") from error
    else:
        schema = given
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError("json: a schema is a JSON object, as {'type': 'object'}", param="json")
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise _refused("json", "the keyword x-guidance is not taken")
    num_properties = _measure(schema, 0)
    if num_properties > MAX_PROPERTIES:
        raise _refused("json", f"the schema has {num_properties} properties, and may have {MAX_PROPERTIES}")
    if not isinstance(given, str):
        _require_size("json", json.dumps(schema), MAX_GRAMMAR_CHARS)
    return schema if isinstance(schema, Mapping) else {} if schema else {"anyOf": []}


def _measure(value: object, depth: int) -> int:
    """Return how many properties are declared at any depth. Raises RequestError where it is nested too deeply."""
    if depth > 2 * MAX_SCHEMA_DEPTH:  # an object in an object takes two levels
        raise _refused("json", f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value)
        declared = items.get("properties")
        own = len(cast("Mapping[str, object]", declared)) if isinstance(declared, Mapping) else 0
        return own + sum(_measure(item, depth + 1) for item in items.values())
    if isinstance(value, (list, tuple)):
        return sum(_measure(item, depth + 1) for item in cast("Sequence[object]", value))
    return 0


def _require_size(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise _refused(name, f"it has {len(text)} characters, and may have {limit}")


def _refused(name: str, why: str) -> RequestError:
    code = "unsupported_schema" if name == "json" else "unsupported_grammar"
    return RequestError(f"{name} cannot be followed: {why[:MAX_MESSAGE_CHARS]}", param=name, code=code)


def _in_one_line(text: str) -> str:
    """Return the first line of an error, and the one that says what it is; never what was generated."""
    lines = [line.strip() for line in text.strip().splitlines()]
    said = [line for at, line in enumerate(lines) if at == 0 or line.startswith("error: ")]
    return " ".join(said) or "it cannot be satisfied"
