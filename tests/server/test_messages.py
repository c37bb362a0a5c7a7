"""The Messages API over HTTP, by Anthropic's official client, and its content blocks cut at every place."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anthropic
import msgspec
import pytest
from live_server import (
    PATIENCE_S,
    FailingExecutor,
    GatedExecutor,
    LiveServer,
    eventually,
    gated_serving,
    new_engine,
    put_in_front,
    serving,
    with_template,
)

from ridgeline.server.anthropic.convert import chat_of
from ridgeline.server.anthropic.messages import PING, ContentReader, with_pings
from ridgeline.server.anthropic.protocol import Block, MessagesRequest, MessageTurn
from ridgeline.text.outputs import OutputFormat
from ridgeline.text.reasoning import chosen_reasoning
from ridgeline.text.tools.formats import FORMATS

TEMPLATE = """\
{%- if tools %}<tool_call> tools: {{ tools | tojson }} {% endif %}\
{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{% endfor %}{% if add_generation_prompt %}{% if enable_thinking %}<think>
{% else %}</think>{% endif %}{% endif %}"""
MESSAGES = [{"role": "user", "content": "Weather?"}]
GREEDY = {"temperature": 0}  # the client has no such parameter any more, and the API does


def tool(name: str, **more: object) -> dict:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"name": name, "input_schema": schema} | more


TOOLS = [tool("first"), tool("second", input_schema={"type": "object", "additionalProperties": False})]


@pytest.fixture(scope="module")
def model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(chat_model, tmp_path_factory.mktemp("models") / "thinker", TEMPLATE)


def client_of(server: LiveServer, **options: object) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S} | options
    )


@pytest.fixture
def client(thinker: LiveServer) -> Iterator[anthropic.Anthropic]:
    with client_of(thinker) as client:
        yield client


def arguments(body: dict) -> dict:
    return {"model": "thinker", "messages": MESSAGES, "max_tokens": 24, "extra_body": GREEDY} | body


def ask(client: anthropic.Anthropic, **body: object) -> anthropic.types.Message:
    """The message, after the streamed one was seen to be the same."""
    whole = client.messages.create(**arguments(body))
    with client.messages.stream(**arguments(body)) as stream:
        names = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert told(streamed) == told(whole)
    return whole


def told(message: anthropic.types.Message) -> dict:
    """What does not differ between two answers to one request: ids do, and what the prefix cache had."""
    fields = message.to_dict()
    assert fields.pop("id").startswith("msg_")
    usage = fields.pop("usage")
    fields = {name: value for name, value in fields.items() if value is not None}  # one has nulls of the client's own
    fields["counts"] = (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"])
    fields["content"] = [{**block, "id": None} for block in fields["content"]]
    return fields


def test_text(client: anthropic.Anthropic):
    brief = "Be brief. " * 8
    message = ask(client, system=[{"type": "text", "text": brief, "cache_control": {"type": "ephemeral"}}])
    (block,) = message.content
    assert (message.type, message.role, message.model, block.type) == ("message", "assistant", "thinker", "text")
    assert block.text and message.stop_reason == "max_tokens" and message.stop_sequence is None
    assert message.usage.output_tokens == 24 and message.usage.input_tokens > 0
    again = client.messages.create(**arguments({"system": brief}))
    assert again.content == message.content and again.usage.cache_read_input_tokens > 0


def test_a_stop_sequence_is_named(client: anthropic.Anthropic):
    text = ask(client).content[0].text
    stop = text[len(text) // 2 :][:4]
    message = ask(client, stop_sequences=["never said", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_max_tokens_beyond_the_context_end_with_it(client: anthropic.Anthropic, thinker: LiveServer):
    limit = thinker.engine.info().max_model_len
    text = "Rain."
    while (count := client.messages.count_tokens(**without_limit(text)).input_tokens) < limit - 24:
        text += " It rained." * max(1, (limit - 24 - count) // 8)
    message = ask(client, messages=without_limit(text)["messages"], max_tokens=100_000)
    assert message.stop_reason == "model_context_window_exceeded"
    used = message.usage
    assert used.input_tokens + used.cache_read_input_tokens == count
    assert used.output_tokens == limit - count


def without_limit(text: str) -> dict:
    return {"model": "thinker", "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "first"}])
def test_a_forced_call_and_the_turn_after_it(client: anthropic.Anthropic, choice: dict):
    choice = {**choice, "disable_parallel_tool_use": True}
    message = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=150, extra_body={"temperature": 0})
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use" and call.id.startswith("toolu_")
    assert call.input == {} if call.name == "second" else 0 <= call.input["n"] <= 9
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}]}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    assert ask(client, messages=turns, tools=TOOLS, tool_choice={"type": "none"}).content[0].type == "text"


def test_thinking_comes_where_it_is_asked_for(client: anthropic.Anthropic):
    message = ask(client, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=12)
    (block,) = message.content
    assert block.type == "thinking" and block.thinking and block.signature
    assert [block.type for block in ask(client, max_tokens=12).content] == ["text"]
    assert ask(client, thinking={"type": "adaptive"}, max_tokens=12).content[0].thinking == block.thinking
    turns = [*MESSAGES, {"role": "assistant", "content": [block.to_dict(), {"type": "text", "text": "Rain."}]}]
    assert ask(client, messages=[*turns, *MESSAGES]).content


def test_the_output_follows_a_schema(client: anthropic.Anthropic):
    form = {"type": "json_schema", "schema": tool("f")["input_schema"]}
    for asked in ({"output_config": {"format": form}}, {"extra_body": {"output_format": form, "temperature": 0}}):
        message = ask(client, **asked, max_tokens=100)
        assert json.loads(message.content[0].text)["n"] in range(10) and message.stop_reason == "end_turn"


def test_models_are_listed_as_this_client_knows_them(client: anthropic.Anthropic):
    (model,) = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "thinker", "thinker")
    assert client.models.retrieve("thinker").created_at == model.created_at
    assert datetime.now(UTC) - model.created_at < timedelta(days=1)
    with pytest.raises(anthropic.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.body["error"]["type"] == "not_found_error"


def test_the_last_message_is_continued(client: anthropic.Anthropic, thinker: LiveServer):
    turns = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    text = ask(client, messages=turns).content[0].text
    prompt = thinker.post("tokenize", prompt="user: Weather?assistant: It is", add_special_tokens=False).json()
    done = thinker.complete(prompt=prompt["tokens"], max_tokens=24, temperature=0)
    assert text == done["choices"][0]["text"]
    assert client.messages.count_tokens(model="thinker", messages=turns).input_tokens == prompt["count"]
    chat = {"messages": turns, "max_tokens": 24, "temperature": 0, "continue_final_message": True}
    assert thinker.post("chat/completions", **chat).json()["choices"][0]["message"]["content"] == text
    refused = thinker.post("chat/completions", **chat | {"messages": MESSAGES})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic):
    prompt = {"system": "Be brief.", "tools": TOOLS, "messages": MESSAGES, "model": "thinker"}
    counted = client.messages.count_tokens(**prompt).input_tokens
    used = ask(client, **prompt, tool_choice={"type": "auto"}).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens > 0


def test_what_is_ignored_is_said(client: anthropic.Anthropic):
    raw = client.messages.with_raw_response.create(
        **arguments({"tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]})
        | {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        thinking={"type": "enabled", "budget_tokens": 2048},
        extra_query={"beta": "true"},
        extra_headers={"anthropic-beta": "anything", "x-request-id": "mine"},
    )
    assert raw.headers["x-ridgeline-ignored"] == "tools.web_search, thinking.budget_tokens"
    assert raw.headers["request-id"] == raw.headers["x-request-id"] == "mine"
    new = client.messages.with_raw_response.create(
        **arguments({"extra_body": {"soon": 1, "evil\r\nx: y": 2, "temperature": 0}})
    )
    assert new.headers["x-ridgeline-ignored"] == "soon" and "x" not in new.headers


CALL = {"type": "tool_use", "id": "toolu_1", "name": "first", "input": {"n": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens: expected `int`, got `null`"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: a block of type 'image'"),
        (
            {"messages": [{"role": "user", "content": [CALL]}]},
            "a block of type 'tool_use' is not supported here, only text, tool_result",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a block of type 'text' needs text"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id must be"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [CALL]}]}, "cannot be continued"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "needs id and name"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [CALL]},
                    {"role": "user", "content": [RESULT | {"content": [IMAGE]}]},
                ]
            },
            "messages[1].content[0].content[0]: a block of type 'image'",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": ""}]}, "cannot be continued"),
        ({"system": [IMAGE]}, "system[0]: a block of type 'image'"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"tools": [tool("a b")]}, "tools[0].name"),
        ({"tools": [tool("a"), tool("a")]}, "one name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice asks for ['']"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice asks for ['x']"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"stop_sequences": [""]}, "a stop string must have"),
    ],
)
def test_refusals_say_what_and_where(thinker: LiveServer, body: dict, words: str):
    response = thinker.post("messages", **{"messages": MESSAGES, "max_tokens": 4} | body)
    error = response.json()
    assert response.status_code == 400 and words in error["error"]["message"], error
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == response.headers["request-id"]


def test_errors_are_the_classes_of_the_client(client: anthropic.Anthropic, thinker: LiveServer):
    with pytest.raises(anthropic.NotFoundError, match="nobody") as error:
        ask(client, model="nobody")
    assert error.value.body["error"]["type"] == "not_found_error" and error.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is"):
        ask(client, messages=without_limit("Rain. " * 3000)["messages"])
    assert thinker.client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    large = thinker.post("messages", messages=[{"role": "user", "content": "x" * (3 * 2**20)}])
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


def test_keys_come_in_either_header(model: Path):
    with serving(new_engine(model), api_key="secret") as server:
        for right in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with client_of(server, **right) as client:
                assert client.messages.count_tokens(model="thinker", messages=MESSAGES).input_tokens
        with client_of(server) as client, pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            ask(client)
        assert server.client.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200


def test_a_stream_that_breaks_ends_with_an_error(model: Path):
    engine = new_engine(model)
    executor = put_in_front(engine, FailingExecutor)
    gate = put_in_front(engine, GatedExecutor)
    with serving(engine) as server, client_of(server) as client:
        gate.release()
        with pytest.raises(anthropic.APIStatusError) as error, client.messages.stream(**arguments({})) as stream:
            for _ in stream:
                executor.broken = True
                gate.open()
        assert error.value.body["error"]["type"] == "api_error" and "secret detail" not in str(error.value)


def test_an_overload_has_a_status_of_its_own(model: Path):
    with gated_serving(model, max_queued_requests=1) as (server, gate), ThreadPoolExecutor() as pool:
        # two run, one waits
        taken = [pool.submit(server.post, "completions", prompt=[1], max_tokens=2) for _ in range(3)]
        eventually(lambda: server.engine.num_unfinished == 3)
        with client_of(server) as client, pytest.raises(anthropic.APIStatusError) as error:
            client.messages.create(**arguments({}))
        gate.open()
        assert [completion.result().status_code for completion in taken] == [200] * 3
    assert (error.value.status_code, error.value.body["error"]["type"]) == (529, "overloaded_error")
    assert error.value.response.headers["retry-after"] and error.value.request_id


def test_pings_fill_silence_but_do_not_begin():
    async def slow():
        await asyncio.sleep(0.05)
        yield b"1"
        await asyncio.sleep(0.05)
        yield b"2"

    async def read() -> list[bytes]:
        return [event async for event in with_pings(slow(), 0.01)]

    events = asyncio.run(read())
    assert events[0] == b"1" and events[-1] == b"2" and set(events[1:-1]) == {PING}


def test_a_stream_that_is_closed_while_it_is_silent_closes_its_source():
    closed = []

    async def hangs():
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def leave() -> None:
        stream = with_pings(hangs(), 0.001)
        assert [await anext(stream), await anext(stream)] == [b"1", PING]
        await stream.aclose()

    asyncio.run(leave())
    assert closed == [True]


TEXT = 'Hm, so.</think>I look.<tool_call>{"name": "f", "arguments": {"n": [1, "é"]}}</tool_call>\n' + (
    '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done. '
)
BLOCKS = [
    {"type": "thinking", "thinking": "Hm, so."},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "f", "input": {"n": [1, "é"]}},
    {"type": "tool_use", "name": "f", "input": {}},
    {"type": "text", "text": "Done. "},
]


def replayed(events: bytes) -> list[dict]:
    """The blocks that the events make, by the rules of the API and nothing of ours."""
    blocks: list[dict] = []
    texts: dict[str, str] = {}
    for lines in events.decode().split("\n\n")[:-1]:
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) and not texts
            blocks.append(event["content_block"])
            texts = {"partial_json": ""}
            continue
        assert event["index"] == len(blocks) - 1 and texts
        if event["type"] == "content_block_delta":
            kind, text = next((k, v) for k, v in event["delta"].items() if k != "type")
            texts[kind] = texts.get(kind, "") + text
        else:
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(texts["partial_json"] or "{}")
            blocks[-1] |= {kind: text for kind, text in texts.items() if kind != "partial_json"}
            texts = {}
    assert not texts
    return blocks


def bare(block: dict) -> dict:
    return {name: value for name, value in block.items() if name not in ("id", "signature")}


def test_blocks_are_the_same_wherever_the_text_is_cut():
    form = OutputFormat(FORMATS["hermes"], ["f"], chosen_reasoning("qwen3", ""), is_open=True)
    whole = replayed(ContentReader(form).feed(TEXT, last=True))
    assert [bare(block) for block in whole] == BLOCKS and whole[0]["signature"]
    for cut in range(len(TEXT) + 1):
        reader = ContentReader(form)
        events = reader.feed(TEXT[:cut], last=False) + reader.feed(TEXT[cut:], last=True)
        assert [bare(block) for block in replayed(events)] == BLOCKS
        assert [bare(msgspec.to_builtins(block)) for block in reader.content] == BLOCKS


def test_neighbours_of_one_role_are_one_message():
    turns = [
        MessageTurn(role="user", content="a"),
        MessageTurn(role="user", content=[Block(type="text", text="b")]),
        MessageTurn(role="assistant", content=[Block(type="redacted_thinking"), Block(type="text", text="c")]),
    ]
    chat = chat_of(MessagesRequest(messages=turns, max_tokens=1))
    assert [(m.role, m.content) for m in chat.messages] == [("user", "a\nb"), ("assistant", "c")]
    assert chat.continue_final_message
