"""The rule by which a variant replaces the default, on made-up rounds."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.backends.native.tuning.tuner import Decision, decide, noise_of

SECONDS = st.floats(1e-4, 1.0)


def rounds_of(**seconds: list[float]) -> list[dict[str, float]]:
    return [dict(zip(seconds, each)) for each in zip(*seconds.values())]


def test_what_is_faster_in_every_round_is_taken() -> None:
    rounds = rounds_of(old=[1.0] * 7, new=[0.8] * 7)
    assert decide("old", rounds) == Decision("new", 1.25, 7, 7)


def test_less_than_three_percent_is_no_gain() -> None:
    assert decide("old", rounds_of(old=[1.0] * 7, new=[0.98] * 7)) == Decision("old", 1.0, 0, 7)
    assert decide("old", rounds_of(old=[1.0] * 7, new=[0.97] * 7)).variant == "new"


def test_a_gain_has_to_repeat() -> None:
    """Faster by half in four of seven rounds is a good median and no proof."""
    assert decide("old", rounds_of(old=[1.0] * 7, new=[0.5] * 4 + [1.1] * 3)).variant == "old"
    assert decide("old", rounds_of(old=[1.0] * 7, new=[0.5] * 5 + [1.1] * 2)).variant == "new"


def test_a_busy_moment_hits_all_of_its_round() -> None:
    load = [1, 9, 1, 2, 5, 1, 3]
    rounds = rounds_of(old=[1.0 * x for x in load], new=[0.9 * x for x in load], worse=[1.1 * x for x in load])
    assert decide("old", rounds).variant == "new"


def test_of_equals_the_first_is_taken() -> None:
    rounds = rounds_of(old=[1.0] * 7, near=[0.802] * 7, far=[0.8] * 7)
    assert decide("old", rounds).variant == "near", "it fetches less, and is as fast"
    assert decide("old", rounds_of(old=[1.0] * 7, near=[0.82] * 7, far=[0.8] * 7)).variant == "far"


def test_the_first_that_is_near_the_best_must_win_itself() -> None:
    """Within one percent of the best, yet below the least gain."""
    rounds = rounds_of(old=[1.0] * 7, near=[1 / 1.025] * 7, far=[1 / 1.032] * 7)
    assert decide("old", rounds).variant == "far"


def test_without_rounds_or_others_it_is_the_default() -> None:
    assert decide("old", []) == Decision("old", 1.0, 0, 0)
    assert decide("old", rounds_of(old=[1.0, 2.0])) == Decision("old", 1.0, 0, 2)


@given(st.lists(st.fixed_dictionaries({"a": SECONDS, "b": SECONDS, "c": SECONDS}), min_size=1, max_size=9))
def test_only_a_clear_winner_replaces_the_default(rounds: list[dict[str, float]]) -> None:
    decision = decide("a", rounds)
    assert decision.num_rounds == len(rounds)
    if decision.variant == "a":
        assert decision.score == 1.0
        return
    ratios = sorted(each["a"] / each[decision.variant] for each in rounds)
    assert decision.score >= 1.03 and ratios[0] <= decision.score <= ratios[-1]
    assert decision.rounds_won == sum(ratio > 1 for ratio in ratios) >= len(rounds) * 5 / 7


@given(st.lists(SECONDS, min_size=7, max_size=7), st.floats(0.5, 2.0), st.randoms(use_true_random=False))
def test_units_and_the_order_of_rounds_do_not_matter(old: list[float], factor: float, order: random.Random) -> None:
    rounds = rounds_of(old=old, new=[each * factor for each in old], other=[each * 0.9 for each in old])
    decision = decide("old", rounds)
    scaled = [{name: 1024 * seconds for name, seconds in each.items()} for each in rounds]
    order.shuffle(scaled)
    assert decide("old", scaled) == decision


def test_noise_is_what_the_same_work_differs_by() -> None:
    assert noise_of("a", "b", rounds_of(a=[1.0, 2.0, 3.0], b=[1.0, 2.0, 9.0])) == 0.0
    assert noise_of("a", "b", rounds_of(a=[1.0, 2.0, 1.0], b=[2.0, 1.0, 1.0])) == pytest.approx(math.log(2))


def test_a_gain_is_more_than_the_noise() -> None:
    rounds = rounds_of(old=[1.0] * 7, new=[0.8] * 7)
    assert decide("old", rounds, noise=0.1).variant == "new"
    assert decide("old", rounds, noise=0.12).variant == "old"


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.02, 0.1, 0.5, 2.0]))
def test_noise_alone_rarely_looks_like_a_winner(seed: int, spread: float) -> None:
    """Twelve variants that are all the same, on quiet and on loud machines, winners having to win twice."""
    noise = random.Random(seed)

    def rounds(*names: str) -> list[dict[str, float]]:
        return [{name: 1 + spread * noise.random() for name in names} for _ in range(7)]

    def winner(*names: str) -> str:
        each = rounds("default", "again", *names)
        return decide(
            "default",
            [{n: s for n, s in one.items() if n != "again"} for one in each],
            noise_of("default", "again", each),
        ).variant

    taken = 0
    for _ in range(20):
        first = winner(*(f"v{i}" for i in range(11)))
        taken += first != "default" and winner(first) == first
    assert taken <= 4


@pytest.mark.parametrize("won", range(8))
def test_five_of_seven_rounds(won: int) -> None:
    rounds = rounds_of(old=[1.0] * 7, new=[0.5] * won + [1.01] * (7 - won))
    assert (decide("old", rounds).variant == "new") == (won >= 5)
