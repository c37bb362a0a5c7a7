"""What an operator relies on: request ids, keys, probes, the log, and metrics that agree with what clients counted."""

import asyncio
import json
import logging
import re
from pathlib import Path

import httpx
import pytest
from live_server import PATIENCE_S, LiveServer, eventually, new_engine, serving
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.core.errors import ConfigError
from ridgeline.core.log import JsonFormatter
from ridgeline.core.step import TokenLogprob
from ridgeline.engine.client import CAUSES
from ridgeline.server.metric_names import METRICS
from ridgeline.server.metrics import STAGES
from ridgeline.server.openai.logprobs import CompletionLogprobsWriter, TokenNames, chat_logprobs
from ridgeline.server.settings import ServerSettings, require_safe_host
from ridgeline.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/nope"), ("PUT", "/v1/models"), ("POST", "/v1/completions")]
)
def test_every_response_has_a_request_id(live: LiveServer, method: str, path: str) -> None:
    minted = live.client.request(method, path).headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{32}", minted)
    response = live.client.request(method, path, headers={"x-request-id": "Trace_1.2-b"})
    assert response.headers["x-request-id"] == "Trace_1.2-b"
    for unfit in ("a b", "a" * 129, "a/b", "a\tb", ""):
        other = live.client.request(method, path, headers={"x-request-id": unfit}).headers["x-request-id"]
        assert re.fullmatch(r"req-[0-9a-f]{32}", other)


def test_two_requests_of_one_client_id_do_not_meet(live: LiveServer, golden: dict) -> None:
    body = {"prompt": [1], "max_tokens": 30, "temperature": 0, "return_token_ids": True}

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S, headers={"x-request-id": "same"}) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(4)))

    completions = [response.json() for response in asyncio.run(both())]
    assert len({completion["id"] for completion in completions}) == 4
    assert all(completion["choices"][0]["token_ids"] == golden["ids"][:30] for completion in completions)


def test_health_and_ready(live: LiveServer) -> None:
    assert live.client.get("/health").json() == {"status": "ok"}
    assert live.client.get("/ready").json() == {"status": "ready"}


def test_api_key(chat_model: Path) -> None:
    with serving(new_engine(chat_model), api_key="right-key", served_model_names=("a", "b/c")) as live:
        body = {"model": "a", "prompt": [1], "max_tokens": 1}
        for path in ("/v1/models", "/metrics", "/v1/completions", "/nope"):
            for value in (
                None,
                "right-key",
                "Bearer",
                "Bearer right-ke",
                "Bearer right-key2",
                "Basic right-key",
            ):
                headers = {} if value is None else {"authorization": value}
                response = live.client.request("GET", path, headers=headers)
                assert response.status_code == 401, (path, value)
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "right-key" not in response.text
        odd = live.client.get("/v1/models", headers={b"authorization": b"Bearer \xff\xfe"})
        assert odd.status_code == 401
        for path in ("/health", "/ready"):
            assert live.client.get(path).status_code == 200
        live.client.headers["authorization"] = "Bearer right-key"
        assert live.post("completions", **body).status_code == 200
        assert [model["id"] for model in live.client.get("/v1/models").json()["data"]] == ["a", "b/c"]
        assert live.client.get("/v1/models/b/c").json()["id"] == "b/c"
        assert live.post("completions", **body | {"model": "b/c"}).json()["model"] == "b/c"


def test_hosts_that_others_reach_need_a_key() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        require_safe_host(host, has_keys=False, insecure_no_auth=False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="--api-key"):
            require_safe_host(host, has_keys=False, insecure_no_auth=False)
        require_safe_host(host, has_keys=True, insecure_no_auth=False)
        require_safe_host(host, has_keys=False, insecure_no_auth=True)
    with pytest.raises(ConfigError, match="empty"):
        ServerSettings(api_key=" ")
    assert "secret-key" not in repr(ServerSettings(api_key="secret-key"))


def test_metrics_agree_with_the_client(chat_model: Path) -> None:
    """Exactly: every token, answer, refusal and abort that clients saw is one that the counters saw."""
    with serving(new_engine(chat_model)) as live:
        prompt_tokens = output_tokens = 0
        reasons: list[str] = []
        bodies = [
            {"prompt": "Once upon a time", "max_tokens": 7},
            {"prompt": ["The dog", "Lily"], "max_tokens": 5, "n": 2},
            {"prompt": [1], "max_tokens": 40, "temperature": 0, "stop": "little"},
            {"prompt": [1] * 40, "max_tokens": 3},
            {"prompt": [1] * 40, "max_tokens": 3},
        ]
        cached = 0
        for body in bodies:
            completion = live.complete(**body)
            prompt_tokens += completion["usage"]["prompt_tokens"]
            output_tokens += completion["usage"]["completion_tokens"]
            cached += completion["usage"]["prompt_tokens_details"]["cached_tokens"]
            reasons += [choice["finish_reason"] for choice in completion["choices"]]
        for _ in range(3):
            assert live.post("completions", prompt=[], max_tokens=1).status_code == 400
        assert live.client.get("/nope").status_code == 404
        expected = {
            "ridgeline_prompt_tokens_total": prompt_tokens,
            "ridgeline_generation_tokens_total": output_tokens,
            'ridgeline_request_success_total{finished_reason="length"}': reasons.count("length"),
            'ridgeline_request_success_total{finished_reason="stop"}': reasons.count("stop"),
            'ridgeline_requests_rejected_total{reason="invalid_request_error"}': 3,
            'ridgeline_requests_rejected_total{reason="not_found"}': 1,
            **{f'ridgeline_requests_aborted_total{{stage="{stage}"}}': 0 for stage in STAGES},
            "ridgeline_time_to_first_token_seconds_count": len(reasons),
            "ridgeline_e2e_request_latency_seconds_count": len(reasons),
            "ridgeline_prefix_cache_hits_total": cached,
            "ridgeline_prompt_tokens_cached_total": cached,
            "ridgeline_inter_token_latency_seconds_count": output_tokens - len(reasons),
            "ridgeline_request_queue_time_seconds_count": len(reasons),
            "ridgeline_request_generation_tokens_sum": output_tokens,
            "ridgeline_request_generation_tokens_count": len(reasons),
            "ridgeline_queue_tokens": 0,
            "ridgeline_engine_heartbeat_age_seconds": 0,
            **{f'ridgeline_engine_restarts_total{{cause="{cause}"}}': 0 for cause in CAUSES},
            "ridgeline_num_requests_running": 0,
            "ridgeline_num_requests_waiting": 0,
            "ridgeline_kv_cache_usage_perc": 0,
        }
        lines = live.client.get("/metrics").text.splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert {name: float(samples[name]) for name in expected} == expected
        assert reasons.count("stop") == 1 and cached == 32
        assert float(samples["ridgeline_step_duration_seconds_count"]) == live.engine.engine.loop.stats().num_steps
        kinds = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        assert all(kind.startswith(("ridgeline_", "process_")) for kind in kinds)
        eventually(lambda: live.metric("ridgeline_event_loop_lag_seconds_count") > 2)


def test_metrics_have_vllm_s_names_where_they_are_asked_for(chat_model: Path) -> None:
    """Each that is not ours alone stands there twice, with the same samples."""
    with serving(new_engine(chat_model), metrics_compat="vllm", served_model_names=("a", "b")) as live:
        live.complete(prompt="Once", max_tokens=4)
        text = live.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    aliases = {name[5:] for name in families if name.startswith("vllm:") and not name.endswith("_created")}
    own_names = {metric.vllm: name for name, metric in METRICS.items() if metric.vllm}
    assert aliases == set(own_names) - {
        "spec_decode_num_accepted_tokens_per_pos",
        "lora_requests_info",
    }  # there were none
    for alias in aliases:
        own = families[f"ridgeline_{own_names[alias]}"]
        found = families[f"vllm:{alias}"].samples
        samples = [(s.name.partition(":")[2], s.value) for s in found]
        assert samples == [(s.name.replace(own.name, alias, 1), s.value) for s in own.samples]
        assert all(
            s.labels["model_name"] == "a" and s.labels["engine"] == "0" for s in families[f"vllm:{alias}"].samples
        )


def test_a_log_of_json_has_the_facts_by_name_and_no_content(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ridgeline")
    live.client.headers["x-request-id"] = "json-test"
    try:
        live.complete(prompt="xyzzy secret words", max_tokens=3)
    finally:
        del live.client.headers["x-request-id"]
    eventually(lambda: any("json-test" in record.getMessage() for record in caplog.records))
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert line.pop("ms") > 0 and line.pop("time").endswith("+00:00") and line.pop("prompt") > 3
    assert line.pop("event").startswith("json-test POST") and "xyzzy" not in caplog.text
    about = {"request_id": "json-test", "method": "POST", "path": "/v1/completions", "status": 200}
    assert line == {"level": "info", "logger": "ridgeline.server.access", "cached": 0, "output": 3} | about
    failed = logging.LogRecord("a", logging.ERROR, "", 0, "it \n failed", None, (ValueError, ValueError("x"), None))
    written = JsonFormatter().format(failed)
    assert "\n" not in written and json.loads(written)["stack"].endswith("ValueError: x")


def test_the_log_has_one_line_a_request_and_no_prompt(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ridgeline")
    live.client.headers["x-request-id"] = "log-test"
    try:
        live.complete(prompt="xyzzy secret words", max_tokens=3)
        live.post("completions", prompt="xyzzy", nope="xyzzy")
        live.client.get("/v1/models/a%0aINFO forged line")
        live.client.get("/health")
        live.client.get("/metrics")
    finally:
        del live.client.headers["x-request-id"]
    eventually(lambda: len([record for record in caplog.records if "log-test" in record.getMessage()]) >= 3)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert re.fullmatch(r"log-test POST /v1/completions status=200 prompt=\d+ cached=0 output=3 ms=[\d.]+", lines[0])
    assert "status=400" in lines[1] and "status=404" in lines[2]
    assert not any("xyzzy" in line or "\n" in line for line in lines)


def test_tokens_that_are_no_characters_keep_their_bytes(shared_data: Path) -> None:
    tokenizer = Tokenizer.from_folder(shared_data / "models/stories260K")
    assert tokenizer is not None
    names = TokenNames(tokenizer)
    ids = tokenizer.encode("é中", add_special_tokens=False)
    logprobs = [TokenLogprob(token_id, -float("inf"), 1, ()) for token_id in ids]
    entries = chat_logprobs(names, logprobs).content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode().strip() == "é中"
    assert "bytes:\\xe4" in [entry.token for entry in entries]
    assert all(entry.logprob == -9999.0 for entry in entries)
    writer = CompletionLogprobsWriter(names, with_top=False, skip_special=True)
    whole = writer.write(list(zip(ids, logprobs)))
    writer = CompletionLogprobsWriter(names, with_top=False, skip_special=True)
    pieces = [writer.write([pair]) for pair in zip(ids, logprobs)]
    assert [offset for piece in pieces for offset in piece.text_offset] == whole.text_offset
    assert whole.top_logprobs is None
    assert TokenNames(None).name(7) == "token_id:7"


def test_of_tokens_that_are_spelled_alike_the_likeliest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `A` and the byte <0x41>: clients compare the chosen token's value with the highest of them."""
    monkeypatch.setattr(TokenNames, "raw", lambda self, token_id: b"A" if token_id < 3 else b"B")
    writer = CompletionLogprobsWriter(TokenNames(None), with_top=True, skip_special=True)
    top = ((1, -0.5), (3, -1.0), (2, -9.0))
    chosen = [(token, TokenLogprob(token, value, rank, top)) for rank, (token, value) in enumerate(top, 1)]
    assert writer.write(chosen).top_logprobs == [{"A": -0.5, "B": -1.0}] * 3
