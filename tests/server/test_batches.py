"""Files and batches over HTTP by the official client: every line is answered once, whatever dies on the way."""

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from live_server import PATIENCE_S, GatedExecutor, LiveServer, eventually, new_engine, put_in_front, serving

from children import Child
from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server.batch import batches as batches_module
from ridgeline.server.batch.store import Folder

COMPLETIONS = "/v1/completions"
PROMPTS = ["Once upon a time", "The end", "A dog", "One day"]


def line(name: str, url: str = COMPLETIONS, **body: object) -> bytes:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0} | body
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def client_of(url: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def keeping(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(new_engine(chat_model), files=str(tmp_path_factory.mktemp("files"))) as server:
        yield server


@pytest.fixture
def client(keeping: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(keeping.url) as made:
        yield made


def begin(client: openai.OpenAI, *lines: bytes, **options: object) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    options = {"endpoint": COMPLETIONS, "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    deadline = time.monotonic() + PATIENCE_S
    while (now := client.batches.retrieve(batch.id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    return now


def results_of(client: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    if file_id is None:
        return {}
    results = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    by_name = {each["custom_id"]: each for each in results}
    assert len(by_name) == len(results), "a line is there twice"
    return by_name


def test_a_batch_from_upload_to_content(client: openai.OpenAI):
    file = client.files.create(file=("in.jsonl", line("a") + line("b", temperature=-1) + line("ü")), purpose="batch")
    assert (file.object, file.filename, file.purpose, file.status) == ("file", "in.jsonl", "batch", "processed")
    assert client.files.content(file.id).content == line("a") + line("b", temperature=-1) + line("ü")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", metadata={"of": "me"}
    )
    assert batch.object == "batch" and batch.status in ("validating", "in_progress") and batch.metadata == {"of": "me"}
    done = ended(client, batch)
    assert done.status == "completed" and done.errors is None, done
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    good, bad = results_of(client, done.output_file_id), results_of(client, done.error_file_id)
    assert good.keys() == {"a", "ü"} and bad.keys() == {"b"}
    assert good["a"]["response"]["body"]["object"] == "text_completion" and good["a"]["error"] is None
    assert bad["b"]["response"]["status_code"] == 400
    assert bad["b"]["response"]["body"]["error"]["param"] == "temperature"
    used = [good[name]["response"]["body"]["usage"] for name in good]
    assert done.usage.input_tokens == sum(each["prompt_tokens"] for each in used) > 0
    assert done.usage.output_tokens == sum(each["completion_tokens"] for each in used) > 0
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.usage.output_tokens_details.reasoning_tokens == 0
    assert done.usage.input_tokens_details.cached_tokens == sum(
        each["prompt_tokens_details"]["cached_tokens"] for each in used
    )
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.bytes == len(client.files.content(output.id).content)


CHAT = {"model": "stories-chat", "messages": [{"role": "user", "content": "Once"}], "temperature": 0, "seed": 1}
PAIR = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
ASKED = {
    "chat": ("/v1/chat/completions", CHAT | {"max_tokens": 8, "logprobs": True}),
    "structured": (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PAIR}}},
    ),
    "tools": (
        "/v1/chat/completions",
        CHAT
        | {"tools": [{"type": "function", "function": {"name": "f", "parameters": PAIR}}], "tool_choice": "required"},
    ),
    "responses": (
        "/v1/responses",
        {"model": "stories-chat", "input": "Once", "max_output_tokens": 8, "temperature": 0},
    ),
}


@pytest.mark.parametrize(("url", "body"), ASKED.values(), ids=ASKED)
def test_a_line_gets_what_the_client_gets_from_the_endpoint(client: openai.OpenAI, url: str, body: dict):
    request = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode() + b"\n"
    done = ended(client, begin(client, request, endpoint=url))
    assert done.status == "completed" and done.error_file_id is None, client.files.content(done.error_file_id).text
    found = results_of(client, done.output_file_id)["a"]["response"]["body"]
    if url == "/v1/responses":
        response = openai.types.responses.Response.model_validate(found)
        assert response.output_text == client.responses.create(**body).output_text != ""
        return
    (choice,) = openai.types.chat.ChatCompletion.model_validate(found).choices
    (direct,) = client.chat.completions.create(**body).choices
    message, expected = choice.message, direct.message
    assert (message.content, choice.finish_reason) == (expected.content, direct.finish_reason)
    if "tools" in body:
        assert message.tool_calls[0].function == expected.tool_calls[0].function
    else:
        assert message.content and choice.logprobs == direct.logprobs


def test_a_batch_of_embeddings(tmp_path: Path):
    engine = ThreadEngine(EngineConfig.of("python-1m", task="embed", num_threads=1))
    with serving(engine, files=str(tmp_path)) as live, client_of(live.url) as client:
        request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["one", "two"]}}
        done = ended(client, begin(client, json.dumps(request).encode(), endpoint="/v1/embeddings"))
        found = results_of(client, done.output_file_id)["a"]["response"]["body"]["data"]
        direct = client.embeddings.create(model="python-1m", input=["one", "two"], encoding_format="float").data
        assert [each["embedding"] for each in found] == [each.embedding for each in direct]


def test_tokens_are_the_same_by_python_http_and_batch(chat_model: Path, tmp_path: Path):
    config = EngineConfig.of(str(chat_model), dtype="float32", num_threads=1, deterministic=True)
    llm = LLM(str(chat_model), dtype="float32", num_threads=1, deterministic=True)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    body = {"max_tokens": 24, "temperature": 0, "return_token_ids": True}
    with serving(ThreadEngine(config), files=str(tmp_path)) as live, client_of(live.url) as client:
        over_http = [live.complete(prompt=prompt, **body)["choices"][0]["token_ids"] for prompt in PROMPTS]
        batch = begin(client, *(line(f"{i}", prompt=prompt, **body) for i, prompt in enumerate(PROMPTS)))
        answers = results_of(client, ended(client, batch).output_file_id)
    in_batch = [answers[f"{i}"]["response"]["body"]["choices"][0]["token_ids"] for i in range(len(PROMPTS))]
    assert in_batch == over_http == [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), b"{\n"], "invalid_json_line", 2),
        ([line("a"), line("b", url="/v1/embeddings")], "mismatched_url", 2),
        ([line("a", stream=True)], "invalid_request", 1),
        ([b"\n"], "invalid_size", None),
    ],
)
def test_an_input_that_is_wrong_fails_as_a_whole(client: openai.OpenAI, lines: list[bytes], code: str, number: int):
    batch = ended(client, begin(client, *lines))
    assert batch.status == "failed" and batch.output_file_id is None and batch.failed_at
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]


def test_lists_in_pages_and_deletion(client: openai.OpenAI):
    files = [client.files.create(file=(f"{i}", b"x"), purpose="batch") for i in range(5)]
    ids = [file.id for file in files]
    assert [file.id for file in client.files.list(limit=2)][:5] == ids[::-1], "the client follows the pages"
    page = client.files.list(limit=2, order="asc", after=ids[0])
    assert [file.id for file in page.data] == ids[1:3] and page.has_more
    assert client.files.delete(ids[0]).deleted
    for ask_for in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=ids[0]):
            ask_for(ids[0])
    for wrong in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "file-none"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)
    batch = ended(client, begin(client, line("a")))
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input_file_id": "file-none"}, 404),
        ({"input_file_id": "../../etc/passwd"}, 404),
        ({"endpoint": "/v1/files"}, 400),
        ({"completion_window": "1h"}, 400),
        ({"metadata": {"a": "x" * 513}}, 400),
        ({"typo": 1}, 400),
    ],
)
def test_bad_batches_are_refused(keeping: LiveServer, client: openai.OpenAI, body: dict, status: int):
    file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    response = keeping.post("batches", **good | body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_paths_lead_nowhere(keeping: LiveServer):
    for name in ("..%2f..%2fetc%2fpasswd", "../lock", "lock", "%2e%2e", "file-%00", "scratch"):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert httpx.get(keeping.url + path).status_code in (400, 404), path


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, "no file"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "more": "x" * 5000}}, "maximum size of 4KB"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "1"}}, "expires_after"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, "Too many files"),
        ({"content": b"--b\r\ncut", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "no file"),
        ({"content": b"no form", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "no form"),
        ({"json": {}}, "multipart"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
    ],
)
def test_bad_uploads_are_refused_and_leave_nothing(keeping: LiveServer, form: dict, words: str):
    folder = Path(keeping.server._service.settings.files)
    before = sorted(folder.rglob("*"))
    response = keeping.client.post("/v1/files", **form)
    assert response.status_code in (400, 415) and words in response.json()["error"]["message"], response.text
    assert sorted(folder.rglob("*")) == before


def test_a_full_disk_is_said_and_leaves_nothing(keeping: LiveServer, monkeypatch: pytest.MonkeyPatch):
    folder = Path(keeping.server._service.settings.files)
    form = {"files": {"file": b"x" * 9000}, "data": {"purpose": "batch"}}
    file_id = keeping.client.post("/v1/files", **form).json()["id"]
    before = sorted(folder.rglob("*"))

    def full(upload, content) -> None:
        content.write(b"x" * 9000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ridgeline.server.batch.files.copyfileobj", full)
    refused = [keeping.client.post("/v1/files", **form)]
    assert sorted(folder.rglob("*")) == before
    monkeypatch.setattr("ridgeline.server.batch.store.Folder.put", lambda self, stored: full(None, io.BytesIO()))
    batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    refused.append(keeping.client.post("/v1/batches", json=batch))
    assert sorted(folder.rglob("*")) == before
    for response in refused:
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "disk of this server is full" in response.json()["error"]["message"]


def test_sizes_are_bounded(chat_model: Path, tmp_path: Path):
    with (
        serving(new_engine(chat_model), files=str(tmp_path), max_file_bytes=2**18, max_files_bytes=2**18) as live,
        client_of(live.url) as client,
    ):
        with pytest.raises(openai.APIStatusError) as error:
            client.files.create(file=("a", b"x" * 2**19), purpose="batch")
        assert error.value.status_code == 413
        client.files.create(file=("a", b"x" * 2**18), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="delete some"):
            client.files.create(file=("a", b"x"), purpose="batch")


def test_keys_see_their_own_alone(chat_model: Path, tmp_path: Path):
    (tmp_path / "keys.toml").write_text('[alice]\nkey = "a-key"\n[bob]\nkey = "b-key"\n')
    keys = {"api_key_file": str(tmp_path / "keys.toml"), "files": str(tmp_path / "files")}
    with (
        serving(new_engine(chat_model), **keys) as live,
        client_of(live.url, "a-key") as alice,
        client_of(live.url, "b-key") as bob,
    ):
        batch = ended(alice, begin(alice, line("a")))
        assert not bob.files.list().data and not bob.batches.list().data
        for ask_for, name in (
            (bob.files.retrieve, batch.input_file_id),
            (bob.files.content, batch.output_file_id),
            (bob.files.delete, batch.input_file_id),
            (bob.batches.retrieve, batch.id),
            (bob.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask_for(name)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        assert alice.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_without_a_folder_it_says_how(live: LiveServer):
    for path in ("/v1/files", "/v1/batches"):
        response = live.client.get(path)
        assert response.status_code == 404 and "--files" in response.json()["error"]["message"]


def test_interactive_requests_go_first_and_cancelling_keeps_what_is_done(chat_model: Path, tmp_path: Path):
    engine = new_engine(chat_model, max_num_seqs=2)
    gate = put_in_front(engine, GatedExecutor)
    with serving(engine, files=str(tmp_path)) as live, client_of(live.url) as client:
        try:
            batch = begin(client, *(line(f"{i}", max_tokens=100, ignore_eos=True) for i in range(6)))
            gate.release(8)
            eventually(lambda: gate.num_started > 4)
            with pytest.raises(openai.BadRequestError, match=batch.id):
                client.files.delete(batch.input_file_id)
            now = client.batches.cancel(batch.id)
            assert now.status in ("cancelling", "cancelled")
        finally:
            gate.open()
        done = ended(client, batch)
        assert done.status == "cancelled" and done.cancelled_at and done.request_counts.failed == 6
        left = results_of(client, done.error_file_id)
        assert {each["error"]["code"] for each in left.values()} == {"batch_cancelled"} and len(left) == 6
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'cancelled'"):
            client.batches.cancel(batch.id)
        live.assert_idle()


def test_a_batch_that_takes_too_long_expires(monkeypatch: pytest.MonkeyPatch, chat_model: Path, tmp_path: Path):
    monkeypatch.setattr(batches_module, "WINDOW_S", 1)
    engine = new_engine(chat_model, max_num_seqs=2)
    gate = put_in_front(engine, GatedExecutor)
    with serving(engine, files=str(tmp_path)) as live, client_of(live.url) as client:
        try:
            done = ended(client, begin(client, *(line(f"{i}") for i in range(3))))
        finally:
            gate.open()
        assert done.status == "expired" and done.expired_at and done.output_file_id is None
        left = results_of(client, done.error_file_id)
        assert {each["error"]["code"] for each in left.values()} == {"batch_expired"} and len(left) == 3


def texts_of(client: openai.OpenAI, batch: openai.types.Batch, count: int) -> dict[str, str]:
    done = ended(client, batch)
    assert done.status == "completed" and done.request_counts.completed == count == done.request_counts.total, done
    results = results_of(client, done.output_file_id)
    assert results.keys() == {f"{i}" for i in range(count)} and done.error_file_id is None
    return {name: each["response"]["body"]["choices"][0]["text"] for name, each in results.items()}


SAMPLED = [line(f"{i}", max_tokens=30, temperature=1.0, ignore_eos=True) for i in range(40)]


def test_a_restart_goes_on_where_it_was(chat_model: Path, tmp_path: Path):
    texts, used = [], set()
    for stops in (0, 1):
        folder = tmp_path / f"{stops}"
        with serving(new_engine(chat_model, max_num_seqs=4), files=str(folder)) as live, client_of(live.url) as client:
            batch = begin(client, *SAMPLED)
            if stops:
                eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)  # noqa: B023
            else:
                texts.append(texts_of(client, batch, len(SAMPLED)))
        with serving(new_engine(chat_model), files=str(folder)) as live, client_of(live.url) as client:
            if stops:
                texts.append(texts_of(client, batch, len(SAMPLED)))
            done = client.batches.retrieve(batch.id)
            assert done.status == "completed"
            used.add((done.usage.input_tokens, done.usage.output_tokens))
    assert texts[0] == texts[1], "seeds are those of the lines' names"
    assert len(used) == 1, "what came before the restart is counted"


@contextmanager
def started(model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    code = "from ridgeline.cli import main; main()"
    options = [
        "--files",
        str(folder),
        "--dtype",
        "float32",
        "--port",
        "0",
        "--max-num-seqs",
        "4",
        "--log-level",
        "error",
    ]
    command = [sys.executable, "-c", code, "serve", str(model), *options]
    with Child(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            process.kill()


def test_kill_9_of_server_and_engine(chat_model: Path, tmp_path: Path):
    with started(chat_model, tmp_path / "files") as (process, url), client_of(url) as client:
        batch = begin(client, *SAMPLED)
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with started(chat_model, tmp_path / "files") as (process, url), client_of(url) as client:
        texts_of(client, batch, len(SAMPLED))
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    config = EngineConfig.of(str(chat_model), dtype="float32", num_threads=1, max_num_seqs=4)
    with serving(ProcessEngine(config), files=str(tmp_path / "other")) as live, client_of(live.url) as client:
        batch = begin(client, *SAMPLED)
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)
        os.kill(live.engine.process_id, signal.SIGKILL)
        texts_of(client, batch, len(SAMPLED))


def test_one_server_has_a_folder(tmp_path: Path):
    folder = Folder(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        Folder(tmp_path)
    folder.close()
    Folder(tmp_path).close()


def test_a_download_that_nobody_reads_is_given_up(chat_model: Path, tmp_path: Path) -> None:
    with serving(new_engine(chat_model), files=str(tmp_path), stall_timeout_s=1.0) as server:
        with client_of(server.url) as client:
            file = client.files.create(file=("in.jsonl", b"x" * 20_000_000), purpose="batch")
        connections = server.server.server_state.connections
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(server._listener.getsockname())
            reader.sendall(f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert reader.recv(15) == b"HTTP/1.1 200 OK"
            eventually(lambda: server.client.get("/health").is_success and len(connections) == 1)  # which asks that


def test_the_lines_of_a_batch_are_within_the_limits_of_its_key(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a minute's requests are left to others."""
    (tmp_path / "keys.toml").write_text('[a]\nkey = "a-key"\nrequests_per_minute = 12\n')
    keys = {"api_key_file": str(tmp_path / "keys.toml"), "files": str(tmp_path / "files")}
    monkeypatch.setattr("ridgeline.server.clients.time", SimpleNamespace(monotonic=lambda: 7.0))  # it fills up no more
    with serving(new_engine(chat_model), **keys) as live, client_of(live.url, "a-key") as client:
        batch = begin(client, *(line(str(i), max_tokens=1) for i in range(20)))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 5)  # two took its making
        for _ in range(4):
            client.completions.create(model="stories-chat", prompt="Once", max_tokens=1)
        assert client.batches.retrieve(batch.id).request_counts.completed == 5
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert ended(client, batch).request_counts.failed == 15
