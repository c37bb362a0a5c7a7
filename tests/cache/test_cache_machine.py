"""Random use of CacheManager against the oracle, on every kind of layout."""

import pytest
from cache_machine import LAYOUTS, machine_for
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

RUN = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_use_keeps_every_invariant(name):
    run_state_machine_as_test(machine_for(LAYOUTS[name]), settings=RUN)


@pytest.mark.parametrize("name", ["full", "full_and_sliding", "full_and_recurrent"])
def test_random_use_without_prefix_caching(name):
    run_state_machine_as_test(machine_for(LAYOUTS[name], caching=False), settings=settings(RUN, max_examples=20))
