"""Full attention: every query sees every earlier position, so a sequence keeps all its blocks."""

from collections.abc import Iterable, Sequence

from ridgeline.cache.groups import NO_NEED, CacheGroup, Hit, Need
from ridgeline.cache.radix import RadixNode
from ridgeline.cache.table import SequenceTable


class FullGroup(CacheGroup):
    """CacheGroup that never frees before the sequence ends; the tree holds its block for every node."""

    whole_prefix = True
    miss_reason = "evicted or never seen"
    can_roll_back = True

    def match(self, path: Sequence[RadixNode], num_blocks: int) -> Hit:
        """Match every node of the path: each has a block here (the tree's invariant for `whole_prefix`)."""
        return Hit(num_blocks, 0)

    def reserve(self, table: SequenceTable, computed: int, end: int) -> Need:
        """Return the blocks needed up to `end`, and a copy of a partial block at the end that others hold too."""
        num_new = -(-end // self._block_size) - table.end_block
        tail = computed // self._block_size
        copies_tail = computed % self._block_size != 0 and self._pool.ref_count(table.block_at(tail)) > 1
        return Need(max(num_new, 0), tail if copies_tail else None) if num_new > 0 or copies_tail else NO_NEED

    def changing_offsets(self) -> Iterable[int]:
        return (0,)

    def published_block(self, table: SequenceTable, index: int, before: int, computed: int) -> int | None:
        return table.block_at(index)

    def truncate(self, table: SequenceTable, end: int) -> None:
        table.drop_from(-(-end // self._block_size), self._pool)

    def tree_block(self, table: SequenceTable, index: int) -> int | None:
        return table.block_at(index) if index >= table.first_block else None


build = FullGroup
