"""SequenceTable: the blocks of one sequence in one cache group. Owned by the manager, handed to the groups."""

from dataclasses import dataclass, field

from ridgeline.cache.pool import BlockPool
from ridgeline.core.step import BlockTable


@dataclass(slots=True)
class SequenceTable:
    """`blocks[i]` holds block index `first_block + i` of the sequence, i.e. its tokens from index * block_size on.

    A BlockTable shows the same list, so `blocks` changes only between steps, in the methods here, and is left as it is
    at release.
    """

    first_block: int
    blocks: list[int]
    num_logged: int = 0
    _shown: BlockTable | None = field(default=None, compare=False)  # None: the blocks are others than it showed

    @property
    def end_block(self) -> int:
        """One past the last block index."""
        return self.first_block + len(self.blocks)

    def block_at(self, index: int) -> int:
        """Return the block at block index `index` of the sequence."""
        assert self.first_block <= index < self.end_block, f"block index {index} is not in the table"
        return self.blocks[index - self.first_block]

    def show(self, block_size: int) -> BlockTable:
        """Return the table as a plan has it: the same object for as long as nothing has changed."""
        first_token = self.first_block * block_size
        shown = self._shown
        if shown is None or shown.first_token != first_token or shown.num_logged != self.num_logged:
            self._shown = BlockTable(first_token, self.blocks, self.num_logged)
            return self._shown
        return shown

    def append(self, block: int) -> None:
        """Put `block` at the end; its reference is the caller's."""
        self.blocks.append(block)
        self._shown = None

    def replace(self, index: int, block: int) -> None:
        """Put `block` at block index `index`; references are the caller's."""
        self.blocks[index - self.first_block] = block
        self._shown = None

    def drop_before(self, index: int, pool: BlockPool) -> None:
        """Release the blocks before block index `index`."""
        for block in self.blocks[: index - self.first_block]:
            pool.release(block)
        del self.blocks[: index - self.first_block]
        self.first_block = index
        self._shown = None

    def release(self, pool: BlockPool) -> None:
        """Release all blocks, last first, so that a tail is evicted before its prefix. The table is not used again."""
        for block in reversed(self.blocks):
            pool.release(block)

    def drop_from(self, index: int, pool: BlockPool) -> None:
        """Release the blocks from block index `index` on."""
        while self.end_block > index:
            pool.release(self.blocks.pop())
            self._shown = None

    def share(self, pool: BlockPool) -> "SequenceTable":
        """Return a second table on the same blocks, with its own references."""
        assert not self.num_logged, "a state with a log is not shared"
        for block in self.blocks:
            pool.acquire(block)
        return SequenceTable(self.first_block, list(self.blocks))
