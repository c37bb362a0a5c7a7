"""The cache's memory, taken from the system before a step writes it: some systems need longer for a page's first use
than a step has for all that it writes there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ridgeline import _native
from ridgeline.backends.native.memory import CacheMemory, address
from ridgeline.cache.layout import CacheLayout

if TYPE_CHECKING:
    import numpy as np

AHEAD_TOKENS = 2048  # that each group has memory for past the highest slot in use


class CacheWarmer:
    """Keeps memory ready for the slots that come next. Blocks are handed out from the lowest number up."""

    def __init__(self, cache: CacheMemory, layout: CacheLayout) -> None:
        self.native = _native.MemoryWarmer()
        self._block_size = layout.block_size
        self._num_blocks = [group.num_blocks for group in layout.groups]
        # By group, the blocks of its states: uint8 [block, bytes].
        self._states: list[list[np.ndarray]] = [[] for _ in layout.groups]
        for (_, group), blocks in zip(cache.kv.values(), cache.blocks, strict=True):
            self._states[group].append(blocks.reshape(self._num_blocks[group], -1))
        self._ready = [0 if states else count for states, count in zip(self._states, self._num_blocks)]

    def stay_ahead(self, highest_slots: Sequence[int]) -> None:
        """Have memory taken past each group's highest slot, where half of what is ahead is used up."""
        ahead = AHEAD_TOKENS // self._block_size
        used = [slot // self._block_size for slot in highest_slots]
        least = [min(block + ahead // 2, count) for block, count in zip(used, self._num_blocks)]
        if all(ready >= enough for ready, enough in zip(self._ready, least)):
            return
        ends = [
            max(ready, min(block + ahead, count)) for ready, block, count in zip(self._ready, used, self._num_blocks)
        ]
        wanted = [blocks[ready:end] for ready, end, group in zip(self._ready, ends, self._states) for blocks in group]
        if self.native.take([(address(part), part.nbytes) for part in wanted if part.nbytes]):
            self._ready = ends
