"""A bound on the time between tokens: chunks of prompts beside running sequences are as long as it leaves."""

import pytest
from engine_fakes import Clock, FakeExecutor, expected_tokens, make_layout, make_request

from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import SchedulerConfig
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.pacing import MIN_CHUNK_TOKENS
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler

BASE_S, TOKEN_S = 0.020, 0.0005


class Costly(FakeExecutor):
    """Takes its time by the fake clock: a base for every step, and more for every token."""

    def __init__(self, layout, clock):
        super().__init__(layout)
        self.clock = clock

    def collect(self):
        self.clock.now += BASE_S + TOKEN_S * self.in_flight[0].num_tokens
        return super().collect()


def run(max_itl_s):
    """Two sequences decode, then long prompts come; return the seconds of steps from then on that had both, and all."""
    layout, clock, deltas = make_layout((400,)), Clock(), []
    executor = Costly(layout, clock)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_itl_s=max_itl_s)
    scheduler = Scheduler(config, CacheManager(layout), Autoregressive(), 1000, 8, clock)
    loop = EngineLoop(scheduler, executor, Renderer(None), deltas.extend, clock)
    requests = [make_request(name, [ord(name)] * 40, clock, max_tokens=60) for name in "ab"]
    for request in requests:
        loop.submit(request)
    for step in range(400):
        if step == 8:
            late = [make_request(name, [ord(name)] * 300, clock, max_tokens=4) for name in "cd"]
            requests += late
            for request in late:
                loop.submit(request)
        if not loop.step():
            break
    for request in requests:
        got = [token for delta in deltas if delta.request_id == request.request_id for token in delta.token_ids]
        assert got == expected_tokens(request, 0, 1000)
    mixed = [plan.num_tokens for plan in executor.plans[8:] if len({span.num_tokens > 1 for span in plan.spans}) == 2]
    return [BASE_S + TOKEN_S * count for count in mixed], len(executor.plans), clock.now


@pytest.mark.parametrize("max_itl_s", [0.040, 0.060, 0.1])
def test_steps_of_prompts_beside_decodes_stay_within_the_bound(max_itl_s):
    seconds, _, _ = run(max_itl_s)
    assert max(seconds) <= 1.1 * max_itl_s
    assert sorted(seconds)[len(seconds) // 2] >= 0.7 * max_itl_s  # and use it


def test_without_a_bound_a_step_takes_what_the_budget_has():
    seconds, num_steps, total_s = run(None)
    assert max(seconds) == pytest.approx(BASE_S + TOKEN_S * 256)
    bounded_s, more_steps, more_s = run(0.060)
    assert len(bounded_s) > len(seconds)
    assert more_steps >= num_steps
    assert more_s >= total_s - 1e-9


def test_a_bound_that_cannot_be_held_still_lets_prompts_go_on():
    seconds, _, _ = run(0.001)
    assert {round((value - BASE_S) / TOKEN_S) for value in seconds[:-1]} <= {MIN_CHUNK_TOKENS + n for n in (2, 3, 4)}
