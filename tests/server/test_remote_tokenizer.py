"""What lm-eval asks of a server whose tokenizer it uses (`tokenizer_backend=remote`), request by request."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, new_engine, serving

from ridgeline.text.tokenizer import Tokenizer

SMALL = Path(__file__).resolve().parents[2] / "src/ridgeline/models/python-1m"
TEXT = "import os\nimport sys"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(new_engine(SMALL), enable_tokenizer_info_endpoint=True) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(SMALL)
    assert found is not None
    return found


def test_it_looks_for_special_tokens_and_a_template(live: LiveServer, tokenizer: Tokenizer):
    info = live.client.get("/tokenizer_info").json()
    assert {name: info[name] for name in tokenizer.special_tokens} == tokenizer.special_tokens
    assert info["eos_token"] == "<|endoftext|>" and info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] == tokenizer.chat_templates.get("default")
    assert info["model_max_length"] == live.engine.info().max_model_len
    (eos_id,) = live.client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert eos_id == tokenizer.token_id(info["eos_token"])


def test_it_takes_ids_there_and_back_and_scores_them(live: LiveServer, tokenizer: Tokenizer):
    ids = live.client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()["tokens"]
    assert ids == tokenizer.encode(TEXT, add_special_tokens=False)
    assert live.client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == TEXT
    body = {"model": "python-1m", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    prompts = [ids, ids[:3]]
    choices = live.complete(prompt=prompts, **body)["choices"]
    for index, (choice, prompt) in enumerate(zip(choices, prompts, strict=True)):
        logprobs = choice["logprobs"]
        assert choice["index"] == index and len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        for token, logprob, top in list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]))[
            1:
        ]:
            assert logprob <= max(top.values()) <= 0 and (top.get(token, logprob) == logprob)


def test_it_is_not_there_unless_asked_for():
    with serving(new_engine(SMALL)) as server:
        assert server.client.get("/tokenizer_info").status_code == 404
