"""Beams are the outputs of the highest probability, as a plain search over the log-probabilities finds them."""

from pathlib import Path

import pytest
from live_server import LiveServer

from ridgeline import LLM, SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> LLM:
    return LLM(str(chat_model), dtype="float32", num_threads=1)


def plain_search(llm: LLM, prompt: list[int], width: int, num_tokens: int, penalty: float, stop_id: int | None):
    """(token ids, score) of the best outputs, and whether they end before the last token: one model call a round."""
    live, done = [((), 0.0)], []

    def score(ids, total):
        return total / len(ids) ** penalty

    for _ in range(num_tokens):
        asked = [[*prompt, *ids] for ids, _ in live]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
        outputs = llm.generate(asked, params)
        found = [
            ((*ids, token_id), total + logprob)
            for (ids, total), output in zip(live, outputs, strict=True)
            for token_id, logprob in output.outputs[0].logprobs[0].top
        ]
        found = sorted(found, key=lambda each: -each[1])
        done += [each for each in found[: 2 * width] if each[0][-1] == stop_id]
        live = [each for each in found if each[0][-1] != stop_id][:width]
    return sorted([(ids, score(ids, total)) for ids, total in [*done, *live]], key=lambda each: -each[1])[:width]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (2, 2.0)])
@pytest.mark.parametrize("stops", [False, True])
def test_beams_are_those_of_a_plain_search(live: LiveServer, llm: LLM, width: int, penalty: float, stops: bool):
    prompt = live.engine.tokenizer.encode(PROMPT)
    greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    stop_id = greedy.token_ids[5] if stops else None
    more = {"stop_token_ids": [stop_id]} if stops else {}
    said = live.complete(
        prompt=prompt, max_tokens=10, n=width, use_beam_search=True, length_penalty=penalty, return_token_ids=True,
        logprobs=2, ignore_eos=True, **more,
    )  # fmt: skip
    wanted = plain_search(llm, prompt, width, 10, penalty, stop_id)
    assert [tuple(choice["token_ids"]) for choice in said["choices"]] == [ids for ids, _ in wanted]
    for choice, (ids, score) in zip(said["choices"], wanted, strict=True):
        total = sum(choice["logprobs"]["token_logprobs"])
        assert total / len(ids) ** penalty == pytest.approx(score, abs=1e-4)
        assert choice["finish_reason"] == ("stop" if ids[-1] == stop_id else "length")
        assert choice["text"] and choice["index"] == said["choices"].index(choice)
    assert said["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in wanted)
    assert said["usage"]["prompt_tokens"] == len(prompt)


def test_one_beam_is_greedy_and_more_are_at_least_as_likely(live: LiveServer):
    ask = {"prompt": [PROMPT, "A dog"], "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    greedy = live.complete(**ask, temperature=0)["choices"]
    one = live.complete(**ask, use_beam_search=True)["choices"]
    assert [choice["text"] for choice in one] == [choice["text"] for choice in greedy]
    many = live.complete(**ask, use_beam_search=True, n=4)["choices"]
    assert [choice["index"] for choice in many] == list(range(8))
    for number, choice in enumerate(greedy):
        best = sum(many[4 * number]["logprobs"]["token_logprobs"])
        assert best >= sum(choice["logprobs"]["token_logprobs"]) - 1e-4


def test_chats_have_beams(live: LiveServer):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "use_beam_search": True, "n": 2}
    response = live.post("chat/completions", **body)
    assert response.status_code == 200, response.text
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert len(set(texts)) == 2
    live.assert_idle()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"stop": ["x"]}, "use_beam_search"),
        ({"presence_penalty": 1}, "use_beam_search"),
        ({"guided_regex": "a+"}, "use_beam_search"),
        ({"n": 11}, "n"),
        ({"use_beam_search": False, "length_penalty": 1}, "length_penalty"),
    ],
)
def test_what_beams_do_not_have_is_refused(live: LiveServer, more: dict, param: str):
    response = live.post("completions", **{"prompt": "A", "max_tokens": 4, "use_beam_search": True} | more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
