"""What attacks on the transport of `ridgeline serve` do to it and to the clients beside them; loopback, bounded.

usage: python -m benchmarks.attacks [--other ENV/bin/python] [--model python-1m] [--seconds 65]
           [--attacks NAME ...] [--out DIR]

Starts a server with room for 1,024 open files, beside it in turn one of the `--other` environment, and attacks them:
more connections than that, chunks of one byte, bodies that never end or are too large or wrong, garbage, heads without
end, clients that leave, connections that say nothing; last, heads and bodies that dribble beside silent connections,
counted after `--seconds`. A polite client asks for /health all along.
"""

import resource
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import option_parser, save

from ridgeline.bench.report import Report

FILES = 1024
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Server:
    """A server in a process of its own, and the polite client beside the attacks.

    It does not draft unless `options` say so: the outputs of these clients repeat themselves as no one's else do.
    """

    START = ("-c", "from ridgeline.cli import main; main()", "serve")

    def __init__(self, python: str, model: str, *options: str, files: int = FILES) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        command = [python, *self.START, model, "--port", "0", "--speculate", "off", *options]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        with suppress(OSError):
            connection.sendall(data)
        return connection

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def metric(self, name: str) -> float:
        """Return the sum of the samples that have the name, and the labels where it says them."""
        with self.connect(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n") as connection:
            text = b"".join(iter(lambda: connection.recv(2**16), b"")).decode()
        found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert found, f"the server has no metric {name}"
        return sum(map(float, found))

    @property
    def log_bytes(self) -> int:
        return Path(self._log.name).stat().st_size

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Yield a list that fills with the seconds that /health took, on a connection from before; inf: no reply."""
        waits: list[float] = []
        done = threading.Event()
        connection = self.connect()

        def ask() -> None:
            while not done.is_set():
                began = time.perf_counter()
                try:
                    connection.sendall(HEALTH)
                    reply = connection.recv(4096)
                    while reply and not reply.endswith(b"}"):
                        reply += connection.recv(4096)
                    waits.append(time.perf_counter() - began if reply else float("inf"))
                except OSError:
                    waits.append(float("inf"))
                    return
                done.wait(0.02)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield waits
        finally:
            done.set()
            thread.join(20)
            connection.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def too_many_connections(server: Server) -> dict[str, object]:
    connections = []
    for _ in range(FILES + 50):
        with suppress(OSError):
            connections.append(server.connect())
    time.sleep(3)
    new = server.connect(HEALTH)
    new.settimeout(2)
    try:
        reply = new.recv(12).decode()
    except OSError as error:
        reply = type(error).__name__
    for connection in [*connections, new]:
        connection.close()
    time.sleep(1)
    return {"connections": FILES + 50, "a new one gets": reply}


def one_byte_chunks(server: Server) -> dict[str, object]:
    """500,000 chunks: 3 MB."""
    connection = server.connect()
    with suppress(OSError):
        connection.settimeout(60)
        connection.sendall(CHUNKED + b"1\r\n \r\n" * 500_000 + b"0\r\n\r\n")
        connection.recv(4096)
    connection.close()
    time.sleep(0.5)
    return {}


def unfinished_bodies(server: Server) -> dict[str, object]:
    """300 bodies, each 1.9 MB of 2 MB."""
    head = POST + b"Content-Length: 2000000\r\n\r\n"
    before = server.rss_bytes
    connections = [server.connect(head + b" " * 1_900_000) for _ in range(300)]
    time.sleep(2)
    grown = server.rss_bytes - before
    for connection in connections:
        connection.close()
    return {"sent MB": 570, "RSS MB more": round(grown / 1e6)}


def huge_bodies(server: Server) -> dict[str, object]:
    """100 MB, once declared and once in chunks: how much of it was taken before the server refused."""
    before = server.rss_bytes
    found: dict[str, object] = {}
    for name, head in (("declared", POST + b"Content-Length: 100000000\r\n\r\n"), ("in chunks", CHUNKED)):
        with server.connect(head) as connection:
            num_sent, piece = 0, b" " * 2**16
            with suppress(OSError):
                while num_sent < 10**8 and not select.select([connection], [], [], 0)[0]:
                    connection.sendall(piece if name == "declared" else b"10000\r\n%b\r\n" % piece)
                    num_sent += len(piece)
            found[name] = f"{connection.recv(12).decode()} after {num_sent / 1e6:.1f} MB"
    return found | {"RSS MB more": round((server.rss_bytes - before) / 1e6)}


def idle_connections(server: Server) -> dict[str, object]:
    """4,000 silent connections: what 200 new clients wait for a reply."""
    before = server.rss_bytes
    connections = [server.connect() for _ in range(4000)]
    waits_ms: list[float] = []
    for _ in range(200):
        began = time.perf_counter()
        with server.connect(HEALTH) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        waits_ms.append((time.perf_counter() - began) * 1000)
    kib = (server.rss_bytes - before) / len(connections) / 1024
    for connection in connections:
        connection.close()
    return {"a new one, p50 ms": round(statistics.median(waits_ms), 2), "max ms": max(waits_ms), "KiB each": kib}


def bad_bodies(server: Server) -> dict[str, object]:
    """2,000 bodies that must be refused, a large one in ten, by four clients: how long a refusal takes."""
    small = (
        b"{",
        b"[]",
        b'{"prompt": 1.5}',
        b'{"prompt": "a", "n": -1}',
        b'{"prompt": "a", "x": 1}',
        b'{"prompt": []}',
    )
    large = (
        b'{"prompt": [%b1]}' % (b"1," * 900_000),
        b'{"messages": [%b{}]}' % (b'{"role":"user","content":""},' * 60_000),
        b'{"prompt": "a", "metadata": {%b"z": "1"}}' % b"".join(b'"%d":"1",' % key for key in range(130_000)),
        b'{"prompt": %b' % (b"[" * 1_900_000),
    )
    waits_ms: list[float] = []

    def ask() -> None:
        with server.connect() as connection:
            for number in range(500):
                content = large[number // 10 % len(large)] if number % 10 == 0 else small[number % len(small)]
                began = time.perf_counter()
                connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                reply = connection.recv(2**16)
                while not reply.endswith(b"}}"):
                    reply += connection.recv(2**16)
                assert reply.startswith(b"HTTP/1.1 400"), reply[:200]
                waits_ms.append((time.perf_counter() - began) * 1000)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    waits_ms.sort()
    assert len(waits_ms) == 2000, "a refusal is no 400, or did not come"
    p50, p99 = (waits_ms[int(share * len(waits_ms))] for share in (0.5, 0.99))
    return {"p50 ms": round(p50, 1), "p99 ms": round(p99, 1), "max ms": round(waits_ms[-1], 1)}


def disconnects(server: Server, count: int = 1000) -> dict[str, object]:
    """Clients of long streams that leave, half by FIN and half by RST: when the last block is free again."""
    content = b'{"prompt": [5, 6, 7, 8], "max_tokens": 900, "ignore_eos": true, "stream": true}'
    ask = POST + b"Content-Length: %d\r\n\r\n" % len(content) + content
    for number in range(0, count, 50):
        connections = [server.connect(ask) for _ in range(50)]
        time.sleep(0.1)
        for connection in connections:
            if number % 100:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    began = time.perf_counter()
    names = ('kv_blocks{group="0",state="used"}', "num_requests_running", "num_requests_waiting")
    while any(server.metric(f"ridgeline_{name}") for name in names) and time.perf_counter() - began < 30:
        time.sleep(0.01)
    freed_ms = (time.perf_counter() - began) * 1000
    left = {name.partition("{")[0]: server.metric(f"ridgeline_{name}") for name in names}
    return {"free after ms": round(freed_ms), "aborted": server.metric("ridgeline_requests_aborted_total"), **left}


def garbage(server: Server) -> dict[str, object]:
    before, replies = server.log_bytes, set[str]()
    for _ in range(500):
        with server.connect(b"\x16\x03\x01 nonsense\r\n\r\n") as connection, suppress(OSError):
            reply = connection.recv(4096)
            replies.add("error object" if b'"code"' in reply else "text" if reply else "nothing")
    return {"replies": sorted(replies), "log bytes": server.log_bytes - before}


def endless_heads(server: Server) -> dict[str, object]:
    before, replies = server.rss_bytes, set[str]()
    for _ in range(20):
        with server.connect(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 2**22) as connection, suppress(OSError):
            replies.add(connection.recv(12).decode() or "nothing")
    return {"replies": sorted(replies), "RSS MB more": round((server.rss_bytes - before) / 1e6)}


def length_beside_chunks(server: Server) -> dict[str, object]:
    smuggled = (
        POST
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    )
    with server.connect(smuggled) as connection, suppress(OSError):
        time.sleep(0.5)
        return {"replies": connection.recv(2**16).count(b"x-request-id")}
    return {}


def slow(server: Server, seconds: float) -> dict[str, object]:
    """100 silent connections, 100 heads and 100 bodies of one byte a second."""
    silent = [server.connect() for _ in range(100)]
    heads = [server.connect(b"GET /health HTTP/1.1\r\nX: ") for _ in range(100)]
    bodies = [server.connect(POST + b"Content-Length: 100000\r\n\r\n{") for _ in range(100)]
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for connection in [*heads, *bodies]:
            with suppress(OSError):
                connection.send(b"a")
        time.sleep(1)
    return {
        name: sum(is_open(c) for c in cs) for name, cs in (("silent", silent), ("heads", heads), ("bodies", bodies))
    }


def is_open(connection: socket.socket) -> bool:
    """Tell whether the server has not closed it; a reply before its end does not count as open."""
    with connection, suppress(OSError):
        connection.setblocking(False)
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(2**16):
                return False
        return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What an attack did to the server of one build; None in place of a time: no reply."""

    attack: str
    build: str
    found: dict[str, object]
    health_p50_ms: float
    health_max_ms: float | None
    log_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackReport(Report):
    """Every attack on every build."""

    model: str
    attacks: list[Attack]


def attacked(build: str, python: str, model: str, name: str, attack: Callable[[Server], dict[str, object]]) -> Attack:
    """Attack a server of its own."""
    files = 8192 if attack is idle_connections else FILES
    server = Server(python, model, "--log-level", "warning", "--num-threads", "1", files=files)
    try:
        with server.watched() as waits:
            time.sleep(0.3)
            found = attack(server)
        p50, worst = statistics.median(waits) * 1000, max(waits) * 1000
        log_bytes = server.log_bytes
    finally:
        server.close()
    row = Attack(
        attack=name,
        build=build,
        found=found,
        health_p50_ms=p50,
        health_max_ms=None if worst == float("inf") else worst,
        log_bytes=log_bytes,
    )
    words = ", ".join(f"{key}: {value}" for key, value in found.items())
    print(
        f"{name}, {build}: {words}; /health p50 {p50:.1f} ms, max {worst:.0f} ms; log {log_bytes / 1000:.0f} KB",
        flush=True,
    )
    return row


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--other", help="Python of an environment with another build, to be attacked too")
    parser.add_argument("--model", default="python-1m")
    parser.add_argument("--seconds", type=float, default=65, help="how long the slow clients go on")
    parser.add_argument("--attacks", nargs="+", metavar="NAME", help="only these")
    options = parser.parse_args()
    attacks: dict[str, Callable[[Server], dict[str, object]]] = {
        "length beside chunks": length_beside_chunks,
        "garbage": garbage,
        "endless heads": endless_heads,
        "one-byte chunks": one_byte_chunks,
        "unfinished bodies": unfinished_bodies,
        "huge bodies": huge_bodies,
        "bad bodies": bad_bodies,
        "disconnects": disconnects,
        "idle connections": idle_connections,
        "too many connections": too_many_connections,
        "slow clients, still open": lambda server: slow(server, options.seconds),
    }
    builds = {"other": options.other} if options.other else {}
    builds["this"] = sys.executable
    rows = [
        attacked(build, python, options.model, name, attack)
        for name, attack in attacks.items()
        if not options.attacks or name in options.attacks
        for build, python in builds.items()
    ]
    save(options.out, AttackReport(name="attacks", model=options.model, attacks=rows))


if __name__ == "__main__":
    main()
