"""Faults of servers and of those who ask them: for `doctor_faults.py`, beside those of `doctor_plants.py`."""

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
from benchmarks.callers import Manners, call, post
from benchmarks.doctor_plants import SMALL, Plant, Planted, Run, plant, use_cache

from ridgeline.bench.workload import random_tokens
from ridgeline.engine.process.client import ProcessEngine
from ridgeline.explain.diagnosis import Diagnosis
from ridgeline.explain.rules import Finding
from ridgeline.server.app import create_app
from ridgeline.server.listen import bind
from ridgeline.server.run import DrainingServer
from ridgeline.server.settings import ServerSettings


class Blocking:
    """Middleware that computes on the event loop before each request."""

    def __init__(self, app: Any, blocked_s: float) -> None:
        self._app, self._blocked_s = app, blocked_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            time.sleep(self._blocked_s)
        await self._app(scope, receive, send)


@contextmanager
def served(blocked_s: float = 0.0) -> Iterator[int]:
    """Serve on a free port of the loopback; each request blocks the event loop for so long.

    The engine has a core of its own: what it waits for is not one of those who serve and ask.
    """
    first, *_, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    engine = ProcessEngine(Run([], {}, SMALL).config(1).served())
    os.sched_setaffinity(0, {last})
    app = create_app(engine, engine.tokenizer, ServerSettings())
    app.add_middleware(Blocking, blocked_s=blocked_s)
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    server = DrainingServer(app, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    ready.wait()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(20)


def ask(port: int, seconds: float = 6.0, clients: int = 2) -> float:
    """Ask for completions for some time, from clients that take hardly any of the cores; return their mean seconds."""
    bodies = [
        post("/v1/completions", model=SMALL, prompt=random_tokens(5, n, 60, 4000), max_tokens=60, ignore_eos=True)
        for n in range(clients)
    ]
    waits = call(port, seconds, [Manners(body) for body in bodies])
    return statistics.mean(wait_s for each in waits for _, wait_s, _ in each)


def asked(it: Plant, port: int) -> Planted:
    """Return what the server's own doctor says."""
    time.sleep(0.5)
    told = httpx.get(f"http://127.0.0.1:{port}/explain/doctor", timeout=90).json()["found"]
    findings = [Finding(**each) for each in told["findings"]]
    return it.found(Diagnosis(told["num_steps"], told["num_requests"], told["match"], findings, told["is_simulated"]))


@plant("loop_lag")
def _loop_lag(it: Plant) -> Planted:
    with use_cache(SMALL), served(blocked_s=0.0 if it.without else 0.035) as port:
        seconds = ask(port)
        found = Planted(fault=it.name, found=[], right=True) if it.without else asked(it, port)
        return replace(found, measures={"requests end sooner": seconds})


def _read(port: int, pause_s: float) -> None:
    """Stream a completion with more bytes than buffers hold, after a pause."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        text = json.dumps(
            {"model": SMALL, "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 48}
        )
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{text}".encode())
        data = b""
        time.sleep(pause_s)
        while b"[DONE]" not in data:
            data = data[-8:] + client.recv(2**16)


@plant("client_slow")
def _client_slow(it: Plant) -> Planted:
    with use_cache(SMALL), served() as port:
        began_s = time.perf_counter()
        _read(port, 0.0 if it.without else 12.0)
        seconds = time.perf_counter() - began_s
        found = Planted(fault=it.name, found=[], right=True) if it.without else asked(it, port)
        return replace(found, measures={"requests end sooner": seconds})
