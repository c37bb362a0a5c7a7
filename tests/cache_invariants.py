"""Every invariant of the cache's accounting, asserted. Costs time in proportion to the cache."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.cache.groups.full import FullGroup
from ridgeline.cache.groups.recurrent import RecurrentGroup
from ridgeline.cache.groups.sliding import SlidingGroup
from ridgeline.cache.layout import CacheLayout
from ridgeline.cache.manager import CacheManager, PrefixMatch
from ridgeline.cache.pool import BlockPool
from ridgeline.cache.radix import RadixNode, RadixTree
from ridgeline.cache.table import SequenceTable

UNLIMITED_TOKENS = sys.maxsize


def max_sequence_tokens(layout: CacheLayout) -> int:
    """Return how many tokens one sequence alone can have; UNLIMITED_TOKENS where windows bound all groups."""
    return min(
        UNLIMITED_TOKENS
        if layout.peak_blocks(index, UNLIMITED_TOKENS) <= group.num_blocks
        else group.num_blocks * layout.block_size
        for index, group in enumerate(layout.groups)
    )


def match_of(cache: CacheManager, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
    """Return what an admission would find cached: whole blocks, below len(token_ids). Changes nothing."""
    hit = cache._find(token_ids, salt)
    return PrefixMatch(len(hit.path) * cache.layout.block_size, hit.reason)


def check_cache(cache: CacheManager, token_ids: Mapping[int, Sequence[int]] | None = None) -> None:
    """Check it all; with `token_ids` (sequence id -> its known tokens) also that published nodes have these tokens."""
    check_tree(cache._tree)
    for index, pool in enumerate(cache._pools):
        owners = Counter(block for seq in cache._sequences.values() for block in seq.tables[index].blocks)
        check_pool(pool, owners, set(cache._tree._holders[index]))
    pins = Counter(id(seq.node) for seq in cache._sequences.values() if seq.node is not None)
    for node in cache._tree.nodes():
        assert node.pins == pins.pop(id(node), 0), "a node's pins differ from the sequences that stand on it"
    assert not pins, "a sequence stands on a node that is not in the tree"
    for seq_id, seq in cache._sequences.items():
        _check_sequence(cache, seq, None if token_ids is None else token_ids.get(seq_id))


def check_pool(pool: BlockPool, owners: Mapping[int, int], published: set[int]) -> None:
    """Check against the number of owners of each used block, and the blocks that the radix tree holds."""
    everything = range(pool.num_blocks)
    free = set(pool._free)
    assert len(free) == len(pool._free), "a block is in the free list twice"
    for block in everything:
        assert pool.ref_count(block) == owners.get(block, 0), (
            f"block {block}: reference count {pool.ref_count(block)}, owners {owners.get(block, 0)}"
        )
    assert published == {block for block in everything if pool.is_published(block)}, "published blocks ≠ tree's blocks"
    assert set(pool._cached) == {block for block in published if pool.ref_count(block) == 0}, "cached list is wrong"
    assert free == {b for b in everything if pool.ref_count(b) == 0 and b not in published}, "free list is wrong"
    assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
    assert pool.num_used == len(owners), "blocks in use without an owner"


def check_tree(tree: RadixTree) -> None:
    """Check the structure: edges, back references, no useless node, descendants evicted before ancestors."""
    held: list[dict[int, RadixNode]] = [{} for _ in tree._pools]
    ranks = [{block: rank for rank, block in enumerate(pool._cached)} for pool in tree._pools]
    for node in tree.nodes():
        assert node.children or node.pins or any(b is not None for b in node.blocks), "a useless node was not pruned"
        for tokens, child in node.children.items():
            assert child.parent is node and child.tokens == tokens and child.salt == node.salt
            assert len(tokens) == tree._block_size, "an edge is not one block"
        for group, block in enumerate(node.blocks):
            if block is not None:
                assert block not in held[group], f"two nodes hold block {block} of group {group}"
                held[group][block] = node
            if tree._whole_prefix[group] and node.parent is not None:
                _check_prefix(node, node.parent, group, ranks[group])
    assert tuple(held) == tree._holders, "block -> node map is wrong"


def _check_prefix(node: RadixNode, parent: RadixNode, group: int, rank: dict[int, int]) -> None:
    block, above = node.blocks[group], parent.blocks[group]
    assert block is not None, "a node lost the block that everything below it needs"
    if above is not None and above in rank:
        assert block in rank, f"block {block} of group {group} is used but its prefix is not"
        assert rank[block] < rank[above], f"block {above} of group {group} would be evicted before its descendant"


def _check_sequence(cache: CacheManager, seq: Any, token_ids: Sequence[int] | None) -> None:
    size = cache.layout.block_size
    assert seq.computed <= seq.reserved
    for group, pool, table in zip(cache._groups, cache._pools, seq.tables):
        _check_table(group, table, seq.computed, seq.reserved, size)
        # Of a recurrent state it is known only until the commit: every reservation makes it private anew.
        is_reserved = seq.reserved > seq.computed and not isinstance(group, RecurrentGroup)
        for block in table.blocks[seq.computed // size - table.first_block :] if is_reserved else ():
            assert pool.ref_count(block) == 1 and not pool.is_published(block), f"writable block {block} is shared"
    node, index = seq.node, seq.computed // size
    while node is not None and node.parent is not None:
        index -= 1
        for kind, table, published in zip(cache._groups, seq.tables, node.blocks):
            assert kind.tree_block(table, index) in (None, published), "a table and the tree disagree on a block"
        if token_ids is not None:
            assert node.tokens == tuple(token_ids[index * size : (index + 1) * size]), "a node holds other tokens"
        node = node.parent
    assert seq.node is None or index == 0, "a sequence stands at the wrong depth of the tree"


def _check_table(group: object, table: SequenceTable, computed: int, reserved: int, size: int) -> None:
    """Check that the table holds exactly what later queries of the sequence can see, and room up to `reserved`."""
    match group:
        case RecurrentGroup():
            assert table.first_block == max(computed - 1, 0) // size, "a state of other tokens"
            assert len(table.blocks) == 1 or (computed == 0 and not table.blocks), "a sequence has one state"
            return
        case SlidingGroup():
            first = group.first_visible_block(computed)
            assert table.first_block == first, "blocks below the window, or a hole inside it"
        case FullGroup():
            assert table.first_block == 0, "a full group lost the start of a sequence"
        case _:
            raise AssertionError(f"no invariants are known of {type(group).__name__}")
    assert table.end_block == -(-reserved // size), "the table does not end with the reservation"
