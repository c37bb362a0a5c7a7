"""Greedy tokens are looked at by a grammar once they are sampled, which takes less than to find out its mask before.

It is asked about the likeliest token, then about the next ones, and only where it allows none of these for its mask.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.backends.step import StepOutput
from ridgeline.core.arrays import Array
from ridgeline.core.step import NO_TOKEN, Checker, IntArray
from ridgeline.decoding.largest import largest

_NUM_LIKELIEST = 16  # tokens that a grammar is asked about before its mask


class Checked(NamedTuple):
    """A token that a backend samples, by its place, with its row of logits and what checks it."""

    at: int
    row: int
    checker: Checker


def check_tokens(checked: Sequence[Checked], output: StepOutput) -> None:
    """Let the tokens of a step be checked, and write those that others take the place of."""
    token_ids, likeliest_DK = output.sampled_token_ids, output.likeliest_DK
    if token_ids is None or not checked:
        return
    for at, row, checker in checked:
        known_K = None if likeliest_DK is None else likeliest_DK[at]
        token_ids[at] = checked_token(checker, int(token_ids[at]), output.logits_RV[row], known_K)


def checked_token(checker: Checker, token_id: int, logits_V: Array, known_K: IntArray | None = None) -> int:
    """Return the allowed token of the largest logit, where `token_id` is that of the largest of all; `known_K` are
    those of the largest ones, in order, where it begins with that."""
    if token_id == NO_TOKEN:
        return token_id
    if (found := checker.first_allowed(_likeliest(token_id, logits_V, known_K))) is not None:
        return found
    fits_V = np.unpackbits(checker.allowed.view(np.uint8), bitorder="little")[: len(logits_V)].view(np.bool_)
    logits_V = np.where(fits_V, logits_V[: len(fits_V)], -math.inf)
    found = int(logits_V.argmax())
    return found if logits_V[found] > -math.inf else NO_TOKEN


def _likeliest(token_id: int, logits_V: Array, known_K: IntArray | None) -> Iterator[int]:
    yield token_id
    if known_K is not None and known_K[0] == token_id:
        yield from known_K[1:].tolist()
    else:
        yield from largest(logits_V, _NUM_LIKELIEST)[1][1:].tolist()
