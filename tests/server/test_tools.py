"""Tools and reasoning over HTTP, by the official client: forced calls, streamed calls, the second turn, refusals."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_server import PATIENCE_S, LiveServer, new_engine, serving, with_template
from pydantic import BaseModel

TEMPLATE = """\
{%- if tools %}<tool_call> tools: {{ tools | tojson }} {% endif %}\
{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{% endfor %}{% if enable_thinking %}<think>
{% else %}</think>{% endif %}"""
MESSAGES = [{"role": "user", "content": "Weather?"}]


def tool(name: str, **more: object) -> dict:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


TOOLS = [tool("first"), tool("second", parameters=None)]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("second", parameters=None)]}}
NAMED = {"type": "function", "function": {"name": "first"}}
CALL = '<tool_call>\n{"name": "first", "arguments": {"n": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinker(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = with_template(chat_model, tmp_path_factory.mktemp("models") / "thinker", TEMPLATE)
    with serving(new_engine(folder)) as server:
        yield server
        server.assert_idle()


@pytest.fixture
def client(thinker: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def ask(client: openai.OpenAI, **body: object):
    return client.chat.completions.create(**{"model": "thinker", "messages": MESSAGES, "max_tokens": 150} | body)


def streamed(client: openai.OpenAI, **body: object) -> tuple[dict, str]:
    """The message as its deltas make it, and how it ended."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for chunk in ask(client, stream=True, **body):
        (choice,) = chunk.choices
        delta = choice.delta
        assert delta.to_dict() or choice.finish_reason
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(message["tool_calls"]) and call.type == "function"
                message["tool_calls"].append([call.function.name, ""])
            else:
                assert call.function.name is None
            message["tool_calls"][call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return message, reason


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop"), (ALLOWED, "tool_calls")])
def test_a_forced_call_is_valid_and_streams_the_same(client: openai.OpenAI, choice: object, reason: str):
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
    (whole,) = ask(client, **body).choices
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == reason and whole.message.content is None and call.type == "function" and call.id
    arguments = json.loads(call.function.arguments)
    assert arguments == {} if call.function.name == "second" else 0 <= arguments["n"] <= 9
    assert choice != ALLOWED or call.function.name == "second"
    message, how = streamed(client, **body)
    assert message["tool_calls"] == [[call.function.name, call.function.arguments]] and how == reason
    assert message["content"] == ""


class First(BaseModel):
    ok: bool


def test_the_helpers_of_the_client(client: openai.OpenAI):
    tools = [openai.pydantic_function_tool(First, name="first")]
    body = {"model": "thinker", "messages": MESSAGES, "max_tokens": 100, "tools": tools, "tool_choice": "required"}
    body["parallel_tool_calls"] = False
    parsed = client.chat.completions.parse(**body, seed=1).choices[0].message.tool_calls[0]
    assert isinstance(parsed.function.parsed_arguments, First)
    with client.chat.completions.stream(**body, seed=1) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == parsed.function.parsed_arguments


def test_calls_among_text_stream_the_same(client: openai.OpenAI):
    """The text is forced by a choice, so that the tools themselves are free."""
    text = f"Let me see. {CALL}\n{CALL} Done."
    body = {"tools": TOOLS, "extra_body": {"guided_choice": [text]}, "max_tokens": 250}
    (whole,) = ask(client, **body).choices
    assert whole.message.content == "Let me see.Done." and whole.finish_reason == "tool_calls"
    calls = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    assert calls == [["first", '{"n": 3}']] * 2
    message, reason = streamed(client, **body)
    assert (message["content"], message["tool_calls"], reason) == (whole.message.content, calls, "tool_calls")
    cut, reason = streamed(client, **body | {"max_tokens": 40})
    assert reason == "length" and cut["content"] == "Let me see."


def test_without_tools_the_text_stays(client: openai.OpenAI):
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = ask(client, extra_body={"guided_choice": [CALL]}, **body).choices
        assert choice.message.content == CALL and choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_a_prompt_that_opens_reasoning(client: openai.OpenAI):
    body = {"max_tokens": 12, "temperature": 0, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    whole = ask(client, **body)
    message = whole.choices[0].message
    assert message.content is None and message.reasoning_content
    assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens == 12
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        usages = [chunk.usage for chunk in ask(client, **body, stream=True, stream_options=options) if chunk.usage]
        assert usages[-1].completion_tokens == 12
        counts = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 12
    assert streamed(client, **body)[0]["reasoning_content"] == message.reasoning_content
    effort = ask(client, max_tokens=12, temperature=0, reasoning_effort="high").choices[0].message
    assert effort.reasoning_content == message.reasoning_content
    closed = ask(client, max_tokens=12, temperature=0, reasoning_effort="none").choices[0].message
    assert closed.content and not hasattr(closed, "reasoning_content")
    without = ask(client, max_tokens=12, n=2, reasoning_effort="none").usage
    assert without.completion_tokens_details.reasoning_tokens == 0
    assert ask(client, n=2, **body).usage.completion_tokens_details.reasoning_tokens == 24


def test_the_second_turn(client: openai.OpenAI):
    output = ask(client, tools=TOOLS, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": output.tool_calls[0].id, "content": [{"type": "text", "text": "Rain"}]}
    for first in (output, output.model_dump(), output.model_dump(exclude_none=True)):
        assert ask(client, messages=[*MESSAGES, first, result], tools=TOOLS, max_tokens=2).choices


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [tool("a b")]}, "tools", "regex"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "one name"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "128"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tool_choice": "required"}, "tool_choice", "tools has"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": TOOLS[:1], "tool_choice": ALLOWED}, "tool_choice", "asks for ['second']"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "asks for a call"),
        (
            {"tools": TOOLS, "tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice",
            "asks for a call",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "grammar": "root ::= [a]"}, "tool_choice", "grammar"),
        (
            {"tools": [tool("f", parameters={"uniqueItems": True}, strict=True)], "tool_choice": "required"},
            "tools",
            "uniqueItems",
        ),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "earlier"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "tool_call_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            "messages[0].tool_calls[0].function",
            "'[1]'",
        ),
    ],
)
def test_refusals_name_the_field(thinker: LiveServer, body: dict, param: str, words: str):
    response = thinker.post("chat/completions", **{"messages": MESSAGES, "max_tokens": 4} | body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error


def test_keywords_that_are_unknown_are_left_out_unless_strict(client: openai.OpenAI):
    loose = tool(
        "f", parameters={"type": "object", "properties": {}, "additionalProperties": False, "uniqueItems": True}
    )
    assert ask(client, tools=[loose], tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls


def test_a_call_that_was_cut_off_may_come_back(thinker: LiveServer):
    """As LangChain sends it over responses: what max_tokens left of the arguments is no JSON."""
    call = {"id": "1", "type": "function", "function": {"name": "first", "arguments": '{"'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ]
    text = thinker.client.post("/tokenize", json={"messages": turns}).raise_for_status().json()
    asked = {"model": "thinker", "max_tokens": 4, "tools": TOOLS}
    response = thinker.post("chat/completions", messages=turns, **asked)
    assert response.status_code == 200
    counted = thinker.client.post("/tokenize", json={"messages": turns, "tools": TOOLS}).raise_for_status().json()
    assert response.json()["usage"]["prompt_tokens"] == counted["count"] > text["count"]
    assert (
        thinker.client.post("/detokenize", json={"tokens": text["tokens"]}).json()["prompt"].count('<first "{\\"">')
        == 1
    )
    given = [
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "1", "name": "first", "arguments": '{"'},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
    ]
    assert thinker.post("responses", input=given, max_output_tokens=16).status_code == 200
