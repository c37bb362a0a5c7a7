"""Users who wait for the end of one request before they send the next, told from requests that come by themselves."""

from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
import pytest

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.explain.closed_loop import users_of
from ridgeline.explain.machine import simulated_machine
from ridgeline.explain.recorded_workload import RecordedWorkload
from ridgeline.explain.simulation import run_simulated


def served(came_N, slots, lasts):
    """Return when requests end that are served in turn by so many slots."""
    free, ended = [0.0] * slots, []
    for came_s in came_N:
        heappush(free, end_s := max(came_s, heappop(free)) + lasts())
        ended.append(end_s)
    return np.sort(ended)


def closed_loop(users, slots, think_s, count, lasts):
    """Return when requests come and end of users who think a while behind the end of each."""
    asks, free, came, ended = [0.0] * users, [0.0] * slots, [], []
    for _ in range(count):
        came.append(heappop(asks))
        heappush(free, end_s := max(came[-1], heappop(free)) + lasts())
        heappush(asks, end_s + think_s)
        ended.append(end_s)
    return np.sort(came), np.sort(ended)


@pytest.mark.parametrize("users", [2, 6, 16])
@pytest.mark.parametrize("slots", [1, 4, 64])
@pytest.mark.parametrize("think_s", [0.0, 0.1])
def test_users_are_counted_by_what_is_under_way(users, slots, think_s):
    rng = np.random.default_rng(users)
    found = users_of(*closed_loop(users, slots, think_s, 20 * users, lambda: rng.uniform(0.7, 1.3)))
    assert found is not None
    assert abs(found.num - users) <= 1
    assert found.think_s == pytest.approx(think_s, abs=0.15)


@pytest.mark.parametrize("under_way", [0.1, 1, 16, 100])
def test_requests_at_random_have_no_users(under_way):
    rng = np.random.default_rng(1)
    found = []
    for _ in range(20):
        came_N = np.cumsum(rng.exponential(1.0, 400))
        found.append(users_of(came_N, np.sort(came_N + rng.uniform(0.5, 1.5, 400) * under_way)))
    assert found == [None] * 20


@pytest.mark.parametrize("load", [0.5, 0.95, 2.0])
def test_a_queue_of_requests_at_random_has_no_users(load):
    rng = np.random.default_rng(2)
    came_N = np.cumsum(rng.exponential(1 / load, 400))
    assert users_of(came_N, served(came_N, 1, lambda: rng.uniform(0.7, 1.3))) is None


@pytest.mark.parametrize("at_once", [1, 4, 12])
@pytest.mark.parametrize("lasts_s", [0.3, 0.9, 2.5])
def test_what_comes_by_a_clock_has_no_users(at_once, lasts_s):
    rng = np.random.default_rng(3)
    came_N = np.repeat(np.arange(40.0), at_once)
    assert users_of(came_N, np.sort(came_N + rng.uniform(0.9, 1.1, len(came_N)) * lasts_s)) is None


def test_few_requests_and_none_that_ended_have_no_users():
    assert users_of(np.zeros(100), np.empty(0)) is None
    assert users_of(np.arange(8.0), np.arange(8.0) + 1) is None
    assert users_of(np.zeros(100), np.arange(100.0) + 1) is None  # all came before one ended


@pytest.fixture(scope="module")
def asked():
    lengths = np.random.default_rng(4).integers(8, 40, 96)
    return [BenchRequest(prompt=[number + 3] * 64, max_tokens=int(length)) for number, length in enumerate(lengths)]


def on_card(**options):
    return simulated_machine(EngineConfig.of("llama-3-8b", **options), "h100-sxm")


def test_users_think_between_requests(asked):
    found = run_simulated(on_card(), asked, max_concurrency=6, think_s=0.5)
    results = found.results
    user_s = sum(record.e2el_s + 0.5 for record in found.log.records)
    assert user_s / results.duration_s == pytest.approx(6, rel=0.05)  # Little's law
    assert results.duration_s > 0.5 * (len(asked) / 6 - 1)


def test_users_ask_a_faster_engine_sooner(asked):
    one_slot, slots = (
        simulated_machine(EngineConfig.of("python-9m", num_threads=1, max_num_seqs=count)) for count in (1, 16)
    )
    recording = run_simulated(one_slot, asked, max_concurrency=6, think_s=0.001).recording
    workload = RecordedWorkload.of(recording, one_slot.setup.layout.block_size)
    assert workload.users is not None
    assert workload.users.num == 6
    assert workload.users.think_s == pytest.approx(0.001, rel=0.2)
    users, recorded = (
        each.run(slots).results.latencies.e2el_ms.mean for each in (workload, replace(workload, users=None))
    )
    real = run_simulated(slots, asked, max_concurrency=6, think_s=0.001).results.latencies.e2el_ms.mean
    assert users == pytest.approx(real, rel=0.05)
    assert recorded < 0.7 * real  # at the recorded times the queue would be empty
    assert workload.at_once().users is None
