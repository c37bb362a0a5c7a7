"""The server over an EngineClient that has no model: nothing but the protocol, a tokenizer and plain data is needed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, fake_info
from live_server import PATIENCE_S, LiveServer, eventually, serving

from ridgeline.text.tokenizer import Tokenizer

WITHOUT_TORCH = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine, fake_info
from starlette.testclient import TestClient
from ridgeline.server.app import create_app
from ridgeline.server.settings import ServerSettings
with TestClient(create_app(FakeEngine(fake_info()), None, ServerSettings())) as http:
    print(http.post("/v1/completions", json={"prompt": [10], "max_tokens": 2}).json()["choices"][0]["text"])
assert "torch" not in sys.modules, "serving a client imports torch"
"""


@pytest.fixture
def engine(chat_model: Path) -> FakeEngine:
    return FakeEngine(fake_info(), Tokenizer.from_folder(chat_model))


@pytest.fixture
def counting(engine: FakeEngine) -> Iterator[LiveServer]:
    with serving(engine) as live:
        yield live


def test_completions_and_chat_are_what_the_client_streams(counting: LiveServer, engine: FakeEngine) -> None:
    completion = counting.complete(prompt=[[10], [20, 30]], max_tokens=3, n=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in completion["choices"]] == [[11, 12, 13]] * 2 + [[31, 32, 33]] * 2
    assert completion["choices"][0]["text"] == " 11 12 13"
    assert completion["usage"]["completion_tokens"] == 12
    with counting.client.stream(
        "POST", "/v1/completions", json={"prompt": [10], "max_tokens": 2, "stream": True}
    ) as http:
        *events, done, _ = http.read().decode().split("\n\n")
    assert done == "data: [DONE]"
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events] == [" 11", " 12"]
    chat = counting.post("chat/completions", messages=[{"role": "user", "content": "Lily"}], max_tokens=1)
    assert chat.status_code == 200
    assert engine.num_unfinished == 0 and not engine.aborted


def test_requests_are_checked_and_completed_from_the_info(counting: LiveServer, engine: FakeEngine) -> None:
    counting.complete(prompt=[10], max_tokens=2, model="backwards")
    (request,) = engine.submitted
    assert (request.adapter, request.params.temperature, request.stop_ids) == (1, 0.5, frozenset({2}))
    for body, words in (
        ({"prompt": [512]}, "from 0 to 511"),
        ({"prompt": [1], "max_tokens": 64}, "maximum context length is 64 tokens"),
        ({"prompt": [1], "n": 5}, "4 sequences"),
        ({"prompt": [1], "model": "other"}, "there is counter, backwards"),
    ):
        refused = counting.post("completions", **body)
        assert refused.status_code in (400, 404) and words in refused.json()["error"]["message"]
    assert len(engine.submitted) == 1
    models = counting.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("counter", 64), ("backwards", 64)]
    assert {model["quality"] for model in models} == {"KL 0.0123 ± 0.0004 bits per token to base, of 300 tokens"}


def test_metrics_are_the_clients_stats(counting: LiveServer) -> None:
    expected = {
        "ridgeline_num_requests_running": 3,
        "ridgeline_num_requests_waiting": 4,
        "ridgeline_num_preemptions_total": 5,
        "ridgeline_kv_cache_usage_perc": 0.3,
        "ridgeline_prefix_cache_queries_total": 70,
        "ridgeline_prefix_cache_hits_total": 32,
    }
    assert {name: counting.metric(name) for name in expected} == expected


def test_a_client_without_room_is_a_503_and_a_caller_that_leaves_is_an_abort(chat_model: Path) -> None:
    engine = FakeEngine(fake_info(), room=2)
    engine.go = False
    with serving(engine, shutdown_timeout_s=0.0) as live:
        body = {"prompt": [10], "max_tokens": 2}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json=body | {"n": 2}, timeout=0.5)
        eventually(lambda: len(engine.aborted) == 1)
        assert live.post("completions", prompt=[[1], [2], [3]], max_tokens=1).status_code == 503
        assert live.client.get("/ready").status_code == 200
        live.server._signalled = True  # else the server ends with its engine
        engine.stop()
        assert live.client.get("/ready").status_code == 503
        assert live.client.get("/health").status_code == 200


def test_serving_a_client_loads_no_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "11 12"
