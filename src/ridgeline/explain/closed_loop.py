"""Tell a closed loop by its requests: users who wait for the end of one before they send the next. No torch.

A faster engine is asked sooner by them, so its queue is never empty and each waits longer than at the recorded times.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SecondsArray = npt.NDArray[np.float64]
FEW, TURNS = 16, 3  # arrivals, and those of each user, with less of which a closed loop looks like any other load
EVEN = 0.01  # deviation, by their mean, of the times in which as many requests come, of what comes at a steady rate
FULL, OFTEN, DISPERSION = 0.7, 0.3, 0.4  # of the users that wait: mean, share of the time for all, variance by mean


class Users(NamedTuple):
    """Says how many users there are, of whom each asks again `think_s` after his last request ended."""

    num: int
    think_s: float


def users_of(came_N: SecondsArray, ended_M: SecondsArray) -> Users | None:
    """Return the users by when requests came and ended, each in order: about as many are under way all the time.

    None where that varies, as it does with requests that come at random (its variance is its mean then), where they
    come at a steady rate, and for one user, whom any light load looks like.
    """
    if len(came_N) < FEW or not len(ended_M):
        return None
    count_T, lasted_T = _under_way(came_N, ended_M)
    num_later = int((came_N >= ended_M[0]).sum())
    if num_later < FEW or not lasted_T.any():
        return None
    mean = float(np.average(count_T, weights=lasted_T))
    variance = float(np.average((count_T - mean) ** 2, weights=lasted_T))
    order = np.argsort(count_T)
    users = int(count_T[order][np.searchsorted(np.cumsum(lasted_T[order]), 0.95 * lasted_T.sum())])
    often = float(lasted_T[count_T >= users].sum() / lasted_T.sum())
    is_constant = mean >= FULL * users and (often >= OFTEN or variance <= DISPERSION * mean)
    if users < 2 or num_later < TURNS * users or not is_constant:
        return None
    turns_N = came_N[users:] - came_N[:-users]
    if turns_N.std() < EVEN * turns_N.mean():
        return None
    thought_s = [max(0.0, float(came_s - ended_s)) for came_s, ended_s in zip(came_N[users:], ended_M)]
    return Users(users, float(np.mean(thought_s)))


def _under_way(came_N: SecondsArray, ended_M: SecondsArray) -> tuple[npt.NDArray[np.int64], SecondsArray]:
    """Return how many requests are under way from one moment to the next, and for how many seconds between the first
    end and the last arrival."""
    times_T = np.concatenate([came_N, ended_M])
    order = np.argsort(times_T, kind="stable")
    count_T = np.cumsum(np.where(order < len(came_N), 1, -1))[:-1]
    begin_s, end_s = float(ended_M[0]), float(came_N[-1])
    return count_T, np.diff(np.clip(times_T[order], min(begin_s, end_s), end_s))
