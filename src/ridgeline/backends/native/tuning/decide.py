"""The rule by which a variant replaces the default. Called by tuner.py; measures nothing.

On a shared machine any one reading may be half of the next. So variants run in rounds, each beside the default of the
same round, the default itself twice: what the two differ by is noise, and a variant has to win by more, repeatedly.
The default is what remains when in doubt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from statistics import median

MIN_SCORE = 1.03  # times as fast as the default, at the median
MIN_NOISES = 2.0  # by which a score is above 1
MIN_WON = 5 / 7  # of the rounds
TIE = 0.01  # of the best score, within which the earlier variant is taken

Round = Mapping[str, float]
"""Seconds of each variant, the default among them, one after the other within a moment."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The variant to take; how many times as fast as the default it was, and in how many rounds it was faster."""

    variant: str
    score: float
    rounds_won: int
    num_rounds: int


def decide(default: str, rounds: Sequence[Round], noise: float = 0.0) -> Decision:
    """Return the fastest variant that beats `default` beyond doubt, else the default with a score of 1.

    `noise` is what `noise_of` finds in the same rounds.

    Among equally fast variants, the first in the order of the rounds' keys is taken: the one that fetches least.
    """
    found = [_judged(default, variant, rounds) for variant in rounds[0] if variant != default] if rounds else []
    min_score, min_won = max(MIN_SCORE, exp(MIN_NOISES * noise)), ceil(MIN_WON * len(rounds))
    better = [each for each in found if each.score >= min_score and each.rounds_won >= min_won]
    if not better:
        return Decision(default, 1.0, 0, len(rounds))
    best = max(each.score for each in better)
    return next(each for each in better if each.score >= best * (1 - TIE))


def noise_of(first: str, again: str, rounds: Sequence[Round]) -> float:
    """Return how far two runs of the same work in one round are apart, at the median, as a logarithm."""
    return median(abs(log(seconds[first] / seconds[again])) for seconds in rounds)


def _judged(default: str, variant: str, rounds: Sequence[Round]) -> Decision:
    ratios = [seconds[default] / seconds[variant] for seconds in rounds]
    return Decision(variant, median(ratios), sum(ratio > 1 for ratio in ratios), len(ratios))
