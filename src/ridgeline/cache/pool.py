"""BlockPool: the block ids of one cache group and who holds them. Called by the groups, the radix tree and the manager.

    free ──allocate──▶ used (reference count > 0) ──release──▶ free, or, when published in the radix tree, cached
                        ▲                                                                             │
                        └──────────────────acquire (a prefix hit)─────────────────────────────────────┤
    free ◀──────────────────────────withdraw (evicted or reset)──────────────────────────────────────┘

Every operation is O(1). Must not import torch.
"""

from collections import OrderedDict


class BlockPool:
    """Counts references of blocks 0 .. num_blocks - 1. Cached ones are evicted in the order of their release."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest in CPU caches
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can still be taken: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_published(self, block: int) -> bool:
        return bool(self._published[block])

    def allocate(self) -> int:
        """Take a free block, with one reference. The caller has made sure that there is one."""
        block = self._free.pop()
        assert self._ref_counts[block] == 0 and not self._published[block], f"free block {block} is held"
        self._ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self._ref_counts[block] == 0:
            assert self._published[block], f"block {block} is free and cannot be shared"
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached (most recently used) or free."""
        assert self._ref_counts[block] > 0, f"block {block} released more often than acquired"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._published[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int) -> None:
        """Mark a used block as held by a radix node: it is immutable and outlives its last reference."""
        assert self._ref_counts[block] > 0 and not self._published[block], f"block {block} cannot be published"
        self._published[block] = True

    def withdraw(self, block: int) -> None:
        """Release the radix node's hold on a block: it is free at once, or when its last reference goes."""
        assert self._published[block], f"block {block} is not published"
        self._published[block] = False
        if self._ref_counts[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def least_recent(self) -> int:
        """Return the cached block to evict next. The caller has made sure that there is one."""
        return next(iter(self._cached))
