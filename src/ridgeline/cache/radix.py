"""The radix tree that shares prefixes: an edge is one block of tokens, a node the blocks that hold their KV.

Called by CacheManager only. Namespaced by salt; tokens are compared themselves (dict keys), never only a hash.

Eviction takes the least recently released cached block of a group, in O(1). For a group that needs whole prefixes this
is always a leaf: a sequence that references a node references all its ancestors, and releases its tail first, so a
node never stands before its descendants in the pool's order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ridgeline.cache.pool import BlockPool

NEVER_SEEN = "evicted or never seen"
DIFFERS = "first differing token"


@dataclass(slots=True, eq=False)
class RadixNode:
    """One block of tokens, which follows its parent's. `blocks[group]` is None where that group has let its block go.

    `pins` counts the live sequences whose newest published block this is; a pinned node stays, blocks or not.
    """

    parent: "RadixNode | None"
    tokens: tuple[int, ...]
    salt: str
    blocks: list[int | None]
    pins: int = 0
    children: dict[tuple[int, ...], "RadixNode"] = field(default_factory=dict[tuple[int, ...], "RadixNode"])


class RadixTree:
    """Shares published prefixes. `whole_prefix[group]`: a node without that group's block serves nobody and goes."""

    def __init__(self, block_size: int, pools: Sequence[BlockPool], whole_prefix: Sequence[bool]) -> None:
        self._block_size = block_size
        self._pools = tuple(pools)
        self._whole_prefix = tuple(whole_prefix)
        self._roots: dict[str, RadixNode] = {}
        self._holders: tuple[dict[int, RadixNode], ...] = tuple({} for _ in pools)  # [group] block -> its node
        self.num_evicted = 0  # blocks

    def walk(self, token_ids: Sequence[int], salt: str, max_blocks: int) -> tuple[list[RadixNode], str]:
        """Return the nodes along `token_ids`, at most `max_blocks`, and why there is no further one."""
        path: list[RadixNode] = []
        node = self._roots.get(salt)
        if node is None:
            return path, NEVER_SEEN
        size = self._block_size
        for start in range(0, max_blocks * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path, DIFFERS if node.children else NEVER_SEEN

    def pin_root(self, salt: str) -> RadixNode:
        """Return the root of `salt`, made if missing, pinned once."""
        if salt not in self._roots:
            self._roots[salt] = RadixNode(None, (), salt, [None] * len(self._pools))
        return self.pin(self._roots[salt])

    def pin(self, node: RadixNode) -> RadixNode:
        """Keep `node` until `unpin`."""
        node.pins += 1
        return node

    def unpin(self, node: RadixNode) -> None:
        """Let `node` go; it is removed if nothing else needs it."""
        node.pins -= 1
        assert node.pins >= 0, "a node was unpinned more often than pinned"
        self._prune(node)

    def child(self, node: RadixNode, tokens: tuple[int, ...]) -> RadixNode:
        """Return the child of `node` along `tokens`, made without blocks if missing."""
        found = node.children.get(tokens)
        if found is None:
            found = node.children[tokens] = RadixNode(node, tokens, node.salt, [None] * len(self._pools))
        return found

    def publish(self, node: RadixNode, group: int, block: int) -> None:
        """Let `node` hold `block` of `group` from now on."""
        node.blocks[group] = block
        self._holders[group][block] = node
        self._pools[group].publish(block)

    def evict(self, group: int) -> None:
        """Free the least recently used cached block of `group`; the pool has one.

        Where a hit needs whole prefixes the node goes, with its blocks of all groups.
        """
        node = self._holders[group][self._pools[group].least_recent()]
        whole = self._whole_prefix[group]
        assert not (whole and node.children), "eviction of a node that still has children"
        for index in range(len(self._pools)) if whole else (group,):
            self.num_evicted += node.blocks[index] is not None
            self._withdraw(node, index)
        self._prune(node)

    def clear(self) -> None:
        """Forget everything. Blocks in use stay with their sequences; pins are void."""
        for node in list(self.nodes()):
            for group in range(len(self._pools)):
                self._withdraw(node, group)
        self._roots.clear()

    def nodes(self) -> Iterator[RadixNode]:
        """Yield all nodes, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _withdraw(self, node: RadixNode, group: int) -> None:
        block = node.blocks[group]
        if block is not None:
            node.blocks[group] = None
            del self._holders[group][block]
            self._pools[group].withdraw(block)

    def _prune(self, node: RadixNode) -> None:
        """Remove `node`, then its ancestors, while they are unpinned leaves without any block."""
        while not node.children and not node.pins and all(block is None for block in node.blocks):
            parent, node.parent = node.parent, None
            if parent is None:
                del self._roots[node.salt]
                return
            del parent.children[node.tokens]
            node = parent
