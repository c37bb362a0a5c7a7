"""Vectors and token ids over HTTP, by the official client and as vLLM's endpoints have them."""

import base64
import json
import shutil
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
def embedder(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Of a model that was trained to have its vectors cut."""
    folder = tmp_path_factory.mktemp("models") / "nested"
    shutil.copytree(chat_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    with serving(ThreadEngine(EngineConfig.of(str(folder), task="embed", dtype="float32", num_threads=1))) as server:
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


def test_long_inputs_are_cut_where_that_is_asked(embedder: LiveServer):
    ids = embedder.client.post("/tokenize", json={"prompt": "Once upon a time there was a dog"}).json()["tokens"]
    text = embedder.post("embeddings", input="Once upon a time there was a dog", truncate_prompt_tokens=4).json()
    begun = embedder.post("embeddings", input=[ids[:4], ids], truncate_prompt_tokens=4).json()
    assert text["usage"]["prompt_tokens"] == 4 and begun["usage"]["prompt_tokens"] == 8
    for item in begun["data"]:
        np.testing.assert_allclose(item["embedding"], text["data"][0]["embedding"], atol=1e-6)
    most = embedder.client.get("/v1/models").json()["data"][0]["max_model_len"]
    for given in ("a " * 9000, [1] * 9000):
        response = embedder.post("embeddings", input=given, truncate_prompt_tokens=-1)
        assert response.json()["usage"]["prompt_tokens"] == most, response.text


@pytest.mark.parametrize("dimensions", [[8, 16], None])
def test_vectors_are_cut_only_where_the_model_was_trained_for_it(
    chat_model: Path, tmp_path: Path, dimensions: list[int] | None
):
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": dimensions}))
    with serving(ThreadEngine(EngineConfig.of(str(folder), task="embed", dtype="float32", num_threads=1))) as server:
        refused = server.post("embeddings", input="a", dimensions=9)
        words = "does not say that its first dimensions" if dimensions is None else "must be one of 8, 16, got 9"
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "dimensions"
        assert dimensions is None or server.post("embeddings", input="a", dimensions=8).status_code == 200


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
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1, or from 1"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
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
