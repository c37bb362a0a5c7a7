"""Quarantine: requests that were there when the engine died, so that one that kills it does so twice at most.

A request is known by what it asks for, since clients send it again under another id. Those that were there at a death
are suspects: again, they come one at a time until their first token, so that a second death has one culprit.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import msgspec

from ridgeline.core.clock import Clock
from ridgeline.core.errors import OverloadedError, QuarantinedError
from ridgeline.decoding.request import SLOTS, Request
from ridgeline.engine.outputs import OutputDelta
from ridgeline.engine.streams import LATE

MEMORY_S = 600.0
MAX_KNOWN = 4096
DEATHS = 2  # at which a request must have been there


class Quarantine:
    """Remembers requests by how many deaths of the engine they were there at; on one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # and when the last one was
        self._turn = asyncio.Lock()
        self._on_trial: frozenset[bytes] = frozenset()

    def suspects(self, requests: Iterable[Request]) -> frozenset[bytes]:
        """Return those of the requests that were there at a death. Raises QuarantinedError for two."""
        while self._deaths and self._clock() - next(iter(self._deaths.values()))[1] > MEMORY_S:
            self._deaths.popitem(last=False)
        if not self._deaths:  # as nearly always
            return frozenset()
        found = frozenset(map(_digest, requests)) & self._deaths.keys()
        if any(self._deaths[name][0] >= DEATHS for name in found):
            what = f"the engine died {DEATHS} times while it computed this request"
            then = f"it is refused for {MEMORY_S / 60:g} minutes; change it, and tell the operator"
            raise QuarantinedError(f"{what}: {then}")
        return found

    async def tried(
        self, suspects: frozenset[bytes], stream: AsyncGenerator[OutputDelta, None], deadline_s: float | None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yield the stream of suspects, of which no others run until it has begun; at its end they are none.

        Raises OverloadedError where `deadline_s`, on the clock, passes before it is their turn.
        """
        async with aclosing(stream) as deltas:
            try:
                left_s = None if deadline_s is None else deadline_s - self._clock()
                async with asyncio.timeout(left_s):
                    await self._turn.acquire()
            except TimeoutError:
                raise OverloadedError(LATE) from None
            try:
                self._on_trial = suspects
                first = await anext(deltas, None)
            finally:
                self._on_trial = frozenset()
                self._turn.release()
            if first is not None:
                yield first
            async for delta in deltas:
                yield delta
        for name in suspects:
            self._deaths.pop(name, None)

    def died(self, present: Sequence[Request]) -> None:
        """Take in a death of the engine, and the requests that it had."""
        found = frozenset(map(_digest, present))
        for name in found:
            before = self._deaths.pop(name, (0, 0.0))[0]
            is_blamed = not self._on_trial or name in self._on_trial
            self._deaths[name] = before + 1 if is_blamed else max(before, 1), self._clock()
        while len(self._deaths) > MAX_KNOWN:
            self._deaths.popitem(last=False)


def _digest(request: Request) -> bytes:
    asked = request.prompt_ids, request.params, request.adapter % SLOTS, request.pooling, request.prediction_ids
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()
