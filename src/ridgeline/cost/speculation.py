"""Speculation: how many tokens a round makes, and how much faster that is (Leviathan et al., arXiv 2211.17192)."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def tokens_per_round(acceptance: Sequence[float]) -> float:
    """Return the mean tokens of a round whose k-th draft is accepted with probability `acceptance[k]` if it is reached.

    The target's own token, which follows the last accepted one, is counted.
    """
    return 1 + sum(accumulate(acceptance, mul))


def speedup(acceptance: Sequence[float], draft_ratio: float) -> float:
    """Return the speed-up where a draft costs `draft_ratio` of a target step and verifying costs one target step.

    That holds as long as the round's tokens keep the target memory-bound.
    """
    return tokens_per_round(acceptance) / (1 + len(acceptance) * draft_ratio)
