import pytest

from cache_invariants import UNLIMITED_TOKENS, max_sequence_tokens
from ridgeline.cache.groups import build_group, kinds
from ridgeline.cache.layout import (
    RECURRENT_BLOCKS_PER_SEQUENCE,
    CacheLayout,
    GroupLayout,
    KvStateSize,
    RecurrentStateSize,
    plan_layout,
)
from ridgeline.cache.pool import BlockPool
from ridgeline.core.errors import ConfigError

FULL = GroupLayout("full", (0, 2), None, 100, 10)
SLIDING = GroupLayout("sliding", (1,), 64, 50, 8)


def test_sizes():
    layout = CacheLayout(16, (FULL, SLIDING), max_span_tokens=32)
    assert [layout.block_bytes(0), layout.block_bytes(1)] == [1600, 800]
    assert layout.total_bytes == 10 * 1600 + 8 * 800


def test_a_full_group_bounds_a_sequence_and_a_large_enough_window_does_not():
    assert max_sequence_tokens(CacheLayout(16, (FULL, SLIDING), 32)) == 160
    assert max_sequence_tokens(CacheLayout(16, (SLIDING,), 32)) == UNLIMITED_TOKENS  # 64 + 32 + 16 tokens in 8 blocks
    assert max_sequence_tokens(CacheLayout(16, (SLIDING,), 64)) == 8 * 16
    assert max_sequence_tokens(CacheLayout(16, (SLIDING,))) == 8 * 16


def test_states_of_equal_window_form_a_group():
    states = [KvStateSize(10, 128), KvStateSize(20), KvStateSize(30, 128), KvStateSize(40), KvStateSize(5, 64)]
    layout = plan_layout(states, 16, 10**6, 1024, 256)
    assert [(g.kind, g.states, g.window, g.bytes_per_token) for g in layout.groups] == [
        ("full", (1, 3), None, 60),
        ("sliding", (4,), 64, 5),
        ("sliding", (0, 2), 128, 40),
    ]


def test_the_budget_is_divided_as_one_sequence_needs_it():
    states = [KvStateSize(64), KvStateSize(64, 128)]
    one = 1024 * 64 + (128 + 256 + 16) * 64
    layout = plan_layout(states, 16, 7 * one, 1024, 256)
    assert [group.num_blocks for group in layout.groups] == [7 * 64, 7 * 25]
    assert layout.total_bytes == 7 * one
    assert max_sequence_tokens(layout) == 7 * 1024


@pytest.mark.parametrize("budget_bytes", [91_136, 100_000, 1_234_567])
def test_the_budget_is_never_exceeded_and_one_sequence_always_fits(budget_bytes):
    layout = plan_layout([KvStateSize(64), KvStateSize(64, 128)], 16, budget_bytes, 1024, 256)
    assert layout.total_bytes <= budget_bytes
    assert max_sequence_tokens(layout) >= 1024


def test_too_small_a_budget_names_need_value_and_fix():
    with pytest.raises(ConfigError, match=r"max_model_len=1024 needs 65,536 bytes.*budget is 65,535 bytes; lower"):
        plan_layout([KvStateSize(64)], 16, 65_535, 1024, 256)


def test_a_window_longer_than_the_context_costs_no_more_than_full():
    layout = plan_layout([KvStateSize(64, 4096)], 16, 65_536, 1024, 256)
    assert layout.groups[0].num_blocks == 64


@pytest.mark.parametrize("block_size", [-16, 0, 3, 24, 512])
def test_block_size_must_be_a_power_of_two_up_to_256(block_size):
    with pytest.raises(ConfigError, match=f"power of two from 1 to 256, got {block_size}"):
        plan_layout([KvStateSize(64)], block_size, 10**6, 1024, 256)


@pytest.mark.parametrize(
    ("states", "max_model_len", "span", "message"),
    [
        ([], 1024, 256, "no KV state"),
        ([KvStateSize(64)], 0, 256, "max_model_len must be at least 1, got 0"),
        ([KvStateSize(64)], 1024, 0, "max_span_tokens must be at least 1, got 0"),
        ([KvStateSize(64, 0)], 1024, 256, "window must be at least 1, got 0"),
        ([KvStateSize(0)], 1024, 256, "bytes_per_token must be at least 1, got 0"),
    ],
)
def test_values_that_describe_no_memory_are_refused(states, max_model_len, span, message):
    with pytest.raises(ConfigError, match=message):
        plan_layout(states, 16, 10**6, max_model_len, span)


def test_kind_and_window_must_agree():
    with pytest.raises(ConfigError, match="only a sliding group has a window"):
        GroupLayout("full", (0,), 64, 8, 8)
    with pytest.raises(ConfigError, match="only a sliding group has a window"):
        GroupLayout("sliding", (0,), None, 8, 8)


def test_every_kind_is_a_file_and_an_unknown_one_is_refused():
    assert {"full", "sliding"} <= set(kinds())
    with pytest.raises(ConfigError, match="unknown cache group kind 'astral'"):
        build_group(0, GroupLayout("astral", (0,), None, 8, 8), 16, BlockPool(8))


def test_recurrent_states_get_what_the_sequences_leave_or_half():
    states = [KvStateSize(8), RecurrentStateSize(1000), RecurrentStateSize(24)]
    rich = plan_layout(states, 4, 10_000_000, 100, 50, max_num_seqs=3)
    assert [group.kind for group in rich.groups] == ["full", "recurrent"]
    assert rich.groups[1].states == (1, 2) and rich.block_bytes(1) == 1024
    assert rich.groups[1].num_blocks == 3 * RECURRENT_BLOCKS_PER_SEQUENCE
    assert rich.groups[0].num_blocks == (10_000_000 - rich.groups[1].num_blocks * 1024) // 32
    tight = plan_layout(states, 4, 10_000, 100, 50, max_num_seqs=3)
    assert tight.groups[1].num_blocks == 7 and tight.total_bytes <= 10_000  # beside three sequences of 800 bytes
    tighter = plan_layout([KvStateSize(40), *states[1:]], 4, 10_000, 100, 50, max_num_seqs=3)
    assert tighter.groups[1].num_blocks == 4 and tighter.total_bytes <= 10_000
    alone = plan_layout(states[1:], 4, 10_000, 100, 50, max_num_seqs=3)
    assert [group.num_blocks for group in alone.groups] == [9]
    alone = plan_layout(states[1:], 4, 100_000, 100, 50, max_num_seqs=3)
    assert [group.num_blocks for group in alone.groups] == [97]  # what sequences do not need is for checkpoints
    with pytest.raises(ConfigError, match="one sequence"):
        plan_layout(states, 4, 2000, 100, 50)
