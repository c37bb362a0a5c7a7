"""Completions beyond one answer to one text: the best of several, text between two texts, biases by text."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, new_engine, serving

PYTHON = Path(__file__).resolve().parents[2] / "src/ridgeline/models/python-1m"
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BODY = {"prompt": ["Once upon", "A dog"], "max_tokens": 12, "temperature": 1.5, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """python-1m with the tokens of fill-in-the-middle in place of its three last ones."""
    folder = tmp_path_factory.mktemp("models") / "filler"
    shutil.copytree(PYTHON, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for number, name in zip(range(len(vocab) - 3, len(vocab)), GAP):
        (lost,) = (token for token, token_id in vocab.items() if token_id == number)
        del vocab[lost]
        merges.remove(next(pair for pair in merges if "".join(pair) == lost))
        content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with serving(new_engine(folder)) as server:
        yield server
        server.assert_idle()


def means(response: dict) -> list[float]:
    scores = [choice["logprobs"]["token_logprobs"] for choice in response["choices"]]
    return [sum(each) / len(each) for each in scores]


def test_the_best_of_several_are_those_of_the_highest_mean(live: LiveServer):
    every = live.complete(**BODY, n=6, logprobs=0)
    found, scores = every["choices"], means(every)
    assert len({choice["text"] for choice in found}) > 8, "choices that are alike would hide a mistake"
    best = live.complete(**BODY, n=2, best_of=6, logprobs=0)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for prompt in range(2):
        of_prompt = range(6 * prompt, 6 * prompt + 6)
        wanted = sorted(of_prompt, key=lambda index: -scores[index])[:2]
        kept = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in kept] == [found[index]["text"] for index in wanted]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 12 * 12
    plain = live.complete(**BODY, n=2, best_of=6)
    assert [choice["text"] for choice in plain["choices"]] == [choice["text"] for choice in best["choices"]]
    assert {choice["logprobs"] for choice in plain["choices"]} == {None}


@pytest.mark.parametrize(
    "asked", [{"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": 129}, {"best_of": 2, "stream": True}]
)
def test_a_best_of_that_makes_no_sense_is_named(live: LiveServer, asked: dict):
    refused = live.post("completions", prompt="a", **asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "best_of", refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_suffix_is_what_stands_behind_the_gap(filler: LiveServer, stream: bool):
    tokenizer = filler.engine.tokenizer
    before, behind = "def f(x):\n    return ", "\n\nprint(f(1))"
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in (before, behind)]
    prefix, suffix, middle = (tokenizer.token_id(name) for name in GAP)
    ids = [*tokenizer.encode(""), prefix, *texts[0], suffix, *texts[1], middle]
    same = {"max_tokens": 6, "temperature": 0, "stream": stream, "return_token_ids": True}
    asked = filler.post("completions", prompt=before, suffix=behind, **same)
    expected = filler.post("completions", prompt=ids, **same)
    assert asked.status_code == 200, asked.text

    def tokens(text: str) -> list[list[int]]:
        return [json.loads(line[6:])["choices"][0]["token_ids"] for line in text.split("\n\n") if line[6:7] == "{"]

    if stream:
        assert tokens(asked.text) == tokens(expected.text) != []
        return
    (got,), (want,) = asked.json()["choices"], expected.json()["choices"]
    assert (got["prompt_token_ids"], got["text"]) == (ids, want["text"])
    echoed = filler.complete(prompt=before, suffix=behind, echo=True, max_tokens=1)["choices"][0]["text"]
    assert echoed.startswith(before)


def test_a_model_that_fills_no_gap_says_so_and_long_texts_are_not_tokenized(live: LiveServer, filler: LiveServer):
    for server, body, code in (
        (live, {"prompt": "a", "suffix": "b"}, "suffix"),
        (filler, {"prompt": [5, 6], "suffix": "b"}, "suffix"),
        (filler, {"prompt": "a", "suffix": "b" * 1_000_000}, "prompt"),
    ):
        refused = server.post("completions", **body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == code, refused.text
    assert live.complete(prompt="a", suffix="", max_tokens=1)["choices"]


def test_a_bias_by_text_is_one_on_each_of_its_tokens(live: LiveServer):
    greedy = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    ids = live.engine.tokenizer.encode("dog and", add_special_tokens=False)
    assert len(ids) > 1
    by_text = live.complete(**greedy, logit_bias={"dog and": 50, "5": -1})
    assert by_text["choices"] != live.complete(**greedy)["choices"]
    by_id = live.complete(**greedy, logit_bias={**{str(token_id): 50 for token_id in ids}, "5": -1})
    assert by_text["choices"][0]["text"] == by_id["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2, "temperature": 0}
    said = [
        live.post("chat/completions", **chat, logit_bias=bias).json()["choices"][0]["message"]["content"]
        for bias in ({"dog and": 50}, {str(token_id): 50 for token_id in ids})
    ]
    assert said[0] == said[1]


def test_tokens_are_excluded_and_prompts_cut_as_in_vllm(live: LiveServer):
    tokenizer = live.engine.tokenizer
    greedy = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def choice(**body: object) -> dict:
        return live.complete(**{**greedy, **body})["choices"][0]

    assert set(choice(allowed_token_ids=[300, 301])["token_ids"]) <= {300, 301}
    plain = choice()["token_ids"]
    single, pair = tokenizer.decode(plain[1:2]), tokenizer.decode(plain[1:3])
    without = choice(bad_words=[single])["token_ids"]
    assert without[0] == plain[0] and plain[1] not in without
    changed = choice(bad_words=[pair])["token_ids"]
    assert changed[:2] == plain[:2] and changed[2] != plain[2]
    prompt_ids = tokenizer.encode(greedy["prompt"])
    cut = choice(truncate_prompt_tokens=2, echo=True)
    assert cut["prompt_token_ids"] == prompt_ids[-2:] and cut["text"].startswith(tokenizer.decode(prompt_ids[-2:]))
    assert choice(truncate_prompt_tokens=-1)["token_ids"] == plain
    room = live.engine.info().max_model_len
    assert len(choice(prompt=[5] * (room + 9), truncate_prompt_tokens=-1)["prompt_token_ids"]) == room - 8
    named = choice(return_tokens_as_token_ids=True, logprobs=1)
    assert named["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in plain]
    chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2, "logprobs": True}
    reply = live.post("chat/completions", **chat, return_tokens_as_token_ids=True, truncate_prompt_tokens=1).json()
    assert reply["usage"]["prompt_tokens"] == 1
    assert reply["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    for field, value in {
        "allowed_token_ids": [], "bad_words": [""], "truncate_prompt_tokens": 0,
    }.items():  # fmt: skip
        refused = live.post("completions", **greedy, **{field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field
    refused = live.post("completions", **greedy, allowed_token_ids=[10**6])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "allowed_token_ids"
    eos = next(iter(live.engine.info().generation.eos_token_ids))
    refused = live.post("completions", **{**greedy, "max_tokens": 4}, allowed_token_ids=[eos], min_tokens=2)
    assert refused.status_code == 400 and "leave none to be sampled" in refused.json()["error"]["message"]
