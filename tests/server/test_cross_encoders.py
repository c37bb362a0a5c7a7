"""/rerank and /score of models that read two texts together: the sigmoid of what transformers' own head gives."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from live_server import LiveServer, serving
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, ModelLoadError, RequestError
from ridgeline.engine.llm import LLM
from ridgeline.engine.thread_engine import ThreadEngine

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "dog", "cat", "ran", "slept", "sat", "on", "the", "mat"]
WORDS += ["and", "then", "some", "more"]
QUERY, DOCUMENTS = "a dog", ["a cat sat", "the dog ran and then slept on the mat", "more", "a dog", "cat " * 20]
TINY = {"vocab_size": len(WORDS), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
TINY |= {"intermediate_size": 80, "max_position_embeddings": 66, "pad_token_id": 0}
KINDS = {
    "bert": ("Bert", {}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "roberta": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
}


def save_tokenizer(folder: Path, *, with_types: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    second = 1 if with_types else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def save(folder: Path, kind: str, num_labels: int = 1) -> torch.nn.Module:
    """A random classifier whose logits are far enough apart to tell one pair from another."""
    name, fields = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(TINY | fields), num_labels=num_labels)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    save_tokenizer(folder, with_types=kind == "bert")
    return model


def expected(model: torch.nn.Module, folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """The raw logits, one pair at a time; positions are the text's, whatever its token ids are."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    logits = []
    for encoding in (tokenizer.encode(*pair) for pair in pairs):
        inputs = {"input_ids": torch.tensor([encoding.ids])}
        if "bert" in model.config.model_type:
            inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
            first = 0 if model.config.model_type == "bert" else model.config.pad_token_id + 1
            inputs["position_ids"] = torch.arange(first, first + len(encoding.ids))[None]
        with torch.no_grad():
            logits.append(float(model(**inputs).logits[0, 0]))
    return logits


@pytest.fixture(scope="module", params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, list[float]]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save(folder, request.param)
    config = EngineConfig.of(str(folder), dtype="float32", backend=backend, num_threads=1, max_num_seqs=8)
    with serving(ThreadEngine(config)) as server:
        yield server, expected(model, folder, [(QUERY, document) for document in DOCUMENTS])
        server.assert_idle()


def sigmoid(logits: list[float]) -> np.ndarray:
    return 1 / (1 + np.exp(-np.array(logits)))


def test_scores_are_those_of_transformers(served: tuple[LiveServer, list[float]]):
    server, logits = served
    assert np.ptp(logits) > 0.05, "pairs that score alike would hide a mistake"
    for path in ("/score", "/v1/score"):
        body = server.client.post(path, json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
        assert [item["score"] for item in body["data"]] == pytest.approx(sigmoid(logits), abs=1e-5)
    raw = server.post("score", text_1=[QUERY] * 5, text_2=DOCUMENTS, use_activation=False).json()["data"]
    assert [item["score"] for item in raw] == pytest.approx(logits, abs=2e-4)


def test_documents_are_ranked(served: tuple[LiveServer, list[float]]):
    server, logits = served
    order = np.argsort(-np.array(logits), kind="stable").tolist()
    asked = {"query": QUERY, "documents": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = server.client.post(path, json=asked | {"top_n": 3}).json()
        assert [result["index"] for result in body["results"]] == order[:3]
        found = [result["relevance_score"] for result in body["results"]]
        assert found == pytest.approx(sigmoid(logits)[order[:3]], abs=1e-5)
        assert ("document" in body["results"][0]) == (path != "/v2/rerank")
    assert body["meta"]["tokens"]["input_tokens"] > 20 and set(body) == {"id", "results", "meta"}


def test_a_long_document_is_cut_where_that_is_asked(served: tuple[LiveServer, list[float]]):
    server, _ = served
    whole = {"query": QUERY, "documents": ["cat cat cat", "cat " * 20]}
    cut = server.client.post("/v2/rerank", json=whole | {"max_tokens_per_doc": 3}).json()["results"]
    assert cut[0]["relevance_score"] == pytest.approx(cut[1]["relevance_score"], abs=1e-6)
    apart = server.client.post("/v2/rerank", json=whole).json()["results"]
    assert abs(apart[0]["relevance_score"] - apart[1]["relevance_score"]) > 1e-4
    long = server.post("rerank", query=QUERY, documents=["cat " * 100])
    assert long.status_code == 400 and long.json()["error"]["param"] == "documents", long.text


def test_a_classifier_gives_no_vectors_and_no_text(served: tuple[LiveServer, list[float]]):
    server, _ = served
    refused = server.post("embeddings", input="a dog")
    assert refused.status_code == 400 and "/v1/score" in refused.json()["error"]["message"]
    assert server.post("completions", prompt="a dog").status_code == 400
    many = server.post("score", text_1="a", text_2=["b"] * 2049)
    assert many.status_code == 400 and many.json()["error"]["param"] == "text_1", many.text
    long = {"query": "a dog", "documents": ["b " * 3000], "truncate_prompt_tokens": 12}
    assert server.post("rerank", **long).json()["usage"]["prompt_tokens"] == 12


def test_more_labels_than_one_are_no_score_but_classes(tmp_path: Path):
    labels, texts = ["bad", "good", "unknown"], ["the dog ran", "some more", "a cat sat on the mat"]
    model = save(tmp_path, "bert", num_labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {str(number): labels[number] for number in (2, 0, 1)}  # in another order
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with torch.no_grad():
        logits = [model(torch.tensor([tokenizer.encode(text).ids])).logits[0] for text in texts]
    with serving(ThreadEngine(EngineConfig.of(str(tmp_path), dtype="float32", num_threads=1))) as server:
        refused = server.post("rerank", query="a", documents=["b"])
        assert refused.status_code == 400 and "3 labels" in refused.json()["error"]["message"]
        body = server.client.post("/classify", json={"input": texts}).json()
        raw = server.client.post("/classify", json={"input": texts, "use_activation": False}).json()
        alone = server.client.post("/classify", json={"input": tokenizer.encode(texts[1]).ids}).json()
    assert body["object"] == "list" and body["id"].startswith("classify-") and body["usage"]["prompt_tokens"] > 9
    for index, (each, expected) in enumerate(zip(body["data"], logits, strict=True)):
        assert each["probs"] == pytest.approx(torch.softmax(expected, 0).tolist(), abs=1e-5)
        assert raw["data"][index]["probs"] == pytest.approx(expected.tolist(), abs=2e-4)
        told = (each["index"], each["label"], each["num_classes"])
        assert told == (index, labels[int(expected.argmax())], 3)
    assert alone["data"][0]["probs"] == pytest.approx(body["data"][1]["probs"], abs=1e-6)


def test_one_label_is_a_class_by_its_sigmoid(served: tuple[LiveServer, list[float]]):
    server, _ = served
    (raw,) = server.client.post("/classify", json={"input": QUERY, "use_activation": False}).json()["data"]
    (each,) = server.client.post("/classify", json={"input": QUERY}).json()["data"]
    assert each == {
        "index": 0,
        "label": "LABEL_0",
        "probs": [pytest.approx(sigmoid(raw["probs"])[0])],
        "num_classes": 1,
    }


def test_quantized_the_head_stays_exact_and_what_lacks_is_named(tmp_path: Path):
    model = save(tmp_path, "xlm-roberta")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    config = EngineConfig.of(str(tmp_path), dtype="float32", backend="native", quantize="int8", num_threads=1)
    with serving(ThreadEngine(config)) as server:
        data = server.post("score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False).json()["data"]
    assert [each["score"] for each in data] == pytest.approx(expected(model, tmp_path, pairs), abs=0.1)
    with pytest.raises(ConfigError, match="leave task out"):
        LLM(str(tmp_path), task="generate")
    with pytest.raises(RequestError, match="classifies"):
        LLM(str(tmp_path), num_threads=1).embed("a dog")
    state = model.state_dict()
    state.pop("classifier.out_proj.weight")
    transformers.PreTrainedModel.save_pretrained(model, tmp_path, state_dict=state)
    with pytest.raises(ModelLoadError, match=r"classifier.out_proj.weight"):
        LLM(str(tmp_path))
