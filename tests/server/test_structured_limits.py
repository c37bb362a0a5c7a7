"""Grammars that take for ever, reasoning before a constrained output, and strict tools among text."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from live_server import PATIENCE_S, LiveServer, eventually, new_engine, serving, with_template

from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.server.service import MAX_TRIALS
from ridgeline.text.grammar import Grammar, GrammarCompiler
from ridgeline.text.grammar_trial import GrammarTrial
from ridgeline.text.outputs import OutputFormat, OutputReader
from ridgeline.text.reasoning import FORMATS as REASONING
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tools.forcing import calls_among_text, reasoning_before
from ridgeline.text.tools.formats import FORMATS
from ridgeline.weights.folder import ModelFolder

MESSAGES = [{"role": "user", "content": "Hm?"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a.{{{length}}}b"} for length in range(5, 40)]}
SLOW = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19)]}


@pytest.mark.parametrize("schema", [ENDLESS, SLOW])
def test_a_schema_that_takes_for_ever_is_refused_and_others_are_served(chat_model: Path, schema: dict) -> None:
    with serving(new_engine(chat_model), grammar_timeout_s=0.5) as server:
        good = {"messages": MESSAGES, "max_tokens": 40, "guided_regex": "[0-9]{3}"}
        for _ in range(2):
            response = server.post("chat/completions", messages=MESSAGES, guided_json=schema)
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == "guided_json", error
            assert error["code"] == "unsupported_schema" and "takes more than 0.5 s" in error["message"]
            assert server.post("chat/completions", **good).json()["choices"][0]["message"]["content"].isdecimal()
        server.assert_idle()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = ModelFolder.open("python-1m").tokenizer()
    assert found is not None
    return found


def follows(tokenizer: Tokenizer, params: StructuredOutputsParams, text: str) -> bool:
    """Tell whether a whole output may be this text."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({0}))
    matcher = compiler.compile(params).matcher.deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", REASONING, ids=lambda form: form.names[0])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"json": SCHEMA}, '{"n": 5}'),
        ({"regex": "[0-9]+"}, "12"),
        ({"choice": ("yes", "no")}, "yes"),
        ({"grammar": 'start: "x"+'}, "xx"),
        ({"grammar": 'root ::= "x"+'}, "xx"),
    ],
    ids=["json", "regex", "choice", "lark", "gbnf"],
)
def test_a_grammar_binds_behind_the_reasoning(
    tokenizer: Tokenizer, form, is_open: bool, asked: dict, text: str
) -> None:
    preamble = reasoning_before(form, None, tokenizer, is_open=is_open)
    params = StructuredOutputsParams(**asked, preamble=preamble)
    begin = "" if is_open else form.begin
    assert follows(tokenizer, params, f"{begin}hm, {text}?\n{form.end}\n\n{text}")
    assert not follows(tokenizer, params, f"{begin}hm{form.end}?")
    assert follows(tokenizer, params, text) != is_open, "what the prompt has not begun may be left out"


CALL = '{"name": "first", "arguments": {"n": 3}}'
DEEPSEEK = '<｜tool▁call▁begin｜>first<｜tool▁sep｜>{"n": 3}<｜tool▁call▁end｜>'
PARAMETERS = CALL.replace("arguments", "parameters")
AMONG_TEXT = {
    "hermes": (
        f"Hm <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call> end",
        ["<tool_call> no", "a<tool_call>"],
    ),
    "granite": (f"Hm <|tool_call|>[{CALL}, {CALL}] end", ["<|tool_call|>no", f"<tool_call>{CALL}"]),
    "mistral": (f"Hm [TOOL_CALLS][{CALL}]", ["[TOOL_CALLS]no"]),
    "llama3_json": (f"<|python_tag|>{PARAMETERS}", ['{"a": 1}', "a <|python_tag|>"]),
    "generic": (f"{PARAMETERS}; {PARAMETERS}", ['{"a": 1}', "  [1]"]),
    "deepseek_v3": (
        f"a <｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>",
        ["<｜tool▁calls▁begin｜>no", "<｜tool▁call▁begin｜>first"],
    ),
}


@pytest.mark.parametrize("name", AMONG_TEXT)
def test_calls_among_text_are_strict_from_their_marker_on(tokenizer: Tokenizer, name: str) -> None:
    grammar = calls_among_text(FORMATS[name], {"first": (SCHEMA, True)}, tokenizer, parallel=True)
    params = StructuredOutputsParams(grammar=grammar)
    good, bad = AMONG_TEXT[name]
    for text in (good, "no call at all", ""):
        assert follows(tokenizer, params, text), text
    for text in (*bad, good.replace(": 3", ': "3"'), good.replace("first", "other")):
        assert not follows(tokenizer, params, text), text


def test_behind_its_reasoning_an_output_is_content_whatever_stands_in_it() -> None:
    think = REASONING[-1]
    for is_open in (True, False):
        form = OutputFormat(reasoning=think, is_open=is_open, leads=True)
        begin = "" if is_open else "<think>"
        for text, thought in ((f"{begin}hm</think>\n", "hm"), ("", "")):
            if is_open and not text:
                continue
            reader = OutputReader(form)
            pieces = [piece for char in f'{text}{{"a": "<think>b"}}' for piece in reader.feed(char, last=False)]
            pieces += reader.feed("", last=True)
            assert "".join(piece.text for piece in pieces if piece.kind == "content") == '{"a": "<think>b"}'
            assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == thought


TEMPLATE = (
    "{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}{% if think %}<think>{% else %}</think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = with_template(chat_model, tmp_path_factory.mktemp("models") / "thinker", TEMPLATE)
    with serving(new_engine(folder)) as server:
        yield server
        server.assert_idle()


def test_a_server_lets_the_model_reason_first(thinker: LiveServer) -> None:
    """This one never ends its reasoning by itself, so a bias does."""
    tokenizer = thinker.engine.tokenizer
    for think, kind in ((True, "reasoning_content"), (False, "content")):
        body = {"messages": MESSAGES, "chat_template_kwargs": {"think": think}, "max_tokens": 30, "seed": 3}
        message = thinker.post("chat/completions", **body, guided_json=SCHEMA).json()["choices"][0]["message"]
        assert message[kind] and not message.get("content" if think else "reasoning_content"), message
        assert think or message["content"].lstrip().startswith("{")
    bias = dict.fromkeys(tokenizer.encode("</think>", add_special_tokens=False), 50)
    body = {"messages": MESSAGES, "chat_template_kwargs": {"think": True}, "max_tokens": 200, "seed": 3}
    message = thinker.post("chat/completions", **body, guided_regex="[0-9]{3}", logit_bias=bias).json()
    (choice,) = message["choices"]
    if choice["finish_reason"] == "stop":
        assert choice["message"]["content"].isdecimal()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputsParams]:
    """Takes in what is compiled."""
    found: list[StructuredOutputsParams] = []
    compiles = GrammarCompiler.compile

    def noted(compiler: GrammarCompiler, params: StructuredOutputsParams):
        found.append(params)
        return compiles(compiler, params)

    monkeypatch.setattr(GrammarCompiler, "compile", noted)
    return found


def test_strict_tools_make_a_grammar_and_others_do_not(
    thinker: LiveServer, compiled: list[StructuredOutputsParams]
) -> None:
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "first", "parameters": SCHEMA, "strict": strict}}
        response = thinker.post("chat/completions", messages=MESSAGES, tools=[tool], max_tokens=5)
        assert response.status_code == 200 and bool(compiled) == strict
    unsupported = {**SCHEMA, "uniqueItems": True, "type": "array"}
    tool = {"type": "function", "function": {"name": "first", "parameters": unsupported, "strict": True}}
    refused = thinker.post("chat/completions", messages=MESSAGES, tools=[tool], max_tokens=5)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools", refused.text


def test_tools_that_are_not_allowed_cannot_be_called(
    thinker: LiveServer, tokenizer: Tokenizer, compiled: list[StructuredOutputsParams]
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("first", "other")]
    call = f"Hm <tool_call>\n{CALL}\n</tool_call>"
    for chosen, mode in (("first", "auto"), ("first", "required"), ("other", "auto")):
        named = {"type": "function", "function": {"name": chosen}}
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        asked = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 5}
        response = thinker.post("chat/completions", **asked)
        assert response.status_code == 200, response.text
        begin = "" if mode == "required" else "Hm "
        for name in ("first", "other"):
            text = call.replace("Hm ", begin).replace("first", name)
            assert follows(tokenizer, compiled[-1], text) is (name == chosen), (name, chosen, mode)
        assert follows(tokenizer, compiled[-1], "no call") is (mode == "auto")
    counted = {"tools": tools, "messages": MESSAGES}
    all_of_them = thinker.client.post("/tokenize", json=counted).json()["count"]
    assert response.json()["usage"]["prompt_tokens"] == all_of_them, "the prompt is the same, whatever is allowed"


def test_a_trial_that_dies_is_the_grammar_s_fault(tokenizer: Tokenizer) -> None:
    trial = GrammarTrial(0.3, tokenizer, tokenizer.vocab_size, frozenset({0}))
    with pytest.raises(RequestError, match=r"json cannot be followed: it takes more than 0\.3 s"):
        trial.require(StructuredOutputsParams(json=json.dumps(ENDLESS)))
    trial.require(StructuredOutputsParams(json={"type": "integer"}))


TRIED_HERE = """
import sys
from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.grammar_trial import GrammarTrial
from ridgeline.weights.folder import ModelFolder
tokenizer = ModelFolder.open("python-1m").tokenizer()
trial = GrammarTrial(30.0, tokenizer, tokenizer.vocab_size, frozenset({0}))
for given in ({"grammar": 'root ::= "a"+'}, {"json": {"type": "object"}, "preamble": 'start: "a" @output'}):
    trial.require(StructuredOutputsParams(**given))
for given in ({"grammar": "root ::= other"}, {"json": {"a": "\\ud800", "multipleOf": 1e-9}}, {"regex": "\\ud800("}):
    try:
        trial.require(StructuredOutputsParams(**given))
    except RequestError as error:
        print(error.param, error.code)
assert not {"llguidance", "llguidance.gbnf_to_lark"} & set(sys.modules), "the server has read a grammar itself"
"""


def test_what_a_request_asks_for_is_read_by_the_process_that_tries_it() -> None:
    """To turn GBNF or a schema into what llguidance knows takes time as compiling does, and the same bound holds."""
    done = subprocess.run([sys.executable, "-c", TRIED_HERE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "grammar unsupported_grammar",
        "json unsupported_schema",
        "regex unsupported_grammar",
    ]


def test_more_than_any_grammar_may_have_is_not_tried(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial(30.0, tokenizer, tokenizer.vocab_size, frozenset({0}))
    monkeypatch.setattr(trial, "_start", None)
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for given, why in (("a" * 2**20, "characters"), ({"enum": nested}, "nested")):
        with pytest.raises(RequestError, match=f"^json cannot be followed: .*{why}") as refused:
            trial.require(StructuredOutputsParams(json=given))
        assert refused.value.code == "unsupported_schema"


def test_a_grammar_is_tried_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is refused, unless it took too long: only then another try may end otherwise."""
    trial = GrammarTrial(30.0, tokenizer, tokenizer.vocab_size, frozenset({0}))
    good, bad = (StructuredOutputsParams(json=schema) for schema in ({"type": "integer"}, {"uniqueItems": True}))
    for _ in range(2):
        trial.require(good)
        with pytest.raises(RequestError, match="uniqueItems"):
            trial.require(bad)
    monkeypatch.setattr(trial, "_idle", [])  # with which every new trial would start a process

    def no_process() -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(trial, "_start", no_process)
    trial.require(good)
    with pytest.raises(RequestError, match="uniqueItems"):
        trial.require(bad)


def test_schemas_that_take_their_time_delay_nobody_else(chat_model: Path) -> None:
    """There are more of them than the server has threads, and each takes all the time that it may."""
    with serving(new_engine(chat_model), grammar_timeout_s=0.5) as server, ThreadPoolExecutor(16) as pool:
        schemas = [ENDLESS | {"title": str(at)} for at in range(16)]
        asked = [pool.submit(server.post, "completions", prompt="a", guided_json=schema) for schema in schemas]
        wait(asked, return_when=FIRST_COMPLETED)
        assert server.complete(prompt="a", max_tokens=2)["choices"]
        assert not all(each.done() for each in asked)
        assert all(each.result().status_code == 400 for each in asked)


def test_the_server_answers_others_while_grammars_are_tried(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: its event loop waits for none of them."""
    trying, go_on = threading.Semaphore(0), threading.Event()
    find_problem = GrammarTrial._find_problem

    def slowly(trial: GrammarTrial, asked: str):
        trying.release()
        assert go_on.wait(PATIENCE_S)
        return find_problem(trial, asked)

    monkeypatch.setattr(GrammarTrial, "_find_problem", slowly)
    with serving(new_engine(chat_model)) as server, ThreadPoolExecutor(4) as pool:
        good = [
            pool.submit(server.complete, prompt="a", max_tokens=9, guided_grammar=f'root ::= "{letter}" [0-9]')
            for letter in "xyz"
        ]
        bad = pool.submit(server.post, "completions", prompt="a", guided_grammar="root ::= other")
        try:
            assert all(trying.acquire(timeout=PATIENCE_S) for _ in range(MAX_TRIALS))
            for stream in (False, True, False):
                assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200
                assert server.post("completions", prompt="a", max_tokens=2, stream=stream).status_code == 200
            assert not any(each.done() for each in (*good, bad))
        finally:
            go_on.set()
        texts = sorted(each.result()["choices"][0]["text"] for each in good)
        assert [text[0] for text in texts] == ["x", "y", "z"] and all(text[1:].isdecimal() for text in texts)
        assert bad.result().json()["error"]["param"] == "guided_grammar"
        server.assert_idle()


def test_requests_pass_the_gate_while_a_grammar_is_compiled(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort of one that still waits there is an abort; its grammar is nobody's any more."""
    engine = new_engine(chat_model)
    compiling, go_on = threading.Event(), threading.Event()
    compiles = GrammarCompiler.compile

    def slowly(compiler: GrammarCompiler, params: StructuredOutputsParams) -> Grammar:
        compiling.set()
        assert go_on.wait(PATIENCE_S)
        return compiles(compiler, params)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    with serving(engine) as server, ThreadPoolExecutor(2) as pool:
        asked = pool.submit(server.complete, prompt="a", max_tokens=8, guided_regex="[0-9]{3}")
        assert compiling.wait(PATIENCE_S)
        assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "guided_regex": "[0-9]{4}"}, timeout=0.2)
        eventually(lambda: server.engine.num_unfinished == 1)
        go_on.set()
        assert asked.result()["choices"][0]["text"].isdecimal()
        server.assert_idle()
