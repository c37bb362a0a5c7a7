"""Seeded bugs: each is patched in, and the state machine must notice it on some layout."""

import dataclasses

import pytest
from cache_machine import LAYOUTS, machine_for
from cache_machine import RUN as SEARCH
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import ridgeline.cache.groups.recurrent as recurrent_module
from ridgeline.cache.groups import Hit, Need
from ridgeline.cache.groups.full import FullGroup
from ridgeline.cache.groups.sliding import SlidingGroup
from ridgeline.cache.layout import CacheLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.cache.pool import BlockPool
from ridgeline.cache.radix import NEVER_SEEN, RadixNode, RadixTree
from ridgeline.cache.table import SequenceTable

RUN = settings(SEARCH, phases=[Phase.generate], report_multiple_bugs=False)
BUGS = {}


def bug(owner, name):
    """Register `build(original)`, which returns the faulty replacement of `owner.name`."""

    def register(build):
        BUGS[build.__name__] = (owner, name, build)
        return build

    return register


# ---- the pool


@bug(BlockPool, "release")
def skip_a_free(original):
    def release(pool, block):
        original(pool, block)
        if pool._free and pool._free[-1] == block and len(pool._free) % 5 == 0:
            pool._free.pop()

    return release


@bug(BlockPool, "release")
def double_free(original):
    def release(pool, block):
        original(pool, block)
        if pool._free and pool._free[-1] == block and len(pool._free) % 5 == 0:
            pool._free.append(block)

    return release


@bug(BlockPool, "release")
def free_while_still_shared(original):
    def release(pool, block):
        if pool._ref_counts[block] == 2:
            pool._ref_counts[block] = 1
        original(pool, block)

    return release


@bug(BlockPool, "release")
def cached_block_also_freed(original):
    def release(pool, block):
        original(pool, block)
        if block in pool._cached:
            pool._free.append(block)

    return release


@bug(BlockPool, "release")
def never_keep_a_published_block(original):
    def release(pool, block):
        original(pool, block)
        if block in pool._cached:
            del pool._cached[block]
            pool._free.append(block)

    return release


@bug(BlockPool, "acquire")
def hit_takes_no_reference(original):
    def acquire(pool, block):
        if pool._ref_counts[block] == 0:
            original(pool, block)

    return acquire


@bug(BlockPool, "acquire")
def hit_leaves_block_evictable(original):
    def acquire(pool, block):
        cached = block in pool._cached
        original(pool, block)
        if cached:
            pool._cached[block] = None

    return acquire


@bug(BlockPool, "withdraw")
def evicted_block_is_lost(original):
    def withdraw(pool, block):
        original(pool, block)
        if pool._ref_counts[block] == 0:
            pool._free.pop()

    return withdraw


@bug(BlockPool, "withdraw")
def eviction_keeps_block_published(original):
    def withdraw(pool, block):
        original(pool, block)
        pool._published[block] = True

    return withdraw


@bug(BlockPool, "least_recent")
def evict_the_most_recent(original):
    return lambda pool: next(reversed(pool._cached))


@bug(BlockPool, "least_recent")
def evict_a_referenced_block(original):
    def least_recent(pool):
        used = [b for b in range(pool.num_blocks) if pool._published[b] and pool._ref_counts[b] > 0]
        return used[0] if used else original(pool)

    return least_recent


@bug(BlockPool, "num_available")
def evictable_blocks_not_counted(original):
    return property(lambda pool: pool.num_free)


# ---- tables


@bug(SequenceTable, "drop_before")
def window_drop_keeps_references(original):
    def drop_before(table, index, pool):
        del table.blocks[: index - table.first_block]
        table.first_block = index

    return drop_before


@bug(SequenceTable, "drop_before")
def window_drop_forgets_first_block(original):
    def drop_before(table, index, pool):
        first = table.first_block
        original(table, index, pool)
        table.first_block = first

    return drop_before


@bug(SequenceTable, "release")
def release_prefix_before_tail(original):
    def release(table, pool):
        for block in table.blocks:
            pool.release(block)

    return release


@bug(SequenceTable, "release")
def release_skips_last_block(original):
    def release(table, pool):
        for block in reversed(table.blocks[:-1]):
            pool.release(block)

    return release


@bug(SequenceTable, "share")
def fork_takes_no_references(original):
    return lambda table, pool: SequenceTable(table.first_block, list(table.blocks))


@bug(SequenceTable, "share")
def fork_aliases_the_list(original):
    def share(table, pool):
        child = original(table, pool)
        child.blocks = table.blocks
        return child

    return share


@bug(SequenceTable, "share")
def fork_leaves_out_the_last_block(original):
    def share(table, pool):
        child = original(table, pool)
        if child.blocks:
            pool.release(child.blocks.pop())
        return child

    return share


@bug(SequenceTable, "drop_from")
def truncate_keeps_one_block_too_many(original):
    return lambda table, index, pool: original(table, index + 1, pool)


@bug(SequenceTable, "drop_from")
def truncate_drops_one_block_too_many(original):
    return lambda table, index, pool: original(table, max(index - 1, table.first_block), pool)


# ---- groups


def in_full_alone(original, faulty):
    """Replace `reserve` in full groups, and not in sliding ones, which inherit it."""
    return lambda group, *args: (faulty if type(group) is FullGroup else original)(group, *args)


@bug(FullGroup, "reserve")
def no_copy_on_write_in_full(original):
    return in_full_alone(original, lambda *args: Need(original(*args).num_new))


@bug(SlidingGroup, "reserve")
def no_copy_on_write_in_sliding(original):
    return lambda *args: Need(original(*args).num_new)


@bug(FullGroup, "reserve")
def always_copy_the_tail(original):
    def reserve(group, table, computed, end):
        num_new, copy_at = original(group, table, computed, end)
        return Need(num_new, computed // group._block_size if computed % group._block_size else copy_at)

    return in_full_alone(original, reserve)


@bug(FullGroup, "reserve")
def reserve_rounds_down(original):
    def reserve(group, table, computed, end):
        return original(group, table, computed, max(computed, end // group._block_size * group._block_size))

    return in_full_alone(original, reserve)


@bug(SlidingGroup, "first_visible_block")
def window_one_token_short(original):
    return lambda group, computed: max(0, computed - group._layout.window + 2) // group._block_size


@bug(SlidingGroup, "first_visible_block")
def window_one_token_long(original):
    return lambda group, computed: max(0, computed - group._layout.window) // group._block_size


@bug(SlidingGroup, "commit")
def window_blocks_never_freed(original):
    return lambda group, table, computed: None


@bug(SlidingGroup, "match")
def sliding_match_ignores_freed_blocks(original):
    def match(group, path, num_blocks):
        return Hit(num_blocks, group.first_visible_block(num_blocks * group._block_size))

    return match


@bug(SlidingGroup, "match")
def sliding_match_demands_whole_prefix(original):
    def match(group, path, num_blocks):
        blocks = [node.blocks[group._index] for node in path[:num_blocks]]
        present = blocks.index(None) if None in blocks else num_blocks
        return Hit(present, group.first_visible_block(present * group._block_size))

    return match


# ---- the tree


@bug(RadixTree, "walk")
def match_ignores_salt(original):
    def walk(tree, token_ids, salt, max_blocks):
        paths = [original(tree, token_ids, root, max_blocks)[0] for root in tree._roots]
        return max(paths, key=len, default=[]), NEVER_SEEN

    return walk


@bug(RadixTree, "walk")
def match_compares_a_weak_hash(original):
    def walk(tree, token_ids, salt, max_blocks):
        path, node, size = [], tree._roots.get(salt), tree._block_size
        for start in range(0, max_blocks * size, size):
            children = node.children.items() if node is not None else ()
            near = [child for key, child in children if sum(key) == sum(token_ids[start : start + size])]
            if not near:
                break
            node = near[0]
            path.append(node)
        return path, NEVER_SEEN

    return walk


@bug(RadixTree, "_prune")
def useless_nodes_stay(original):
    return lambda tree, node: None


@bug(RadixTree, "pin")
def nodes_are_not_pinned(original):
    return lambda tree, node: node


@bug(RadixTree, "clear")
def reset_keeps_blocks(original):
    return lambda tree: tree._roots.clear()


@bug(RadixTree, "evict")
def eviction_takes_only_one_group(original):
    def evict(tree, group):
        node = tree._holders[group][tree._pools[group].least_recent()]
        tree._withdraw(node, group)
        tree._prune(node)

    return evict


@bug(recurrent_module.RecurrentGroup, "reserve")
def checkpoint_is_written_over(original):
    return lambda group, *args: Need(original(group, *args).num_new)


@bug(recurrent_module.RecurrentGroup, "published_block")
def state_is_published_for_every_block(original):
    return lambda group, table, index, before, computed: table.blocks[0]


@bug(recurrent_module.RecurrentGroup, "match")
def hit_needs_no_checkpoint(original):
    def match(group, path, num_blocks):
        found = original(group, path, num_blocks)
        return Hit(num_blocks, found.first_block) if found.num_blocks else found

    return match


@bug(recurrent_module.RecurrentGroup, "match")
def first_checkpoint_instead_of_last(original):
    def match(group, path, num_blocks):
        held = [node.blocks[group._index] is not None for node in path[:num_blocks]]
        return Hit(held.index(True) + 1, held.index(True)) if any(held) else Hit(0, 0)

    return match


@bug(recurrent_module.RecurrentGroup, "published_block")
def state_with_a_log_is_a_checkpoint(original):
    def published_block(group, table, *args):
        return original(group, SequenceTable(table.first_block, table.blocks), *args)

    return published_block


@bug(recurrent_module.RecurrentGroup, "log")
def what_is_logged_counts_as_in_the_state(original):
    return lambda group, table, num_logged: None


@bug(recurrent_module.RecurrentGroup, "span_end")
def drafts_overrun_the_log(original):
    return lambda group, computed, end, *, drafts: end if drafts else original(group, computed, end, drafts=False)


# ---- the manager


@bug(CacheManager, "commit")
def partial_block_is_published(original):
    def commit(cache, seq_id, token_ids, num_computed, num_logged):
        seq, size = cache._sequences[seq_id], cache.layout.block_size
        original(cache, seq_id, token_ids, num_computed, num_logged)
        index = num_computed // size
        if seq.node is not None and num_computed % size and len(token_ids) >= (index + 1) * size:
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            seq.node = cache._publish(seq.node, tokens, seq, index, (index + 1) * size)

    return commit


@bug(CacheManager, "commit")
def chunk_publishes_wrong_tokens(original):
    def commit(cache, seq_id, token_ids, num_computed, num_logged):
        shifted = [*token_ids[1:], 0] if cache._sequences[seq_id].computed else token_ids
        original(cache, seq_id, shifted, num_computed, num_logged)

    return commit


@bug(CacheManager, "_publish")
def duplicate_is_kept(original):
    def publish(cache, node, tokens, *args):
        found = node.children.get(tokens)
        if found is None:
            return original(cache, node, tokens, *args)
        cache._tree.pin(found)
        cache._tree.unpin(node)
        return found

    return publish


@bug(CacheManager, "_publish")
def duplicate_is_not_released(original):
    def publish(cache, node, tokens, seq, index, computed):
        own = [table.block_at(index) for table in seq.tables]
        child = original(cache, node, tokens, seq, index, computed)
        for pool, table, block in zip(cache._pools, seq.tables, own):
            if table.block_at(index) != block:
                pool._free.remove(block)
                pool._ref_counts[block] = 1
        return child

    return publish


@bug(CacheManager, "reserve")
def reserve_is_not_atomic(original):
    def reserve(cache, seq_id, end):
        copies = original(cache, seq_id, end)
        if copies is None and cache._pools[0].num_free:
            cache._sequences[seq_id].tables[0].blocks.append(cache._allocate(0))
        return copies

    return reserve


@bug(CacheManager, "reserve")
def copies_are_not_reported(original):
    return lambda cache, seq_id, end: None if original(cache, seq_id, end) is None else []


@bug(CacheManager, "_copy_block")
def copy_goes_backwards(original):
    def copy_block(cache, *args):
        copy = original(cache, *args)
        return dataclasses.replace(copy, source=copy.target, target=copy.source)

    return copy_block


@bug(CacheManager, "_copy_block")
def copy_keeps_reference_on_source(original):
    def copy_block(cache, *args):
        copy = original(cache, *args)
        cache._pools[copy.group]._ref_counts[copy.source] += 1
        return copy

    return copy_block


@bug(CacheManager, "fork")
def fork_child_believes_it_may_write(original):
    def fork(cache, parent_id, child_id):
        original(cache, parent_id, child_id)
        cache._sequences[child_id].reserved += 1

    return fork


@bug(CacheManager, "reset_prefix_cache")
def reset_lets_old_sequences_publish(original):
    def reset(cache):
        salts = {seq_id: seq.node.salt for seq_id, seq in cache._sequences.items() if seq.node is not None}
        original(cache)
        for seq_id, salt in salts.items():
            cache._sequences[seq_id].node = cache._tree.pin_root(salt)

    return reset


@bug(CacheManager, "can_admit")
def admission_counts_evictable_hits_twice(original):
    def can_admit(cache, token_ids, salt=""):
        hit = cache._find(token_ids, salt)
        return all(
            cache.layout.peak_blocks(index, len(token_ids) + 1) - len(hit.path[first:]) <= pool.num_available
            for index, (pool, first) in enumerate(zip(cache._pools, hit.first_blocks))
        )

    return can_admit


@bug(CacheManager, "_num_promised")
def admission_forgets_what_it_promised(original):
    return lambda cache, group: 0


@bug(CacheLayout, "peak_blocks")
def admission_forgets_the_next_token(original):
    return lambda layout, group, num_tokens: original(layout, group, num_tokens - 1)


@bug(CacheManager, "release")
def release_leaves_its_pin(original):
    def release(cache, seq_id):
        node = cache._sequences[seq_id].node
        if node is not None:
            node.pins += 1
        original(cache, seq_id)

    return release


@bug(CacheManager, "truncate")
def truncate_forgets_the_blocks(original):
    def truncate(cache, seq_id, num_computed):
        seq = cache._sequences[seq_id]
        seq.reserved = min(seq.reserved, num_computed)

    return truncate


@bug(RadixTree, "child")
def existing_node_is_replaced(original):
    def child(tree, node, tokens):
        made = node.children[tokens] = RadixNode(node, tokens, node.salt, [None] * len(tree._pools))
        return made

    return child


def is_caught():
    for layout in LAYOUTS.values():
        try:
            run_state_machine_as_test(machine_for(layout), settings=RUN)
        except (AssertionError, LookupError):  # anything else would be a fault of the seeded bug itself
            return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_seeded_bug_is_caught(name, monkeypatch):
    owner, attribute, build = BUGS[name]
    monkeypatch.setattr(owner, attribute, build(getattr(owner, attribute)))
    assert is_caught(), f"the state machine does not notice: {name}"


def test_there_are_enough_bugs():
    assert len(BUGS) >= 20
