"""Recurrent states: a sequence has one state, of all its computed tokens, however many they are.

    computed  0 ─ ─ ─ ─ span ─ ─ ─ ─▶ 32 ─ ─ ─ ─ span ─ ─ ─ ─▶ 45
    block     A: zero, written in place │ A: published           B: a copy of A, written in place

A state after a whole number of blocks is a checkpoint: the tree holds it as the block of the node that ends there, and
a sequence that goes on from it writes into a copy. A hit ends at a checkpoint. Spans are cut so that prompts leave one
at their last whole block.

A span with drafts leaves the state as it is before it, and its tokens in a log behind the state: those that are
accepted are added to it by the next step, the others are forgotten. A state with tokens in its log alone is no
checkpoint and is not shared, so no copy of a block needs the log.

    computed  45 ─ ─ b ─ ─▶ 48             45: state │ 46 47 48 49: log    48 committed: 46 47 48 are pending
              48 ─ ─ ─ ─ ─▶ ..             48: state │ 49 ..: log
"""

from collections.abc import Sequence

from ridgeline.cache.groups import CacheGroup, Hit, Need
from ridgeline.cache.layout import GroupLayout
from ridgeline.cache.pool import BlockPool
from ridgeline.cache.radix import RadixNode
from ridgeline.cache.table import SequenceTable

DECODE_CHECKPOINT_TOKENS = 256  # how far apart the checkpoints of an output are; each costs a copy of the state


class RecurrentGroup(CacheGroup):
    """CacheGroup whose tables hold one block: `first_block` is the block index of the last computed token.

    A reservation has no size, what was computed can be undone while it is logged, and the sequence moves on to copies
    of shared blocks.
    """

    whole_prefix = False
    miss_reason = "no checkpoint of the recurrent state"
    can_branch = False  # a state has one log
    in_place = True

    def __init__(self, index: int, layout: GroupLayout, block_size: int, pool: BlockPool) -> None:
        super().__init__(index, layout, block_size, pool)
        self.can_roll_back, self._max_logged = layout.max_logged > 0, layout.max_logged
        self._spacing = max(DECODE_CHECKPOINT_TOKENS // block_size, 1) * block_size  # of an output's checkpoints

    def match(self, path: Sequence[RadixNode], num_blocks: int) -> Hit:
        """Match up to the last node that holds a checkpoint."""
        for length in range(num_blocks, 0, -1):
            if path[length - 1].blocks[self._index] is not None:
                return Hit(length, length - 1)
        return Hit(0, 0)

    def reserve(self, table: SequenceTable, computed: int, end: int) -> Need:
        if not table.blocks:
            return Need(1)
        (block,) = table.blocks
        shared = self._pool.ref_count(block) > 1 or self._pool.is_published(block)
        return Need(0, table.first_block if shared and end > computed else None)

    def span_end(self, computed: int, end: int, *, drafts: bool) -> int:
        if drafts:  # a checkpoint's last token is a span of its own, without them
            last = computed - computed % self._spacing + self._spacing - 1
            return min(end, max(last, computed + 1), computed + self._max_logged)
        boundary = end // self._block_size * self._block_size
        return boundary if end - computed > 1 and boundary > computed else end

    def published_block(self, table: SequenceTable, index: int, before: int, computed: int) -> int | None:
        """Return the state where it is that after block `index`: after prompt spans, and now and then of an output."""
        if (index + 1) * self._block_size != computed or table.num_logged:
            return None
        return table.blocks[0] if computed - before > 1 or computed % self._spacing == 0 else None

    def log(self, table: SequenceTable, num_logged: int) -> None:
        assert num_logged <= self._max_logged, f"{num_logged} tokens in a log of {self._max_logged}"
        table.num_logged = num_logged

    def commit(self, table: SequenceTable, computed: int) -> None:
        table.first_block = max(computed - 1, 0) // self._block_size


build = RecurrentGroup
