"""Context length, cache and step limits follow from a backend's plan; no model is there."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ridgeline.backends.base import StepLimits
from ridgeline.cache.layout import RECURRENT_BLOCKS_PER_SEQUENCE, KvStateSize, RecurrentStateSize
from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.engine.sizing import choose_sizes
from ridgeline.program.op import KvState, RecurrentState

ATTENTION = KvState(num_heads=2, head_dim=8, window=None)  # 64 bytes a token in the plan below
RECURRENT = RecurrentState(((4, 25),), (8,))  # 400 bytes a sequence, 32 a token in its log
MIB = 1 << 20


@dataclass
class Plan:
    """A backend with two bytes per entry and a given amount of memory."""

    available_bytes: int
    weight_bytes: int = 0
    workspace: Callable[[StepLimits], int] = lambda limits: 0
    choices: dict = field(default_factory=dict)
    asked: list[StepLimits] = field(default_factory=list)

    def state_size(self, state):
        if isinstance(state, RecurrentState):
            return RecurrentStateSize(state.num_bytes, state.logged_bytes)
        return KvStateSize(state.bytes_per_token(2), state.window)

    def workspace_bytes(self, limits):
        self.asked.append(limits)
        return self.workspace(limits)


def config(*, max_model_len=None, kv_cache_bytes=None, max_num_seqs=4, max_num_batched_tokens=32, **others):
    return EngineConfig(
        **others,
        model=ModelConfig(model="none", max_model_len=max_model_len),
        cache=CacheConfig(block_size=16, kv_cache_bytes=kv_cache_bytes),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
    )


def sizes(plan, states=(ATTENTION,), max_positions=1024, all_rows=False, **options):
    return choose_sizes(plan, config(**options), states, max_positions, all_rows=all_rows)


def test_memory_for_all_sequences_where_there_is_enough():
    sizing = sizes(Plan(100 * MIB))
    assert sizing.max_model_len == 1024
    assert sizing.choices["max_model_len"].reason == "what the model declares"
    assert sizing.choices["kv_cache_bytes"].reason == "4 sequences of 1024 tokens"
    assert sizing.layout.total_bytes == 4 * (1024 + 16) * 64


def test_half_of_what_weights_and_workspace_leave():
    plan = Plan(400_000, weight_bytes=100_000, workspace=lambda limits: 60_000)
    sizing = sizes(plan)
    assert sizing.choices["kv_cache_bytes"].value == "120,000"
    assert sizing.choices["kv_cache_bytes"].reason == "50% of the free memory"
    assert 120_000 - 16 * 64 < sizing.layout.total_bytes <= 120_000


def test_an_unstated_context_is_halved_until_one_sequence_fits():
    sizing = sizes(Plan(0), kv_cache_bytes=300 * 64)
    assert sizing.max_model_len == 256
    assert sizing.choices["max_model_len"].reason.startswith("of the declared 1024")
    assert sizing.choices["kv_cache_bytes"].reason == "as asked"


def test_a_shorter_context_needs_less_workspace():
    """Free is 100,000: at 1024 tokens the workspace takes all of it, at 512 half, which holds one sequence of 256."""
    plan = Plan(100_000, workspace=lambda limits: limits.context * 100_000 // 1024)
    assert sizes(plan).max_model_len == 256
    assert [limits.context for limits in plan.asked] == [1024, 512, 256]


def test_a_stated_context_must_fit():
    assert sizes(Plan(0), max_model_len=256, kv_cache_bytes=256 * 64).choices["max_model_len"].reason == "as asked"
    with pytest.raises(ConfigError, match="lower max_model_len or give the cache more memory"):
        sizes(Plan(0), max_model_len=257, kv_cache_bytes=256 * 64)


def test_nothing_fits():
    with pytest.raises(ConfigError, match="lower max_model_len"):
        sizes(Plan(0), kv_cache_bytes=64)
    with pytest.raises(ConfigError, match="lower max_model_len"):
        sizes(Plan(1000, weight_bytes=2000))


def test_recurrent_states_are_counted_by_sequence():
    sizing = sizes(Plan(100 * MIB), states=(ATTENTION, RECURRENT))
    wanted = 4 * ((1024 + 16) * 64 + RECURRENT_BLOCKS_PER_SEQUENCE * 400)
    assert sizing.choices["kv_cache_bytes"].value == f"{wanted:,}"
    assert [group.kind for group in sizing.layout.groups] == ["full", "recurrent"]


def test_states_have_a_log_where_drafts_are_asked_for():
    speculation = SpeculationConfig(speculate="ngram", num_speculative_tokens=3)
    (states,) = sizes(Plan(100 * MIB), states=(RECURRENT,), speculation=speculation).layout.groups
    assert (states.max_logged, states.bytes_per_sequence) == (4, 400 + 2 * 4 * 32)
    (states,) = sizes(Plan(100 * MIB), states=(RECURRENT,), speculation=speculation, all_rows=True).layout.groups
    assert (states.max_logged, states.bytes_per_sequence) == (0, 400), "what embeds has no drafts"


@pytest.mark.parametrize(("all_rows", "num_rows"), [(False, 4), (True, 32)])
def test_the_largest_step(all_rows, num_rows):
    plan = Plan(100 * MIB)
    sizing = sizes(plan, all_rows=all_rows)
    assert [sizing.limits] == plan.asked == [StepLimits(num_tokens=32, num_rows=num_rows, num_seqs=4, context=1024)]
