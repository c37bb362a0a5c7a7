"""Shares of the slots: a client that has none gets one at once, whoever has them all; nobody is preempted in vain."""

import statistics
from collections import Counter

import pytest
from engine_fakes import Driver, make_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.request import FinishReason
from ridgeline.engine.sharing import BESIDE_S, SlotCap


def driver_of(num_slots=4, **options):
    """Room for all that run, so that nobody is preempted for lack of blocks."""
    options.setdefault("max_num_batched_tokens", 64)
    return Driver(make_layout((400,)), max_num_seqs=num_slots, **options)


def add(driver, name, client, max_tokens=20, size=5, **options):
    driver.add(name, [ord(name[0]) + int(name[1:] or 0)] * size, max_tokens=max_tokens, client=client, **options)


def running(driver):
    return Counter(seq.request.client for seq in driver.scheduler.running())


def test_a_client_that_comes_is_in_the_next_step_whoever_has_all_slots():
    driver = driver_of()
    for i in range(12):
        add(driver, f"f{i}", client=1)
    for _ in range(3):
        driver.step()
    assert running(driver) == {1: 4}
    add(driver, "p", client=2, max_tokens=1)
    driver.step()
    assert driver.tokens["p", 0]
    (preempted,) = driver.executor.plans[-1].decisions.preempted
    (admitted,) = driver.executor.plans[-1].decisions.admitted
    assert preempted.for_seq_id == admitted.seq_id
    driver.step()
    assert running(driver) == {1: 4}, "the slot goes back"
    driver.run()
    driver.assert_answers()
    assert driver.finished.index(("f3", 0)) < driver.finished.index(("f4", 0)), "who made way goes on before the others"


def test_a_client_that_comes_while_another_computes_its_prompt_is_served_when_that_decodes():
    driver = driver_of(num_slots=2, policy="priority", max_num_batched_tokens=16)
    add(driver, "f0", client=1, priority=-1, max_tokens=60)
    driver.step()
    add(driver, "f1", client=1, max_tokens=60, size=60)
    driver.step()
    add(driver, "p", client=2, max_tokens=1)
    for _ in range(10):
        driver.step()
    assert driver.tokens["p", 0]
    driver.run()
    driver.assert_answers()


def test_two_clients_that_want_everything_have_half_each():
    driver = driver_of(num_slots=6)
    for i in range(20):
        add(driver, f"a{i}", client=1, max_tokens=40)
    for _ in range(2):
        driver.step()
    for i in range(20):
        add(driver, f"b{i}", client=2, max_tokens=40)
    for _ in range(4):
        driver.step()
    assert running(driver) == {1: 3, 2: 3}
    before = driver.scheduler.stats().num_preemptions
    for _ in range(20):
        driver.step()
    assert running(driver) == {1: 3, 2: 3} and driver.scheduler.stats().num_preemptions == before == 3


@pytest.mark.parametrize("n", [2, 3])
def test_nobody_makes_way_for_more_than_a_share(n):
    driver = driver_of()
    for i in range(4):
        add(driver, f"f{i}", client=1)
    driver.step()
    add(driver, "p", client=2, n=n)
    driver.step()
    assert driver.scheduler.stats().num_preemptions == (2 if n == 2 else 0)


def test_one_client_alone_never_makes_way_and_a_better_priority_does_not_either():
    driver = driver_of(policy="priority")
    for i in range(5):
        add(driver, f"f{i}", client=1, priority=-1, max_tokens=6 if i == 4 else 20)
    for _ in range(9):
        driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.scheduler.finish("f4", None, FinishReason.ABORT)
    add(driver, "p", client=2)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.stats().num_preemptions == 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 25),
            st.sampled_from([(client, call) for client in (1, 2, 3) for call in (0, client, 10 * client)]),
            st.integers(1, 12),
            st.integers(1, 3),
            st.integers(1, 30),
        ),
        max_size=24,
    ),
    st.integers(2, 5),
    st.booleans(),
)
def test_everybody_ends_and_nobody_makes_way_in_vain(asked, num_slots, prefix_caching):
    """Requests are (step, client and its request, output tokens, n, prompt tokens). A sequence gains a token before it
    makes way, and before it does again."""
    driver = driver_of(num_slots, prefix_caching=prefix_caching, max_num_batched_tokens=8)
    lengths: dict[int, int] = {}  # when it was preempted last
    for step in range(60):
        for i, (_, (client, call), max_tokens, n, size) in enumerate(one for one in asked if one[0] == step):
            add(driver, f"{chr(97 + step)}{i}", client, max_tokens, size, n=min(n, num_slots), call=call)
        known = {seq.seq_id: seq.num_output for seq in driver.scheduler.running()}
        num_plans = len(driver.executor.plans)
        driver.step()
        driver.check()
        for plan in driver.executor.plans[num_plans:]:
            for preemption in plan.decisions.preempted:
                assert known[preemption.seq_id] > lengths.get(preemption.seq_id, 0)
                lengths[preemption.seq_id] = known[preemption.seq_id]
    driver.run()
    driver.assert_answers()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_runs_in_the_background_makes_way_for_all_else(policy):
    """Also for requests of its own client, of a worse priority, and for more than a share."""
    driver = driver_of(policy=policy)
    for i in range(8):
        add(driver, f"b{i}", client=1, background=True, priority=-9, max_tokens=40)
    for _ in range(3):
        driver.step()
    assert running(driver) == {1: 4}
    for i in range(5):
        add(driver, f"p{i}", client=1 + i % 2, priority=9, max_tokens=10)
    for _ in range(6):
        driver.step()
    assert all(not seq.request.background for seq in driver.scheduler.running())
    assert len(driver.scheduler.running()) == 4
    driver.run()
    driver.assert_answers()
    order = [name for name, _ in driver.finished]
    assert all(name.startswith("p") for name in order[:5]), "nothing of the background ends before"
    assert len(order) == 13


def test_the_background_never_takes_a_slot_from_others():
    driver = driver_of(num_slots=2)
    for i in range(2):
        add(driver, f"p{i}", client=1, max_tokens=30)
    for _ in range(2):
        driver.step()
    add(driver, "b0", client=2, background=True)
    for _ in range(10):
        driver.step()
    assert running(driver) == {1: 2} and driver.scheduler.stats().num_preemptions == 0
    driver.run()
    driver.assert_answers()


def calls(driver):
    return Counter(seq.call for seq in driver.scheduler.running())


@pytest.mark.parametrize("n", [1, 6])
def test_a_request_of_many_outputs_makes_way_for_another_of_its_client(n):
    """Of prompts, or of one prompt `n` times; the other is in the next step, before all prompts that wait."""
    driver = driver_of(num_slots=6)
    for i in range(20 // n):
        add(driver, f"a{i}", client=1, call=1, n=n, max_tokens=40)
    for _ in range(3):
        driver.step()
    assert calls(driver) == {1: 6}
    add(driver, "p", client=1, max_tokens=2)
    driver.step()
    assert driver.tokens["p", 0] and calls(driver) == {1: 5, "p": 1}
    driver.step()
    driver.step()
    assert calls(driver) == {1: 6}, "the slot goes back"
    driver.run()
    driver.assert_answers()


def test_requests_of_a_client_have_equal_shares_of_what_is_its_own():
    driver = driver_of(num_slots=8)
    for name, client, call in (("a", 1, 1), ("b", 2, 2), ("c", 2, 3)):
        for i in range(20):
            add(driver, f"{name}{i}", client=client, call=call, max_tokens=60)
        for _ in range(10):
            driver.step()
    assert calls(driver) == {1: 4, 2: 2, 3: 2}
    before = driver.scheduler.stats().num_preemptions
    for _ in range(20):
        driver.step()
    assert calls(driver) == {1: 4, 2: 2, 3: 2} and driver.scheduler.stats().num_preemptions == before == 6
    driver.run()
    driver.assert_answers()


def test_requests_of_one_prompt_are_first_come_first_served_among_their_client():
    driver = driver_of(num_slots=2)
    for i in range(8):
        add(driver, f"p{i}", client=1, max_tokens=3)
    driver.run()
    assert [name for name, _ in driver.finished] == [f"p{i}" for i in range(8)]
    assert driver.scheduler.stats().num_preemptions == 0


def flooded(step_s, num_steps, other_client=2, num_flood=70):
    """Run a flood of client 1, and a token for another client every few steps; return how many the last steps compute,
    at the median."""
    driver = driver_of(num_slots=64, max_num_batched_tokens=1024)
    num_added, sizes = 0, []
    for step in range(num_steps):
        num_finished = sum(name.startswith("f") for name, _ in driver.finished)
        while num_added - num_finished < num_flood:
            driver.add(f"f{num_added}", [3, 4], client=1, max_tokens=8 + num_added % 7)
            num_added += 1
        if step % 5 == 0:
            driver.add(f"p{step}", [5, 6], client=other_client, max_tokens=1)
        driver.clock.now += step_s(len(driver.scheduler.running()))
        driver.step()
        sizes.append(len(driver.executor.plans[-1].spans))
    return statistics.median(sizes[-200:])


def test_a_flood_has_fewer_slots_beside_another_client_where_shorter_steps_compute_as_much():
    assert 4 <= flooded(lambda num_seqs: 1e-4 * (1 + num_seqs), 3000) <= 8, "0.8 of the tokens per second of 64"


def test_a_flood_keeps_its_slots_where_a_step_takes_as_long_for_fewer():
    assert flooded(lambda num_seqs: 1e-2 * (30 + num_seqs), 3000) >= 60


def test_one_client_alone_has_all_slots_however_long_steps_take():
    assert flooded(lambda num_seqs: 1e-4 * (1 + num_seqs), 3000, other_client=1) >= 60


def test_slots_are_bounded_only_as_long_as_another_client_asks():
    cap = SlotCap()
    for step in range(1, 200):
        cap.came(1 + step % 2, step * 1e-3)
        cap.observe(64, 64, step * 1e-3)
    assert cap.slots(200, 0.2) == 32, "half is tried"
    for now_s in (0.5, 1.0, 1.1):
        cap.came(2, now_s)
        cap.observe(64, 64, now_s)
    assert cap.slots(999, 0.199 + BESIDE_S) is None


def test_a_client_that_asks_once_in_a_while_takes_no_slots_from_another():
    cap = SlotCap()
    for step in range(1, 5000):
        cap.came(1, step * 1e-3)
        if step % 500 == 0:  # two in a second
            cap.came(2, step * 1e-3)
        cap.observe(64, 64, step * 1e-3)
        assert cap.slots(step, step * 1e-3) is None


def test_a_request_of_more_outputs_than_the_bound_still_runs():
    driver = driver_of(num_slots=64, max_num_batched_tokens=1024)
    driver.scheduler.cap.slots = lambda step, now_s: 2
    add(driver, "a0", client=1, n=8, max_tokens=3)
    add(driver, "a1", client=1, max_tokens=3)
    driver.step()
    assert running(driver) == {1: 8}
    assert driver.executor.plans[-1].decisions.head_waits == "slots"
    driver.run()
    driver.assert_answers()
