"""Structured output over HTTP, by the official client: response_format, vLLM's and llama.cpp's fields, refusals."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from live_server import PATIENCE_S, LiveServer
from pydantic import BaseModel

from ridgeline.core.errors import RequestError
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.text.grammar import GrammarState
from ridgeline.text.grammar_trial import GrammarTrial

MESSAGES = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


class Answer(BaseModel):
    ok: bool
    n: int | None


@pytest.fixture
def client(live: LiveServer):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_response_format(client: openai.OpenAI):
    model = client.models.list().data[0].id
    formats = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
        {"type": "text"},
    ]
    for form in formats:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, response_format=form, max_tokens=60, seed=1, n=2
        )
        for choice in answer.choices:
            if form["type"] != "text" and choice.finish_reason == "stop":
                value = json.loads(choice.message.content)
                assert form["type"] == "json_object" or set(value) == {"ok", "n"}
    assert {choice.finish_reason for choice in answer.choices} == {"length"}  # free text goes on


def test_the_helpers_of_the_client(client: openai.OpenAI):
    model = client.models.list().data[0].id
    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Answer, max_tokens=100, seed=2
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Answer, max_tokens=100, seed=2
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= "z" [0-3]'}}, "z[0-3]"),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'root ::= "x" [0-3]', "guided_decoding_backend": "xgrammar"}, "x[0-3]"),
        ({"grammar": 'root ::= "y" [0-3]'}, "y[0-3]"),
        ({"grammar": 'start: "y" /[0-3]/ </s>'}, "y[0-3]"),
        ({"guided_grammar": 'start: "y" /[0-3]/ <[2]>'}, "y[0-3]"),
        ({"guided_json": {"enum": ["p", "q"]}}, '"[pq]"'),
        ({"json_schema": {"type": "boolean"}}, "true|false"),
        ({"response_format": {"type": "json_object", "schema": {"const": 5}}}, "5"),
    ],
)
def test_fields_of_other_servers(live: LiveServer, fields: dict, pattern: str):
    choices = live.complete(prompt="Once", max_tokens=20, seed=3, n=2, **fields)["choices"]
    assert all(choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]) for choice in choices)
    assert live.complete(prompt="Once", max_tokens=4)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format", "regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_regex and guided_choice"),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs", "choices"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"guided_json": False}, "guided_json", "Unsatisfiable"),
        ({"guided_grammar": 'start: "a" <|im_end|>'}, "guided_grammar", 'unknown special token: "<|im_end|>"'),
        ({"guided_grammar": 'start: "a" <[999999]>'}, "guided_grammar", "999999"),
        ({"guided_decoding_backend": "mine"}, "guided_decoding_backend", "xgrammar"),
    ],
)
def test_refusals_name_the_field(live: LiveServer, fields: dict, param: str, words: str):
    response = live.post("completions", prompt="Once", max_tokens=4, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert words in error["message"], error


UNSUPPORTED = {  # by a word of the refusal
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"contains": {"const": 1}},
    "minContains": {"contains": {}, "minContains": 2},
    "unevaluatedProperties": {"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
    "unevaluatedItems": {"anyOf": [{"prefixItems": [{}]}], "unevaluatedItems": False},
    "if": {"if": {"const": 1}, "then": {"type": "string"}},
    "not": {"not": {"const": "a"}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "oneOf": {"oneOf": [{"minimum": 1}, {"maximum": 5}]},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "https://example.com/a": {"$ref": "https://example.com/a"},
    "/$defs/missing": {"$ref": "#/$defs/missing"},
    "iri": {"type": "string", "format": "iri"},
    "look-around": {"type": "string", "pattern": "(?!a)b"},
    "backreferences": {"type": "string", "pattern": r"(a)\1"},
    "minProperties": {"type": "object", "minProperties": 2},
    "const": {"const": 2**53 + 1},
    "multipleOf": {"multipleOf": 1e-11},
    "type: any": {"type": "any"},
}


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_a_keyword_that_cannot_be_followed_is_named_wherever_it_stands(live: LiveServer, word: str):
    inner = {"anyOf": [{"type": "null"}, UNSUPPORTED[word]]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    asked = {"type": "json_schema", "json_schema": {"name": "any", "strict": True, "schema": schema}}
    messages = [{"role": "user", "content": "Once"}]
    response = live.post("chat/completions", messages=messages, max_tokens=4, response_format=asked)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "response_format", error
    assert error["code"] == "unsupported_schema" and word in error["message"], error


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": True}}},
        {"guided_json": True},
        {"json_schema": "true"},
    ],
)
def test_a_schema_of_any_value(live: LiveServer, fields: dict):
    bias = {live.client.post("/tokenize", json={"prompt": "1", "add_special_tokens": False}).json()["tokens"][-1]: 100}
    (choice,) = live.complete(prompt="Once", max_tokens=4, temperature=0, logit_bias=bias, **fields)["choices"]
    assert choice["text"].strip().isdecimal()


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gives_up_ends_its_request_alone(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    """Real limits end a matcher in the same way; here it is the one with the regular expression, at its third token."""
    consume, num_consumed = GrammarState._consume, 0

    def give_up(state: GrammarState, token_id: int) -> None:
        nonlocal num_consumed
        num_consumed += 1
        if num_consumed >= 3:
            raise RequestError("the grammar gave up, make it simpler: too big", param="structured_outputs")
        consume(state, token_id)

    body = {"prompt": "Once", "max_tokens": 30, "seed": 1, "temperature": 0}
    plain = live.complete(**body)["choices"][0]["text"]
    monkeypatch.setattr(GrammarState, "_consume", give_up)
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(live.complete, **body)
        response = live.post("completions", **body, guided_regex="[a-z ]{20,40}", stream=stream)
        assert neighbour.result(PATIENCE_S)["choices"][0]["text"] == plain
    if stream:
        assert response.status_code == 200 and "event: error" in response.text
        error = json.loads(response.text.rsplit("data: ", 1)[1])["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["code"] == "grammar_gave_up" and error["message"].endswith("too big"), error
    live.assert_idle()


def test_a_schema_that_takes_long_delays_no_other(live: LiveServer, monkeypatch: pytest.MonkeyPatch):
    require, slow, go = GrammarTrial.require, threading.Event(), threading.Event()

    def held(trial: GrammarTrial, params: StructuredOutputsParams) -> None:
        if "slow" in params.choice:
            slow.set()
            assert go.wait(PATIENCE_S)
        require(trial, params)

    monkeypatch.setattr(GrammarTrial, "require", held)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(live.complete, prompt="Once", max_tokens=20, guided_choice=["slow"])
        assert slow.wait(PATIENCE_S)
        assert live.complete(prompt="Once", max_tokens=20, guided_choice=["quick"])["choices"][0]["text"] == "quick"
        assert not waiting.done()
        go.set()
        assert waiting.result(PATIENCE_S)["choices"][0]["text"] == "slow"
