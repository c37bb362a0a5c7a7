"""Executors with several plans in flight: the same tokens as one by one, whatever ends or moves in the meantime."""

import pytest
from engine_fakes import Clock, Driver, FakeExecutor, make_layout, make_request

from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.render import Renderer
from ridgeline.engine.request import FinishReason
from ridgeline.engine.scheduler import Scheduler

PROMPTS = {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5, 6, 7, 8, 9], "c": [20], "d": [30, 31, 32, 33, 34]}


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("blocks", [64, 9])
def test_tokens_do_not_depend_on_the_depth(depth, blocks, chains):
    """Also where blocks are so few that sequences in flight are preempted."""
    driver = Driver(make_layout((blocks,)), depth=depth, chains=chains, max_num_seqs=6, max_num_batched_tokens=6)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, max_tokens=9, n=2 if name == "c" else 1)
    driver.run()
    driver.assert_answers()
    driver.check()
    assert set(driver.reasons.values()) == {FinishReason.LENGTH}
    assert (driver.executor.num_overlapping > 5) == (depth > 1)
    assert (driver.executor.num_pending > 5) == (depth > 1 and chains)
    assert (driver.scheduler.stats().num_preemptions > 0) == (blocks == 9)


def test_a_sequence_is_in_one_plan_at_a_time_and_every_plan_has_some():
    driver = Driver(make_layout((64,)), depth=2, max_num_seqs=4, max_num_batched_tokens=16)
    for name in "abcd":
        driver.add(name, [ord(name)], max_tokens=8)
    driver.step()
    for _ in range(4):
        driver.step()
        first, second = driver.in_flight[0], driver.scheduler.plan()
        planned = [{span.seq_id for span in plan.spans} for plan in (first, second)]
        assert list(map(len, planned)) == [2, 2] and not planned[0] & planned[1]
        driver.executor.submit(second)
        driver.in_flight.append(second)


@pytest.mark.parametrize("how", ["abort", "deadline", "preempt"])
def test_a_plan_in_flight_survives_the_end_of_its_sequence(how):
    """Its blocks go to another sequence at once, its result to nobody."""
    driver = Driver(make_layout((3,)), depth=2, max_num_seqs=2, max_num_batched_tokens=16, prefix_caching=False)
    driver.add("gone", [1, 2, 3, 4, 5], max_tokens=3, deadline_s=driver.clock() + 1)
    plan = driver.scheduler.plan()
    driver.executor.submit(plan)
    driver.in_flight.append(plan)
    (seq,) = driver.scheduler.running()
    if how == "preempt":
        driver.scheduler.preempt(seq)
    else:
        driver.clock.now += 2 if how == "deadline" else 0
        driver.take(
            driver.scheduler.finish("gone", None, FinishReason.ABORT) if how == "abort" else driver.scheduler.expire()
        )
    assert driver.cache.stats().groups[0].used == 0
    driver.add("next", [7, 8, 9, 10, 11, 12], max_tokens=4, priority=-1)
    driver.run()
    assert driver.executor.num_overlapping > 0
    driver.assert_answers(skip=set() if how == "preempt" else {("gone", 0)})
    assert driver.tokens.get(("gone", 0), []) == [] or how == "preempt"
    driver.check()


def test_the_carrier_of_a_prompt_ends_while_it_is_computed():
    driver = Driver(make_layout((64,)), depth=2, max_num_seqs=8, max_num_batched_tokens=16)
    driver.add("many", [5, 6, 7, 8, 9], n=3, max_tokens=6)
    plan = driver.scheduler.plan()
    driver.executor.submit(plan)
    driver.in_flight.append(plan)
    driver.take(driver.scheduler.finish("many", 0, FinishReason.ABORT))
    driver.run()
    driver.assert_answers(skip={("many", 0)})
    assert driver.reasons["many", 1] is driver.reasons["many", 2] is FinishReason.LENGTH
    driver.check()


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_one_sequence_alone_keeps_the_executor_busy_where_it_chains(windows):
    """Every token but the first is computed from one that nobody has seen yet, up to the one known to be the last."""
    driver = Driver(make_layout((64,) * len(windows), windows), depth=3, chains=True)
    driver.add("a", [1, 2, 3, 4, 5], max_tokens=20)
    driver.run()
    driver.assert_answers()
    driver.check()
    assert len(driver.executor.plans) == 20
    assert driver.executor.num_pending == 19
    assert driver.executor.num_overlapping == 19


def test_a_stop_token_in_flight_ends_its_sequence_and_what_was_planned_behind_it_is_dropped():
    driver = Driver(make_layout((64,)), depth=3, chains=True, max_num_seqs=3)
    for number in range(12):
        driver.add(str(number), [number, 9, 9], max_tokens=30, ignore_eos=False)
    driver.run()
    driver.assert_answers()
    driver.check()
    assert FinishReason.STOP in driver.reasons.values()
    num_computed = sum(plan.num_tokens for plan in driver.executor.plans)
    num_used = sum(3 + len(tokens) - 1 for tokens in driver.tokens.values())
    assert num_used < num_computed <= num_used + 2 * 12  # at most two plans were in flight behind an end


def test_what_hangs_on_the_token_before_waits_for_it():
    driver = Driver(make_layout((64,)), depth=2, chains=True, max_num_seqs=8)
    driver.add("penalised", [1, 2], max_tokens=6, repetition_penalty=1.3)
    driver.add("forked", [3, 4], max_tokens=1, n=2)
    driver.add("scored", [5] * 14, max_tokens=1, prompt_logprobs=0)
    driver.run()
    driver.assert_answers()
    assert driver.executor.num_pending == 0


class Breaking(FakeExecutor):
    """Fails to compute the plans numbered in `broken`, and the parts of them that are computed again."""

    broken = ()

    def compute(self, plan):
        result = super().compute(plan)
        if abs(plan.step) in self.broken:
            raise RuntimeError("lost")
        return result


@pytest.mark.parametrize(("depth", "chains"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_the_loop_keeps_plans_in_flight_and_a_failed_one_ends_its_own_requests(depth, chains):
    layout, clock, deltas = make_layout((64,)), Clock(), []
    executor = Breaking(layout, depth, chains=chains)
    executor.broken = (5,)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler = Scheduler(config, CacheManager(layout), Autoregressive(), 100, 4, clock, depth, chains=chains)
    loop = EngineLoop(scheduler, executor, Renderer(None), deltas.extend, clock)
    for name in "abcd":
        loop.submit(make_request(name, [ord(name)], clock, max_tokens=12))
    failed = None
    for _ in range(200):
        if failed is None and len(executor.plans) >= 5:
            failed = {span.seq_id for span in executor.plans[4].spans}
        if len(executor.plans) == 8:
            loop.abort("d")
        if not loop.step():
            break
    ends = {delta.request_id: delta.finish.reason for delta in deltas if delta.finish is not None}
    lost = {name for name, reason in ends.items() if reason is FinishReason.ERROR}
    assert lost == {"abcd"[seq_id] for seq_id in failed}
    assert set(ends) == set("abcd")
    assert (executor.num_overlapping > 3) == (depth > 1)
    assert not executor.in_flight and not (scheduler.running() or scheduler.stats().num_waiting)
    assert scheduler.stats().cache.groups[0].used == 0
    whole = Driver(layout, max_num_seqs=4)
    for name in "abcd":
        whole.add(name, [ord(name)], max_tokens=12)
    whole.run()
    for name in set("abcd") - lost:
        got = [token for delta in deltas if delta.request_id == name for token in delta.token_ids]
        expected = whole.tokens[name, 0]
        assert got == (expected if ends[name] is FinishReason.LENGTH else expected[: len(got)])


@pytest.mark.parametrize(("stop", "depth"), [((), 2), (("never said",), 2), ((), 1)])
def test_callers_hear_of_a_step_behind_the_next_plan_where_it_is_computed_and_no_text_may_end(stop, depth):
    layout, clock, heard = make_layout((64,)), Clock(), []
    executor = FakeExecutor(layout, depth)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler = Scheduler(config, CacheManager(layout), Autoregressive(), 100, 4, clock, depth)

    def deliver(deltas):
        heard.extend([(len(executor.plans), delta.token_ids) for delta in deltas])

    loop = EngineLoop(scheduler, executor, Renderer(None), deliver, clock)
    loop.submit(make_request("a", [1], clock, max_tokens=4, stop=stop))
    while loop.step():
        pass
    assert [submitted for submitted, _ in heard] == ([1, 2, 3, 4] if stop or depth == 1 else [2, 3, 4, 4])
    assert all(len(token_ids) == 1 for _, token_ids in heard)


def test_what_has_ended_is_delivered_before_what_goes_on():
    layout, clock, heard = make_layout((64,)), Clock(), []
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4), CacheManager(layout), Autoregressive(), 100, 4, clock)
    loop = EngineLoop(scheduler, FakeExecutor(layout), Renderer(None), heard.append, clock)
    for name, max_tokens in (("a", 3), ("b", 2), ("c", 3), ("d", 2)):
        loop.submit(make_request(name, [ord(name)], clock, max_tokens=max_tokens))
    while loop.step():
        pass
    orders = ["".join(delta.request_id for delta in deltas) for deltas in heard if deltas]
    assert orders == ["abcd", "bdac", "ac"]


@pytest.mark.parametrize(("depth", "chains"), [(1, False), (2, True)])
def test_what_comes_while_callers_hear_is_in_the_next_step(depth, chains):
    """In the one behind that which is computed meanwhile, if one is; another client has all slots."""
    layout, clock, came = make_layout((64,)), Clock(), []
    executor = FakeExecutor(layout, depth, chains=chains)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32)
    scheduler = Scheduler(config, CacheManager(layout), Autoregressive(), 100, 4, clock, depth, chains=chains)

    def deliver(deltas):
        if deltas and len(executor.plans) > 5 and not came:
            came.append(len(executor.plans) - len(executor.in_flight))
            loop.submit(make_request("p", [9], clock, max_tokens=1, client=2))

    loop = EngineLoop(scheduler, executor, Renderer(None), deliver, clock)
    for number in range(5):
        loop.submit(make_request(f"f{number}", [number] * 3, clock, max_tokens=12, client=1))
    while loop.step():
        pass
    admitted = {one.seq_id: index for index, plan in enumerate(executor.plans) for one in plan.decisions.admitted}
    assert admitted[5] == came[0] + depth - 1
