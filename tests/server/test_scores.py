"""/v1/rerank and /v1/score: the cosines of the vectors that /v1/embeddings gives, in the shapes of vLLM and Jina."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from live_server import LiveServer, serving

from ridgeline.core.config import EngineConfig
from ridgeline.engine.thread_engine import ThreadEngine

TEXTS = ["Once upon a time", "The end", "A dog ran", "Once upon a day"]


@pytest.fixture(scope="module")
def encoder(chat_model: Path) -> Iterator[LiveServer]:
    config = EngineConfig.of(str(chat_model), task="embed", dtype="float32", num_threads=1, deterministic=True)
    with serving(ThreadEngine(config)) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def cosines(encoder: LiveServer) -> np.ndarray:
    data = encoder.post("embeddings", input=TEXTS, encoding_format="float").json()["data"]
    vectors = np.array([item["embedding"] for item in data])
    return vectors @ vectors.T


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_come_closest_first(encoder: LiveServer, cosines: np.ndarray, path: str):
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    body = encoder.client.post(path, json={"query": TEXTS[0], "documents": documents, "model": None}).json()
    assert body["id"].startswith("rerank-") and body["model"]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 4
    order = np.argsort(-cosines[0, 1:], kind="stable")
    assert [result["index"] for result in body["results"]] == order.tolist()
    for result in body["results"]:
        assert result["document"] == {"text": TEXTS[1 + result["index"]]}
        assert result["relevance_score"] == pytest.approx(cosines[0, 1 + result["index"]], abs=1e-5)
    short = {"query": TEXTS[0], "documents": documents, "top_n": 1, "return_documents": False}
    (best,) = encoder.client.post(path, json=short).json()["results"]
    assert best == {"index": order[0], "relevance_score": body["results"][0]["relevance_score"]}
    same = encoder.client.post(path, json={"query": "a", "documents": ["b", "b", "b"], "top_n": 0}).json()["results"]
    assert [result["index"] for result in same] == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        (TEXTS[0], TEXTS[1], [(0, 1)]),
        (TEXTS[0], TEXTS[1:], [(0, 1), (0, 2), (0, 3)]),
        (TEXTS[1:], TEXTS[0], [(1, 0), (2, 0), (3, 0)]),
        (TEXTS[:2], TEXTS[2:], [(0, 2), (1, 3)]),
    ],
)
def test_scores_of_pairs(encoder: LiveServer, cosines: np.ndarray, first: object, second: object, pairs: list):
    body = encoder.post("score", text_1=first, text_2=second).json()
    assert body["object"] == "list" and body["created"] > 0 and body["id"].startswith("score-")
    assert [item["index"] for item in body["data"]] == list(range(len(pairs)))
    assert {item["object"] for item in body["data"]} == {"score"}
    assert [item["score"] for item in body["data"]] == pytest.approx([cosines[pair] for pair in pairs], abs=1e-5)


def test_as_many_documents_as_openai_takes_texts(encoder: LiveServer, cosines: np.ndarray):
    results = encoder.post("rerank", query=TEXTS[0], documents=[*["b"] * 2047, TEXTS[3]]).json()["results"]
    assert len(results) == 2048 and results[0]["index"] == 2047
    assert results[0]["relevance_score"] == pytest.approx(cosines[0, 3], abs=1e-5)
    data = encoder.post("score", text_1=["b"] * 2048, text_2=["b"] * 2048).json()["data"]
    assert len(data) == 2048 and data[-1]["score"] == pytest.approx(1, abs=1e-5)


def test_texts_are_cut_where_that_is_asked(encoder: LiveServer):
    body = {"text_1": "Once upon a", "text_2": "Once upon a time there was"}
    free, cut = (encoder.post("score", **body, **more).json() for more in ({}, {"truncate_prompt_tokens": 4}))
    assert cut["data"][0]["score"] == pytest.approx(1, abs=1e-5) != free["data"][0]["score"]
    long = {"query": "Once", "documents": ["b " * 5000], "truncate_prompt_tokens": -1}
    assert encoder.post("rerank", **long).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": [1]}, "documents"),
        ("rerank", {"documents": ["b"]}, "query"),
        ("rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ("rerank", {"query": "a", "documents": ["b " * 5000]}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "typo": 1}, "typo"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("score", {"text_1": [], "text_2": "a"}, "text_2"),
        ("score", {"text_1": "a"}, "text_2"),
    ],
)
def test_bad_input_names_the_field(encoder: LiveServer, path: str, body: dict, param: str):
    response = encoder.post(path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_model_that_generates_says_how(live: LiveServer):
    assert "no labels" in live.client.post("/classify", json={"input": "a"}).json()["error"]["message"]
    for path, body in (("rerank", {"query": "a", "documents": ["b"]}), ("score", {"text_1": "a", "text_2": "b"})):
        response = live.post(path, **body)
        assert response.status_code == 400 and "--task embed" in response.json()["error"]["message"]
