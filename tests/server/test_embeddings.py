"""Vectors and token ids over HTTP, by the official client and as vLLM's endpoints have them."""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from live_server import PATIENCE_S, LiveServer, serving

from ridgeline import LLM
from ridgeline.core.config import EngineConfig
from ridgeline.engine.thread_engine import ThreadEngine

TEXTS = ["Once upon a time", "The end"]


@pytest.fixture(scope="module")
def embedder(chat_model: Path) -> Iterator[LiveServer]:
    config = EngineConfig.of(str(chat_model), task="embed", dtype="float32", num_threads=1)
    with serving(ThreadEngine(config)) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def expected(chat_model: Path) -> list[np.ndarray]:
    llm = LLM(str(chat_model), task="embed", dtype="float32", num_threads=1)
    return [output.embedding for output in llm.embed(TEXTS)]


def test_the_official_client(embedder: LiveServer, expected: list[np.ndarray]):
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S) as client:
        model = client.models.list().data[0].id
        for encoding in ({}, {"encoding_format": "float"}):  # by itself it asks for base64
            answer = client.embeddings.create(model=model, input=TEXTS, **encoding)
            assert [item.index for item in answer.data] == [0, 1]
            for item, vector in zip(answer.data, expected):
                np.testing.assert_allclose(item.embedding, vector, atol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
        (short,) = client.embeddings.create(model=model, input=TEXTS[0], dimensions=8).data
        np.testing.assert_allclose(short.embedding, expected[0][:8] / np.linalg.norm(expected[0][:8]), atol=1e-6)


def test_token_ids_as_input(embedder: LiveServer, expected: list[np.ndarray]):
    ids = embedder.client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    for given, count in ((ids, 1), ([ids, ids], 2)):
        data = embedder.post("embeddings", input=given, encoding_format="base64").json()["data"]
        assert len(data) == count
        vector = np.frombuffer(base64.b64decode(data[-1]["embedding"]), dtype="<f4")
        np.testing.assert_allclose(vector, expected[0], atol=1e-6)


def test_as_many_texts_as_openai_takes(embedder: LiveServer, expected: list[np.ndarray]):
    data = embedder.post("embeddings", input=[*["a"] * 2047, TEXTS[0]]).json()["data"]
    assert len(data) == 2048
    np.testing.assert_allclose(data[-1]["embedding"], expected[0], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "list of token ids"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": ""}, "input", None),
        ({"input": [10**6]}, "input", "token ids must be from 0"),
        ({"input": [1] * 5000}, "input", "context"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 10**6}, "dimensions", "at most"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({}, "input", "input"),
    ],
)
def test_bad_input_names_the_field(embedder: LiveServer, body: dict, param: str, words: str | None):
    response = embedder.post("embeddings", **body)
    if words is None:  # the start of a text is a token
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_a_model_does_what_it_was_loaded_for(embedder: LiveServer, live: LiveServer):
    refused = embedder.post("completions", prompt="a")
    assert refused.status_code == 400 and "embed" in refused.json()["error"]["message"]
    refused = live.post("embeddings", input="a")
    assert refused.status_code == 400 and "--task embed" in refused.json()["error"]["message"]


def test_tokenize_and_back(live: LiveServer):
    for root in ("", "/v1"):
        body = live.client.post(f"{root}/tokenize", json={"prompt": TEXTS[0], "return_token_strs": True}).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] > 0
        plain = live.client.post(f"{root}/tokenize", json={"content": TEXTS[0], "add_special_tokens": False}).json()
        assert plain["tokens"] == body["tokens"][1:] and plain["token_strs"] is None
        text = live.client.post(f"{root}/detokenize", json={"tokens": plain["tokens"]}).json()
        assert text == {"prompt": TEXTS[0]}
    messages = [{"role": "user", "content": "Hi"}]
    chat = live.client.post("/tokenize", json={"messages": messages}).json()["count"]
    usage = live.post("chat/completions", messages=messages, max_tokens=1).json()["usage"]
    assert chat == usage["prompt_tokens"]
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": messages}), ("/detokenize", {})):
        assert live.client.post(path, json=body).status_code == 400
    assert live.client.post("/detokenize", json={"tokens": [-1]}).json()["error"]["param"] == "tokens"
    assert live.client.get("/version").json()["version"]
