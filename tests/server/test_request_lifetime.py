"""What a request leaves behind: nothing that only the garbage collector could free, whose looks all others wait for."""

import gc
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, fake_info
from live_server import LiveServer, eventually, serving
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ridgeline.server.service import RequestNote

NUM_REQUESTS = 20


def num_alive() -> int:
    return sum(type(each) in (RequestResponseCycle, RequestNote) for each in gc.get_objects())  # asks no object itself


def refused(live: LiveServer) -> int:
    service = live.server._service
    service.num_slots += 10**6
    try:
        return live.post("completions", prompt=[1]).status_code
    finally:
        service.num_slots -= 10**6


ASKED: dict[str, tuple[int, Callable[[LiveServer], int]]] = {
    "health": (200, lambda live: live.client.get("/health").status_code),
    "completion": (200, lambda live: live.post("completions", prompt=[1], max_tokens=2).status_code),
    "stream": (200, lambda live: live.post("completions", prompt=[1], max_tokens=2, stream=True).status_code),
    "bad body": (400, lambda live: live.post("completions", prompt=[10**9]).status_code),
    "no such path": (404, lambda live: live.client.get("/nowhere").status_code),
    "no such model": (404, lambda live: live.post("completions", prompt=[1], model="nobody's").status_code),
    "full queue": (503, refused),
}


@pytest.mark.parametrize("kind", ASKED)
def test_no_request_waits_for_the_collector(kind: str) -> None:
    status, ask = ASKED[kind]
    with serving(FakeEngine(fake_info())) as live:
        assert ask(live) == status
        gc.collect()
        before = num_alive()
        gc.disable()
        try:
            assert {ask(live) for _ in range(NUM_REQUESTS)} == {status}
            eventually(lambda: num_alive() <= before + 2)  # a connection holds on to its last one
        finally:
            gc.enable()
