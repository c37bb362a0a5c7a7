"""Sliding-window attention: a query at position p sees the keys in (p - window, p]; older blocks are released."""

from collections.abc import Iterable, Sequence

from ridgeline.cache.groups import Hit
from ridgeline.cache.groups.full import FullGroup
from ridgeline.cache.radix import RadixNode
from ridgeline.cache.table import SequenceTable


class SlidingGroup(FullGroup):
    """Appends as a full group does, and keeps the blocks of the last `window - 1` computed tokens alone."""

    whole_prefix = False
    miss_reason = "sliding blocks freed"

    def first_visible_block(self, computed: int) -> int:
        """Return the block of the oldest key that the query at `computed` sees; later queries see no older one."""
        assert self._layout.window is not None
        return max(0, computed - self._layout.window + 1) // self._block_size

    def changing_offsets(self) -> Iterable[int]:
        """Return where a block ends, and where the window leaves one."""
        assert self._layout.window is not None
        return 0, (self._layout.window - 1) % self._block_size

    def match(self, path: Sequence[RadixNode], num_blocks: int) -> Hit:
        """Search down from `num_blocks` for the first length whose window is all there, in one pass over the path."""
        run_end = num_blocks  # path[index + 1 : run_end] all have a block
        for index in range(num_blocks - 1, -1, -1):
            if self.first_visible_block(run_end * self._block_size) > index:
                break
            if path[index].blocks[self._index] is None:
                run_end = index
        return Hit(run_end, self.first_visible_block(run_end * self._block_size))

    def commit(self, table: SequenceTable, computed: int) -> None:
        first = self.first_visible_block(computed)
        if first > table.first_block:
            table.drop_before(first, self._pool)


build = SlidingGroup
