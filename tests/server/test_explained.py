"""Where the time of a request went: in its response and afterwards, for whoever sent it and nobody else."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_server import LiveServer, eventually, new_engine, serving

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import RequestError
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.server import explained
from ridgeline.server.clients import Client
from ridgeline.server.explained import Explained

PROMPT = "Once upon a time there was"
SHORT = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run after all else, and other tests may be much."""
    monkeypatch.setattr(explained, "MAX_EXPLAIN_S", 300)


@pytest.fixture(scope="module")
def live(chat_model: Path) -> Iterator[LiveServer]:
    with serving(new_engine(chat_model, max_num_seqs=2), served_model_names=("m",)) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


def check(record: dict, prompt: int, output: int) -> None:
    """Limit, prediction and measurement are apart, of a named provenance, and the parts sum to the whole."""
    assert record["tokens"]["prompt"] == prompt
    assert record["tokens"]["output"] == output
    assert record["provenance"] in ("prior", "calibrated")
    assert set(record["parts"]) == {"queue", "prefill", "decode"}
    assert sum(record["decoding"].values()) == pytest.approx(record["parts"]["decode"])
    steps = [dict(zip(record["head"], step, strict=True)) for step in record["steps"]]
    assert sum(step["kind"] == "decode" for step in steps) == output - 1
    assert all(0 < step["limit_ms"] < step["predicted_ms"] and step["measured_ms"] > 0 for step in steps)


def test_a_response_says_where_its_time_went(client: openai.OpenAI) -> None:
    plain = client.completions.create(**SHORT)
    assert "explain" not in plain.to_dict()
    found = client.completions.create(**SHORT, extra_body={"explain": True})
    assert found.choices[0].text == plain.choices[0].text
    assert "error" not in found.to_dict()["explain"], found.to_dict()["explain"]
    (record,) = found.to_dict()["explain"]["outputs"]
    check(record, found.usage.prompt_tokens, 5)


def test_a_stream_says_it_in_its_last_chunk(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, "n": 2}
    chunks = list(client.chat.completions.create(**asked, stream=True, extra_body={"explain": True}))
    assert [("explain" in chunk.to_dict()) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert "error" not in chunks[-1].to_dict()["explain"], chunks[-1].to_dict()["explain"]
    records = chunks[-1].to_dict()["explain"]["outputs"]
    assert len(records) == 2
    for record in records:
        check(record, chunks[-1].usage.prompt_tokens, 4)


def test_it_can_be_asked_for_afterwards_by_either_id(live: LiveServer) -> None:
    response = live.client.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine"})
    for name in ("mine", response.json()["id"]):
        found = live.client.get(f"/v1/requests/{name}/explain")
        assert found.status_code == 200
        assert found.json()["id"] == name
        (record,) = found.json()["outputs"]
        check(record, response.json()["usage"]["prompt_tokens"], 5)
    missing = live.client.get("/v1/requests/nobody/explain")
    assert missing.status_code == 404
    assert "'nobody'" in missing.json()["error"]["message"]


def test_a_key_sees_its_own_requests_alone(chat_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "a"\n[bob]\nkey = "b"\n')
    with serving(new_engine(chat_model), api_key_file=str(keys), served_model_names=("m",)) as live:
        mine, others = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        done = live.client.post("/v1/completions", json=SHORT | {"explain": True}, headers=mine)
        assert "error" not in done.json()["explain"], done.json()["explain"]
        check(done.json()["explain"]["outputs"][0], done.json()["usage"]["prompt_tokens"], 5)
        path = f"/v1/requests/{done.json()['id']}/explain"
        assert [live.client.get(path, headers=key).status_code for key in (mine, others, {})] == [200, 404, 401]


def test_what_is_not_told_is_refused(live: LiveServer, chat_model: Path) -> None:
    beams = live.client.post("/v1/completions", json=SHORT | {"explain": True, "use_beam_search": True, "n": 2})
    assert (beams.status_code, beams.json()["error"]["param"]) == (400, "explain")
    with serving(new_engine(chat_model), explain=False, served_model_names=("m",)) as other:
        refused = other.client.post("/v1/completions", json=SHORT | {"explain": True})
        assert refused.status_code == 400
        assert "--no-explain" in refused.json()["error"]["message"]
        done = other.client.post("/v1/completions", json=SHORT)
        assert other.client.get(f"/v1/requests/{done.json()['id']}/explain").status_code == 403


def test_what_cannot_be_found_out_harms_no_response(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: str) -> None:
        raise RequestError("it takes too long")

    monkeypatch.setattr(explained, "reply_of", refuse)
    done = live.client.post("/v1/completions", json=SHORT | {"explain": True})
    assert done.status_code == 200
    assert "it takes too long" in done.json()["explain"]["error"]
    assert done.json()["choices"][0]["text"]


def test_an_engine_in_a_process_of_its_own_and_one_that_died(chat_model: Path) -> None:
    engine = ProcessEngine(EngineConfig(model=ModelConfig(model=str(chat_model), dtype="float32"), num_threads=1))
    with serving(engine, served_model_names=("m",)) as live:
        done = live.client.post("/v1/completions", json=SHORT | {"explain": True})
        assert "error" not in done.json()["explain"], done.json()["explain"]
        check(done.json()["explain"]["outputs"][0], done.json()["usage"]["prompt_tokens"], 5)
        path = f"/v1/requests/{done.json()['id']}/explain"
        before = engine.process_id
        engine._link.process.kill()
        eventually(lambda: engine.process_id not in (before, None) and engine.accepting)
        live.complete(**SHORT)  # it has the number that the other had
        assert live.client.get(path).status_code == 404


def test_as_many_are_remembered_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        process_id = 7

    monkeypatch.setattr(explained, "MAX_REQUESTS", 10)
    remembered = Explained(Engine())
    for number in range(40):
        for output in range(20):
            remembered.ended(
                "one id" if number % 2 else f"r{number}", Client(), f"c{number}", 100 * number + output + 1
            )
    assert len(remembered._sequences) <= 20
    assert all(len(seq_ids) <= explained.MAX_OUTPUTS for _, seq_ids in remembered._sequences.values())
    assert remembered._sequences["", "one id"] == (7, list(range(3901, 3909)))
