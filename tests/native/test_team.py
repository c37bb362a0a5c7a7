"""Whether a step is run by one worker or by all follows from the times of the steps, whatever they are."""

import random

import pytest

pytest.importorskip("ridgeline._native", reason="the native module is not built")

from ridgeline import LLM, SamplingParams, _native


def run(team, milliseconds_of, num_steps, own_ms=1.0):
    """Milliseconds of all steps, and how many of them one worker ran; beyond `own_ms` several are held up."""
    total, num_alone = 0.0, 0
    for _ in range(num_steps):
        alone = team.alone
        milliseconds = milliseconds_of(alone)
        team.observe(milliseconds / 1000, 0.0 if alone else max(0.0, milliseconds - own_ms) / 1000)
        total, num_alone = total + milliseconds, num_alone + alone
    return total, num_alone


def test_all_workers_are_faster():
    total, num_alone = run(_native.Team(), lambda alone: 1.6 if alone else 1.0, 5000)
    assert 1 <= num_alone <= 30
    assert total < 1.01 * 5000


def test_long_steps_are_not_tried_on_one_worker():
    """Not even when one is held up: the try would cost a whole step of twice the time."""
    generator = random.Random(0)
    times = (16.0 if generator.random() < 0.99 else 100.0 for _ in range(5000))
    _, num_alone = run(_native.Team(), lambda alone: next(times), 5000, own_ms=16.0)
    assert num_alone == 0


def test_all_workers_are_held_up():
    total, num_alone = run(_native.Team(), lambda alone: 1.6 if alone else 20.0, 5000)
    assert num_alone > 4900
    assert total < 1.1 * 1.6 * 5000


def test_a_disturbance_is_answered_at_once_and_forgotten_when_it_ends():
    team = _native.Team()
    run(team, lambda alone: 1.6 if alone else 1.0, 200)
    _, num_alone = run(team, lambda alone: 1.6 if alone else 20.0, 100)
    assert num_alone > 80
    _, num_alone = run(team, lambda alone: 1.6 if alone else 1.0, 2000)
    assert num_alone < 300


def test_the_first_steps_are_slow_for_all():
    """Caches are cold and threads asleep: such a step says nothing of what one worker would take."""
    times = iter([12.0, 2.0])
    _, num_alone = run(_native.Team(), lambda alone: 1.6 if alone else next(times, 1.0), 12)
    assert num_alone == 1


def test_one_step_that_takes_long_says_little_of_the_next():
    """Its caller may have come late: one worker, who is slower, must not be taken for it."""
    team = _native.Team()
    run(team, lambda alone: 1.8 if alone else 1.0, 100)
    assert not team.alone
    team.observe(0.010)
    _, num_alone = run(team, lambda alone: 1.8 if alone else 1.0, 9)
    assert num_alone == 1


@pytest.mark.parametrize("seed", range(5))
def test_single_hiccups_cost_little(seed):
    generator = random.Random(seed)

    def milliseconds_of(alone):
        return (1.6 if alone else 1.0) + (10.0 if generator.random() < 0.01 else 0.0)

    total, _ = run(_native.Team(), milliseconds_of, 5000)
    generator.seed(seed)
    without = 5000 * 1.0 + sum(10.0 for _ in range(5000) if generator.random() < 0.01)
    assert total < 1.1 * without


def test_equal_times_change_nothing():
    _, num_alone = run(_native.Team(), lambda alone: 1.0, 5000)
    assert num_alone < 50


def test_tokens_are_those_of_one_thread_whoever_runs_a_step():
    """Long enough that both ways are tried many times."""
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, logprobs=1)
    outputs = []
    for num_threads in (1, 3):
        llm = LLM("python-1m", backend="native", num_threads=num_threads, deterministic=True, pack_cache=False)
        for prompts in (["def f("], ["def f(", "class A", "import "]):
            outputs.append(
                [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params, use_tqdm=False)]
            )
    assert outputs[:2] == outputs[2:]
