"""CacheManager: which blocks every sequence has, in every group. The only thing of the cache that the scheduler calls.

    admit ─▶ reserve ─▶ (the step runs) ─▶ commit ─▶ reserve ─▶ … ─▶ release
             positions [computed, reserved) are writable; [0, computed) are written and never written again

It knows no kind of memory: groups decide what they serve, need and no longer see; the manager takes from all pools or
from none. Not thread-safe: one engine loop owns it. Must not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.cache.groups import NO_NEED, build_group
from ridgeline.cache.layout import CacheLayout
from ridgeline.cache.pool import BlockPool
from ridgeline.cache.radix import RadixNode, RadixTree
from ridgeline.cache.table import SequenceTable
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import BlockCopy, BlockTable

MAX_BLOCKS = 1 << 24
CACHING_OFF = "prefix caching is off"
LAST_TOKEN = "last token must be computed"
WHOLE_BLOCKS = "only whole blocks are shared"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many tokens of a prompt all groups can serve, and why not more."""

    num_tokens: int
    reason: str


NOT_ADMITTED = PrefixMatch(0, "never admitted")


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one group: free + cached + used == total. Cached ones are evicted when free ones run out."""

    free: int
    cached: int
    used: int
    total: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Block counts per group, and since the start: admissions, their tokens, those served from the cache, evictions."""

    groups: tuple[GroupStats, ...]
    prefix_queries: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    blocks_evicted: int = 0


@dataclass(slots=True)
class _Sequence:
    tables: tuple[SequenceTable, ...]  # [group]
    computed: int
    reserved: int
    promised: int  # tokens of its prompt and one more: what admission found room for
    num_logged: int = field(default=0, init=False)  # computed tokens that recurrent states do not have yet
    branches: Sequence[Sequence[list[int]]] = field(default=(), init=False)  # [branch][group], from `first_own` on
    first_own: int = field(default=0, init=False)  # block index
    node: RadixNode | None  # the newest published block, pinned; None: does not publish


@dataclass(frozen=True, slots=True)
class _PrefixHit:
    path: list[RadixNode]  # the nodes that are served
    first_blocks: tuple[int, ...]  # [group] the first block of the path that the group needs
    reason: str


class CacheManager:
    """Counts and shares blocks over one layout; see the module docstring for the life of a sequence.

    With `prefix_caching`, whole computed blocks are shared by all sequences of equal tokens and equal `salt`. Raises
    ConfigError for more than MAX_BLOCKS, as each takes memory here as well.
    """

    def __init__(self, layout: CacheLayout, *, prefix_caching: bool = True) -> None:
        if (most := max((group.num_blocks for group in layout.groups), default=0)) > MAX_BLOCKS:
            raise ConfigError(f"the KV cache has {most:,} blocks, and {MAX_BLOCKS:,} is the most: give it less memory")
        self.layout = layout
        self._prefix_caching = prefix_caching
        self._pools = tuple(BlockPool(group.num_blocks) for group in layout.groups)
        pools = enumerate(zip(layout.groups, self._pools))
        self._groups = tuple(build_group(i, group, layout.block_size, pool) for i, (group, pool) in pools)
        self.changing_offsets = frozenset({0}).union(*[group.changing_offsets() for group in self._groups])
        self._tree = RadixTree(layout.block_size, self._pools, [group.whole_prefix for group in self._groups])
        self._sequences: dict[int, _Sequence] = {}
        self._prefix_queries = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0

    def can_admit(self, token_ids: Sequence[int], salt: str = "") -> bool:
        """Tell whether the whole prompt and one more token would fit now. Changes nothing.

        Blocks in use count as taken, and so do those that admitted sequences still need for their own prompts.
        """
        hit = self._find(token_ids, salt)
        for index, (pool, first) in enumerate(zip(self._pools, hit.first_blocks)):
            matched = _blocks_of(hit.path[first:], index)
            num_evictable = sum(pool.ref_count(block) == 0 for block in matched)
            num_new = self.layout.peak_blocks(index, len(token_ids) + 1) - len(matched)
            if num_new > pool.num_available - num_evictable - self._num_promised(index):
                return False
        return True

    def admit(self, seq_id: int, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Register a sequence, take references on its cached prefix, and return what of it was cached."""
        assert seq_id not in self._sequences, f"sequence {seq_id} is already admitted"
        hit = self._find(token_ids, salt)
        tables: list[SequenceTable] = []
        for index, (pool, first) in enumerate(zip(self._pools, hit.first_blocks)):
            blocks = _blocks_of(hit.path[first:], index)
            for block in blocks:
                pool.acquire(block)
            tables.append(SequenceTable(first, blocks))
        node: RadixNode | None = None
        if self._prefix_caching:
            node = self._tree.pin(hit.path[-1]) if hit.path else self._tree.pin_root(salt)
        num_cached = len(hit.path) * self.layout.block_size
        self._sequences[seq_id] = _Sequence(tuple(tables), num_cached, num_cached, len(token_ids) + 1, node)
        self._prefix_queries += 1
        self._prefix_query_tokens += len(token_ids)
        self._prefix_hit_tokens += num_cached
        return PrefixMatch(num_cached, hit.reason)

    # ---- the step

    def reserve(self, seq_id: int, end: int) -> list[BlockCopy] | None:
        """Make positions [computed, end) writable, evicting cached blocks; None, with nothing changed, if blocks lack.

        The copies must run in the given order before anything of the step is written; drop them only if the sequence
        is released before the step runs.
        """
        seq = self._sequences[seq_id]
        needs = [group.reserve(table, seq.computed, end) for group, table in zip(self._groups, seq.tables)]
        if needs.count(NO_NEED) == len(needs):  # as for most tokens of an output
            seq.reserved = max(seq.reserved, end)
            return []
        for pool, need in zip(self._pools, needs):
            if need.num_new + (need.copy_at is not None) > pool.num_available:
                return None
        copies: list[BlockCopy] = []
        for index, (table, need) in enumerate(zip(seq.tables, needs)):
            if need.copy_at is not None:
                copies.append(self._copy_block(index, table, need.copy_at))
            for _ in range(need.num_new):
                table.append(self._allocate(index))
        seq.reserved = max(seq.reserved, end)
        return copies

    def branch(self, seq_id: int, ends: Sequence[int]) -> list[BlockCopy] | None:
        """Make [computed, end) writable once more for each of `ends`, the branches of a tree beside the reserved one.

        Returns as `reserve` does. `take_branch` says which branch is final.
        """
        seq, size = self._sequences[seq_id], self.layout.block_size
        self._prune(seq)
        first = seq.computed // size
        counts = [-(-end // size) - first for end in ends]
        if any(sum(counts) > pool.num_available for pool in self._pools):
            return None
        groups = range(len(self._pools))
        seq.first_own, seq.branches = first, [[[self._allocate(g) for _ in range(n)] for g in groups] for n in counts]
        if seq.computed % size == 0:
            return []
        sources = [table.block_at(first) for table in seq.tables]
        return [BlockCopy(g, sources[g], blocks[g][0]) for blocks in seq.branches for g in groups]

    def take_branch(self, seq_id: int, branch: int) -> None:
        """Make the blocks of a branch, counted from 1, the sequence's own; 0: those it has. The others are free."""
        seq = self._sequences[seq_id]
        if branch:
            for table, blocks in zip(seq.tables, seq.branches[branch - 1]):
                for place, block in enumerate(blocks):
                    own = table.block_at(seq.first_own + place)
                    table.replace(seq.first_own + place, block)
                    blocks[place] = own
        self._prune(seq)

    def _prune(self, seq: _Sequence) -> None:
        for groups in seq.branches:
            for pool, blocks in zip(self._pools, groups):
                for block in blocks:
                    pool.release(block)
        seq.branches = ()

    def span_end(self, computed: int, end: int, *, drafts: bool = False) -> int:
        """Return where a span from `computed` on that could reach `end` should end, to help later prefix hits.

        With `drafts` at its end, some of which may be left out, it should end where all groups can take them back.
        """
        if not self._prefix_caching and not drafts:
            return end
        return min(group.span_end(computed, end, drafts=drafts) for group in self._groups)

    def commit(
        self, seq_id: int, token_ids: Sequence[int], num_computed: int, num_logged: int = 0, *, begins: int = 0
    ) -> None:
        """Record that positions below `num_computed` hold the KV of `token_ids` (all known tokens of the sequence).

        Position 0 is that of the token `begins`: a cache may have no entries of those before. The last `num_logged`
        were computed in a span with drafts, of which they were accepted.
        Whole blocks are published. Where an equal one is published already the sequence switches to it and frees its
        own, so that a sequence that references a node references the whole path above it.
        """
        seq = self._sequences[seq_id]
        assert seq.computed <= num_computed <= seq.reserved, (
            f"sequence {seq_id}: commit to {num_computed} outside computed {seq.computed} .. reserved {seq.reserved}"
        )
        known = len(token_ids) - begins
        assert num_computed <= known, f"sequence {seq_id}: {num_computed} computed of {known} tokens"
        size = self.layout.block_size
        if num_logged != seq.num_logged:
            seq.num_logged = num_logged
            for group, table in zip(self._groups, seq.tables):
                group.log(table, num_logged)
        first, end = seq.computed // size, num_computed // size
        if first < end and seq.node is not None:
            for index in range(first, end):
                at = begins + index * size
                seq.node = self._publish(seq.node, tuple(token_ids[at : at + size]), seq, index, num_computed)
        seq.computed = num_computed
        for group, table in zip(self._groups, seq.tables):
            group.commit(table, num_computed)

    def truncate(self, seq_id: int, num_computed: int) -> None:
        """Give back what was reserved from position `num_computed` on (rejected drafts); committed tokens stay."""
        seq = self._sequences[seq_id]
        assert num_computed >= seq.computed, f"sequence {seq_id}: cannot undo committed tokens"
        if num_computed < seq.reserved:
            self._prune(seq)
            seq.reserved = num_computed
            for group, table in zip(self._groups, seq.tables):
                group.truncate(table, num_computed)

    def give_back(self, ends: Mapping[int, int]) -> bool:
        """`truncate` every sequence to its end in `ends`, or to what it has computed; whether that freed anything."""
        before = self.num_free_blocks()
        for seq_id, seq in self._sequences.items():
            self.truncate(seq_id, ends.get(seq_id, seq.computed))
        return self.num_free_blocks() != before

    def fork(self, parent_id: int, child_id: int) -> None:
        """Register a child with the parent's computed tokens, sharing its blocks; who writes into one first copies it.

        What the parent had reserved beyond its computed tokens is given back: it is not shared.
        """
        assert child_id not in self._sequences, f"sequence {child_id} is already admitted"
        parent = self._sequences[parent_id]
        self.truncate(parent_id, parent.computed)
        tables = tuple(table.share(pool) for pool, table in zip(self._pools, parent.tables))
        node = None if parent.node is None else self._tree.pin(parent.node)
        self._sequences[child_id] = _Sequence(tables, parent.computed, parent.computed, parent.promised, node)

    def release(self, seq_id: int) -> None:
        """Forget a sequence. Its published blocks stay cached until they are evicted; the others are free."""
        seq = self._sequences.pop(seq_id)
        self._prune(seq)
        for pool, table in zip(self._pools, seq.tables):
            table.release(pool)
        if seq.node is not None:
            self._tree.unpin(seq.node)

    def tables(self, seq_id: int) -> tuple[BlockTable, ...]:
        """Return the sequence's block table in each group: a live view, good until the next call for the sequence.

        A table that has not changed since the last call is the same object.
        """
        seq = self._sequences[seq_id]
        shown = tuple([table.show(self.layout.block_size) for table in seq.tables])
        if not seq.branches:
            return shown
        by_group = list(zip(*seq.branches))
        return tuple([replace(table, branches=branches) for table, branches in zip(shown, by_group)])

    # ---- the cache as a whole

    @property
    def plans_ahead(self) -> bool:
        """Whether a sequence's step may be planned before the one that it goes on from is committed."""
        return not any(group.in_place for group in self._groups)

    @property
    def can_branch(self) -> bool:
        """Whether a sequence may go on in several ways within a step, of which one is final."""
        return all(group.can_branch for group in self._groups)

    def kinds_without_rollback(self) -> tuple[str, ...]:
        """Return the kinds of groups that keep every computed token: `commit` must get all of a reservation."""
        kinds = (layout.kind for layout, group in zip(self.layout.groups, self._groups) if not group.can_roll_back)
        return tuple(dict.fromkeys(kinds))

    def num_free_blocks(self) -> tuple[int, ...]:
        """Return, per group, how many blocks can still be taken: free ones and evictable cached ones."""
        return tuple(pool.num_available for pool in self._pools)

    def block_counts(self) -> list[int]:
        """Free, cached and used blocks of each group, one after the other."""
        counts: list[int] = []
        for pool in self._pools:
            free, cached = pool.num_free, pool.num_cached
            counts += (free, cached, pool.num_blocks - free - cached)
        return counts

    def stats(self) -> CacheStats:
        """Return counts of blocks and of prefix hits."""
        groups = [GroupStats(pool.num_free, pool.num_cached, pool.num_used, pool.num_blocks) for pool in self._pools]
        of_prefixes = self._prefix_queries, self._prefix_query_tokens, self._prefix_hit_tokens
        return CacheStats(tuple(groups), *of_prefixes, self._tree.num_evicted)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes, as after a change of weights. Running sequences keep their blocks but publish no more:
        their KV belongs to before the reset."""
        self._tree.clear()
        for seq in self._sequences.values():
            seq.node = None

    # ---- parts

    def _find(self, token_ids: Sequence[int], salt: str) -> _PrefixHit:
        """Return the longest prefix that all groups can serve, leaving at least one token to compute."""
        size = self.layout.block_size
        limit = max(len(token_ids) - 1, 0) // size
        if not self._prefix_caching:
            return _PrefixHit([], (0,) * len(self._groups), CACHING_OFF)
        path, reason = self._tree.walk(token_ids, salt, limit)
        num_blocks = len(path)
        if num_blocks == limit:
            reason = LAST_TOKEN if len(token_ids) % size == 0 else WHOLE_BLOCKS
        # A shorter hit of one group may need other blocks of another: ask again until all agree.
        while True:
            hits = [group.match(path, num_blocks) for group in self._groups]
            shortest = min(range(len(hits)), key=lambda index: hits[index].num_blocks)
            if hits[shortest].num_blocks == num_blocks:
                return _PrefixHit(path[:num_blocks], tuple(hit.first_block for hit in hits), reason)
            num_blocks = hits[shortest].num_blocks
            reason = self._groups[shortest].miss_reason

    def _num_promised(self, group: int) -> int:
        """Count the blocks of `group` that sequences in the middle of their prompts have yet to take."""
        unfinished = [seq for seq in self._sequences.values() if seq.computed < seq.promised - 1]
        pairs = [(self.layout.peak_blocks(group, s.promised), len(s.tables[group].blocks)) for s in unfinished]
        return sum(max(0, peak - taken) for peak, taken in pairs)

    def _allocate(self, group: int) -> int:
        if self._pools[group].num_free == 0:
            self._tree.evict(group)
        return self._pools[group].allocate()

    def _copy_block(self, group: int, table: SequenceTable, index: int) -> BlockCopy:
        """Copy the block at block index `index`, which others hold too, before it is written (copy-on-write)."""
        source = table.block_at(index)
        target = self._allocate(group)
        self._pools[group].release(source)
        table.replace(index, target)
        return BlockCopy(group, source, target)

    def _publish(
        self, node: RadixNode, tokens: tuple[int, ...], seq: _Sequence, index: int, computed: int
    ) -> RadixNode:
        """Publish the block at block index `index` below the pinned `node`; returns its node, pinned instead."""
        child = self._tree.child(node, tokens)
        for group, (kind, table) in enumerate(zip(self._groups, seq.tables)):
            own, published = kind.published_block(table, index, seq.computed, computed), child.blocks[group]
            if own is None:
                continue
            if published is None:
                self._tree.publish(child, group, own)
            elif kind.tree_block(table, index) is not None:
                self._pools[group].acquire(published)
                self._pools[group].release(own)
                table.replace(index, published)
        self._tree.pin(child)
        self._tree.unpin(node)
        return child


def _blocks_of(path: Sequence[RadixNode], group: int) -> list[int]:
    """Return the blocks of `group` along `path`, where a match has found all of them."""
    blocks = [node.blocks[group] for node in path]
    present = [block for block in blocks if block is not None]
    assert len(present) == len(blocks), "a match promised a block that is not there"
    return present
