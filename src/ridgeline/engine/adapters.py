"""Adapters: the LoRA adapters that an engine serves, which come and go while it runs. On one event loop.

A number is given once; by SLOTS it is the adapter's place in memory. A place is free again when no name stands for it
and no open request has it: these end with the adapter that they began with.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ModelNotFoundError, OverloadedError, RequestError
from ridgeline.decoding.request import SLOTS, Request


class Adapters:
    """Keeps `numbers`, an `EngineInfo.adapters`. `requests` are open; `put` loads to a number's place."""

    def __init__(
        self,
        numbers: dict[str, int],
        config: EngineConfig,
        requests: Callable[[], Iterable[Request]],
        put: Callable[[int, str, str], Awaitable[None]],
    ) -> None:
        self._numbers, self._folders, self._room = numbers, dict(config.adapters), config.max_loras
        self._requests, self._put = requests, put
        self._turn = asyncio.Lock()
        self._next = SLOTS

    async def load(self, name: str, folder: str, *, in_place: bool) -> None:
        """Serve the adapter of a folder, also `in_place` of one of that name.

        Raises RequestError for a name or a number too many, OverloadedError where open requests leave no place,
        ConfigError and ModelLoadError for what is no adapter of this model.
        """
        async with self._turn:
            if name in self._numbers and not in_place:
                raise RequestError(f"adapter {name!r} is loaded; unload it, or set load_inplace", param="lora_name")
            named = {number % SLOTS for number in self._numbers.values()}
            if len(named) >= self._room:
                raise RequestError(f"max_loras is {self._room}, and as many are loaded; unload one", param="lora_name")
            used = named.union(request.adapter % SLOTS for request in self._requests())
            place = next((place for place in range(1, self._room + 1) if place not in used), None)
            if place is None:
                raise OverloadedError("open requests use the adapters that were unloaded; retry when they have ended")
            number, self._next = self._next + place, self._next + SLOTS
            await self._put(number, name, folder)
            self._numbers[name], self._folders[name] = number, folder

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Raises ModelNotFoundError."""
        if self._numbers.pop(name, None) is None:
            known = ", ".join(self._numbers) or "none"
            raise ModelNotFoundError(f"no adapter {name[:200]!r} is loaded; there is {known}")
        del self._folders[name]

    def require(self, requests: Iterable[Request]) -> None:
        """Raise ModelNotFoundError for a request whose adapter has been unloaded since it was made."""
        if any(request.adapter and request.adapter not in self._numbers.values() for request in requests):
            raise ModelNotFoundError("the adapter of this request has just been unloaded")

    def again(self) -> dict[str, str]:
        """Return the folders that another engine begins with, less those that are gone, numbered as it does."""
        self._folders = {name: folder for name, folder in self._folders.items() if Path(folder).expanduser().is_dir()}
        self._numbers.clear()
        self._numbers |= {name: self._next + place for place, name in enumerate(self._folders, 1)}
        self._next += SLOTS
        return self._folders
