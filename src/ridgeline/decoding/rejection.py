"""Accept drafted tokens by rejection sampling: the rule `reject`, which keeps most of what a sampling drafter drafts.

A token x that was sampled from q is accepted with probability min(1, p(x) / q(x)); otherwise one is sampled from what p
has more than q, max(p - q, 0). Either way the outcome is distributed as p, and the chance to accept, 1 - TV(p, q), is
the largest that there is (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

p and q are whole numbers, those that `random_sample` takes a token from, after all processors. The three random numbers
of a position are words of streams of their own, so that none is used for two purposes:

    proposal  word(seed ^ PROPOSAL, n)    accept  word(seed ^ ACCEPTANCE, n)    residual  word(seed ^ RESIDUAL, n)
"""

from typing import Final

import numpy as np

from ridgeline.core.step import Trial, Weights
from ridgeline.decoding.random_sample import random_word

PROPOSAL: Final = 0x5851F42D4C957F2D
ACCEPTANCE: Final = 0xD1342543DE82EF95
RESIDUAL: Final = 0xAF251AF3B0F025B5
_RESIDUAL_ONE = 2.0**44


def sample(weights: Weights, word: int) -> int:
    """Return the token that `word`, 64 random bits, takes from `weights`; at least one of them is above 0."""
    cdf_N = np.cumsum(weights.weights_N)
    target = word * int(cdf_N[-1]) >> 64
    return int(weights.token_ids_N[np.searchsorted(cdf_N, target, side="right")])


def verify(target: Weights, trial: Trial, seed: int, num_output: int) -> int:
    """Return the drafted token if it is accepted, else one from the residual distribution: never the drafted one."""
    if _is_accepted(target, trial, random_word(seed ^ ACCEPTANCE, num_output)):
        return trial.token_id
    residual = residual_weights(target, trial.weights)
    if not residual.weights_N.any():  # p and q differ by less than the rounding
        return trial.token_id
    return sample(residual, random_word(seed ^ RESIDUAL, num_output))


def residual_weights(target: Weights, proposal: Weights) -> Weights:
    """Return max(p - q, 0) over the tokens of `target`, in 44 bits."""
    share_N = target.weights_N / int(target.weights_N.sum())
    place_N = np.searchsorted(proposal.token_ids_N, target.token_ids_N)
    place_N = np.minimum(place_N, len(proposal.token_ids_N) - 1)
    is_same_N = proposal.token_ids_N[place_N] == target.token_ids_N
    drafted_N = np.where(is_same_N, proposal.weights_N[place_N] / int(proposal.weights_N.sum()), 0.0)
    more_N = np.maximum(share_N - drafted_N, 0.0)
    most = more_N.max()
    scaled_N = more_N * (_RESIDUAL_ONE / most) if most > 0 else more_N
    return Weights(target.token_ids_N, scaled_N.astype(np.int64))


def _is_accepted(target: Weights, trial: Trial, word: int) -> bool:
    """Compare word / 2^64 with p(x) / q(x), in whole numbers of any size."""
    p, q = _weight(target, trial.token_id), _weight(trial.weights, trial.token_id)
    p_total, q_total = int(target.weights_N.sum()), int(trial.weights.weights_N.sum())
    return word * q * p_total < (p * q_total << 64)


def _weight(weights: Weights, token_id: int) -> int:
    place = int(np.searchsorted(weights.token_ids_N, token_id))
    found = place < len(weights.token_ids_N) and int(weights.token_ids_N[place]) == token_id
    return int(weights.weights_N[place]) if found else 0
