"""Sliding-window attention: a query at position p sees the keys in (p - window, p]; older blocks are released."""

from collections.abc import Sequence

from ridgeline.cache.groups import CacheGroup, Hit, Need, append_need
from ridgeline.cache.layout import GroupLayout
from ridgeline.cache.pool import BlockPool
from ridgeline.cache.radix import RadixNode
from ridgeline.cache.table import SequenceTable


def build(index: int, layout: GroupLayout, block_size: int, pool: BlockPool) -> CacheGroup:
    assert layout.window is not None
    return SlidingGroup(index, layout.window, block_size, pool)


class SlidingGroup:
    """CacheGroup that keeps the blocks of the last `window - 1` computed tokens, and those being written."""

    whole_prefix = False
    miss_reason = "sliding blocks freed"

    def __init__(self, index: int, window: int, block_size: int, pool: BlockPool) -> None:
        self._index = index
        self._window = window
        self._block_size = block_size
        self._pool = pool

    def first_visible_block(self, computed: int) -> int:
        """The block of the oldest key that the query at position `computed` sees; no later query sees an older one."""
        return max(0, computed - self._window + 1) // self._block_size

    def match(self, path: Sequence[RadixNode], num_blocks: int) -> Hit:
        """Going down from `num_blocks`: the first length whose window is all there. One pass over the path."""
        run_end = num_blocks  # path[index + 1 : run_end] all have a block
        for index in range(num_blocks - 1, -1, -1):
            if self.first_visible_block(run_end * self._block_size) > index:
                break
            if path[index].blocks[self._index] is None:
                run_end = index
        return Hit(run_end, self.first_visible_block(run_end * self._block_size))

    def reserve(self, table: SequenceTable, computed: int, end: int) -> Need:
        return append_need(table, computed, end, self._block_size, self._pool)

    def span_end(self, computed: int, end: int) -> int:
        return end

    def published_block(self, table: SequenceTable, index: int, before: int, computed: int) -> int | None:
        return table.block_at(index)

    def commit(self, table: SequenceTable, computed: int) -> None:
        first = self.first_visible_block(computed)
        if first > table.first_block:
            table.drop_before(first, self._pool)

    def truncate(self, table: SequenceTable, end: int) -> None:
        table.drop_from(-(-end // self._block_size), self._pool)

    def release(self, table: SequenceTable) -> None:
        table.release(self._pool)

    def writable_blocks(self, table: SequenceTable, computed: int, reserved: int) -> Sequence[int]:
        return table.written(computed, reserved, self._block_size)

    def tree_block(self, table: SequenceTable, index: int) -> int | None:
        return table.block_at(index) if index >= table.first_block else None

    def check(self, table: SequenceTable, computed: int, reserved: int) -> None:
        assert table.first_block == self.first_visible_block(computed), "blocks below the window, or a hole inside it"
        assert table.end_block == -(-reserved // self._block_size), "the table does not end with the reservation"
