"""Predicted times against sums by hand."""

import pytest
from published_configs import QWEN3_06B

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
    """10 GB/s from memory and 100 GB/s from a cache of 1 MB; 1000 Gop/s in bf16, and twice of all with 2 threads."""
    values = {
        "machine": Machine(cpu_model="Some CPU", num_cores=2, memory_bytes=2**34, isa_level="avx512bf16"),
        "probe_version": PROBE_VERSION,
        "measured_at": "2026-11-21T12:00:00+00:00",
        "stream_buffer_bytes": 2**28,
        "cache_bytes": 10**6,
        "cached_buffer_bytes": 10**5,
        "scalar_per_cycle": None,
        "stream_bytes_per_s": {1: _ceiling(10), 2: _ceiling(20)},
        "cached_bytes_per_s": {1: _ceiling(100), 2: _ceiling(200)},
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


def test_a_model_that_fits_in_the_cache_stays_there():
    cost = OpCost(weight_bytes=1e5)
    assert Roofline(hardware(), 1, 10**6).predict(cost, "bf16").seconds == pytest.approx(1e-6)
    assert Roofline(hardware(), 1, 10**6 + 1).predict(cost, "bf16").seconds == pytest.approx(1e-5)


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
