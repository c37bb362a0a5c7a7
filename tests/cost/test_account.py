"""The account against computations by hand and by enumeration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import GEMMA2_2B, LLAMA_2_70B, LLAMA_3_8B, NUM_PARAMETERS, PHI3_MINI, QWEN3_06B

from ridgeline.cost.account import (
    embedding_parameters,
    head_parameters,
    kv_bytes,
    kv_bytes_per_token,
    kv_groups,
    weight_bytes,
)
from ridgeline.program.lower import lower
from ridgeline.program.ops.attention import visible_keys
from ridgeline.program.passes.fuse import Group, fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from ridgeline.spec.families import read_spec
from walked import account, account_groups, total


def program_of(config):
    return lower(read_spec(config))


TIED = program_of(QWEN3_06B)
PROGRAMS = {config["model_type"]: program_of(config) for config in (GEMMA2_2B, PHI3_MINI, LLAMA_3_8B)}


def by_kind(accounts, kind):
    return total((op, cost) for op, cost in accounts if op.kind == kind)


@given(num_tokens=st.integers(1, 40), before=st.integers(0, 60), window=st.none() | st.integers(1, 70))
def test_visible_keys_equals_enumeration(num_tokens, before, window):
    kv_length = before + num_tokens
    seen = [
        {key for key in range(kv_length) if key <= query and (window is None or key > query - window)}
        for query in range(before, kv_length)
    ]
    assert visible_keys(num_tokens, kv_length, window) == (sum(map(len, seen)), len(set().union(*seen)))


@pytest.mark.parametrize(
    ("config", "expected"), [row[1:] for row in NUM_PARAMETERS], ids=[row[0] for row in NUM_PARAMETERS]
)
def test_parameters_of_published_models(config, expected):
    program = program_of(config)
    assert program.num_parameters == expected
    assert weight_bytes(program, 2) == 2 * expected
    assert weight_bytes(program, 0.5) == expected / 2


def test_embedding_and_head_parameters():
    llama, qwen = program_of(LLAMA_3_8B), program_of(QWEN3_06B)
    assert embedding_parameters(llama) == head_parameters(llama) == 128_256 * 4096
    assert embedding_parameters(qwen) == 151_936 * 1024
    assert head_parameters(qwen) == 0


def test_decode_of_llama_3_8b_by_hand():
    program = program_of(LLAMA_3_8B)
    context = 8192
    accounts = account(program, Load.decode(1, context))
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    head = 128_256 * 4096
    assert by_kind(accounts, "linear").flops == 2 * matrices
    assert by_kind(accounts, "lm_head").flops == 2 * head
    assert by_kind(accounts, "attention").flops == 32 * 32 * context * (4 * 128 + 5)
    step = total(accounts)
    assert step.weight_bytes == 2 * (program.num_parameters - 128_256 * 4096 + 4096)  # one row of the embedding
    assert step.kv_read_bytes == context * 131_072
    assert step.kv_write_bytes == 131_072
    logits = by_kind(accounts, "lm_head")
    assert logits.activation_bytes == 2 * 4096 + 4 * 128_256  # bf16 in, fp32 out
    assert step.num_bytes == step.weight_bytes + step.kv_read_bytes + step.kv_write_bytes + step.activation_bytes


def test_prefill_of_llama_3_8b_by_hand():
    program = program_of(LLAMA_3_8B)
    tokens = 1000
    accounts = account(program, Load(((tokens, tokens),), num_rows=1))
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert by_kind(accounts, "linear").flops == 2 * tokens * matrices
    assert by_kind(accounts, "lm_head").flops == 2 * 128_256 * 4096  # one row only
    assert by_kind(accounts, "attention").flops == 32 * 32 * (tokens * (tokens + 1) // 2) * (4 * 128 + 5)
    assert by_kind(accounts, "embed").weight_bytes == 2 * tokens * 4096
    assert by_kind(accounts, "select_rows").activation_bytes == 8 + 2 * 2 * 4096  # one row read, one written
    assert total(accounts).kv_write_bytes == tokens * 131_072


@given(batch=st.integers(1, 300), context=st.integers(1, 8192))
@settings(max_examples=30, deadline=None)
def test_a_decode_batch_reads_the_weights_once(batch, context):
    program = TIED
    one = total(account(program, Load.decode(1, context)))
    many = total(account(program, Load.decode(batch, context)))
    assert many.weight_bytes == one.weight_bytes + (batch - 1) * 1024 * 2  # a row of the embedding each
    assert many.kv_read_bytes == batch * one.kv_read_bytes
    assert many.kv_write_bytes == batch * one.kv_write_bytes
    assert many.flops == pytest.approx(batch * one.flops)


def test_a_tied_head_reads_the_table_once_a_step():
    accounts = account(TIED, Load.decode(7, 100))
    table = 151_936 * 1024
    assert by_kind(accounts, "lm_head").weight_bytes == 2 * table
    assert by_kind(accounts, "embed").weight_bytes == 2 * 7 * 1024
    assert total(accounts).weight_bytes == 2 * (TIED.num_parameters + 7 * 1024)


@given(
    chunks=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    config=st.sampled_from([GEMMA2_2B, PHI3_MINI, LLAMA_3_8B]),
)
@settings(max_examples=30, deadline=None)
def test_chunked_prefill_computes_as_much_as_a_whole_one(chunks, config):
    program = PROGRAMS[config["model_type"]]
    ends = [sum(chunks[: index + 1]) for index in range(len(chunks))]
    steps = [account(program, Load(((chunk, end),), num_rows=0)) for chunk, end in zip(chunks, ends)]
    whole = account(program, Load(((ends[-1], ends[-1]),), num_rows=0))
    for kind in ("linear", "attention", "rmsnorm", "rope"):
        assert sum(by_kind(step, kind).flops for step in steps) == by_kind(whole, kind).flops
    assert sum(total(step).kv_write_bytes for step in steps) == total(whole).kv_write_bytes


def test_no_logit_rows_leave_the_head_unread():
    accounts = account(TIED, Load(((100, 100),), num_rows=0))
    assert by_kind(accounts, "lm_head").num_bytes == 0


def test_element_sizes_apply_to_their_own_kind_of_bytes():
    load = Load.decode(4, 1000)
    plain = total(account(TIED, load))
    small = total(account(TIED, load, ElementBytes(weight=0.5, activation=2, kv=1)))
    assert small.weight_bytes == plain.weight_bytes / 4
    assert small.kv_read_bytes == plain.kv_read_bytes / 2
    assert small.kv_write_bytes == plain.kv_write_bytes / 2
    assert (small.activation_bytes, small.flops) == (plain.activation_bytes, plain.flops)


def test_accounts_follow_the_program():
    accounts = account(TIED, Load.decode(1, 1))
    assert [op for op, _ in accounts] == list(TIED.ops)


@given(
    config=st.sampled_from([GEMMA2_2B, PHI3_MINI, LLAMA_3_8B]),
    spans=st.lists(st.tuples(st.integers(1, 300), st.integers(300, 9000)), min_size=1, max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_groups_cost_what_their_ops_cost_but_for_what_stays_inside(config, spans):
    program, load = PROGRAMS[config["model_type"]], Load(tuple(spans), num_rows=len(spans))
    ops, groups = account(program, load), fuse(program)
    grouped = account_groups(program, groups, load)
    whole = sum(grouped, OpCost())
    for name in ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes"):
        assert getattr(whole, name) == pytest.approx(getattr(total(ops), name))
    costs = {op.label: cost for op, cost in ops}
    for group, cost in zip(groups, grouped, strict=True):
        apart = sum((costs[op.label] for op in group.ops), OpCost())
        assert cost.activation_bytes <= apart.activation_bytes
        assert (cost == apart) == (len(group.ops) == 1)


def test_ops_alone_cost_as_groups_what_they_cost_as_ops():
    """One op a group, but for the doubled read of what an op reads twice; nothing here does."""
    load = Load.decode(3, 50)
    groups = tuple(Group(op.kind, op.label, (op,)) for op in TIED.ops)
    assert account_groups(TIED, groups, load) == [cost for _, cost in account(TIED, load)]


def test_traffic_of_the_groups_of_a_layer_by_hand():
    """Qwen3 0.6B: hidden 1024, 16 query heads and 8 of keys and values of 128, feed-forward 3072."""
    tokens = 5
    groups = fuse(TIED)
    costs = account_groups(TIED, groups, Load.decode(tokens, 100))
    moved = {(group.kind, group.label): cost.activation_bytes / tokens for group, cost in zip(groups, costs)}
    hidden, heads, angles = 2 * 1024, 2 * 16 * 128, 2 * 4 * 64
    assert moved["norm_qkv", "layers.3.attn.q"] == hidden + angles + heads  # keys and values: to the cache only
    assert moved["attention", "layers.3.attn.attention"] == heads + heads
    assert moved["linear_add", "layers.3.attn.o"] == heads + hidden + hidden
    assert moved["norm_gated", "layers.3.ffn.gate"] == hidden + 2 * 3072
    assert moved["linear_add", "layers.3.ffn.down"] == 2 * 3072 + hidden + hidden
    assert moved["norm_head", "logits"] == 8 + hidden + 4 * 151_936


def test_kv_memory_of_published_models():
    assert kv_bytes_per_token(program_of(LLAMA_3_8B), 2) == 131_072
    assert kv_bytes(program_of(LLAMA_2_70B), 4096, 2) == 1_342_177_280
    assert kv_bytes_per_token(program_of(LLAMA_3_8B), 1) == 65_536 + 2 * 32 * 8 * 2  # scales of int8


def test_kv_memory_stops_growing_at_the_window():
    program = PROGRAMS["gemma2"]
    full, sliding = kv_groups(program, 2)
    per_layer = 2 * 4 * 256 * 2
    assert (full.kind, full.num_states, full.bytes_per_token) == ("full", 13, 13 * per_layer)
    assert (sliding.kind, sliding.num_states, sliding.bytes_per_token) == ("sliding", 13, 13 * per_layer)
    assert kv_bytes_per_token(program, 2) == 26 * per_layer
    assert kv_bytes(program, 4096, 2) == 4096 * 26 * per_layer
    assert kv_bytes(program, 8192, 2) == 8192 * 13 * per_layer + 4096 * 13 * per_layer
