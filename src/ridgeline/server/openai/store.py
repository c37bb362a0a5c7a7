"""Responses that are stored for a client, in memory: a restart forgets them."""

import asyncio
from collections.abc import Sequence

from starlette.exceptions import HTTPException

_ENTRY_BYTES = 1024  # what an entry takes beside its texts, at most: so their number is bounded too
_ITEM_BYTES = 256  # and what the name of an item takes
Stored = tuple[bytes, bytes]  # a response, and the items that it was made of, both as JSON


class ResponseStore:
    """Keeps one client's responses by their ids: `max_bytes` at once, the oldest go first, each for `max_age_s`."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._room_bytes = max_bytes
        self._max_age_s = max_age_s
        self._stored: dict[str, tuple[Stored, Sequence[str], asyncio.TimerHandle]] = {}
        self._homes: dict[str, str] = {}  # the responses of items, by their ids

    def put(self, response_id: str, stored: Stored, items: Sequence[str] = ()) -> None:
        """Keep a response, at the expense of older ones; `items` are the ids of what came with it."""
        timer = asyncio.get_running_loop().call_later(self._max_age_s, self.forget, response_id)
        self._stored[response_id] = (stored, items, timer)
        self._homes |= dict.fromkeys(items, response_id)
        self._room_bytes -= _num_bytes(stored, items)
        while self._room_bytes < 0:
            self.forget(next(iter(self._stored)))

    def get(self, response_id: str) -> Stored:
        """Return a response. Raises HTTPException 404."""
        if response_id not in self._stored:
            raise HTTPException(404, f"Response with id '{response_id[:100]}' not found.")
        return self._stored[response_id][0]

    def home_of(self, item_id: str) -> Stored | None:
        """Return the response that an item came with, where it is still stored; any thread."""
        found = self._stored.get(self._homes.get(item_id, ""))
        return None if found is None else found[0]

    def forget(self, response_id: str) -> None:
        """Forget a response that is stored."""
        stored, items, timer = self._stored.pop(response_id)
        timer.cancel()
        self._room_bytes += _num_bytes(stored, items)
        for item_id in items:
            if self._homes.get(item_id) == response_id:
                del self._homes[item_id]


def _num_bytes(stored: Stored, items: Sequence[str]) -> int:
    return _ENTRY_BYTES + sum(map(len, stored)) + sum(_ITEM_BYTES + len(item_id) for item_id in items)
