"""langchain-openai: chat over both of OpenAI's endpoints, text completions, tools, structured output, vectors."""

import asyncio

from driving import EMBEDS, GREEDY, MODEL, PAIR, TEXT, TOOL, URL, check, post, run_checks, said
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

WHOSE = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "unused", "max_retries": 0}
LONG = {"max_tokens": 200, "temperature": 1, "seed": 2}


class Pair(BaseModel, extra="forbid"):
    """A flag and a digit."""

    ok: bool
    n: int = Field(ge=0, le=9)


def chat_model(**options: object) -> ChatOpenAI:
    return ChatOpenAI(**{**WHOSE, **GREEDY, **options})


@check
def chat():
    for responses in (False, True):
        reply = chat_model(use_responses_api=responses, **({"max_tokens": 16} if responses else {})).invoke(TEXT)
        assert reply.text.startswith(said()), responses
        assert reply.usage_metadata["output_tokens"] == (16 if responses else 8)
    return reply.text


@check
def stream_with_usage():
    for responses in (False, True):
        model = chat_model(use_responses_api=responses, stream_usage=True)
        chunks = list(model.stream(TEXT))
        assert "".join(chunk.text for chunk in chunks) == model.invoke(TEXT).text, responses
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    return len(chunks)


@check
def asynchronous_and_batches():
    model = chat_model()

    async def streamed() -> str:
        return "".join([chunk.text async for chunk in model.astream(TEXT)])

    assert asyncio.run(streamed()) == said()
    assert {reply.text for reply in model.batch([TEXT] * 4)} == {said()}
    return 4


@check
def messages_of_all_roles():
    messages = [SystemMessage("a"), HumanMessage("b"), AIMessage("c"), HumanMessage([{"type": "text", "text": TEXT}])]
    return chat_model().invoke(messages).usage_metadata["input_tokens"]


@check
def log_probabilities():
    found = chat_model(logprobs=True, top_logprobs=2).invoke(TEXT).response_metadata["logprobs"]["content"]
    assert len(found) == 8 and all(len(each["top_logprobs"]) == 2 for each in found)
    return found[0]["token"]


@check
def structured_output():
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            for responses in (False, True):
                seed = {} if responses else {"seed": 2}
                model = ChatOpenAI(**WHOSE, max_tokens=200, temperature=1, use_responses_api=responses, **seed)
                found = model.with_structured_output(Pair, method=method, strict=strict).invoke(TEXT)
                assert isinstance(found, Pair), (method, strict, responses)
    raw = chat_model(**LONG).with_structured_output(Pair, include_raw=True).invoke(TEXT)
    assert isinstance(raw["parsed"], Pair) and raw["parsing_error"] is None
    named = {"title": "pair", "description": "A pair.", **PAIR}
    assert set(chat_model(**LONG).with_structured_output(named).invoke(TEXT)) == {"ok", "n"}
    return found


@check
def structured_output_streamed():
    chunks = list(chat_model(**LONG).with_structured_output(Pair).stream(TEXT))
    assert isinstance(chunks[-1], Pair)
    return chunks[-1]


@check
def tools_there_and_back():
    for responses in (False, True):
        options = {"use_responses_api": responses} | ({} if responses else {"seed": 2})
        model = ChatOpenAI(**WHOSE, max_tokens=200, temperature=1, **options)
        first = model.bind_tools([TOOL], tool_choice="required").invoke(TEXT)
        assert {call["name"] for call in first.tool_calls} == {"pair"}, first
        results = [ToolMessage("done", tool_call_id=call["id"]) for call in first.tool_calls]
        last = model.bind_tools([TOOL]).invoke([HumanMessage(TEXT), first, *results])
        assert last.usage_metadata["output_tokens"] > 0
    return first.tool_calls


@check
def tools_streamed():
    model = chat_model(**LONG).bind_tools([TOOL], tool_choice="pair")
    calls = [call for chunk in model.stream(TEXT) for call in chunk.tool_call_chunks]
    assert {call["name"] for call in calls if call["name"]} == {"pair"} and len(calls) > 1
    return len(calls)


@check
def text_completions():
    model = OpenAI(**WHOSE, **GREEDY)
    expected = post("v1/completions", prompt=TEXT, **GREEDY)["choices"][0]["text"]
    assert model.invoke(TEXT) == expected == "".join(model.stream(TEXT))
    assert model.generate([TEXT, "def "]).llm_output["token_usage"]["completion_tokens"] == 16
    return expected


@check
def vectors():
    model = OpenAIEmbeddings(
        model=MODEL, base_url=f"{EMBEDS}/v1", api_key="unused", check_embedding_ctx_length=False, max_retries=0
    )
    expected = post("v1/embeddings", EMBEDS, input=[TEXT])["data"][0]["embedding"]
    for found in (model.embed_query(TEXT), *model.embed_documents([TEXT])):
        assert all(abs(x - y) < 1e-6 for x, y in zip(found, expected, strict=True))
    return len(expected)


run_checks("langchain-openai")
