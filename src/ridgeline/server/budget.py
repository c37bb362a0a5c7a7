"""BodyBudget: how many bytes of request bodies the server holds at once, whoever sends them."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from ridgeline.core.errors import OverloadedError


class BodyBudget:
    """Room for bytes that have arrived and are not decoded yet."""

    def __init__(self, max_bytes: int) -> None:
        self.room_bytes = max_bytes

    @contextmanager
    def holding(self) -> Generator[Callable[[int], None]]:
        """Yield a function that takes room for more bytes, until the block ends; it raises OverloadedError."""
        held_bytes = 0

        def take(num_bytes: int) -> None:
            nonlocal held_bytes
            if num_bytes > self.room_bytes:
                raise OverloadedError("the bodies of other requests fill the memory that is set aside; retry later")
            self.room_bytes -= num_bytes
            held_bytes += num_bytes

        try:
            yield take
        finally:
            self.room_bytes += held_bytes
