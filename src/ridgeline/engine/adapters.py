"""Adapters: the LoRA adapters that an engine serves, which come and go while it runs. On one event loop.

A number is given once. Its rest by SLOTS is the adapter's place in the engine's memory, which the next one gets when no
name stands for it and no request uses it any more: what is under way ends with the adapter that it began with.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ModelNotFoundError, OverloadedError, RequestError
from ridgeline.decoding.request import SLOTS, Request


class Adapters:
    """Numbers adapters in `numbers`, the `EngineInfo.adapters` that all others see.

    `requests` are those that the engine computes; `load` brings an adapter to a number's place: number, name, folder.
    """

    def __init__(
        self,
        numbers: dict[str, int],
        config: EngineConfig,
        requests: Callable[[], Iterable[Request]],
        load: Callable[[int, str, str], Awaitable[None]],
    ) -> None:
        self._numbers, self._folders, self._room = numbers, dict(config.adapters), config.max_loras
        self._requests, self._load = requests, load
        self._turn = asyncio.Lock()
        self._num_loads = 0

    async def load(self, name: str, folder: str, *, in_place: bool) -> None:
        """Serve the adapter of a folder, also `in_place` of one of that name, with which open requests go on.

        Raises RequestError for a name that is taken and too many, OverloadedError where open requests leave no place,
        ConfigError and ModelLoadError for what is no adapter of this model.
        """
        async with self._turn:
            if name in self._numbers and not in_place:
                raise RequestError(f"adapter {name!r} is loaded; unload it, or set load_inplace", param="lora_name")
            number = self._free_place() + self._next_life()
            await self._load(number, name, folder)
            self._numbers[name], self._folders[name] = number, folder

    def unload(self, name: str) -> None:
        """Serve an adapter no more; open requests end with it. Raises ModelNotFoundError."""
        if name not in self._numbers:
            raise ModelNotFoundError(
                f"no adapter {name[:200]!r} is loaded; there is {', '.join(self._numbers) or 'none'}"
            )
        del self._numbers[name], self._folders[name]

    def require(self, requests: Iterable[Request]) -> None:
        """Raise ModelNotFoundError for a request whose adapter has been unloaded since it was made."""
        if any(request.adapter and request.adapter not in self._numbers.values() for request in requests):
            raise ModelNotFoundError("the adapter of this request has just been unloaded")

    def again(self) -> dict[str, str]:
        """Return the folders that another engine begins with, less those that are gone, and number them as it does."""
        self._folders = {name: folder for name, folder in self._folders.items() if Path(folder).expanduser().is_dir()}
        life = self._next_life()
        self._numbers.clear()
        self._numbers |= {name: life + place for place, name in enumerate(self._folders, 1)}
        return self._folders

    def _next_life(self) -> int:
        self._num_loads += 1
        return SLOTS * self._num_loads

    def _free_place(self) -> int:
        named = {number % SLOTS for number in self._numbers.values()}
        if len(named) >= self._room:
            raise RequestError(
                f"{self._room} adapters may be loaded (max_loras), and are; unload one", param="lora_name"
            )
        free = set(range(1, self._room + 1)) - named - {request.adapter % SLOTS for request in self._requests()}
        if not free:
            raise OverloadedError("open requests use the adapters that were unloaded; retry when they have ended")
        return min(free)
