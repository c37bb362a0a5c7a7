"""The request that Learn walks through: all but its times is what the bundled model says here."""

import json
import re
from importlib import resources
from math import exp

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.explain import price

FILE = resources.files("ridgeline.server") / "ui" / "data-walk.js"


def shown(token):
    return token.replace("\n", "⏎").replace(" ", "␣") or "start"


@pytest.fixture(scope="module")
def stages():
    data = FILE.read_text(encoding="utf-8").partition("export default ")[2].rstrip(";\n")
    return {title: (says, what) for title, says, _, what in json.loads(data)["stages"]}


@pytest.fixture(scope="module")
def output(stages):
    body = json.loads(stages["HTTP"][1].partition("\n\n")[2])
    llm = LLM(body["model"])
    params = SamplingParams(max_tokens=body["max_tokens"], temperature=0, logprobs=body["logprobs"])
    return llm.generate([body["prompt"]], params, use_tqdm=False)[0], llm.get_tokenizer()


def test_its_request_is_whole(stages):
    head, _, body = stages["HTTP"][1].partition("\n\n")
    assert f"Content-Length: {len(body)}" in head
    sent = f"{head}\n\n{body}".replace("\n", "\r\n")
    assert f"sends {len(sent)} bytes" in stages["HTTP"][0]


def test_its_tokens_are_the_tokenizer_s_and_the_model_s(stages, output):
    found, tokenizer = output
    _, rows = stages["Text becomes tokens"][1]
    assert rows[1][1] == "|".join(map(str, found.prompt_token_ids))
    assert rows[0][1] == "|".join(shown(tokenizer.decode([token])) for token in found.prompt_token_ids)
    made = [row[-1] for row in stages["Token by token"][1][2]]
    assert "".join(made) == shown(found.outputs[0].text)
    assert len(made) == len(found.outputs[0].token_ids) == 8


def test_its_probabilities_are_the_model_s(stages, output):
    found, tokenizer = output
    first = {shown(tokenizer.decode([token])): logprob for token, logprob in found.outputs[0].logprobs[0].top}
    for token, probability in stages["Logits become a token"][1][2][:3]:
        assert float(probability) == pytest.approx(exp(first[token]), rel=0.05, abs=2e-3)


def test_its_steps_and_cost_are_counted(stages, output):
    prompt = len(output[0].prompt_token_ids)
    rows = stages["Token by token"][1][2]
    assert [row[:3] for row in rows] == [["prefill", prompt, 0], *(["decode", 1, prompt + i] for i in range(7))]
    assert all(0 < limit < predicted for _, _, _, limit, predicted, _, _ in rows)
    cost = price("python-9m", prompt=prompt).cost
    says = stages["A place in a step"][0]
    assert f"{cost.flops / 1e6:,.0f} MFLOP and {cost.num_bytes / 1e6:,.1f} MB" in says


def test_its_event_is_that_of_the_first_token(stages):
    event = re.search(r"data: ({.*})", stages["Tokens become text"][1])[1]
    assert shown(json.loads(event)["choices"][0]["text"]) == stages["Token by token"][1][2][0][-1]
