"""The two POST endpoints, over HTTP, as the official client and a plain one see them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_server import PATIENCE_S, LiveServer, new_engine, serving

from ridgeline.core.config import EngineConfig
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server.service import Service
from ridgeline.server.settings import ServerSettings

START = "Once upon a time"
GREEDY = {"temperature": 0.0}


@pytest.fixture
def client(live: LiveServer):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def lines_of(live: LiveServer, path: str, **body: object) -> list[str]:
    """The raw lines of a stream, its blank ones left out."""
    with live.client.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return response.read().decode().split("\n\n")


def chunks_of(live: LiveServer, path: str, **body: object) -> list[dict]:
    """Every event is one data line, the last is [DONE], and nothing follows it."""
    *events, done, rest = lines_of(live, path, **body)
    assert done == "data: [DONE]"
    assert rest == ""
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_golden_200_tokens(live: LiveServer, golden: dict) -> None:
    body = {"prompt": golden["prompt_ids"], "max_tokens": 200, "return_token_ids": True} | GREEDY
    completion = live.complete(**body)
    (choice,) = completion["choices"]
    assert choice["token_ids"] == golden["ids"]
    assert choice["prompt_token_ids"] == golden["prompt_ids"]
    assert choice["finish_reason"] == "length"
    assert completion["usage"]["completion_tokens"] == 200
    chunks = chunks_of(live, "completions", **body)
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == golden["ids"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_the_asynchronous_client_streams_many_at_once(live: LiveServer, client: openai.OpenAI) -> None:
    bodies = [{"model": "stories-chat", "prompt": START, "max_tokens": 8, "seed": seed} for seed in range(8)]

    async def text_of(asked: openai.AsyncOpenAI, body: dict) -> str:
        stream = await asked.completions.create(**body, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def texts() -> list[str]:
        url = f"{live.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=PATIENCE_S) as asked:
            return await asyncio.gather(*(text_of(asked, body) for body in bodies))

    expected = [client.completions.create(**body).choices[0].text for body in bodies]
    assert asyncio.run(texts()) == expected and len(set(expected)) > 1


def test_openai_completion_streamed_is_the_same(client: openai.OpenAI) -> None:
    body = {"model": "stories-chat", "prompt": START, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**body)
    assert whole.choices[0].text.startswith(", there was a little")
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        24,
    )


def test_openai_chat_streamed_is_the_same(client: openai.OpenAI) -> None:
    body = {
        "model": "stories-chat",
        "messages": [{"role": "user", "content": START}],
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**body)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content.startswith(", there was a little")
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_content_parts_developer_and_template_errors(live: LiveServer) -> None:
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    body = {"max_tokens": 4, "return_token_ids": True} | GREEDY
    joined = live.post("chat/completions", messages=[{"role": "user", "content": parts}], **body).json()
    plain = live.post("chat/completions", messages=[{"role": "user", "content": "Once upon\na time"}], **body).json()
    assert joined["prompt_token_ids"] == plain["prompt_token_ids"]
    messages = [{"role": "developer", "content": "Tell."}, {"role": "assistant"}, {"role": "user", "content": "Now."}]
    assert live.post("chat/completions", messages=messages, **body).status_code == 200


def test_chat_without_max_tokens_fills_the_context(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": START}], "ignore_eos": True, "min_tokens": 100} | GREEDY
    completion = live.post("chat/completions", **body).json()
    assert completion["usage"]["total_tokens"] == 512
    assert completion["choices"][0]["finish_reason"] == "length"


def test_n_answers_and_seeds(client: openai.OpenAI) -> None:
    body = {"model": "stories-chat", "prompt": START, "max_tokens": 12, "temperature": 1.0, "n": 3, "seed": 7}
    whole = client.completions.create(**body)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in client.completions.create(**body, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_many_prompts_number_their_answers(live: LiveServer) -> None:
    prompts = [START, "The dog", "Lily and Tom"]
    alone = [live.complete(prompt=prompt, max_tokens=8, **GREEDY)["choices"][0]["text"] for prompt in prompts]
    together = live.complete(prompt=prompts, max_tokens=8, n=2, **GREEDY)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert [choice["text"] for choice in together["choices"]] == [text for text in alone for _ in range(2)]
    by_ids = live.complete(prompt=[[1, 403], [1]], max_tokens=4, echo=True, **GREEDY)
    assert [choice["text"].split()[0] for choice in by_ids["choices"]] == ["Once", "Once"]


def test_completion_logprobs_and_echo(live: LiveServer) -> None:
    body = {"prompt": START, "max_tokens": 6, "logprobs": 3, "echo": True} | GREEDY
    choice = live.complete(**body)["choices"][0]
    lists = choice["logprobs"]
    assert choice["text"].startswith(START)
    assert lists["tokens"][0] == "<s>" and lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert len({len(values) for values in lists.values()}) == 1
    for token, offset in zip(lists["tokens"][2:], lists["text_offset"][2:]):
        assert choice["text"][offset : offset + len(token)] == token
    for logprob, top in zip(lists["token_logprobs"][-6:], lists["top_logprobs"][-6:]):
        assert len(top) == 3 and max(top.values()) == logprob <= 0  # greedy: the chosen one is the likeliest
    chunks = chunks_of(live, "completions", **body)
    for name, values in lists.items():
        assert [value for chunk in chunks for value in chunk["choices"][0]["logprobs"][name]] == values
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_an_echo_of_no_tokens_scores_the_prompt(live: LiveServer) -> None:
    body = {"prompt": [START, "The"], "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True, **GREEDY}
    more, none = (live.complete(max_tokens=count, **body)["choices"] for count in (1, 0))
    for one, other in zip(more, none, strict=True):
        assert (other["text"], other["token_ids"]) == ((START, START, "The", "The")[other["index"]], [])
        assert other["logprobs"] == {name: values[:-1] for name, values in one["logprobs"].items()}
    chunks = chunks_of(live, "completions", max_tokens=0, **body)
    assert sorted(each["text"] for chunk in chunks for each in chunk["choices"]) == [START, START, "The", "The"]
    assert live.post("completions", prompt=START, max_tokens=0).status_code == 400


def test_chat_logprobs_carry_the_bytes_of_the_text(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="stories-chat",
        messages=[{"role": "user", "content": START}],
        max_tokens=10,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    entries = completion.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == completion.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob


def test_prompt_logprobs(live: LiveServer) -> None:
    completion = live.complete(prompt=[1, 403, 407], max_tokens=1, prompt_logprobs=2, **GREEDY)
    first, second, third = completion["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["403"]["rank"] == 1 and second["403"]["decoded_token"] == " Once"
    assert set(third["407"]) == {"logprob", "rank", "decoded_token"}


def test_stop_string_is_cut_and_named(client: openai.OpenAI, live: LiveServer) -> None:
    body = {"model": "stories-chat", "prompt": START, "max_tokens": 40, "temperature": 0, "stop": ["little", "zebra"]}
    whole = client.completions.create(**body)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].text == ", there was a "
    assert whole.choices[0].stop_reason == "little"
    streamed = [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]
    assert "".join(choice.text for choice in streamed) == ", there was a "
    assert streamed[-1].finish_reason == "stop"
    response = live.complete(**body, include_stop_str_in_output=True)
    assert response["choices"][0]["text"] == ", there was a little"


def test_cached_tokens_are_reported(live: LiveServer) -> None:
    prompt = [1, *range(300, 340)]
    first = live.complete(prompt=prompt, max_tokens=1)
    again = live.complete(prompt=prompt, max_tokens=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_sampling_fields_reach_the_sampler(live: LiveServer) -> None:
    ids = {"prompt": [1], "max_tokens": 5, "return_token_ids": True}
    forced = live.complete(**ids, **GREEDY, logit_bias={"300": 100})
    assert forced["choices"][0]["token_ids"] == [300] * 5
    stopped = live.complete(**ids, **GREEDY, stop_token_ids=[407])
    assert stopped["choices"][0]["token_ids"][-1] == 407
    assert stopped["choices"][0]["stop_reason"] == 407
    greedy = live.complete(**ids, **GREEDY)["choices"][0]["token_ids"]
    assert live.complete(**ids, temperature=1.0, top_k=1)["choices"][0]["token_ids"] == greedy
    assert live.complete(**ids, temperature=1.0, min_p=1.0)["choices"][0]["token_ids"] == greedy
    assert live.complete(**ids, temperature=1.0, top_p=1e-6)["choices"][0]["token_ids"] == greedy


def test_timings_at_the_end_only(live: LiveServer) -> None:
    chunks = chunks_of(live, "completions", prompt=START, max_tokens=4)
    assert all("timings" not in chunk["choices"][0] for chunk in chunks[:-1])
    timings = chunks[-1]["choices"][0]["timings"]
    assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["latency_ms"]


def test_neutral_openai_fields_are_taken(live: LiveServer) -> None:
    neutral = {
        "store": False,
        "parallel_tool_calls": True,
        "metadata": {"team": "a"},
        "service_tier": "fast",
        "top_logprobs": 0,
        "modalities": ["text"],
        "logit_bias": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "user": "someone",
        "safety_identifier": "s",
        "reasoning_effort": None,
    }
    response = live.post("chat/completions", messages=[{"role": "user", "content": START}], max_tokens=2, **neutral)
    assert response.status_code == 200, response.text
    assert response.json()["service_tier"] == "default"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("stories-chat", "model", 512)
    assert client.models.retrieve("stories-chat").id == "stories-chat"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@pytest.fixture
def eager(chat_model: Path) -> Iterator[LiveServer]:
    """A server that verifies every draft, whatever a busy machine makes of its steps' times."""
    with serving(new_engine(chat_model, SpeculationConfig(adaptive_speculation=False))) as server:
        yield server


def test_a_prediction_is_followed_and_counted(eager: LiveServer) -> None:
    """OpenAI's field, with speculation off: the same tokens, and how many of the prediction's were accepted."""
    live, client = eager, openai.OpenAI(base_url=f"{eager.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)
    asked = {"model": "stories-chat", "messages": [{"role": "user", "content": START}], "max_tokens": 120}
    plain = client.chat.completions.create(**asked, temperature=0)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    assert "draft_n" not in plain.choices[0].timings
    parts = [{"type": "text", "text": text}]
    for content, others in ((text, {}), (parts, {"stream": True, "stream_options": {"include_usage": True}})):
        prediction = {"type": "content", "content": content}
        got = client.chat.completions.create(**asked, temperature=0, prediction=prediction, **others)
        if others:
            *chunks, last = got
            said, usage, timings = "", last.usage, chunks[-1].choices[0].timings
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            said, usage, timings = got.choices[0].message.content, got.usage, got.choices[0].timings
        details = usage.completion_tokens_details
        assert said == text
        assert details.accepted_prediction_tokens == timings["draft_n_accepted"] > 0
        assert details.rejected_prediction_tokens == timings["draft_n"] - timings["draft_n_accepted"]
    off = {"prediction": prediction, "speculation": {"enabled": False}}
    (choice,) = (body := live.post("chat/completions", **asked, temperature=0, **off).json())["choices"]
    assert choice["message"]["content"] == text
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert "draft_n" not in choice["timings"]


def test_messages_of_other_servers_are_taken(client: openai.OpenAI) -> None:
    """What clients add to messages and parts, our own reply sent back, and hints that change nothing."""
    model = client.models.list().data[0].id
    first = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], max_tokens=3)
    reply = first.choices[0].message.model_dump() | {"reasoning_details": [], "id": "m1"}
    parts = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    second = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "user", "content": "a"},
            reply,
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": parts},
        ],
        max_tokens=3,
        store=True,
        service_tier="flex",
        verbosity="low",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": True},
        extra_body={"prompt_cache_options": {"a": 1}},
    )
    assert list(second)[-1].usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"include_usage": True}, [None, None, 3]),
        ({"include_usage": True, "continuous_usage_stats": True}, [1, 2, 3, 3]),
        ({"continuous_usage_stats": True}, ["absent"] * 3),
    ],
)
def test_which_chunks_have_token_counts(live: LiveServer, options: dict, counts: list) -> None:
    body = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "stream": True, "stream_options": options}
    lines = live.post("completions", **body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    usages = [chunk.get("usage", "absent") for chunk in chunks]
    got = [usage["completion_tokens"] if isinstance(usage, dict) else usage for usage in usages]
    assert got[-1] == counts[-1] and set(got) == set(counts), got


def test_the_fingerprint_tells_what_computes_the_digits(client: openai.OpenAI, chat_model: Path) -> None:
    asked = {"model": "stories-chat", "max_tokens": 2}
    chat = asked | {"messages": [{"role": "user", "content": START}]}
    whole = client.chat.completions.create(**chat)
    assert whole.choices[0].message.annotations == [] and whole.choices[0].message.refusal is None
    found = {whole.system_fingerprint, client.completions.create(**asked, prompt=START).system_fingerprint}
    found |= {chunk.system_fingerprint for chunk in client.chat.completions.create(**chat, stream=True)}
    found |= {chunk.system_fingerprint for chunk in client.completions.create(**asked, prompt=START, stream=True)}
    (name,) = found
    for dtype in ("float32", "bfloat16"):
        engine = ThreadEngine(EngineConfig.of(str(chat_model), dtype=dtype, num_threads=1))
        fingerprint = Service(engine, engine.tokenizer, ServerSettings()).fingerprint
        assert fingerprint.startswith("fp_") and (fingerprint == name) is (dtype == "float32")
        engine.stop()
