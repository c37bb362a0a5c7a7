"""Predicted times against sums by hand."""

import pytest
from published_configs import QWEN3_06B

from ridgeline.cost.efficiency import CACHED
from ridgeline.cost.hardware import PROBE_VERSION, Ceiling, Hardware, Machine
from ridgeline.cost.roofline import Roofline, bytes_per_weight, costs_of
from ridgeline.program.lower import lower
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from ridgeline.spec.families import read_spec
from walked import account, account_groups

GIGA = 10**9
PROGRAM = lower(read_spec(QWEN3_06B))


def hardware(**changes):
    """10 GB/s from memory and 100 GB/s from a cache, 50 of 1 MiB; 1000 Gop/s in bf16; twice of all with 2 threads."""
    values = {
        "machine": Machine(cpu_model="Some CPU", num_cores=2, memory_bytes=2**34, isa_level="avx512bf16"),
        "probe_version": PROBE_VERSION,
        "measured_at": "2026-11-21T12:00:00+00:00",
        "stream_buffer_bytes": 2**28,
        "cache_bytes": 2**20,
        "cached_buffer_bytes": 2**16,
        "scalar_per_cycle": None,
        "stream_bytes_per_s": {1: _ceiling(10), 2: _ceiling(20)},
        "cached_bytes_per_s": {1: _ceiling(100), 2: _ceiling(200)},
        "reread_bytes_per_s": {2**18: {1: _ceiling(100), 2: _ceiling(200)}, 2**20: {1: _ceiling(50), 2: _ceiling(100)}},
        "ops_per_s": {"bf16": {1: _ceiling(1000), 2: _ceiling(2000)}},
    }
    return Hardware(**values | changes)


def _ceiling(giga_per_s):
    return Ceiling.of([giga_per_s * GIGA])


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [
        (OpCost(weight_bytes=1e9), 0.1, "memory"),
        (OpCost(kv_read_bytes=5e8, kv_write_bytes=5e8), 0.1, "memory"),
        (OpCost(flops=1e12, weight_bytes=1e9), 1.0, "compute"),
        (OpCost(flops=1e11, weight_bytes=1e9), 0.1, "memory"),  # the ridge
        (OpCost(activation_bytes=1e6), 1e-5, "cache"),  # what fits in the cache comes from there
        (OpCost(activation_bytes=1e7), 1e-3, "memory"),
        (OpCost(weight_bytes=1e4, activation_bytes=1e6), 1.1e-5, "cache"),
        (OpCost(), 0.0, "nothing"),
    ],
)
def test_predictions_by_hand(cost, seconds, bound):
    one, two = (Roofline(hardware(), threads, 1e9).predict(cost, "bf16") for threads in (1, 2))
    assert (one.seconds, one.bound) == (pytest.approx(seconds), bound)
    assert (two.seconds, two.bound) == (pytest.approx(seconds / 2), bound)


@pytest.mark.parametrize(
    ("step_bytes", "giga_per_s", "where"),
    [
        (2**12, 100, "cache"),
        (2**18, 100, "cache"),
        (2**19, 75, "cache"),  # between two sizes
        (2**20, 50, "cache"),
        (2**20.5, 30, "cache"),
        (2**20.5 - 1, 30, "cache"),  # sizes are told apart by eighths of an octave
        (2**21, 10, "memory"),
        (2**40, 10, "memory"),
    ],
)
def test_a_model_is_read_as_fast_as_what_caches_keep_of_so_many_bytes(step_bytes, giga_per_s, where):
    cost = OpCost(weight_bytes=1e5)
    for threads in (1, 2):
        roofline = Roofline(hardware(), threads, step_bytes)
        found = roofline.predict(cost, "bf16")
        assert found.seconds == pytest.approx(1e5 / (giga_per_s * threads * GIGA))
        assert found.bound == where and (roofline.where == CACHED) == (where == "cache")


def test_a_share_of_memory_s_speed_is_memory_and_no_cache_is_slower():
    slow = {2**20: {1: _ceiling(12), 2: _ceiling(20)}}
    assert (
        Roofline(hardware(reread_bytes_per_s=slow), 1, 2**20).predict(OpCost(weight_bytes=1), "bf16").bound == "memory"
    )
    slow = {2**20: {1: _ceiling(3), 2: _ceiling(3)}}  # somebody else had the cache
    assert hardware(reread_bytes_per_s=slow).reread(2**20, 1) == 10 * GIGA


def test_without_sizes_between_them_there_are_the_second_level_caches_and_memory():
    alone = hardware(reread_bytes_per_s={})
    assert [alone.reread(size, 1) / GIGA for size in (2**16, 2**17)] == [100, 10]
    assert [alone.reread(size, 2) / GIGA for size in (2**17, 2**18)] == [200, 20]


def test_unknown_peaks_leave_the_memory_bound():
    cost = OpCost(flops=1e15, weight_bytes=1e9)
    for machine, inputs in ((hardware(ops_per_s={}), "bf16"), (hardware(), "int8")):
        prediction = Roofline(machine, 1, 1e9).predict(cost, inputs)
        assert (prediction.seconds, prediction.bound) == (pytest.approx(0.1), "memory")


def test_costs_are_the_account_s():
    load, bf16, int8 = Load.decode(3, 100), ElementBytes(), ElementBytes(weight=1)
    by_op = costs_of(PROGRAM, [((op.label,), bf16) for op in PROGRAM.ops], load)
    assert by_op == [cost for _, cost in account(PROGRAM, load, bf16)]
    groups = fuse(PROGRAM)
    pieces = [(tuple(op.label for op in group.ops), int8 if group.kind == "norm_head" else bf16) for group in groups]
    pieces.insert(5, ((), bf16))  # the draw, which no op of the program is
    costs = costs_of(PROGRAM, pieces, load)
    assert costs.pop(5) == OpCost(activation_bytes=4 * 3 * PROGRAM.vocab_size)
    for group, cost, wide, narrow in zip(
        groups, costs, account_groups(PROGRAM, groups, load, bf16), account_groups(PROGRAM, groups, load, int8)
    ):
        assert cost == (narrow if group.kind == "norm_head" else wide)


def test_bytes_per_weight_are_those_of_a_panel():
    assert bytes_per_weight("f32", 100) == 4 and bytes_per_weight("bf16", 100) == 2
    assert bytes_per_weight("int8", 256) * 256 == 256 + 4
    assert bytes_per_weight("int4", 256, 64) * 256 == 128 + 4 * 2
    assert bytes_per_weight("int4", 256, 64, zero_points=True) * 256 == 128 + 4 * 3
