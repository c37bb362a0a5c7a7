"""The cache's memory, taken from the system before a step writes it: some systems need longer for a page's first use
than a step has for all that it writes there.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ridgeline import _native
from ridgeline.backends.native.memory import HUGE_PAGE_BYTES, CacheMemory, address
from ridgeline.cache.layout import CacheLayout

if TYPE_CHECKING:
    import numpy as np

AHEAD_TOKENS = 2048  # that each group has memory for past the highest slot in use


class CacheWarmer:
    """Keeps memory ready for the slots that come next. Blocks are handed out from the lowest number up."""

    def __init__(self, cache: CacheMemory, layout: CacheLayout) -> None:
        self._block_size = layout.block_size
        self._num_blocks = [group.num_blocks for group in layout.groups]
        # By group, the blocks of its states: uint8 [block, bytes].
        self._states: list[list[np.ndarray]] = [[] for _ in layout.groups]
        for (_, group), blocks in zip(cache.kv.values(), cache.blocks, strict=True):
            self._states[group].append(blocks.reshape(self._num_blocks[group], -1))
        self._ready = [0 if states else count for states, count in zip(self._states, self._num_blocks)]
        self._thread: threading.Thread | None = None

    def stay_ahead(self, highest_slots: Sequence[int]) -> None:
        """Start a thread that takes memory past each group's highest slot, where half of what is ahead is used up."""
        ahead = AHEAD_TOKENS // self._block_size
        used = [slot // self._block_size for slot in highest_slots]
        least = [min(block + ahead // 2, count) for block, count in zip(used, self._num_blocks)]
        if all(ready >= enough for ready, enough in zip(self._ready, least)):
            return
        if self._thread is None or not self._thread.is_alive():
            wanted = [min(block + ahead, count) for block, count in zip(used, self._num_blocks)]
            self._thread = threading.Thread(target=self._take, args=(wanted,), name="cache-memory", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until all that was asked for is taken."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, wanted: Sequence[int]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # steps come first, where threads have priorities
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for group, (ready, end) in enumerate(zip(self._ready, wanted)):
            for state in self._states[group]:
                part = state[ready:end].reshape(-1)
                for start in range(0, part.nbytes, HUGE_PAGE_BYTES):  # in pieces: others wait for the system less
                    piece = part[start : start + HUGE_PAGE_BYTES]
                    if not _native.populate(address(piece), piece.nbytes):
                        self._ready = list(self._num_blocks)  # the system cannot be asked
                        return
            self._ready[group] = max(ready, end)
