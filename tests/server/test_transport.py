"""What a socket may do before, beside and after HTTP: every limit of the transport, by raw bytes over loopback."""

import asyncio
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fake_engine import FakeEngine, fake_info
from live_server import PATIENCE_S, LiveServer, eventually, serving

from ridgeline.core.errors import ConfigError
from ridgeline.server.listen import bind_unix, load_certificate, url_of
from ridgeline.server.settings import ServerSettings, only_local_names
from ridgeline.server.sse import WRITE
from ridgeline.server.transport import MAX_HEADERS, MAX_PIPELINED, RESERVED_FILES, Connection, room_for_connections

HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(FakeEngine(fake_info())) as live:
        yield live


@contextmanager
def opened(live: LiveServer, data: bytes = b"") -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    try:
        while piece := connection.recv(2**16):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def refusal(answer: bytes) -> tuple[int, dict]:
    """Status and error of an answer that must be OpenAI's error object with an id, and the last of its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"].startswith("req-")
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == KEYS
    return int(lines[0].split()[1]), error


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_HEADS = {
    "no_http": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    "no_version": (b"GET /health\r\n\r\n", 505),
    "version_2": (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "version_1.2": (b"GET /health HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "no_host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two_hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "length_beside_chunks": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks_beside_length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "two_lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
    "negative_length": (POST + b"Content-Length: -5\r\n\r\n", 400),
    "unknown_coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "coding_before_chunks": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "codings_in_two_headers": (POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked_twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunk_of_no_size": (CHUNKED + b"zz\r\n", 400),
    "chunk_of_huge_size": (CHUNKED + b"f" * 40 + b"\r\n", 400),
    "space_before_colon": (b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "folded_header": (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\r\n\tb\r\n\r\n", 400),
    "bare_line_feeds": (b"GET /health HTTP/1.1\nHost: a\n\n", 400),
    "nul_in_a_value": (b"GET /health HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
    "target_not_ascii": (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "long_target": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    "long_value": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000, 431),
    "many_headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (MAX_HEADERS + 2), 431),
    "endless_name": (b"GET / HTTP/1.1\r\n" + b"a" * 70_000, 431),
    "chunk_extension": (CHUNKED + b"1;" + b"a" * 600_000, 431),
}


@pytest.mark.parametrize(("sent", "status"), BAD_HEADS.values(), ids=BAD_HEADS.keys())
def test_what_is_no_http_is_refused_with_the_error_object(server: LiveServer, sent: bytes, status: int) -> None:
    with opened(server, sent) as connection:
        got, error = refusal(read_all(connection))
    assert got == status
    assert error["type"] == "invalid_request_error" and error["code"]
    assert server.client.get("/health").status_code == 200


def test_a_bad_request_after_a_good_one_is_not_answered_in_its_place(server: LiveServer) -> None:
    with opened(server, HEALTH + b"nonsense\r\n\r\n") as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    paths = [b"/health", b"/version", b"/nope", b"/ready"]
    sent = b"".join(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n" for path in paths)
    with opened(server, sent[:-2] + b"Connection: close\r\n\r\n") as connection:
        answer = read_all(connection)
    places = [answer.index(words) for words in (b'"ok"', b'"version"', b'"not_found"', b'"ready"')]
    assert places == sorted(places) and answer.count(b"HTTP/1.1 ") == 4


def test_a_pipeline_has_a_bound(server: LiveServer) -> None:
    with opened(server, HEALTH * (MAX_PIPELINED + 40)) as connection:
        assert read_all(connection).count(b"HTTP/1.1 200") == MAX_PIPELINED + 1


def test_head_and_options(server: LiveServer) -> None:
    head = server.client.head("/health")
    assert (head.status_code, head.content) == (200, b"") and int(head.headers["content-length"]) > 0
    options = server.client.options("/health")
    assert options.status_code == 405 and "GET" in options.headers["allow"]
    assert options.json()["error"]["code"] == "method_not_allowed"


def test_expect_100_is_answered_only_where_the_body_will_be_read(server: LiveServer) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    expecting = POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with opened(server, expecting % len(body)) as connection:
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    with opened(server, expecting % (2**30)) as connection:
        assert refusal(read_all(connection))[0] == 413


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(server: LiveServer, stream: bool) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 3, "stream": stream}).encode()
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    with opened(server, head + body) as connection:
        head, _, answer = read_all(connection).partition(b"\r\n\r\n")
    assert b" 200 OK" in head and b"chunked" not in head.lower()
    assert answer.endswith(b"data: [DONE]\n\n") if stream else json.loads(answer)["choices"]


def test_an_upgrade_is_ignored_and_a_trailer_is_no_header(server: LiveServer) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with opened(server, upgrade) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
    trailed = CHUNKED.replace(b"/v1/completions", b"/nope") + b"0\r\nX-Request-Id: from-a-trailer\r\n\r\n"
    with opened(server, trailed) as connection:
        answer = connection.recv(2**16)
    assert b" 404 " in answer and b"from-a-trailer" not in answer


def test_an_answer_before_the_body_was_read_arrives_and_ends_the_connection(server: LiveServer) -> None:
    sent = POST.replace(b"/v1/completions", b"/nope") + b"Content-Length: 1000000\r\n\r\n" + b" " * 500_000
    with opened(server, sent) as connection:
        assert refusal(read_all(connection))[0] == 404


def test_a_chunked_body_over_the_limit_is_413(server: LiveServer) -> None:
    megabyte = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with opened(server) as connection:
        sender = threading.Thread(target=lambda: send_what_is_taken(connection, CHUNKED + megabyte * 3))
        sender.start()
        status, error = refusal(read_all(connection))
        sender.join(PATIENCE_S)
    assert (status, error["code"]) == (413, "body_too_large")


def send_what_is_taken(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


@pytest.fixture
def hasty() -> Iterator[LiveServer]:
    """A server whose patience is short."""
    timeouts = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "idle_timeout_s": 0.4}
    with serving(FakeEngine(fake_info()), **timeouts) as live:
        yield live


def test_what_does_not_arrive_in_time_ends(hasty: LiveServer) -> None:
    with opened(hasty, b"GET /hea") as slow_head, opened(hasty, POST + b"Content-Length: 9\r\n\r\n{") as slow_body:
        with opened(hasty) as silent, opened(hasty, HEALTH) as idle:
            assert read_all(silent) == b""
            assert read_all(idle).startswith(b"HTTP/1.1 200")
        assert refusal(read_all(slow_head))[0] == 408
        status, error = refusal(read_all(slow_body))
    assert (status, error["code"]) == (408, "request_timeout")
    eventually(lambda: not hasty.server.server_state.connections)


def test_dribbling_bytes_do_not_buy_time(hasty: LiveServer) -> None:
    """One byte at a time, each well within every timeout."""
    for sent in (b"GET / HTTP/1.1\r\n" + b"A" * 10_000, b"\r\n" * 10_000):
        with opened(hasty) as connection:
            stop = threading.Event()

            def dribble(connection: socket.socket = connection, data: bytes = sent, stop: threading.Event = stop):
                for byte in data:
                    send_what_is_taken(connection, bytes([byte]))
                    if stop.wait(0.01):
                        break

            sender = threading.Thread(target=dribble)
            sender.start()
            assert refusal(read_all(connection))[0] == 408
            stop.set()
            sender.join(PATIENCE_S)


def test_more_connections_than_allowed_are_told_so() -> None:
    with serving(FakeEngine(fake_info()), max_connections=3) as live:
        live.client.get("/health")  # keeps its connection
        with opened(live), opened(live):
            eventually(lambda: len(live.server.server_state.connections) == 3)
            with opened(live) as fourth:
                status, error = refusal(read_all(fourth))
            assert (status, error["code"]) == (503, "server_is_overloaded")
            assert live.client.get("/health").status_code == 200
        eventually(lambda: len(live.server.server_state.connections) == 1)
        assert httpx.get(f"{live.url}/health").status_code == 200
        assert live.metric('ridgeline_requests_rejected_total{reason="server_is_overloaded"}') == 1


def test_room_for_connections_stays_below_the_limit_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 2000]
    monkeypatch.setattr("resource.getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr("resource.setrlimit", lambda kind, new: limits.__setitem__(slice(2), new))
    assert room_for_connections(100) == 100 and limits == [1024, 2000]
    assert room_for_connections(1500) == 1500 and limits[0] > 1500
    assert room_for_connections(4096) < 2000 and limits == [2000, 2000]


def test_bodies_that_arrive_share_a_budget() -> None:
    with serving(FakeEngine(fake_info()), max_bodies_bytes=1000) as live:
        head = POST + b"Content-Length: 900\r\n\r\n"
        with opened(live, head + b"{" * 800):
            eventually(lambda: live.server._service.body_room_bytes == 200)
            refused = live.post("completions", prompt="a" * 300)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert live.post("completions", prompt=[1], max_tokens=1).status_code == 200
        eventually(lambda: live.server._service.body_room_bytes == 1000)


def test_hosts() -> None:
    settings = ServerSettings()
    assert only_local_names(settings, "0.0.0.0") is settings
    assert only_local_names(ServerSettings(api_key="k"), "127.0.0.1").allowed_hosts == ()
    local = only_local_names(settings, "127.0.0.1").allowed_hosts
    with serving(FakeEngine(fake_info()), allowed_hosts=local) as live:
        for host, status in (("localhost", 200), ("127.0.0.1:99", 200), ("[::1]:8000", 200), ("LOCALHOST", 200)):
            assert live.client.get("/v1/models", headers={"host": host}).status_code == status
        for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io", "[::2]", ""):
            refused = live.client.get("/v1/models", headers={"host": host})
            assert (refused.status_code, refused.json()["error"]["code"]) == (421, "unknown_host")


def test_cors() -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with serving(FakeEngine(fake_info()), cors_origins=("https://app.example",), api_key="k") as live:
        preflight = live.client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert preflight.headers["x-request-id"].startswith("req-")
        named = live.client.options("/v1/completions", headers=asked | {"x-request-id": "mine"})
        assert named.headers["x-request-id"] == named.headers["request-id"] == "mine"
        for wrong in ({"origin": "https://evil.example"}, {"access-control-request-method": "PUT"}):
            refused = live.client.options("/v1/completions", headers=asked | wrong)
            assert refused.status_code == 400 and refused.headers["x-request-id"].startswith("req-")
            error = refused.json()["error"]
            assert error.keys() == KEYS and error["code"] == "cors_refused" and "Disallowed CORS" in error["message"]
            assert ("access-control-allow-origin" in refused.headers) is ("origin" not in wrong)
        refused = live.client.post("/v1/completions", headers={"origin": "https://app.example"})
        assert refused.status_code == 401  # which the page may read
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = live.client.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def make_certificate(cert: Path, key: Path) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=PATIENCE_S)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(cert, key)
    return str(cert), str(key)


def test_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(FakeEngine(fake_info()), tls_cert=cert, tls_key=key, header_timeout_s=0.3) as live:
        trusting = ssl.create_default_context(cafile=cert)
        url = live.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=trusting, timeout=PATIENCE_S, trust_env=False) as client:
            assert client.get("/health").status_code == 200
            body = {"prompt": [1], "max_tokens": 3, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with opened(live) as silent:  # no handshake
            assert read_all(silent) == b""


def test_connections_without_a_handshake_have_a_bound(certificate: tuple[str, str], caplog) -> None:
    """No protocol counts them: without a bound they take all descriptors, and the loop fills the log."""
    cert, key = certificate
    settings = {"tls_cert": cert, "tls_key": key, "max_connections": 2, "header_timeout_s": 2 * PATIENCE_S}
    with serving(FakeEngine(fake_info()), **settings) as live, ExitStack() as stack:
        silent = [stack.enter_context(opened(live)) for _ in range(2 + RESERVED_FILES // 2)]
        for _ in range(9):
            with opened(live) as another:
                assert read_all(another) == b""  # at once
        assert [record.message for record in caplog.records if "are taken" in record.message] == [
            "all 2 connections are taken: more are refused"
        ]
        for connection in silent:
            connection.close()
        trusting = ssl.create_default_context(cafile=cert)

        def is_served() -> bool:
            with suppress(httpx.TransportError):
                url = live.url.replace("http:", "https:")
                return httpx.get(f"{url}/health", verify=trusting, trust_env=False).status_code == 200
            return False

        eventually(is_served)


def test_a_new_certificate_is_read_while_the_server_serves(certificate: tuple[str, str], tmp_path: Path) -> None:
    """Not before its key is there as well, nor one that is none: clients get the old one until then."""
    cert, key = map(Path, certificate)
    old, new, new_key = cert.read_text(), tmp_path / "new.pem", tmp_path / "new.key"
    make_certificate(new, new_key)
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "old"\n')
    files = {"tls_cert": str(cert), "tls_key": str(key), "api_key_file": str(keys)}
    with serving(FakeEngine(fake_info()), **files) as live:
        address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
        for file, text, shown in (
            (cert, new.read_text(), old),
            (key, new_key.read_text(), new.read_text()),
            (cert, "none", new.read_text()),
        ):
            file.write_text(text)
            live.server._reload()
            assert ssl.get_server_certificate(address, timeout=PATIENCE_S).split() == shown.split()
        keys.write_text('[alice]\nkey = "new"\n')
        live.server._reload()  # beside a certificate that is still broken
        trusting = ssl.create_default_context(cafile=new)
        with httpx.Client(base_url=f"https://127.0.0.1:{address[1]}", verify=trusting, trust_env=False) as client:
            models = [client.get("/v1/models", headers={"authorization": f"Bearer {name}"}) for name in ("old", "new")]
        assert [found.status_code for found in models] == [401, 200]


def test_a_certificate_that_cannot_be_read_is_one_line(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    for given in ((cert, None), (cert, cert), (str(tmp_path / "none.pem"), key)):
        with pytest.raises(ConfigError, match="no certificate with its key") as error:
            load_certificate(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), *given)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="--tls-cert"):
        ServerSettings(tls_key=key)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "ridgeline.sock"
    bind_unix(path).close()  # what a server that is gone leaves
    listener = bind_unix(path)
    assert path.stat().st_mode & 0o777 == 0o600 and url_of(listener) == f"unix:{path}"
    listener.listen()
    with pytest.raises(OSError):
        bind_unix(path)
    with serving(FakeEngine(fake_info()), listener=listener) as live:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2}).status_code == 200
        assert live.engine.num_unfinished == 0


def test_a_panic_of_native_code_is_an_internal_error(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*args: object, **kwargs: object) -> None:
        raise PanicException("secret detail")

    monkeypatch.setattr(server.server._service.intake, "encode", panic)
    failed = server.post("completions", prompt=[1], max_tokens=1)
    assert failed.status_code == 500 and set(failed.json()["error"]) == KEYS
    assert failed.headers["x-request-id"] and "secret" not in failed.text


def test_a_stream_whose_client_is_gone_is_not_written_to_again() -> None:
    """The protocol hears of a failed write behind what else the loop has to do; asyncio logs each one until then."""
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append, is_closing=lambda: len(written) == 2)
    scope = {"http_version": "1.1"}
    flags = {"disconnected": False, "chunked_encoding": True, "response_started": False}
    cycle = SimpleNamespace(scope=scope, flow=SimpleNamespace(write_paused=False), transport=transport, **flags)

    async def app(scope: dict, receive: object, send: object) -> None:
        assert [cycle.scope["state"][WRITE](piece) for piece in (b"a", b"b", b"c", b"d")] == [True] * 4

    asyncio.run(Connection._run(SimpleNamespace(), app, cycle, scope, None, None))
    assert written == [b"1\r\na\r\n", b"1\r\nb\r\n"]
