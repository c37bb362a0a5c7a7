"""Greedy tokens are looked at by a grammar once they are sampled, which takes less than to find out its mask before.

It is asked about the likeliest token, then about the next ones, and only where it allows none of these for its mask.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.backends.step import Likeliest, StepOutput
from ridgeline.core.arrays import Array
from ridgeline.core.step import NO_TOKEN, Checker
from ridgeline.decoding.largest import largest

_LISTED = (1, 16), (16, 64)  # the likeliest tokens that a grammar is asked about before its mask, in turns


class Checked(NamedTuple):
    """A token that a backend samples, by its place, with its row of logits and what checks it."""

    at: int
    row: int
    checker: Checker


def check_tokens(checked: Sequence[Checked], output: StepOutput) -> None:
    """Let the tokens of a step be checked, and write those that others take the place of."""
    if output.sampled_token_ids is None or not checked:
        return
    token_ids = output.sampled_token_ids.tolist()
    for at, row, checker in checked:
        if token_ids[at] != NO_TOKEN and not checker.allows(token_ids[at]):
            output.sampled_token_ids[at] = other_token(checker, output.logits_RV, row, output.likeliest)


def other_token(checker: Checker, logits_RV: Array, row: int, likeliest: Likeliest | None = None) -> int:
    """Return the allowed token of the largest logit of a row, where that of the largest of all is not."""
    listing: Likeliest = likeliest or (lambda row, count: largest(np.asarray(logits_RV[row]), count)[1].tolist())
    listed = (token_id for known, count in _LISTED for token_id in listing(row, count)[known:])
    if (found := checker.first_allowed(listed)) is not None:
        return found
    bits = np.unpackbits(checker.allowed.view(np.uint8), bitorder="little")[: logits_RV.shape[1]]
    fitting_N = np.flatnonzero(bits.view(np.bool_))  # mostly few
    logits_N = np.asarray(logits_RV[row])[fitting_N]
    best = int(logits_N.argmax()) if len(logits_N) else -1
    return int(fitting_N[best]) if best >= 0 and logits_N[best] > -math.inf else NO_TOKEN
