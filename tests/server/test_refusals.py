"""Floods of refusals: who is told to retry and asks again at once is read later, and nobody else waits for it."""

import heapq
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from fake_engine import FakeEngine, fake_info
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import PATIENCE_S, LiveServer, serving

from ridgeline.server import transport
from ridgeline.server.service import Service
from ridgeline.server.settings import ServerSettings
from ridgeline.server.transport import MAX_REST_S, REFUSALS_PER_S, Limiter

CONTENT = json.dumps({"prompt": [1], "max_tokens": 1, "n": 2}).encode()
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(CONTENT),
    CONTENT,
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def new_limiter() -> Limiter:
    return Limiter(Service(FakeEngine(fake_info()), None, ServerSettings()))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.floats(0.0, 0.1), st.floats(0.0, 1e9))
def test_a_flood_asks_no_more_often_than_it_may(num_clients: int, travel_s: float, now_s: float) -> None:
    """Clients that ask again as soon as they are read and heard, for three seconds; a lone one hardly notices."""
    limiter, began_s, count = new_limiter(), now_s, 0
    asking = [(now_s, client) for client in range(num_clients)]
    while asking[0][0] < began_s + 3:
        now_s, client = heapq.heappop(asking)
        rest_s = limiter.rest_s(now_s)
        assert 0 < rest_s <= MAX_REST_S + 1e-6, "never longer than it was told to wait anyway"
        assert num_clients > 1 or rest_s < 2 / REFUSALS_PER_S
        heapq.heappush(asking, (now_s + rest_s + travel_s, client))
        count += 1
        assert count < 20_000
    most_at_once = num_clients / MAX_REST_S  # who comes back when told is let in
    assert count <= num_clients + 3 * max(REFUSALS_PER_S, most_at_once) + 2


@contextmanager
def connected(live: LiveServer) -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


def reply_to(connection: socket.socket, data: bytes) -> bytes:
    """Send a request, and return the head of its response and all its body."""
    connection.sendall(data)
    reply = b""
    while b"\r\n\r\n" not in reply:
        reply += connection.recv(2**16)
    head, _, content = reply.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(content) < length:
        content += connection.recv(2**16)
    assert len(content) == length
    return head


def test_who_was_refused_is_read_later_and_others_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REFUSALS_PER_S", 1e-3)
    monkeypatch.setattr(transport, "MAX_REST_S", 1e3)
    engine = FakeEngine(fake_info())
    with serving(engine) as live, connected(live) as refused, connected(live) as other:
        live.server._service.num_slots = 10**6  # as if a flood had taken all of them
        head = reply_to(refused, ASK)
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head.lower()
        refused.sendall(HEALTH)
        for _ in range(20):
            assert reply_to(other, HEALTH).startswith(b"HTTP/1.1 200")
        refused.setblocking(False)
        with pytest.raises(BlockingIOError):
            refused.recv(1)
        live.server._service.num_slots = 0


def test_it_is_read_again_in_its_turn() -> None:
    with serving(FakeEngine(fake_info())) as live, connected(live) as refused:
        live.server._service.num_slots = 10**6
        for _ in range(5):
            assert reply_to(refused, ASK).startswith(b"HTTP/1.1 503")
        live.server._service.num_slots = 0
        assert reply_to(refused, HEALTH).startswith(b"HTTP/1.1 200")
        assert reply_to(refused, ASK).startswith(b"HTTP/1.1 200")


def test_another_event_loop_that_is_installed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn would take uvloop's, whose transports are none of asyncio's."""
    monkeypatch.setitem(sys.modules, "uvloop", ModuleType("uvloop"))
    with serving(FakeEngine(fake_info())) as live:
        assert live.client.get("/health").status_code == 200
