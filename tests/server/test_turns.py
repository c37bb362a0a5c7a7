"""When clients that are refused are told to come back: as many as there is room for, whoever else floods the server."""

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.server.clients import MAX_REFUSED, MAX_RETRY_AFTER_S, Turns


class Crowd:
    """Clients that do what they are told, before a server of `room` slots that ends an output every `period_s`."""

    def __init__(self, addresses: list[int], room: int, period_s: float, rng: random.Random) -> None:
        self.now_s = 0.0
        self.turns = Turns(lambda: self.now_s)
        self.ended, self.refused = Counter[int](), Counter[int]()
        self._addresses, self._room, self._period_s, self._rng = addresses, room, period_s, rng
        self._num_slots, self._free_s = 0, 0.0
        self._events = [(rng.uniform(0, 1), client, -1.0) for client in range(len(addresses))]
        heapq.heapify(self._events)

    def run_until(self, end_s: float) -> None:
        while self._events[0][0] < end_s:
            self.now_s, client, began_s = heapq.heappop(self._events)
            if began_s >= 0:
                self.turns.ended(self.now_s - began_s, self._num_slots)
                self._num_slots -= 1
                self.ended[client] += 1
            self._ask(client)

    def _ask(self, client: int) -> None:
        if self._num_slots < self._room:
            self._num_slots += 1
            self._free_s = max(self._free_s, self.now_s) + self._period_s
            heapq.heappush(self._events, (self._free_s, client, self.now_s))
        else:
            self.refused[client] += 1
            wait_s = self.turns.next_s(self._addresses[client]) * self._rng.uniform(0.9, 1.1)
            heapq.heappush(self._events, (self.now_s + wait_s, client, -1.0))


@settings(deadline=None, max_examples=25)
@given(
    num_clients=st.integers(50, 1500),
    num_addresses=st.sampled_from([1, 2, 2000]),
    room=st.integers(8, 96),
    period_s=st.floats(0.002, 0.05),
    seed=st.integers(0, 2**32),
)
def test_a_crowd_comes_back_as_there_is_room(
    num_clients: int, num_addresses: int, room: int, period_s: float, seed: int
) -> None:
    """Who was served asks again at once, so that half of what comes may be refused, and nothing stands still."""
    crowd = Crowd([client % num_addresses for client in range(num_clients)], room, period_s, random.Random(seed))
    crowd.run_until(45)
    ended, refused = crowd.ended.total(), crowd.refused.total()
    crowd.run_until(75)
    ended, refused = crowd.ended.total() - ended, crowd.refused.total() - refused
    assert ended >= 0.9 * min(30 / period_s, num_clients * 30)
    beyond_s = MAX_RETRY_AFTER_S / 2  # a crowd too large for the longest wait comes back after that
    assert refused <= 2.5 * ended + 30 * num_clients / beyond_s


def test_a_flood_does_not_make_others_wait() -> None:
    now_s = 0.0
    turns = Turns(lambda: now_s)
    turns.ended(16 * 64, 64)  # an average of one second between the ends of two outputs
    assert [turns.next_s(1) for _ in range(40)] == [min(n, MAX_RETRY_AFTER_S) for n in range(1, 41)]
    assert turns.next_s(2) == 2, "two clients: each gets every second turn"
    now_s = 29.5
    assert turns.next_s(2) == 2
    now_s = 100.0
    assert turns.next_s(1) == 1, "turns that have passed are forgotten"


def test_a_server_that_has_ended_nothing_says_a_second() -> None:
    turns = Turns(lambda: 0.0)
    assert {turns.next_s(client) for client in range(2 * MAX_REFUSED)} == {1}


@pytest.mark.parametrize("num_clients", [1, 3 * MAX_REFUSED])
def test_no_number_of_clients_takes_memory_without_end(num_clients: int) -> None:
    turns = Turns(lambda: 0.0)
    turns.ended(1.0, 1)
    for client in range(num_clients):
        assert 1 <= turns.next_s(client) <= MAX_RETRY_AFTER_S
    assert len(turns._last_s) <= MAX_REFUSED + 1
