"""The cache's memory, taken from the system before a step writes it: a page's first use can take longer than a step."""

from ridgeline import _native
from ridgeline.backends.native.memory import CacheMemory, address
from ridgeline.cache.layout import CacheLayout

AHEAD_TOKENS = 2048  # for which there is memory past the highest slot in use


class CacheWarmer:
    """Keeps memory ready for the slots that come next. Blocks are handed out from the lowest number up."""

    def __init__(self, cache: CacheMemory, layout: CacheLayout) -> None:
        self.native = _native.MemoryWarmer()
        self._block_size, self._ready_blocks = layout.block_size, 0
        groups = (layout.groups[group] for _, group in cache.kv.values())
        states = zip(groups, cache.blocks, strict=True)
        self._states = [blocks.reshape(group.num_blocks, -1) for group, blocks in states]

    def stay_ahead(self, highest_slot: int) -> None:
        """Take memory past a slot, on another thread, where half of what is ahead is used up."""
        used, ahead = highest_slot // self._block_size, AHEAD_TOKENS // self._block_size
        if self._ready_blocks >= used + ahead // 2 or self.native.busy:
            return
        parts = [blocks[self._ready_blocks : used + ahead] for blocks in self._states]
        if self.native.take([(address(part), part.nbytes) for part in parts if part.nbytes]):
            self._ready_blocks = used + ahead
