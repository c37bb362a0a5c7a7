"""What the scheduler may rely on, one fact per test."""

import pytest
from cache_machine import make_layout

from cache_invariants import check_cache, match_of
from ridgeline.cache.manager import CacheManager
from ridgeline.core.step import BlockCopy

FULL = make_layout(4, (None, 8))
SLIDING = make_layout(4, (6, 8), span=4)


class CountingTokens(list):
    """Token ids that count how many of them are read."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def compute(cache, seq_id, tokens, *, salt="", upto=None):
    """Admit and compute `tokens` in one step; returns the number of cached tokens."""
    num_cached = cache.admit(seq_id, tokens, salt).num_tokens
    end = len(tokens) if upto is None else upto
    assert cache.reserve(seq_id, end) == []
    cache.commit(seq_id, tokens, end)
    check_cache(cache)
    return num_cached


def blocks(cache, seq_id, group=0):
    return list(cache.tables(seq_id)[group].blocks)


def group_counts(cache, group=0):
    stats = cache.stats().groups[group]
    return stats.free, stats.cached, stats.used


def test_a_released_prompt_is_found_again():
    cache = CacheManager(FULL)
    assert compute(cache, 1, list(range(10))) == 0
    first = blocks(cache, 1)
    cache.release(1)
    assert group_counts(cache) == (6, 2, 0)
    assert cache.admit(2, list(range(10))).num_tokens == 8
    assert blocks(cache, 2) == first[:2]
    stats = cache.stats()
    assert (stats.prefix_queries, stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2, 20, 8)


@pytest.mark.parametrize(
    ("tokens", "salt", "num_tokens", "reason"),
    [
        (list(range(8)), "", 4, "last token must be computed"),
        (list(range(9)), "", 8, "only whole blocks are shared"),
        ([0, 1, 2, 3, 9, 9, 9, 9, 9], "", 4, "first differing token"),
        (list(range(8)) + [7] * 5, "", 8, "evicted or never seen"),
        (list(range(9)), "tenant", 0, "evicted or never seen"),
        ([5], "", 0, "only whole blocks are shared"),
    ],
)
def test_a_match_says_why_it_is_not_longer(tokens, salt, num_tokens, reason):
    cache = CacheManager(FULL)
    compute(cache, 1, list(range(8)))
    match = match_of(cache, tokens, salt)
    assert (match.num_tokens, match.reason) == (num_tokens, reason)


def test_without_prefix_caching_nothing_is_shared_or_kept():
    cache = CacheManager(FULL, prefix_caching=False)
    compute(cache, 1, list(range(8)))
    assert match_of(cache, list(range(9))).reason == "prefix caching is off"
    assert compute(cache, 2, list(range(9))) == 0
    cache.release(1)
    cache.release(2)
    assert group_counts(cache) == (8, 0, 0)


def test_equal_prompts_computed_at_once_end_up_on_one_copy():
    cache = CacheManager(FULL)
    tokens = list(range(8))
    for seq_id in (1, 2):
        assert cache.admit(seq_id, tokens).num_tokens == 0
        cache.reserve(seq_id, 8)
    assert group_counts(cache) == (4, 0, 4)
    for seq_id in (1, 2):
        cache.commit(seq_id, tokens, 8)
    check_cache(cache)
    assert blocks(cache, 1) == blocks(cache, 2)
    assert group_counts(cache) == (6, 0, 2)


def test_the_least_recently_used_prefix_goes_tail_first():
    cache = CacheManager(FULL)
    for seq_id, first in ((1, 0), (2, 100)):
        compute(cache, seq_id, list(range(first, first + 12)))
    cache.release(2)
    cache.release(1)
    compute(cache, 3, list(range(200, 212)))  # takes the two free blocks and the tail of sequence 2
    assert match_of(cache, list(range(100, 113))).num_tokens == 8
    assert match_of(cache, list(range(13))).num_tokens == 12


def test_reserve_without_room_changes_nothing():
    cache = CacheManager(make_layout(4, (None, 8), (6, 3), span=4))
    compute(cache, 1, list(range(8)))
    cache.admit(2, [50] * 30)
    before = cache.stats()
    assert cache.reserve(2, 8) is None  # the full group has room, the sliding one has not
    assert cache.stats() == before
    assert blocks(cache, 2) == []
    check_cache(cache)


def test_admission_does_not_count_an_evictable_hit_twice():
    cache = CacheManager(make_layout(4, (None, 4)))
    compute(cache, 1, list(range(8)))
    cache.release(1)
    assert cache.can_admit(list(range(15)))  # 2 hit + 2 new, with the token to come
    assert not cache.can_admit(list(range(16)))
    compute(cache, 2, [50] * 4)
    assert not cache.can_admit(list(range(15)))


def test_admission_to_a_sliding_group_counts_the_window_not_the_prompt():
    cache = CacheManager(SLIDING)
    assert cache.can_admit(list(range(1000)))
    assert not CacheManager(make_layout(4, (6, 3), span=4)).can_admit(list(range(1000)))


def test_fork_shares_and_the_first_writer_copies():
    cache = CacheManager(FULL)
    compute(cache, 1, list(range(6)))
    cache.fork(1, 2)
    shared = blocks(cache, 1)
    assert blocks(cache, 2) == shared
    assert group_counts(cache) == (6, 0, 2)
    copies = cache.reserve(2, 7)
    assert copies == [BlockCopy(0, shared[1], blocks(cache, 2)[1])]
    assert blocks(cache, 1) == shared != blocks(cache, 2)
    assert cache.reserve(1, 7) == []
    check_cache(cache)


def test_fork_at_a_block_boundary_copies_nothing():
    cache = CacheManager(FULL)
    compute(cache, 1, list(range(8)))
    cache.fork(1, 2)
    assert cache.reserve(1, 9) == []
    assert cache.reserve(2, 9) == []
    assert blocks(cache, 1)[:2] == blocks(cache, 2)[:2]
    check_cache(cache)


def test_window_blocks_are_freed_as_soon_as_no_query_sees_them():
    cache = CacheManager(SLIDING, prefix_caching=False)
    tokens = list(range(40))
    cache.admit(1, tokens)
    for end in range(1, 41):
        assert cache.reserve(1, end) == []
        cache.commit(1, tokens, end)
        check_cache(cache)
        (table,) = cache.tables(1)
        assert table.first_token == max(0, end - 6 + 1) // 4 * 4
        assert group_counts(cache)[2] == len(table.blocks) <= 3


def test_a_sliding_hit_needs_only_the_window_before_it():
    cache = CacheManager(SLIDING)
    tokens = list(range(40))
    cache.admit(1, tokens)
    for end in range(4, 41, 4):
        assert cache.reserve(1, end) == []
        cache.commit(1, tokens, end)
    cache.release(1)
    check_cache(cache)
    assert match_of(cache, [*tokens, 99]).num_tokens == 40  # 8 of the 10 blocks are left; the last two suffice
    assert cache.admit(2, [*tokens, 99]).num_tokens == 40
    (table,) = cache.tables(2)
    assert (table.first_token, len(table.blocks)) == (32, 2)
    assert match_of(cache, tokens[:5]) == match_of(cache, [*tokens[:4], 77])
    assert match_of(cache, tokens[:5]).reason == "sliding blocks freed"


def test_a_window_of_one_token_keeps_no_computed_block():
    cache = CacheManager(make_layout(4, (1, 4), span=4))
    tokens = list(range(13))
    for end in (4, 8, 12):
        if end == 4:
            cache.admit(1, tokens)
        assert cache.reserve(1, end) == []
        cache.commit(1, tokens, end)
        check_cache(cache)
        assert blocks(cache, 1) == []
    cache.release(1)
    check_cache(cache)


def test_the_groups_agree_on_what_they_can_serve():
    cache = CacheManager(make_layout(4, (None, 16), (6, 5), span=4))
    tokens = list(range(24))
    cache.admit(1, tokens)
    for end in range(4, 25, 4):
        assert cache.reserve(1, end) == []
        cache.commit(1, tokens, end)
    assert match_of(cache, [*tokens, 99]).num_tokens == 24
    match = match_of(cache, tokens[:6])
    assert (match.num_tokens, match.reason) == (0, "sliding blocks freed")


def test_truncate_gives_back_what_drafts_had_reserved():
    cache = CacheManager(FULL)
    tokens = list(range(6))
    compute(cache, 1, tokens)
    assert cache.reserve(1, 14) == []
    assert group_counts(cache)[2] == 4
    cache.commit(1, [*tokens, 6], 7)
    cache.truncate(1, 7)
    check_cache(cache)
    assert group_counts(cache)[2] == 2
    with pytest.raises(AssertionError, match="cannot undo"):
        cache.truncate(1, 6)


def test_reset_forgets_prefixes_and_what_runs_publishes_no_more():
    cache = CacheManager(FULL)
    tokens = list(range(9))
    compute(cache, 1, tokens, upto=4)
    cache.reset_prefix_cache()
    cache.reserve(1, 9)
    cache.commit(1, tokens, 9)
    check_cache(cache)
    assert match_of(cache, tokens).num_tokens == 0
    cache.release(1)
    assert group_counts(cache) == (8, 0, 0)


def test_commit_outside_the_reservation_is_asserted():
    cache = CacheManager(FULL)
    cache.admit(1, [1, 2, 3])
    cache.reserve(1, 2)
    with pytest.raises(AssertionError, match=r"outside computed 0 \.\. reserved 2"):
        cache.commit(1, [1, 2, 3], 3)
    with pytest.raises(AssertionError, match="already admitted"):
        cache.admit(1, [1])


def test_a_decode_token_reads_only_the_block_that_it_completes():
    cache = CacheManager(make_layout(4, (None, 300), (6, 300), span=1000))
    tokens = CountingTokens(range(1001))
    compute(cache, 1, tokens, upto=1000)
    for position in range(1000, 1016):
        tokens.append(position)
        tokens.num_read = 0
        assert cache.reserve(1, position + 1) == []
        cache.commit(1, tokens, position + 1)
        assert tokens.num_read == (4 if position % 4 == 3 else 0)


def test_tables_show_the_live_list():
    cache = CacheManager(FULL)
    cache.admit(1, list(range(20)))
    cache.reserve(1, 20)
    assert cache.tables(1)[0].blocks is cache.tables(1)[0].blocks


def test_stats_add_up():
    cache = CacheManager(make_layout(4, (None, 8), (6, 9), span=4))
    compute(cache, 1, list(range(12)))
    compute(cache, 2, list(range(50, 57)))
    cache.release(1)
    assert [group.total for group in cache.stats().groups] == [8, 9]
    for group, available in zip(cache.stats().groups, cache.num_free_blocks()):
        assert group.free + group.cached + group.used == group.total
        assert available == group.free + group.cached
