"""LiteLLM: its providers that speak to servers like this one, whole and streamed."""

import asyncio
import json

import litellm
from driving import EMBEDS, GREEDY, MESSAGES, MODEL, PAIR, TEXT, TOOL, URL, check, is_pair, post, run_checks, said
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
WHOSE = {"api_base": f"{URL}/v1", "api_key": "unused", "timeout": 120, "num_retries": 0}
LONG = {"max_tokens": 200, "temperature": 1}


class Pair(BaseModel, extra="forbid"):
    ok: bool
    n: int = Field(ge=0, le=9)


def ask(provider: str = "openai", **body: object):
    where = {"api_base": URL} if provider == "anthropic" else {}
    return litellm.completion(
        **{"model": f"{provider}/{MODEL}", "messages": MESSAGES, **WHOSE, **where, **GREEDY, **body}
    )


def text_of(chunks: list) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@check
def chat():
    for provider in ("openai", "hosted_vllm", "anthropic", "litellm_proxy", "custom_openai"):
        reply = ask(provider)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (said(), "length"), provider
        assert reply.usage.completion_tokens == 8, provider
    return reply.choices[0].message.content


@check
def stream_with_usage():
    for provider in ("openai", "hosted_vllm", "anthropic"):
        chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
        assert text_of(chunks) == said(), provider
        assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)][-1] == 8, provider
        rebuilt = litellm.stream_chunk_builder(chunks)
        assert rebuilt.choices[0].message.content == said(), provider
    return len(chunks)


@check
def asynchronous():
    async def both():
        asked = {"model": f"openai/{MODEL}", "messages": MESSAGES, **WHOSE, **GREEDY}
        return await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(4)))

    assert {reply.choices[0].message.content for reply in asyncio.run(both())} == {said()}
    return 4


def is_call(call) -> bool:
    """hosted_vllm takes additionalProperties out of a schema, and a model this small then adds some."""
    found = json.loads(call.function.arguments)
    return call.function.name == "pair" and is_pair({name: found[name] for name in ("ok", "n")})


@check
def tools():
    for provider in ("openai", "hosted_vllm", "anthropic"):
        reply = ask(provider, tools=[TOOL], tool_choice="required", **LONG)
        (call, *_) = reply.choices[0].message.tool_calls
        assert is_call(call), (provider, call.function.arguments)
        assert reply.choices[0].finish_reason in ("tool_calls", "length"), provider
    return call.function.arguments


@check
def tools_streamed():
    for provider in ("openai", "hosted_vllm", "anthropic"):
        named = {"type": "function", "function": {"name": "pair"}}
        chunks = list(ask(provider, tools=[TOOL], tool_choice=named, stream=True, **LONG))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert is_call(call), (provider, call.function.arguments)
    return call.function.arguments


@check
def tools_there_and_back():
    first = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **LONG).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in first.tool_calls]
    reply = ask(messages=[*MESSAGES, first, *results], tools=[TOOL], tool_choice="none")
    return reply.usage.prompt_tokens


@check
def structured_output():
    named = {"type": "json_schema", "json_schema": {"name": "pair", "schema": PAIR, "strict": True}}
    for provider in ("openai", "hosted_vllm"):
        for form in (Pair, named):
            reply = ask(provider, response_format=form, **LONG)
            Pair.model_validate_json(reply.choices[0].message.content)
    chunks = list(ask(response_format=named, stream=True, **LONG))
    Pair.model_validate_json(text_of(chunks))
    return reply.choices[0].message.content


@check
def log_probabilities():
    reply = ask(logprobs=True, top_logprobs=3)
    (first, *_) = reply.choices[0].logprobs.content
    assert len(reply.choices[0].logprobs.content) == 8 and len(first.top_logprobs) == 3
    assert first.logprob == max(top.logprob for top in first.top_logprobs) <= 0
    return first.token


@check
def many_parameters():
    reply = ask(
        "hosted_vllm",
        n=2,
        seed=3,
        stop=["\n\n"],
        top_p=0.9,
        temperature=0.8,
        user="me",
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -1},
        extra_body={"top_k": 20, "min_p": 0.01, "guided_choice": ["a", "b"]},
    )
    assert {choice.message.content for choice in reply.choices} <= {"a", "b"} and len(reply.choices) == 2
    return reply.system_fingerprint


@check
def text_completion():
    asked = {"model": f"text-completion-openai/{MODEL}", "prompt": TEXT, **WHOSE, **GREEDY}
    expected = post("v1/completions", prompt=TEXT, **GREEDY)["choices"][0]["text"]
    assert litellm.text_completion(**asked).choices[0].text == expected
    streamed = litellm.text_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed if chunk.choices) == expected
    reply = litellm.text_completion(**{**asked, "logprobs": 2, "echo": True})
    assert reply.choices[0].text == TEXT + expected
    return expected


@check
def responses():
    asked = {"model": f"openai/{MODEL}", "input": TEXT, **WHOSE, "temperature": 0, "max_output_tokens": 16}
    reply = litellm.responses(**asked)
    text = reply.output[0].content[0].text
    events = list(litellm.responses(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    return text


@check
def anthropic_messages():
    asked = {"model": f"openai/{MODEL}", "messages": MESSAGES, **WHOSE, **GREEDY}
    reply = asyncio.run(litellm.anthropic.messages.acreate(**asked))
    return reply["content"][0]["text"]


@check
def embeddings():
    whose = {**WHOSE, "api_base": f"{EMBEDS}/v1"}
    expected = [each["embedding"] for each in post("v1/embeddings", EMBEDS, input=[TEXT, "a"])["data"]]
    for provider in ("openai", "hosted_vllm"):
        for form in ("float", "base64"):
            found = litellm.embedding(
                model=f"{provider}/{MODEL}", input=[TEXT, "a"], encoding_format=form, **whose
            ).data
            if form == "float":
                for each, vector in zip(found, expected, strict=True):
                    assert all(abs(x - y) < 1e-6 for x, y in zip(each["embedding"], vector, strict=True)), provider
    return len(expected[0])


@check
def errors_are_its_classes():
    for kind, body in (
        (litellm.NotFoundError, {"model": "openai/nope"}),
        (litellm.ContextWindowExceededError, {"max_tokens": 100_000}),
        (litellm.BadRequestError, {"temperature": -1}),
    ):
        try:
            ask(**body)
        except kind as error:
            last = error
        else:
            raise AssertionError(f"no {kind.__name__}")
    return last


run_checks("litellm")
