"""Responses that are stored for a client, in memory: a restart forgets them."""

import asyncio

from starlette.exceptions import HTTPException

_ENTRY_BYTES = 1024  # what an entry takes beside its texts, at most: so their number is bounded too
Stored = tuple[bytes, bytes]  # a response, and the items that it was made of, both as JSON


class ResponseStore:
    """Keeps one client's responses by their ids: `max_bytes` at once, the oldest go first, each for `max_age_s`."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._room_bytes = max_bytes
        self._max_age_s = max_age_s
        self._stored: dict[str, tuple[Stored, asyncio.TimerHandle]] = {}

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response, at the expense of older ones."""
        timer = asyncio.get_running_loop().call_later(self._max_age_s, self.forget, response_id)
        self._stored[response_id] = (stored, timer)
        self._room_bytes -= _ENTRY_BYTES + sum(map(len, stored))
        while self._room_bytes < 0:
            self.forget(next(iter(self._stored)))

    def get(self, response_id: str) -> Stored:
        """Return a response. Raises HTTPException 404."""
        if response_id not in self._stored:
            raise HTTPException(404, f"Response with id '{response_id[:100]}' not found.")
        return self._stored[response_id][0]

    def forget(self, response_id: str) -> None:
        """Forget a response that is stored."""
        stored, timer = self._stored.pop(response_id)
        timer.cancel()
        self._room_bytes += _ENTRY_BYTES + sum(map(len, stored))
