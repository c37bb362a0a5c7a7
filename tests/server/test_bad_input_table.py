"""Thousands of bad inputs over all endpoints: none is the fault of the server, and each gets an error of its API."""

import http.client
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bad_inputs import BadInput, allows, bad_inputs
from live_server import PATIENCE_S, LiveServer, serving
from starlette.routing import Match
from test_batches import begin, client_of, ended, results_of
from test_cross_encoders import save

from ridgeline.core.config import EngineConfig
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.server.batch.lines import Line, _parsed

MODELS = Path(__file__).resolve().parents[2] / "src/ridgeline/models"
CLIENTS = 4
GOOD = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
EMBEDDING = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score")
CLASSIFYING = ("/classify", "/rerank", "/score")
BATCHED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture(scope="module")
def embedder() -> Iterator[LiveServer]:
    config = EngineConfig.of(str(MODELS / "python-1m"), task="embed", num_threads=1)
    with serving(ThreadEngine(config)) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("bert")
    save(folder, "bert")
    with serving(ThreadEngine(EngineConfig.of(str(folder), dtype="float32", num_threads=1))) as server:
        yield server
        server.assert_idle()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = ThreadEngine(EngineConfig.of(str(MODELS / "python-1m"), dtype="float32", num_threads=1, max_loras=1))
    files = str(tmp_path_factory.mktemp("files"))
    with serving(engine, files=files, enable_tokenizer_info_endpoint=True) as server:
        yield server
        server.assert_idle()


def ask(one: http.client.HTTPConnection, row: BadInput) -> Answer:
    """Send a request as it is: nothing of a client's own, but the connection is kept where the server keeps it."""
    one.putrequest(row.method, row.path.replace(" ", "%20"), skip_accept_encoding=True)
    for name, value in row.headers.items():
        one.putheader(name, value.encode("latin-1"))
    one.putheader("content-length", str(len(row.body or b"")))
    one.endheaders(row.body)
    response = one.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def sent(url: str, rows: Sequence[BadInput]) -> list[tuple[BadInput, Answer]]:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)) as connection:
        return [(row, ask(connection, row)) for row in rows]


def wrong_with(row: BadInput, answer: Answer) -> str:
    """Say what is wrong with an answer; empty if nothing is."""
    if answer.status >= 500:
        return "the server blames itself"
    if b"internal_error" in answer.body:
        return "an error hides in a stream"
    if answer.status < 400:
        return "it must be refused" if row.refused else ""
    if answer.headers["content-type"] != "application/json" or not answer.headers.get("x-request-id"):
        return "no JSON, or no id"
    body = json.loads(answer.body)
    if row.path.startswith("/v1/messages") and row.method != "FOO":  # which is no HTTP: nobody looked at the path
        fits = set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
        return "" if fits and body["type"] == "error" and body["error"]["message"] else "not Anthropic's shape"
    error = body.get("error", {})
    fits = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    fits = fits and isinstance(error["param"], str | None) and isinstance(error["code"], str | None)
    return "" if fits and 0 < len(error["message"]) <= 1000 and error["type"] else "not OpenAI's shape"


def check(server: LiveServer, rows: Sequence[BadInput]) -> Counter[int]:
    """Send them all, and return how many answers there were of each status."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        parts = threads.map(lambda start: sent(server.url, rows[start::CLIENTS]), range(CLIENTS))
        asked = [pair for part in parts for pair in part]
    wrong = [
        f"{row.method} {row.path[:60]} {(row.body or b'')[-150:]!r} {dict(row.headers)}: {why}: {answer}"
        for row, answer in asked
        if (why := wrong_with(row, answer))
    ]
    assert not wrong, f"{len(wrong)} of {len(rows)}:\n" + "\n".join(wrong[:40])
    assert server.client.get("/health").status_code == server.client.get("/ready").status_code == 200
    return Counter(answer.status // 100 for _, answer in asked)


def test_no_bad_input_is_the_servers_fault(small: LiveServer) -> None:
    before = small.complete(**GOOD)["choices"][0]["text"]
    document = small.client.get("/openapi.json").json()
    statuses = check(small, list(bad_inputs(document)))
    assert statuses[4] >= 10_000, statuses
    assert small.complete(**GOOD)["choices"][0]["text"] == before


def test_nor_is_it_of_a_server_that_embeds(embedder: LiveServer) -> None:
    """The other serves no vectors, and says so before it looks at what is asked for."""
    before = embedder.post("embeddings", input="a").json()["data"]
    rows = [row for row in bad_inputs(embedder.client.get("/openapi.json").json()) if row.path in EMBEDDING]
    statuses = check(embedder, rows)
    assert statuses[4] >= 200, statuses
    assert statuses[2] >= 5, "what is allowed is served"
    assert embedder.post("embeddings", input="a").json()["data"] == before


def test_nor_is_it_of_a_server_that_classifies(classifier: LiveServer) -> None:
    before = classifier.client.post("/classify", json={"input": "a dog"}).json()["data"]
    rows = [row for row in bad_inputs(classifier.client.get("/openapi.json").json()) if row.path in CLASSIFYING]
    statuses = check(classifier, rows)
    assert statuses[4] >= 500, statuses
    assert statuses[2] >= 5, "what is allowed is served"
    assert classifier.client.post("/classify", json={"input": "a dog"}).json()["data"] == before


def test_every_operation_gets_some(small: LiveServer) -> None:
    """Bodies are spoilt, and parts of paths are; what takes neither has no input but the method."""
    routes = [route for route in small.server.config.app.routes if not route.path.startswith("/ui")]
    got = Counter[tuple[str, str]]()
    for row in bad_inputs(small.client.get("/openapi.json").json()):
        scope = {"type": "http", "path": unquote(row.path.partition("?")[0]), "method": row.method}
        got.update((route.path, row.method) for route in routes if route.matches(scope)[0] is Match.FULL)
    assert min(got[route.path, "POST"] for route in routes if hasattr(route, "body")) >= 80
    assert got["/v1/files", "POST"] >= 80
    takes_parts = [(route.path, method) for route in routes if "{" in route.path for method in route.methods - {"HEAD"}]
    assert len(takes_parts) >= 9 and min(got[taken] for taken in takes_parts) >= 5


@pytest.mark.parametrize("path", BATCHED)
def test_nor_is_a_bad_line_of_a_batch(small: LiveServer, path: str) -> None:
    """Those that are a request at all: others are told before a batch runs."""
    bodies = [row.body for row in bad_inputs(small.client.get("/openapi.json").json()) if row.path == path]
    lines = [
        b'{"custom_id": "%d", "method": "POST", "url": "%s", "body": %s}' % (number, path.encode(), body)
        for number, body in enumerate(bodies)
        if body and b"\n" not in body
    ]
    lines = [line for line in lines if isinstance(_parsed(1, line, path), Line)][::5]
    assert len(lines) >= 200
    with client_of(small.url) as client:
        batch = ended(client, begin(client, *(line + b"\n" for line in lines), endpoint=path))
        results = results_of(client, batch.error_file_id) | results_of(client, batch.output_file_id)
    assert batch.status == "completed" and len(results) == len(lines), batch
    wrong = [each for each in results.values() if not each["response"] or each["response"]["status_code"] >= 500]
    assert not wrong, wrong[:5]
    assert sum(each["response"]["status_code"] == 400 for each in results.values()) >= len(lines) / 2


@pytest.mark.parametrize(
    ("path", "document", "value", "fits"),
    [
        ("a field", {"type": "object", "required": ["a"]}, {}, False),
        ("one too many", {"type": "object", "properties": {}, "additionalProperties": False}, {"a": 1}, False),
        ("a range", {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}, 0, False),
        ("null", {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}, None, True),
        ("no integer", {"type": "integer"}, True, False),
        ("an item", {"type": "array", "items": {"type": "string"}}, ["a", 1], False),
    ],
)
def test_what_the_document_allows(path: str, document: dict, value: object, fits: bool) -> None:
    assert allows({}, document, value) is fits, path
