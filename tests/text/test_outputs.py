"""What a model writes, in every format of tool calls: the same pieces wherever the text is cut, and nothing raises."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import ConfigError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.detokenizer import IncrementalDetokenizer
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.outputs import OutputFormat, OutputReader
from ridgeline.text.reasoning import FORMATS, chosen_reasoning
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.forcing import forced_calls
from ridgeline.text.tools.formats import FORMATS as TOOL_FORMATS
from ridgeline.text.tools.formats import chosen_format

NAMES = {"f": {}, "g": {}}
THINK = chosen_reasoning("qwen3", "")
FORMS = {name: OutputFormat(form, NAMES, THINK) for name, form in TOOL_FORMATS.items()}
F = ("f", '{"a": "x}"}')
# format -> text, calls as (name, arguments), the other pieces as (kind, text)
TEXTS = {
    "hermes": [
        (
            '<think>\nhm\n</think>\n\nHi <tool_call>\n{"name": "f", "arguments": {"a": "x}"}}\n</tool_call>\n'
            "<tool_call>"
            '\n{"arguments": {}, "name": "g"}\n</tool_call>\n',
            [F, ("g", "{}")],
            [("reasoning", "hm"), ("content", "Hi")],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\\\\\"}"}}</tool_call>', [("f", '{"a": "\\\\\\"}"}')], []),
        ("<tool_call>oops</tool_call> x", [], [("content", "<tool_call>oops</tool_call> x")]),
        ('<tool_call>{"name": "f"}', [("f", "{}")], []),
        ('<tool_call>{"name": "f", "arguments": {"a"', [("f", '{"a"')], []),
        ("a < b <tool", [], [("content", "a < b <tool")]),
        ('<think>so <tool_call>{"name": "g"}</tool_call>', [("g", "{}")], [("reasoning", "so")]),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": "x}"}}; {"name":"g","parameters":{}}', [F, ("g", "{}")], []),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "x}"}}', [F], []),
        ('{"name": "other", "parameters": {}} x', [], [("content", '{"name": "other", "parameters": {}} x')]),
        ('{"x": 1}', [], [("content", '{"x": 1}')]),
    ],
    "generic": [('{"name": "f", "arguments": {"a": "x}"}}', [F], [])],
    "mistral": [
        (
            'Hi[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x}"}}, {"name":"g","arguments":{}}]',
            [F, ("g", "{}")],
            [("content", "Hi")],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": "x}"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', [F, ("g", "{}")], []),
        ("[TOOL_CALLS]f{}", [("f", "{}")], []),
        ("[TOOL_CALLS]f", [], [("content", "[TOOL_CALLS]f")]),
    ],
    "granite": [('<|tool_call|>[{"name": "f", "arguments": {"a": "x}"}}]', [F], [])],
    "deepseek_v3": [
        (
            'Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "x}"}\n```'
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [F, ("g", "{}")],
            [("content", "Hi")],
        )
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": "x}"}',
            [F],
            [("reasoning", "hm")],
        ),
        ("<|channel|>final<|message|>Hi<|return|>", [], [("content", "Hi")]),
        ("Hi", [], [("content", "Hi")]),
    ],
}
MARKERS = sorted({marker for form in FORMS.values() for marker in form.markers if marker})
SCRAPS = st.sampled_from(
    [*MARKERS, '{"name": "f", "arguments": {}}', "[", "]", "{", "}", '"', "\\", " \n", "f(", "a=1)", "x"]
)


def pieces(form: OutputFormat, parts: list[str]) -> list[tuple[str, str, int]]:
    """The pieces of an output that comes in parts, neighbours joined; every call begins once, in order."""
    reader = OutputReader(form)
    found: list[list] = []
    for piece in [*(piece for part in parts for piece in reader.feed(part, last=False)), *reader.feed("", last=True)]:
        if found and piece.kind != "call" and found[-1][0::2] == [piece.kind, piece.call]:
            found[-1][1] += piece.text
        else:
            found.append([piece.kind, piece.text, piece.call])
    calls = [number for kind, _, number in found if kind == "call"]
    assert calls == list(range(reader.num_calls))
    return [(kind, text, number) for kind, text, number in found]


def test_every_format_has_texts():
    assert set(TEXTS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_read(name: str):
    for text, calls, others in TEXTS[name]:
        found = pieces(FORMS[name], [text])
        names = [text for kind, text, _ in found if kind == "call"]
        arguments = {number: text for kind, text, number in found if kind == "arguments"}
        assert [(name, arguments[number]) for number, name in enumerate(names)] == calls, text
        assert [(kind, text) for kind, text, _ in found if kind in ("content", "reasoning")] == others, text


@pytest.mark.parametrize("name", TEXTS)
def test_cut_at_every_character_it_is_the_same(name: str):
    for text, _, _ in TEXTS[name]:
        whole = pieces(FORMS[name], [text])
        assert pieces(FORMS[name], list(text)) == whole
        for cut in range(len(text)):
            assert pieces(FORMS[name], [text[:cut], text[cut:]]) == whole, text[:cut]


@pytest.mark.parametrize("name", TEXTS)
@given(st.lists(SCRAPS, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_any_text_cut_anywhere_is_the_same_and_nothing_raises(name: str, scraps: list[str], data: st.DataObject):
    text = "".join(scraps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert pieces(FORMS[name], parts) == pieces(FORMS[name], [text])


def test_text_without_markers_is_content_as_it_is():
    text = " a\n <b> { [ ]\n\n"
    for form in (OutputFormat(), FORMS["hermes"], FORMS["mistral"], OutputFormat(reasoning=THINK)):
        assert pieces(form, [text]) == [("content", text, 0)]


def test_reasoning_that_the_prompt_opened():
    form = OutputFormat(reasoning=THINK, is_open=True)
    assert pieces(form, ["so\n</think>\n\nHi <think>again</think> x"]) == [
        ("reasoning", "so", 0),
        ("content", "Hi", 0),
        ("reasoning", "again", 0),
        ("content", "x", 0),
    ]
    assert pieces(form, ["never ends"]) == [("reasoning", "never ends", 0)]


@pytest.mark.parametrize(
    "text", ["<" * 100_000, " " * 100_000, "<tool_call>" * 10_000, "[" * 100_000, '{"a":' * 20_000]
)
def test_a_long_hostile_text_takes_linear_time(text: str):
    """A quadratic reader takes minutes here, so the bound is loose."""
    before_s = time.process_time()
    for form in FORMS.values():
        pieces(form, [text])
    assert time.process_time() - before_s < 60


def test_formats_are_chosen_by_the_template_or_the_name():
    assert chosen_format("auto", "<tool_call>") is FORMS["hermes"].calls
    assert chosen_format("auto", "nothing") is FORMS["generic"].calls
    assert chosen_format("granite4", "") is FORMS["hermes"].calls
    assert chosen_format("none", "<tool_call>") is None
    assert chosen_reasoning("auto", "x </think>") is THINK and chosen_reasoning("auto", "x") is None
    for choose in (chosen_format, chosen_reasoning):
        with pytest.raises(ConfigError, match="choose one of auto, none, "):
            choose("nope", "")
    names = [name for form in FORMATS for name in form.names]
    assert len(names) == len(set(names))


class NoMarkers:
    """A tokenizer in which no marker is a token."""

    def token_id(self, token: str) -> None:
        return None


@pytest.mark.parametrize("name", TEXTS)
def test_forced_calls_are_read_back(name: str):
    from llguidance import LLMatcher, LLTokenizer

    form = TOOL_FORMATS[name]
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    one_key = {"type": "object", "properties": {"a": {"const": "x}"}}, "required": ["a"], "additionalProperties": False}
    tokenizer = LLTokenizer("byte")
    for parallel in (False, True):
        grammar = forced_calls(form, {"f": (one_key, True), "g": (empty, False)}, NoMarkers(), parallel=parallel)
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        calls = [form.call.replace("$NAME", name).replace("$ARGS", arguments) for name, arguments in (F, ("g", "{}"))]
        several = parallel and form.separator is not None
        for text, fits in (
            (form.opening + calls[0] + form.closing, True),
            (form.opening + (form.separator or "").join(calls) + form.closing, several),
            ("Hi", False),
        ):
            follower = matcher.deep_copy()
            ids = list(text.encode())
            assert (follower.try_consume_tokens(ids) == len(ids) and follower.is_accepting()) == fits, text
            if fits:
                found = [(kind, text) for kind, text, _ in pieces(FORMS[name], [text])]
                assert found[:2] == [("call", "f"), ("arguments", F[1])]
                assert all(json.loads(text) is not None for kind, text in found if kind == "arguments")


@pytest.fixture
def marked(shared_data: Path, tmp_path: Path) -> Tokenizer:
    """A tokenizer in which the marks of hermes are special tokens, which texts leave out."""
    marks = {"512": {"content": "<tool_call>", "special": True}, "513": {"content": "</tool_call>", "special": True}}
    shutil.copyfile(shared_data / "models/stories260K/tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": marks}))
    return Tokenizer.from_folder(tmp_path)


def test_marks_that_are_special_tokens_stay_in_the_text(marked: Tokenizer):
    ids = [512, *marked.encode('{"name": "f"}', add_special_tokens=False), 513]
    shown = IncrementalDetokenizer(marked, [1], shown_ids=frozenset({512, 513})).feed(ids)
    assert shown.startswith("<tool_call>") and shown.endswith("</tool_call>")
    assert "tool_call" not in IncrementalDetokenizer(marked, [1]).feed(ids)
    assert pieces(FORMS["hermes"], [shown]) == [("call", "f", 0), ("arguments", "{}", 0)]


def test_a_mark_that_is_a_token_is_forced_as_that_token(marked: Tokenizer):
    grammar = forced_calls(TOOL_FORMATS["hermes"], {"f": ({"type": "object"}, True)}, marked, parallel=False)
    state = GrammarCompiler(marked, 514, frozenset({2})).compile(StructuredOutputsParams(grammar=grammar)).start()

    def allowed() -> set[int]:
        return {
            token_id
            for token_id in range(514)
            if state.mask()[token_id // 64] >> np.uint64(token_id % 64) & np.uint64(1)
        }

    assert allowed() == {512}
    assert not state.accept(512) and 512 not in allowed() and 513 not in allowed()
