"""Clients of a load that cost next to nothing: one thread, one epoll, requests that are ready as bytes.

The clients of a flood share the cores with the server that they measure. asyncio's streams take 0.3 ms of a core for a
reply, these a tenth of that. A reply's time is taken when epoll tells of it, before any reply is looked at: so no
client waits for another one's bookkeeping, and what is measured is an upper bound.
"""

import heapq
import json
import random
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTH, RETRY_AFTER, END, LAST_CHUNK = b"content-length: ", b"retry-after: ", b"\r\n\r\n", b"\r\n0\r\n\r\n"
Waits = list[tuple[int, float, float]]  # of each reply: status, seconds, and when it came, after all began


@dataclass(frozen=True, slots=True)
class Manners:
    """What a kind of client asks, from which address, and how long it pauses."""

    data: bytes
    address: str = "127.0.0.1"
    pause_s: float = 0.0
    start_within_s: float = 0.0
    patient: bool = False  # does what Retry-After says, give or take a half


@dataclass(slots=True)
class Caller:
    """One client and its connection."""

    manners: Manners
    waits: Waits = field(default_factory=Waits)
    connection: socket.socket | None = None
    began_s: float = 0.0
    reply: bytes = b""

    def ask(self, port: int, poll: select.epoll) -> int:
        """Send the request; return the connection's descriptor."""
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", port), source_address=(self.manners.address, 0))
            self.connection.setblocking(False)
            poll.register(self.connection.fileno(), select.EPOLLIN)
        self.began_s = time.perf_counter()
        self.connection.send(self.manners.data)
        return self.connection.fileno()

    def hear(self, now_s: float, begin_s: float) -> float | None:
        """Read what has come; return for how long to pause, once the reply is whole. Raises ConnectionError."""
        assert self.connection is not None
        data = self.connection.recv(2**16)
        if not data:
            raise ConnectionError("the server has closed a connection")
        self.reply += data
        head, end, content = self.reply.partition(END)
        head = head.lower()
        if not end or not (
            len(content) >= number_behind(LENGTH, head) if LENGTH in head else data.endswith(LAST_CHUNK)
        ):
            return None
        self.waits.append((int(head[9:12]), now_s - self.began_s, now_s - begin_s))
        self.reply = b""
        if self.manners.patient and RETRY_AFTER in head:
            return number_behind(RETRY_AFTER, head) * random.uniform(0.5, 1.5)
        return self.manners.pause_s


def post(path: str, **body: object) -> bytes:
    """Return a request as bytes."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def number_behind(name: bytes, head: bytes) -> int:
    return int(head.split(name, 1)[1].split(b"\r\n", 1)[0])


def call(port: int, seconds: float, all_manners: Sequence[Manners]) -> list[Waits]:
    """Let clients ask for some time; return what each waited for its replies."""
    callers = [Caller(manners) for manners in all_manners]
    begin_s = time.perf_counter()
    due = [(begin_s + random.uniform(0, each.start_within_s), number) for number, each in enumerate(all_manners)]
    heapq.heapify(due)
    by_descriptor: dict[int, int] = {}
    with select.epoll() as poll:
        while (now_s := time.perf_counter()) < begin_s + seconds:
            while due and due[0][0] <= now_s:
                _, number = heapq.heappop(due)
                by_descriptor[callers[number].ask(port, poll)] = number
            next_s = due[0][0] if due else begin_s + seconds
            events = poll.poll(max(0.0, next_s - time.perf_counter()))
            now_s = time.perf_counter()
            for descriptor, _ in events:
                number = by_descriptor[descriptor]
                try:
                    pause_s = callers[number].hear(now_s, begin_s)
                except ConnectionError as error:
                    print(f"a client ended early: {error}", flush=True)
                    poll.unregister(descriptor)
                    continue
                if pause_s is not None:
                    heapq.heappush(due, (now_s + pause_s, number))
    for caller in callers:
        if caller.connection is not None:
            caller.connection.close()
    return [caller.waits for caller in callers]
