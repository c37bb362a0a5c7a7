"""Random use of CacheManager against the oracle, on every kind of layout."""

import pytest
from cache_machine import LAYOUTS, RUN, machine_for
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_use_keeps_every_invariant(name):
    run_state_machine_as_test(machine_for(LAYOUTS[name]), settings=RUN)


@pytest.mark.parametrize("name", ["full", "full_and_sliding", "full_and_recurrent"])
def test_random_use_without_prefix_caching(name):
    run_state_machine_as_test(machine_for(LAYOUTS[name], caching=False), settings=settings(RUN, max_examples=20))
