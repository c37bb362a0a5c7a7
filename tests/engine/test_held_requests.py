"""Requests whose callers do not keep up leave the steps, and go on from where they were: nobody's tokens change."""

import pytest
from engine_fakes import Driver, make_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_invariants import check_cache
from ridgeline.engine.request import FinishReason


def driver_of(num_blocks=400, **options):
    options.setdefault("max_num_batched_tokens", 64)
    return Driver(make_layout((num_blocks,)), max_num_seqs=4, **options)


def running(driver):
    return {seq.request.request_id for seq in driver.scheduler.running()}


def used_blocks(driver):
    return driver.scheduler.stats().cache.groups[0].used


@pytest.fixture
def driver():
    """Two requests that decode, one of them held."""
    driver = driver_of()
    driver.add("slow", [1, 2, 3, 4, 5], max_tokens=20)
    driver.add("quick", [6, 7, 8, 9, 10], max_tokens=10)
    for _ in range(3):
        driver.step()
    driver.scheduler.hold("slow", True)
    return driver


def test_one_that_is_held_has_no_slot_and_no_blocks_and_goes_on_when_it_is_not(driver):
    before, blocks = len(driver.tokens["slow", 0]), used_blocks(driver)
    for _ in range(4):
        driver.step()
        assert running(driver) == {"quick"}
    assert used_blocks(driver) < blocks and len(driver.tokens["slow", 0]) == before
    driver.scheduler.hold("slow", False)
    driver.run()
    driver.assert_answers()
    assert driver.scheduler.stats().num_preemptions == 0


def test_the_engine_rests_while_all_are_held(driver):
    driver.scheduler.hold("quick", True)
    assert driver.scheduler.plan() is None and not running(driver) and used_blocks(driver) == 0
    driver.scheduler.hold("quick", False)
    driver.scheduler.hold("slow", False)
    driver.run()
    driver.assert_answers()


@pytest.mark.parametrize("index", [None, 0])
def test_one_that_is_held_can_end(driver, index):
    driver.step()
    (event,) = driver.scheduler.finish("slow", index, FinishReason.ABORT)
    assert event.reason is FinishReason.ABORT
    driver.scheduler.hold("slow", False)  # comes late
    driver.scheduler.hold("unknown", True)
    while driver.scheduler.running():
        driver.step()
    assert driver.scheduler.plan() is None and used_blocks(driver) == 0
    driver.add("slow", [1, 2, 3], max_tokens=3)
    driver.step()
    driver.step()
    assert running(driver) == {"slow"}, "a name that was held means nothing once its request has ended"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.booleans()), max_size=30),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(18, 60),
    st.booleans(),
)
def test_tokens_are_the_same_whoever_is_held_when(holds, asked, num_blocks, prefix_caching):
    """Requests are (n, prompt, output tokens); holds (step, request, whether it is held). Blocks may run out."""
    driver = driver_of(num_blocks, prefix_caching=prefix_caching, max_num_batched_tokens=16)
    for number, (n, size, max_tokens) in enumerate(asked):
        driver.add(f"r{number}", list(range(number, number + size)), n=n, max_tokens=max_tokens)
    for step in range(25):
        for _, number, held in (hold for hold in holds if hold[0] == step):
            driver.scheduler.hold(f"r{number}", held)
        driver.step()
        check_cache(driver.cache, {seq.seq_id: seq.token_ids for seq in driver.scheduler.running()})
    for number in range(len(asked)):
        driver.scheduler.hold(f"r{number}", False)
    driver.run()
    driver.assert_answers()
