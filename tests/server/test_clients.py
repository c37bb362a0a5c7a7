"""Clients of others, unmodified, against a live server. Those of OpenAI and Anthropic have tests beside each endpoint.

None of these is in an extra: they pin each other's versions. A test whose client is not there skips, and says so in
capitals. `docs/howto/clients.md` has the versions that were tried.
"""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from live_server import PATIENCE_S, LiveServer, new_engine, serving, with_template
from pydantic import BaseModel, Field

from ridgeline.core.config import EngineConfig
from ridgeline.engine.thread_engine import ThreadEngine

pytestmark = pytest.mark.filterwarnings("ignore")  # what clients warn of is theirs
SMALL = Path(__file__).resolve().parents[2] / "src/ridgeline/models/python-1m"
TEMPLATE = """\
{%- if tools %}<tool_call> {{ tools | tojson }} {% endif %}\
{% for message in messages %}{{ message.content }}
{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"""
TEXT = "import os\nimport "
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "max_tokens": 8}


class Pair(BaseModel, extra="forbid"):
    """A flag and a digit, and nothing else: a model this small would go on and on."""

    ok: bool
    n: int = Field(ge=0, le=9)


PAIR = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "pair", "description": "A pair.", "parameters": PAIR}}


def client(name: str) -> ModuleType:
    """Import a client, without what it would fetch or report."""
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"NOT TESTED: {name}, for lack of it: pip install {name.replace('_', '-')} ({error})")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = with_template(SMALL, tmp_path_factory.mktemp("models") / "tiny", TEMPLATE)
    with serving(new_engine(folder)) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = with_template(SMALL, tmp_path_factory.mktemp("models") / "vectors", TEMPLATE)
    with serving(ThreadEngine(EngineConfig.of(str(folder), task="embed", num_threads=1))) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def said(tiny: LiveServer) -> str:
    """What the model says to MESSAGES."""
    return tiny.post("chat/completions", messages=MESSAGES, **GREEDY).json()["choices"][0]["message"]["content"]


class TestLitellm:
    @pytest.fixture
    def ask(self, tiny: LiveServer):
        litellm = client("litellm")
        whose = {"api_base": f"{tiny.url}/v1", "api_key": "unused", "timeout": PATIENCE_S, "num_retries": 0}
        return lambda model, **body: litellm.completion(
            **{"model": model, "messages": MESSAGES, **whose, **GREEDY, **body}
        )

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
    def test_whole_and_streamed(self, tiny: LiveServer, ask, said: str, provider: str):
        where = {"api_base": tiny.url} if provider == "anthropic" else {}
        answer = ask(f"{provider}/tiny", **where)
        assert answer.choices[0].message.content == said
        assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "length"
        chunks = list(ask(f"{provider}/tiny", stream=True, stream_options={"include_usage": True}, **where))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
        assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)][-1] == 8

    def test_tools_and_schemas(self, ask):
        answer = ask("openai/tiny", tools=[TOOL], tool_choice="required", max_tokens=200)
        (call, *_) = answer.choices[0].message.tool_calls
        assert call.function.name == "pair" and set(json.loads(call.function.arguments)) == {"ok"}
        answer = ask("openai/tiny", response_format=Pair, max_tokens=200, temperature=1, seed=1)
        Pair.model_validate_json(answer.choices[0].message.content)

    def test_errors_are_its_classes(self, ask):
        litellm = client("litellm")
        with pytest.raises(litellm.NotFoundError):
            ask("openai/nope")
        with pytest.raises(litellm.ContextWindowExceededError):
            ask("openai/tiny", max_tokens=100_000)
        with pytest.raises(litellm.BadRequestError):
            ask("openai/tiny", temperature=-1)

    def test_text_and_vectors(self, tiny: LiveServer, embedder: LiveServer):
        litellm = client("litellm")
        whose = {"api_key": "unused", "timeout": PATIENCE_S}
        model = "text-completion-openai/tiny"
        answer = litellm.text_completion(model=model, prompt=TEXT, api_base=f"{tiny.url}/v1", **whose, **GREEDY)
        assert answer.choices[0].text == tiny.complete(prompt=TEXT, **GREEDY)["choices"][0]["text"]
        vectors = litellm.embedding(model="openai/vectors", input=[TEXT, "a"], api_base=f"{embedder.url}/v1", **whose)
        expected = embedder.post("embeddings", input=[TEXT, "a"]).json()["data"]
        got = [item["embedding"] for item in vectors.data]
        assert [each["embedding"] == pytest.approx(vector, abs=1e-6) for each, vector in zip(expected, got)] == [
            True
        ] * 2


class TestLangchain:
    @pytest.fixture
    def chat(self, tiny: LiveServer):
        langchain = client("langchain_openai")
        return lambda **options: langchain.ChatOpenAI(
            **{
                "model": "tiny",
                "base_url": f"{tiny.url}/v1",
                "api_key": "unused",
                "max_retries": 0,
                **GREEDY,
                **options,
            }
        )

    @pytest.mark.parametrize("responses", [False, True])
    def test_whole_and_streamed(self, chat, said: str, responses: bool):
        model = chat(use_responses_api=responses, stream_usage=True)
        answer = model.invoke(TEXT)
        assert answer.text == said and answer.usage_metadata["output_tokens"] == 8
        chunks = list(model.stream(TEXT))
        assert "".join(chunk.text for chunk in chunks) == said
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, chat, method: str):
        model = chat(max_tokens=200, temperature=1, seed=2).with_structured_output(Pair, method=method)
        assert isinstance(model.invoke(TEXT), Pair)

    def test_tools_there_and_back(self, chat):
        messages = client("langchain_core.messages")
        model = chat(max_tokens=200).bind_tools([TOOL], tool_choice="required")
        first = model.invoke(TEXT)
        assert {call["name"] for call in first.tool_calls} == {"pair"}
        results = [messages.ToolMessage("done", tool_call_id=call["id"]) for call in first.tool_calls]
        assert chat().invoke([messages.HumanMessage(TEXT), first, *results]).usage_metadata["output_tokens"] > 0
        calls = [call for chunk in model.stream(TEXT) for call in chunk.tool_call_chunks]
        assert {call["name"] for call in calls if call["name"]} == {"pair"}

    def test_vectors(self, embedder: LiveServer):
        langchain = client("langchain_openai")
        model = langchain.OpenAIEmbeddings(
            model="vectors", base_url=f"{embedder.url}/v1", api_key="unused", check_embedding_ctx_length=False
        )
        expected = embedder.post("embeddings", input=TEXT).json()["data"][0]["embedding"]
        assert model.embed_query(TEXT) == pytest.approx(expected, abs=1e-6)


class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA", "TOOLS_STRICT"])
    def test_modes(self, tiny: LiveServer, mode: str):
        instructor, openai = client("instructor"), client("openai")
        with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S) as inner:
            ask = instructor.from_openai(inner, mode=instructor.Mode[mode]).chat.completions.create
            body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "max_retries": 0}
            if mode == "JSON":  # promises an object, not this one: a model this small writes others
                with pytest.raises(Exception, match=r"validation|Field required"):
                    ask(response_model=Pair, seed=3, **body)
            else:
                assert isinstance(ask(response_model=Pair, seed=3, **body), Pair)

    def test_anthropic(self, tiny: LiveServer):
        instructor, anthropic = client("instructor"), client("anthropic")
        with anthropic.Anthropic(base_url=tiny.url, api_key="unused", max_retries=0, timeout=PATIENCE_S) as inner:
            ask = instructor.from_anthropic(inner).messages.create
            pair = ask(model="tiny", messages=MESSAGES, max_tokens=200, response_model=Pair, max_retries=0)
        assert isinstance(pair, Pair)
