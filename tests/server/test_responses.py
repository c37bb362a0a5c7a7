"""The Responses API over HTTP, by OpenAI's official client, and its events replayed by rules that are none of ours."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from live_server import (
    PATIENCE_S,
    FailingExecutor,
    GatedExecutor,
    LiveServer,
    new_engine,
    put_in_front,
    serving,
    with_template,
)
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ridgeline.core.step import TokenLogprob
from ridgeline.server.openai.logprobs import ContentLogprobs, TokenNames
from ridgeline.server.openai.store import ResponseStore
from ridgeline.text.outputs import BlockReader, OutputFormat, ReasoningTokens
from ridgeline.text.reasoning import chosen_reasoning
from ridgeline.text.tools.formats import FORMATS
from ridgeline.weights.folder import ModelFolder

TEMPLATE = """\
{%- if tools %}<tool_call> tools: {{ tools | tojson }} {% endif %}\
{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}\
{% for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{% endfor %}{% if enable_thinking %}<think>
{% else %}</think>{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": "first", "parameters": SCHEMA},
    {"type": "function", "name": "second"},
]


class Answer(BaseModel):
    ok: bool
    n: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(chat_model, tmp_path_factory.mktemp("models") / "thinker", TEMPLATE)


def client_of(server: LiveServer, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def client(thinker: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(thinker) as client:
        yield client


def arguments(body: dict) -> dict:
    return {"model": "thinker", "input": "Weather?", "max_output_tokens": 24, "temperature": 0} | body


def replayed(events: list[dict]) -> dict:
    """The response that the events make; every rule of their order is checked."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    items: list[dict] = []
    is_open = False
    for event in events[2:-1]:
        name = event["type"].removeprefix("response.")
        index = event["output_index"]
        if name == "output_item.added":
            assert not is_open and index == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            is_open = True
            continue
        item = items[-1]
        assert is_open and index == len(items) - 1 and event.get("item_id", item["id"]) == item["id"]
        assert event.get("content_index", 0) == 0
        if name == "content_part.added":
            assert item["content"] == [] and event["part"]["text"] == ""
            item["content"].append(event["part"])
        elif name in ("output_text.delta", "reasoning_text.delta"):
            assert event["delta"]
            item["content"][0]["text"] += event["delta"]
            if name == "output_text.delta":
                item["content"][0]["logprobs"] += event["logprobs"]
        elif name in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif name == "content_part.done":
            assert event["part"] == item["content"][0]
        elif name == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif name == "custom_tool_call_input.done":
            assert event["input"] == item["input"]
        elif name == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif name == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"] and event["name"] == item["name"]
        else:
            assert name == "output_item.done" and item | {"status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
            is_open = False
    last = events[-1]["response"]
    assert not is_open and last["output"] == items
    assert events[-1]["type"] == f"response.{last['status']}" and last["id"] == events[0]["response"]["id"]
    return last


def told(response: dict) -> dict:
    """What does not differ between two answers to one request: ids and times do, and what the prefix cache had."""
    usage = response["usage"]
    cached = usage["input_tokens_details"].pop("cached_tokens")
    assert 0 <= cached <= usage["input_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    times = ("id", "created_at", "completed_at")
    return {key: value for key, value in response.items() if key not in times} | {"output": output}


def ask(client: openai.OpenAI, **body: object) -> openai.types.responses.Response:
    """The response, after the streamed one was seen to be the same."""
    whole = client.responses.create(**arguments(body))
    assert whole.id.startswith("resp_")
    streamed = replayed([event.to_dict() for event in client.responses.create(**arguments(body), stream=True)])
    assert told(streamed) == told(whole.to_dict())
    return whole


def test_text(client: openai.OpenAI):
    response = ask(client, instructions="Be brief. " * 8, metadata={"a": "b"}, user="u", text={"verbosity": "low"})
    assert (response.text.verbosity, response.text.format.type) == ("low", "text")
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert response.output_text == message.content[0].text != ""
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 24 and response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.metadata, response.user, response.temperature, response.store) == ({"a": "b"}, "u", 0, True)
    again = client.responses.create(**arguments({"instructions": "Be brief. " * 8}))
    assert again.user is None and "user" not in again.to_dict(), "which is a text, or not there"
    assert again.output_text == response.output_text and again.usage.input_tokens_details.cached_tokens > 0


def test_an_answer_is_that_of_chat(client: openai.OpenAI):
    chat = client.chat.completions.create(
        model="thinker",
        messages=[
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        max_tokens=24,
        temperature=0,
    )
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    response = ask(client, input=items)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    seeded = {"temperature": 1, "extra_body": {"seed": 7, "top_k": 5}}
    assert ask(client, **seeded).output_text == client.responses.create(**arguments(seeded)).output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "first"}])
def test_tools_there_and_back(client: openai.OpenAI, choice: object):
    body = {"tools": TOOLS, "max_output_tokens": 150, "parallel_tool_calls": False, "tool_choice": choice}
    response = ask(client, **body)
    (call,) = response.output
    assert (call.type, call.status, response.status) == ("function_call", "completed", "completed")
    assert [(tool.name, tool.strict) for tool in response.tools] == [(tool["name"], False) for tool in TOOLS]
    assert json.loads(call.arguments) == {} if call.name == "second" else 0 <= json.loads(call.arguments)["n"] <= 9
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "Rain"}],
    }
    by_hand = [{"role": "user", "content": "Weather?"}, *response.output, result]
    after = ask(client, input=by_hand, tools=TOOLS, tool_choice="none")
    assert after.output[0].type == "message"
    kept = client.responses.create(
        **arguments({"input": [result], "previous_response_id": response.id, "tools": TOOLS, "tool_choice": "none"})
    )
    assert kept.output_text == after.output_text and kept.previous_response_id == response.id
    assert kept.usage.input_tokens == after.usage.input_tokens


def test_reasoning_is_an_item_and_is_counted(client: openai.OpenAI):
    response = ask(client, reasoning={"effort": "high", "summary": "auto"}, include=["reasoning.encrypted_content"])
    (thought,) = response.output
    assert thought.type == "reasoning" and thought.summary == [] and thought.content[0].text
    assert response.usage.output_tokens_details.reasoning_tokens == response.usage.output_tokens == 24
    assert response.reasoning.effort == "high"
    sent = [{"role": "user", "content": "Weather?"}, thought, {"role": "assistant", "content": "Rain."}]
    more = ask(client, input=[*sent, {"role": "user", "content": "And?"}])
    text = f"user: Weather?assistant: Rain.({thought.content[0].text})user: And?</think>"
    counted = client.post("/tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=dict[str, object])
    assert more.usage.input_tokens == counted["count"]


def test_structured_output_is_parsed(client: openai.OpenAI):
    body = {"model": "thinker", "input": "Who?", "max_output_tokens": 100, "text_format": Answer}
    parsed = client.responses.parse(**body, temperature=0)
    assert isinstance(parsed.output_parsed, Answer) and parsed.status == "completed"
    with client.responses.stream(**body, temperature=0) as stream:
        names = {event.type for event in stream}
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert {"response.created", "response.output_text.delta", "response.completed"} <= names
    form = {"format": {"type": "json_object"}, "verbosity": "low"}
    assert client.responses.create(**arguments({"text": form})).output_text.lstrip().startswith("{")


def test_what_is_kept(client: openai.OpenAI):
    first = client.responses.create(**arguments({"input": "One"}))
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(**arguments({"input": "Two", "previous_response_id": first.id}))
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3 and items[1].id == first.output[0].id
    assert [item.content[0].text for item in items] == ["One", first.output_text, "Two"]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in items[::-1]]
    by_hand = [{"role": "user", "content": "One"}, *first.output, {"role": "user", "content": "Two"}]
    assert client.responses.create(**arguments({"input": by_hand})).output_text == second.output_text
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    for gone in (first.id, client.responses.create(**arguments({"store": False})).id, "resp_none"):
        for ask_for in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=gone):
                ask_for(gone)
        with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{gone}' not found") as error:
            client.responses.create(**arguments({"previous_response_id": gone}))
        assert error.value.code == "previous_response_not_found"
    assert client.responses.create(**arguments({"previous_response_id": second.id})).output_text


def test_another_key_does_not_find_it(model: Path, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\n[bob]\nkey = "b"\n')
    with (
        serving(new_engine(model), api_key_file=str(keys)) as server,
        client_of(server, "a") as alice,
        client_of(server, "b") as bob,
    ):
        response = alice.responses.create(**arguments({}))
        for ask_for in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask_for(response.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            bob.responses.create(**arguments({"previous_response_id": response.id}))
        assert alice.responses.retrieve(response.id).id == response.id


def test_truncation_drops_the_first_turns(client: openai.OpenAI):
    turns = [{"role": "user", "content": f"{number} " + "Rain. " * 60} for number in range(8)]
    with pytest.raises(openai.BadRequestError, match="context") as error:
        client.responses.create(**arguments({"input": turns}))
    assert error.value.code == "context_length_exceeded" and error.value.param == "input"
    response = ask(client, input=turns, truncation="auto")
    rest = client.responses.create(**arguments({"input": turns[-1:]}))
    assert response.usage.input_tokens >= rest.usage.input_tokens and response.truncation == "auto"


def test_what_is_ignored_is_said(client: openai.OpenAI):
    raw = client.responses.with_raw_response.create(
        **arguments({}), prompt_cache_key="k", safety_identifier="s", max_tool_calls=3, extra_body={"soon": 1}
    )
    assert raw.headers["x-ridgeline-ignored"] == "soon"


LOGPROBS = "message.output_text.logprobs"
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "second"}]}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": '[ab"]{3}'}}
OTHERS = ("web_search", "file_search", "code_interpreter", "mcp", "computer_use_preview", "image_generation")


def test_tools_of_other_types_are_left_out_and_named(client: openai.OpenAI):
    """As an agent sends them: all that it has, whatever the server runs."""
    others = [{"type": kind, "server_label": "x"} for kind in (*OTHERS, "local_shell")]
    space = {"type": "namespace", "name": "mcp__a", "description": "b", "tools": [TOOLS[0] | {"name": "inner"}]}
    lark = {"type": "custom", "name": "lark", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
    sent = [others[0], TOOLS[0], *others[1:], space, lark]
    raw = client.responses.with_raw_response.create(**arguments({"tools": sent}))
    names = [*(f"tools.{kind}" for kind in (*OTHERS, "local_shell", "namespace")), "tools.lark.format"]
    assert raw.headers["x-ridgeline-ignored"] == ", ".join(names)
    response = raw.parse()
    assert [tool.name for tool in response.tools] == ["first", "lark"]
    counted = client.responses.input_tokens.count(model="thinker", input="Weather?", tools=[TOOLS[0], lark])
    assert response.usage.input_tokens == counted.input_tokens
    plain = client.responses.input_tokens.count(
        model="thinker", input="Weather?", tools=[TOOLS[0], lark | {"format": None}]
    )
    assert plain.input_tokens < counted.input_tokens, "the model is told of the grammar"
    agent = {"instructions": "Be brief.", "prompt_cache_key": "k", "store": False, "include": []}
    agent |= {
        "reasoning": None,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "extra_body": {"client_metadata": {}},
    }
    *_, last = client.responses.create(**arguments(agent | {"tools": sent}), stream=True)
    assert last.type == "response.incomplete" and [tool.name for tool in last.response.tools] == ["first", "lark"]


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
def test_custom_tools_take_a_text(client: openai.OpenAI, choice: object):
    body = {"tools": [CUSTOM], "max_output_tokens": 150, "parallel_tool_calls": False, "tool_choice": choice}
    response = ask(client, **body)
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("custom_tool_call", "patch", "completed")
    assert re.fullmatch('[ab"]{3}', call.input)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    kept = {"input": [result], "previous_response_id": response.id, "tools": [CUSTOM], "tool_choice": "none"}
    by_hand = {
        "input": [{"role": "user", "content": "Weather?"}, call, result],
        "tools": [CUSTOM],
        "tool_choice": "none",
    }
    after = [client.responses.create(**arguments(each)) for each in (kept, by_hand)]
    assert after[0].output_text == after[1].output_text
    cut = client.responses.create(**arguments(body | {"max_output_tokens": 40}))
    assert cut.status == "incomplete"


def test_allowed_tools(client: openai.OpenAI):
    body = {"tools": TOOLS, "max_output_tokens": 150, "parallel_tool_calls": False}
    (call,) = ask(client, **body, tool_choice=ALLOWED).output
    assert call.name == "second"
    free = client.responses.create(**arguments({"tools": TOOLS, "tool_choice": ALLOWED | {"mode": "auto"}}))
    assert free.tool_choice.mode == "auto" and free.output[0].type == "message"


def test_items_are_found_by_their_ids(client: openai.OpenAI):
    first = client.responses.create(**arguments({"input": "One"}))
    (given,) = client.responses.input_items.list(first.id).data
    ids = [{"type": "item_reference", "id": given.id}, {"id": first.output[0].id}]
    more = {"role": "user", "content": "Two"}
    second = client.responses.create(**arguments({"input": [*ids, more]}))
    kept = client.responses.create(**arguments({"input": "Two", "previous_response_id": first.id}))
    assert second.output_text == kept.output_text and second.usage.input_tokens == kept.usage.input_tokens
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["One", first.output_text, "Two"]
    client.responses.delete(first.id)
    again = client.responses.create(**arguments({"input": [*ids, more], "store": False}))
    assert again.output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError, match="not found") as error:
        client.responses.create(**arguments({"input": [*ids, more]}))
    assert error.value.param == "input[0]"


def test_tokens_of_the_input_are_counted(client: openai.OpenAI):
    body = {"model": "thinker", "instructions": "Be brief.", "tools": TOOLS}
    counted = client.responses.input_tokens.count(input="One", **body)
    assert counted.object == "response.input_tokens"
    response = client.responses.create(**arguments(body | {"input": "One"}))
    assert response.usage.input_tokens == counted.input_tokens
    after = client.responses.input_tokens.count(previous_response_id=response.id, **body).input_tokens
    by_hand = [{"role": "user", "content": "One"}, *response.output]
    assert after == client.responses.input_tokens.count(input=by_hand, **body).input_tokens > counted.input_tokens
    for wrong, words in (({"input": "a", "model": "x"}, "no model 'x'"), ({}, "input is empty")):
        with pytest.raises(openai.APIStatusError, match=words):
            client.responses.input_tokens.count(**wrong)


def test_log_probabilities_of_the_text(client: openai.OpenAI):
    text = "Rain, so 7 degrees."
    body = {"include": [LOGPROBS], "top_logprobs": 2, "extra_body": {"guided_choice": [text]}, "max_output_tokens": 80}
    response = ask(client, **body)
    (part,) = response.output[0].content
    assert part.text == text
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode().strip() == text
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
    events = list(client.responses.create(**arguments(body), stream=True))
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in told] == [entry.logprob for entry in part.logprobs] and len(told) > 5
    plain = client.responses.with_raw_response.create(**arguments({"top_logprobs": 2}))
    assert plain.headers["x-ridgeline-ignored"] == "top_logprobs" and not plain.parse().output[0].content[0].logprobs


def test_log_probabilities_leave_out_reasoning_and_calls(chat_model: Path):
    tokenizer = ModelFolder.open(str(chat_model)).tokenizer()
    form = OutputFormat(FORMATS["hermes"], ["f"], chosen_reasoning("qwen3", ""), is_open=True)
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    text = f"Hm, so.</think>\n\nI look.{call}\nDone now."
    scores, reader = ContentLogprobs(TokenNames(tokenizer), form, frozenset()), BlockReader(form)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        scores.feed([TokenLogprob(token_id, -1.0, 1, ())], last=False)
    scores.feed([], last=True)
    blocks = [(step, scores.of(step)) for step in reader.feed(text, last=True) if step.kind == "content"]
    found = [b"".join(bytes(entry.bytes) for entry in block) for step, block in blocks if step.what == "end"]
    assert found == [b"I look.", b"Done now."]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "input: expected"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [IMAGE]}, "input[0]", "a part of type 'input_image' is not supported"),
        ({"input": [{"role": "user"}]}, "input[0]", "an item of type 'message' needs content"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call' is not supported, only message"),
        ({"input": [{"role": "x", "content": "a"}]}, "input", "role"),
        ({"input": [{"type": "function_call", "content": "x"}]}, "input[0]", "needs call_id and name and arguments"),
        ({"input": [RESULT]}, "input", "tool_call_id must be of a call in an earlier message, got 'c'"),
        *(
            ({"tools": [{"type": kind}], "tool_choice": {"type": kind}}, "tool_choice", f"'{kind}' is not supported")
            for kind in ("web_search", "file_search", "computer_use_preview", "code_interpreter", "mcp")
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "asks for a call"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "a custom tool needs a name"),
        ({"tools": TOOLS, "tool_choice": ALLOWED | {"tools": [{"type": "mcp"}]}}, "tool_choice", "asks for a call"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0]", "'msg_x' not found"),
        ({"user": 5}, "user", "expected"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "needs a name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' is not supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "asks for ['x']"),
        ({"tool_choice": "required"}, "tool_choice", "asks for a call"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "<= 20"),
        ({"include": [LOGPROBS], "max_output_tokens": 10**6}, "max_output_tokens", "held"),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}, "text.format", "uniqueItems"),
        ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort"),
        ({"truncation": "some"}, "truncation", "truncation"),
        ({"n": 2}, "n", "not supported"),
        ({"max_tokens": 2}, "max_tokens", "not supported"),
        *(({name: {"id": "x"}}, name, "not supported") for name in ("conversation", "prompt", "moderation")),
        ({"background": True}, "background", "not supported"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream=true"),
    ],
)
def test_refusals_say_what_and_where(thinker: LiveServer, body: dict, param: str, words: str):
    response = thinker.post("responses", **arguments(body))
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"] and error["param"] == param, error


def test_a_stream_that_breaks_ends_with_a_failed_response(model: Path):
    engine = new_engine(model)
    executor = put_in_front(engine, FailingExecutor)
    gate = put_in_front(engine, GatedExecutor)
    with serving(engine) as server, client_of(server) as client:
        gate.release()
        events = []
        for event in client.responses.create(**arguments({}), stream=True):
            events.append(event)
            executor.broken = True
            gate.open()
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error" and "secret" not in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_store_is_bounded_in_bytes_and_in_time():
    async def fill() -> None:
        store = ResponseStore(3 * 1024 + 200, 1e6)
        for number in range(5):
            store.put(str(number), (b"x" * 40, b"[]"))
        with pytest.raises(HTTPException):
            store.get("1")
        assert [store.get(name)[0] for name in "234"] == [b"x" * 40] * 3
        store.put("large", (b"x" * 4096, b"[]"))
        for name in ("4", "large"):
            with pytest.raises(HTTPException):
                store.get(name)
        store.put("5", (b"", b"[]"))
        assert store.get("5") == (b"", b"[]")
        brief = ResponseStore(10_000, 0.001)
        brief.put("1", (b"", b"[]"))
        await asyncio.sleep(0.05)
        with pytest.raises(HTTPException):
            brief.get("1")

    asyncio.run(fill())


TEXT = ["Hm", ", so.", "</th", "ink>", "I look.", '<tool_call>{"name": "f", "arguments": {"n": 1}}', "</tool_call>"]


def test_reasoning_tokens_end_with_the_marker():
    hermes, think = FORMATS["hermes"], chosen_reasoning("qwen3", "")
    tokens = [part.encode() for part in TEXT]
    assert ReasoningTokens(OutputFormat(hermes, ["f"], think, is_open=True)).count(tokens) == 4
    assert ReasoningTokens(OutputFormat(hermes, ["f"], think)).count(tokens) == 0
    assert ReasoningTokens(OutputFormat(hermes, ["f"], think)).count([b"<think>", *tokens]) == 4
    assert ReasoningTokens(OutputFormat(hermes, ["f"], think, is_open=True)).count([b"a", b"<tool_call>", b"b"]) == 2
    assert ReasoningTokens(OutputFormat(hermes, ["f"], None)).count(tokens) == 0


def test_blocks_are_the_same_wherever_the_text_is_cut():
    form, text = OutputFormat(FORMATS["hermes"], ["f"], chosen_reasoning("qwen3", ""), is_open=True), "".join(TEXT)
    whole = [("reasoning", "Hm, so."), ("content", "I look."), ("call", '{"n": 1}')]
    for cut in range(len(text) + 1):
        reader = BlockReader(form)
        steps = [*reader.feed(text[:cut], last=False), *reader.feed(text[cut:], last=True)]
        assert [(step.kind, step.text) for step in steps if step.what == "end"] == whole
        joined = {
            kind: "".join(step.text for step in steps if (step.what, step.kind) == ("more", kind)) for kind, _ in whole
        }
        assert list(joined.items()) == whole
