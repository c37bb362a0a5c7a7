"""The price list against the account, which walks every op: the same sums for every family and any load."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import GEMMA2_2B, LLAMA_2_70B, QWEN3_06B

from families import names, tiny_config
from ridgeline.core.errors import ConfigError
from ridgeline.cost.prices import price_groups
from ridgeline.program.lower import lower
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from ridgeline.spec.families import read_spec
from walked import account_groups

PARTS = OpCost.__dataclass_fields__
SPANS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=6)


def program(config):
    return lower(read_spec(config))


def assert_equal(lowered, load, element):
    groups = fuse(lowered)
    prices = price_groups(lowered, groups, element)
    walked = sum(account_groups(lowered, groups, load, element), OpCost())
    counted = sum((group.cost(load) * group.count for group in prices), OpCost())
    for part in PARTS:
        assert getattr(counted, part) == pytest.approx(getattr(walked, part), rel=1e-12), part
    assert sum(group.count for group in prices) == len(groups)


@pytest.mark.parametrize("name", names())
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 30), spans=SPANS, rows=st.integers(0, 8), weight=st.sampled_from([0.53, 1.0, 2.0, 4.0]))
def test_equal_to_walking_every_op(name, seed, spans, rows, weight):
    try:
        lowered = program(tiny_config(name, seed))
    except ConfigError:
        return
    load = Load(tuple((tokens, before + tokens) for tokens, before in spans), rows)
    assert_equal(lowered, load, ElementBytes(weight=weight, activation=2, kv=1.03))


def test_a_model_of_equal_layers_has_few_prices():
    for config, layers in ((LLAMA_2_70B, 80), (QWEN3_06B, 28)):
        lowered = program(config)
        prices = price_groups(lowered, fuse(lowered), ElementBytes())
        assert len(prices) <= 12
        assert max(group.count for group in prices) >= layers


def test_layers_that_differ_have_their_own_prices():
    """A window on half of the layers makes their attention another one."""
    lowered = program(GEMMA2_2B)
    load = Load(((1, 5000),), 1)
    prices = price_groups(lowered, fuse(lowered), ElementBytes())
    reads = {group.cost(load).kv_read_bytes for group in prices if group.kind == "attention"}
    assert len(reads) == 2
