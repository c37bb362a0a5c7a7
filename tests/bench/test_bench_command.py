"""`ridgeline bench`: every sub-command from its options to its file."""

import contextlib
import json
import socket
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from ridgeline.cli.bench import bench
from ridgeline.core.errors import ConfigError


async def completions(request):
    body = await request.json()
    if body["max_tokens"] == 5:
        return JSONResponse({"error": {"message": "no"}}, status_code=503)

    async def stream():
        for at in range(body["max_tokens"]):
            reason = "length" if at == body["max_tokens"] - 1 else None
            yield f"data: {json.dumps({'choices': [{'text': 'x', 'finish_reason': reason}]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


async def models(request):
    return JSONResponse({"data": [{"id": "tiny"}]})


@pytest.fixture(scope="module")
def url():
    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    config = uvicorn.Config(Starlette(routes=routes), log_level="warning", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def invoke(*arguments):
    result = CliRunner().invoke(bench, list(map(str, arguments)), env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def only_json(folder):
    (path,) = folder.glob("*/*.json")
    return json.loads(path.read_text())


def test_serve_writes_what_it_prints(url, tmp_path):
    workload = "fixed:num_requests=6,input_tokens=4,output_tokens=3"
    result = invoke(
        "serve", "--url", url, "--workload", workload, "--schedule", "poisson", "--rate", 200, "--concurrency", 2,
        "--goodput", "ttft:60000 tpot:60000", "--server", "fake", "--name", "smoke", "--keep-requests",
        "--out", tmp_path, "--api-key", "secret",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "6 / 0 / 0" in result.output and "goodput" in result.output
    report = only_json(tmp_path)
    assert (report["name"], report["server"], report["model"]) == ("smoke", "fake", "tiny")
    assert report["load"]["schedule"] == "poisson" and report["load"]["max_concurrency"] == 2
    assert report["results"]["completed"] == 6 and report["results"]["output_tokens"] == 18
    assert report["results"]["goodput"]["attainment"] == 1.0
    assert len(report["requests"]) == 6
    assert "secret" not in json.dumps(report) and url not in json.dumps(report)


def test_serve_fails_when_nothing_was_answered(url):
    result = invoke("serve", "--url", url, "--workload", "fixed:num_requests=2,input_tokens=4,output_tokens=5")
    assert result.exit_code == 1
    assert "HTTP 503" in result.output


def test_serve_refuses_what_does_not_fit(url):
    with pytest.raises(ConfigError, match="token ids"):
        invoke("serve", "--url", url, "--api", "chat")
    with pytest.raises(ConfigError, match="objective 'speed:1'"):
        invoke("serve", "--url", url, "--goodput", "speed:1")
    assert invoke("serve", "--url", url, "--schedule", "never").exit_code == 2


def test_offline_writes_what_it_prints(stories, tmp_path):
    result = invoke(
        "offline", "--model", stories, "--workload", "fixed:num_requests=4,input_tokens=8,output_tokens=4",
        "--num-threads", 1, "--repeats", 1, "--warmups", 0, "--max-num-seqs", 4, "--no-prefix-caching",
        "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0
    assert "plan + commit / request" in result.output
    report = only_json(tmp_path)
    (system,) = report["systems"]
    assert (system["system"], system["outputs_equal_to_first"]) == ("engine", 4)
    assert system["results"]["output_tokens"] == 16
    assert report["engine"]["max_num_seqs"] == 4 and report["engine"]["prefix_caching"] is False


def test_latency_takes_its_shapes(stories, tmp_path):
    result = invoke(
        "latency", "--model", stories, "--prefill", 16, "--decode", 2, "--decode", 3, "--output-tokens", 4,
        "--num-threads", 1, "--repeats", 1, "--warmups", 0, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0
    points = only_json(tmp_path)["points"]
    assert [(point["kind"], point["tokens_per_step"]) for point in points] == [
        ("prefill", 16),
        ("decode", 2),
        ("decode", 3),
    ]
