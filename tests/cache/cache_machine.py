"""The hypothesis state machine over CacheManager: random use, an exact oracle, and a simulated memory.

The memory holds, for every slot of every block, a fingerprint of all tokens up to that position, the salt and the
weights (epoch), since that is what a KV entry depends on. Every table is read back after every rule.
"""

from dataclasses import dataclass

from cache_oracle import Oracle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_invariants import check_cache, match_of
from ridgeline.cache.layout import CacheLayout, GroupLayout
from ridgeline.cache.manager import CacheManager

MAX_LIVE = 5
MAX_TOKENS = 40
SALTS = ("", "tenant")
RUN = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

picks = st.integers(0, 7)
token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def make_layout(block_size, *groups, span=None):
    """Groups as (window, None, "recurrent" or "logged", num_blocks)."""
    return CacheLayout(block_size, tuple(make_group(i, kind, count) for i, (kind, count) in enumerate(groups)), span)


def make_group(index, kind, num_blocks):
    if kind in ("recurrent", "logged"):
        max_logged = 5 if kind == "logged" else 0
        return GroupLayout("recurrent", (index,), None, 0, num_blocks, bytes_per_sequence=64, max_logged=max_logged)
    return GroupLayout("full" if kind is None else "sliding", (index,), kind, 8, num_blocks)


@dataclass
class Known:
    """What the caller knows of a sequence: its tokens, the fingerprints of its computed positions, and how many of
    these a recurrent state has in its log alone."""

    tokens: list[int]
    salt: str
    prints: list[int]
    num_logged: int = 0


class CacheMachine(RuleBasedStateMachine):
    layout = make_layout(4, (None, 14))
    caching = True

    def __init__(self):
        super().__init__()
        self.cache = CacheManager(self.layout, prefix_caching=self.caching)
        self.oracle = Oracle(self.layout, self.caching)
        self.memory: dict[tuple[int, int, int], int] = {}  # (group, block, slot) -> fingerprint
        self.logs: dict[tuple[int, int, int], int] = {}  # (group, block, row) -> fingerprint; not copied
        self.known: dict[int, Known] = {}
        self.history: list[list[int]] = [[0] * 20]
        self.next_id = self.epoch = self.queries = self.hits = self.asked = 0

    def fingerprint(self, known, tokens, position):
        before = known.prints[position - 1] if position else SALTS.index(known.salt)
        return hash((before, tokens[position], self.epoch))

    def live(self, pick):
        ids = sorted(self.known)
        return ids[pick % len(ids)]

    def new_id(self):
        self.next_id += 1
        return self.next_id

    @precondition(lambda self: len(self.known) < MAX_LIVE)
    @rule(
        base=picks,
        keep=st.integers(0, 30),
        more=token_lists,
        salt=st.sampled_from(SALTS[:1] * 3 + SALTS),
        eager=st.booleans(),
    )
    def admit(self, base, keep, more, salt, eager):
        tokens = (self.history[-1 - base % len(self.history)][:keep] + more)[:MAX_TOKENS]
        size, seq_id = self.layout.block_size, self.new_id()
        match, fits = match_of(self.cache, tokens, salt), self.cache.can_admit(tokens, salt)
        assert match.num_tokens == self.oracle.match(tokens, salt) * size < len(tokens)
        assert match.reason
        assert fits == self.oracle.can_admit(tokens, salt)
        num_cached = self.cache.admit(seq_id, tokens, salt).num_tokens
        assert num_cached == match.num_tokens == self.oracle.admit(seq_id, tokens, salt)
        known = self.known[seq_id] = Known(tokens, salt, [])
        for position in range(num_cached):
            known.prints.append(self.fingerprint(known, tokens, position))
        self.queries, self.asked, self.hits = self.queries + 1, self.asked + len(tokens), self.hits + num_cached
        if eager:
            reserved = self.reserve_to(seq_id, len(tokens) + 1)
            assert reserved or not fits or self.layout.max_span_tokens is not None

    def reserve_to(self, seq_id, end):
        before = self.cache.stats(), [(t.first_token, list(t.blocks)) for t in self.cache.tables(seq_id)]
        copies = self.cache.reserve(seq_id, end)
        expected = self.oracle.reserve(seq_id, end)
        if copies is None:
            assert expected is None
            after = self.cache.stats(), [(t.first_token, list(t.blocks)) for t in self.cache.tables(seq_id)]
            assert before == after
            return False
        assert len(copies) == expected
        for copy in copies:
            for slot in range(self.layout.block_size):
                print_ = self.memory.get((copy.group, copy.source, slot))
                self.memory[copy.group, copy.target, slot] = -1 if print_ is None else print_
        return True

    @precondition(lambda self: self.known)
    @rule(pick=picks, num_tokens=st.integers(1, 12))
    def reserve(self, pick, num_tokens):
        """A plan that is given up after the reservation, and tried again later."""
        seq_id = self.live(pick)
        self.reserve_to(seq_id, len(self.known[seq_id].prints) + num_tokens)

    @precondition(lambda self: self.known)
    @rule(
        pick=picks,
        num_tokens=st.integers(1, 20),
        refused=st.integers(0, 4),
        drafts=token_lists,
        cut=st.booleans(),
        branch=st.integers(0, 2),
    )
    def step(self, pick, num_tokens, refused, drafts, cut, branch):
        """A prompt chunk with drafts behind it, of which some are refused, or a branch beside it is what is kept."""
        self.run(self.live(pick), num_tokens, refused, drafts, cut, branch)

    @precondition(lambda self: self.known)
    @rule(rounds=st.integers(1, 6), token=st.integers(0, 2))
    def decode(self, rounds, token):
        """What an engine does most: one token of every sequence, round after round."""
        for seq_id in sorted(self.known) * rounds:
            if seq_id in self.known:
                self.run(seq_id, 1, 0, [token], False)

    def run(self, seq_id, num_tokens, refused, drafts, cut, branch=0):
        """Reserve, write and commit; where no block is left a sequence is preempted instead."""
        known = self.known[seq_id]
        start = len(known.prints)
        states = [group for group in self.layout.groups if group.kind == "recurrent"]
        if any(not group.max_logged for group in states):
            refused = 0  # a state cannot be undone
        drafted = bool(states) and refused > 0
        if self.layout.max_span_tokens is not None:
            num_tokens = min(num_tokens, self.layout.max_span_tokens)
        tokens = known.tokens + drafts[: max(0, start + num_tokens - len(known.tokens))]
        end = min(start + num_tokens, len(tokens), MAX_TOKENS)
        if end <= start:
            return
        asked, end = end, self.cache.span_end(start, end, drafts=drafted)
        assert end == self.oracle.span_end(start, asked, drafted) > start
        drafted = drafted and end > start + 1
        if not self.reserve_to(seq_id, end):
            self.finish(self.live(num_tokens))
            return
        known.prints = list(known.prints)
        for position in range(start, end):
            known.prints.append(self.fingerprint(known, tokens, position))
        self.write(seq_id, known, start, drafted)
        if branch and self.cache.can_branch:
            self.keep_branch(seq_id, known, start, branch)
        accepted = max(start + 1, end - refused)
        known.tokens = tokens[: max(len(known.tokens), accepted)]
        del known.prints[accepted:]
        known.num_logged = accepted - start if drafted else 0
        self.cache.commit(seq_id, known.tokens, accepted, known.num_logged)
        self.oracle.commit(seq_id, known.tokens, accepted, known.num_logged)
        if cut:
            self.cache.truncate(seq_id, accepted)
            self.oracle.truncate(seq_id, accepted)

    def write(self, seq_id, known, start, drafted):
        for group, table in enumerate(self.cache.tables(seq_id)):
            if self.layout.groups[group].kind == "recurrent":
                self.check_state(group, table, known, start)
                (block,), rows = table.blocks, self.layout.groups[group].log_rows
                self.memory[group, block, 0] = known.prints[start - 1 if drafted else -1]
                if drafted:
                    for position in range(start, len(known.prints)):
                        self.logs[group, block, position % rows] = known.prints[position]
                continue
            for position in range(start, len(known.prints)):
                index, slot = divmod(position - table.first_token, self.layout.block_size)
                self.memory[group, table.blocks[index], slot] = known.prints[position]

    def keep_branch(self, seq_id, known, start, branch):
        """Write what was written to a branch instead, and to others something else; not where blocks are evicted."""
        size, end = self.layout.block_size, len(known.prints)
        count = -(-end // size) - start // size
        if any(group.free < 2 * count for group in self.cache.stats().groups):
            return
        for copy in self.cache.branch(seq_id, [end, end]):
            for slot in range(size):
                print_ = self.memory.get((copy.group, copy.source, slot), -1)
                self.memory[copy.group, copy.target, slot] = print_ if slot < start % size else -1
        for group, table in enumerate(self.cache.tables(seq_id)):
            first = (start - table.first_token) // size
            for number, blocks in enumerate([table.blocks[first:], *table.branches]):
                for position in range(start, end):
                    index, slot = divmod(position - table.first_token, size)
                    right = known.prints[position] if number == branch else -2
                    self.memory[group, blocks[index - first], slot] = right
        self.cache.take_branch(seq_id, branch)

    def check_state(self, group, table, known, computed):
        """A state is that of the tokens before those in its log, and these are there."""
        block, rows = table.blocks[0], self.layout.groups[group].log_rows
        assert table.num_logged == known.num_logged, "another number of tokens in the log"
        folded = computed - table.num_logged
        assert not folded or self.memory.get((group, block, 0)) == known.prints[folded - 1], "another state"
        for position in range(folded, computed):
            assert self.logs[group, block, position % rows] == known.prints[position], "another token in the log"

    @precondition(lambda self: self.known and len(self.known) < MAX_LIVE)
    @rule(pick=picks)
    def fork(self, pick):
        parent_id, child_id = self.live(pick), self.new_id()
        if self.known[parent_id].num_logged:
            return  # who forks has no drafts
        self.cache.fork(parent_id, child_id)
        self.oracle.fork(parent_id, child_id)
        parent = self.known[parent_id]
        self.known[child_id] = Known(list(parent.tokens), parent.salt, list(parent.prints))

    @precondition(lambda self: self.known)
    @rule(pick=picks, num_left=st.integers(0, 6))
    def truncate(self, pick, num_left):
        seq_id = self.live(pick)
        end = len(self.known[seq_id].prints) + num_left
        self.cache.truncate(seq_id, end)
        self.oracle.truncate(seq_id, end)

    @precondition(lambda self: self.known)
    @rule(room=st.lists(st.none() | st.integers(0, 6), min_size=MAX_LIVE, max_size=MAX_LIVE))
    def give_back(self, room):
        """Some sequences keep room for a few tokens, the others none."""
        computed = {seq_id: len(self.known[seq_id].prints) for seq_id in sorted(self.known)}
        ends = {seq_id: computed[seq_id] + more for seq_id, more in zip(computed, room) if more is not None}
        before = self.cache.num_free_blocks()
        freed = self.cache.give_back(ends)
        for seq_id in computed:
            self.oracle.truncate(seq_id, ends.get(seq_id, computed[seq_id]))
        assert freed == (self.cache.num_free_blocks() != before)

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def release(self, pick):
        self.finish(self.live(pick))

    def finish(self, seq_id):
        self.history.append(self.known.pop(seq_id).tokens)
        self.cache.release(seq_id)
        self.oracle.release(seq_id)

    @precondition(lambda self: len(self.history) % 6 == 0)
    @rule()
    def reset(self):
        self.history.append(self.history[-1])  # so that the next reset is some releases away
        self.cache.reset_prefix_cache()
        self.oracle.reset()
        self.epoch += 1

    @invariant()
    def accounting(self):
        check_cache(self.cache, {seq_id: known.tokens for seq_id, known in self.known.items()})
        stats = self.cache.stats()
        assert [(group.free, group.cached, group.used) for group in stats.groups] == self.oracle.counts()
        assert (stats.prefix_queries, stats.prefix_query_tokens, stats.prefix_hit_tokens) == (
            self.queries,
            self.asked,
            self.hits,
        )

    @invariant()
    def memory_reads_back(self):
        """Every key that the next query of a sequence sees is the one that this sequence would have written."""
        size = self.layout.block_size
        for seq_id, known in self.known.items():
            computed = len(known.prints)
            for group, table in enumerate(self.cache.tables(seq_id)):
                if self.layout.groups[group].kind == "recurrent":
                    if computed:
                        self.check_state(group, table, known, computed)
                    continue
                window = self.layout.groups[group].window
                for position in range(0 if window is None else max(0, computed - window + 1), computed):
                    index, slot = divmod(position - table.first_token, size)
                    assert index >= 0, "a visible position lies before the table"
                    assert self.memory[group, table.blocks[index], slot] == known.prints[position]

    def teardown(self):
        for seq_id in sorted(self.known):
            self.cache.release(seq_id)
        check_cache(self.cache)
        self.cache.reset_prefix_cache()
        check_cache(self.cache)
        assert all(group.free == group.total for group in self.cache.stats().groups), "blocks leaked"


LAYOUTS = {
    "two_windows": make_layout(2, (3, 24), (None, 26), (8, 20), span=9),
    "full": make_layout(4, (None, 14)),
    "sliding": make_layout(2, (5, 14), span=6),
    "sliding_unbounded_span": make_layout(4, (9, 12)),
    "full_and_sliding": make_layout(4, (None, 16), (6, 9), span=8),
    "recurrent": make_layout(4, ("recurrent", 8)),
    "full_and_recurrent": make_layout(4, (None, 16), ("recurrent", 7)),
    "all_kinds": make_layout(2, (5, 20), ("recurrent", 9), (None, 24), span=9),
    "logged": make_layout(4, ("logged", 8)),
    "full_and_logged": make_layout(2, (None, 26), ("logged", 8), span=9),
    "block_of_one": make_layout(1, (None, 50), (4, 30), span=9),
}


def machine_for(layout, *, caching=True):
    return type("Machine", (CacheMachine,), {"layout": layout, "caching": caching})
