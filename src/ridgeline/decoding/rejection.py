"""Accept drafted tokens by rejection sampling: the rule `reject`, which keeps most of what a sampling drafter drafts.

A token x that was sampled from q is accepted with probability min(1, p(x) / q(x)); otherwise one is sampled from what p
has more than q, max(p - q, 0). Either way the outcome is distributed as p, and the chance to accept, 1 - TV(p, q), is
the largest that there is (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

Block verification (Sun et al., 2403.10444) accepts x_1 .. x_k together, never fewer of them on average: what p likes
more in one place makes up for what it likes less in another.

    a_0 = 1, a_i = min(a_(i-1) p_i(x_i) / q_i(x_i), 1)       S_i = sum of max(a_i p_(i+1) - q_(i+1), 0)
    b_i = S_i / (S_i + 1 - a_i), b_k = a_k                   t = the last i with u_i < b_i, or 0
    then a token from p_(k+1) where t = k, otherwise from max(a_t p_(t+1) - q_(t+1), 0)

Typical acceptance (Medusa, 2401.10774, 3.3.1) needs no q and is lossy: a drafted token is accepted where
p(x) > min(0.09, 0.3 exp(-H(p))), so that what is likely enough is taken as if it had been sampled.

p and q are whole numbers, those that `random_sample` takes a token from, after all processors. The three random numbers
of a position are words of streams of their own, so that none is used for two purposes:

    proposal  word(seed ^ PROPOSAL, n)    accept  word(seed ^ ACCEPTANCE, n)    residual  word(seed ^ RESIDUAL, n)

`native/kernels/sample/verify.h` computes the same numbers.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ridgeline.core.step import IntArray, SampleRow, Span, Trial, Weights
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.strategy import SequenceView, rows_along

PROPOSAL: Final = 0x5851F42D4C957F2D
ACCEPTANCE: Final = 0xD1342543DE82EF95
RESIDUAL: Final = 0xAF251AF3B0F025B5
TYPICAL_THRESHOLD: Final = 0.09
TYPICAL_SHARE: Final = 0.3  # its square root
_RESIDUAL_ONE = 2.0**44
_MASS_ONE = 2**62


def sample(weights_V: Weights | IntArray, word: int) -> int:
    """Return the token that `word`, 64 random bits, takes from `weights_V`; at least one of them is above 0."""
    cdf_V = np.cumsum(weights_V.astype(np.int64))
    target = word * int(cdf_V[-1]) >> 64
    return int(np.searchsorted(cdf_V, target, side="right"))


def verify(target_V: Weights, trial: Trial, seed: int, num_output: int) -> int:
    """Return the drafted token if it is accepted, else one from the residual distribution: never the drafted one."""
    if _is_accepted(target_V, trial, random_word(seed ^ ACCEPTANCE, num_output)):
        return trial.token_id
    residual_V = residual_weights(target_V, trial.weights_V)
    if not residual_V.any():  # p and q differ by less than the rounding
        return trial.token_id
    return sample(residual_V, random_word(seed ^ RESIDUAL, num_output))


def verify_block(targets: Sequence[Weights], trials: Sequence[Trial], seed: int, num_output: int) -> list[int]:
    """Return a token for each of `trials`, verified together; those behind the first that was not drafted are void."""
    count, accepted, factors = len(trials), 0, [1.0]
    for i, (target_V, trial) in enumerate(zip(targets, trials, strict=True)):
        mass = int((_excess(target_V, trial.weights_V, factors[i]) * _MASS_ONE).astype(np.int64).sum())
        if i and is_block_accepted(factors[i], mass, random_word(seed ^ ACCEPTANCE, num_output + i - 1)):
            accepted = i
        p, q = (whole_V[trial.token_id] / _total(whole_V) for whole_V in (target_V, trial.weights_V))
        factors.append(min(factors[i] * float(p) / float(q), 1.0))
    if random_word(seed ^ ACCEPTANCE, num_output + count - 1) < int(factors[-1] * _MASS_ONE) << 2:
        accepted = count
    tokens = [trial.token_id for trial in trials]
    for i in range(accepted, count):
        residual_V = residual_weights(targets[i], trials[i].weights_V, factors[i])
        if residual_V.any():  # else p and q differ by less than the rounding
            tokens[i] = sample(residual_V, random_word(seed ^ RESIDUAL, num_output + i))
            break
    return tokens


def typical(target_V: Weights, drafted: Sequence[int], word: int) -> int:
    """Return the first of the drafted tokens that is typical of the distribution, else the one that `word` takes."""
    p_V = target_V.astype(np.float64) / _total(target_V)
    entropy = -float((p_V * np.log(np.maximum(p_V, 1e-300))).sum())
    least = min(TYPICAL_THRESHOLD, TYPICAL_SHARE * math.exp(-entropy))
    for token_id in drafted:
        if p_V[token_id] > least:
            return token_id
    return sample(target_V, word)


def with_typical(span: Span, rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Return the rows that decide behind a span's newest known token and each of its draft, which take what is typical
    of the tokens drafted there."""
    known = span.num_tokens - span.num_optional
    drafted: list[list[int]] = [[] for _ in rows]
    for index, parent in enumerate(span.parents or range(known - 1, span.num_tokens - 1), known):
        drafted[parent - known + 1].append(span.token_ids[index])
    return [row._replace(typical=token_ids) for row, token_ids in zip(rows, drafted, strict=True)]


def drafted_rows(
    view: SequenceView, span: Span, first: SampleRow, weights: Sequence[Weights], *, in_block: bool
) -> list[SampleRow]:
    """Return the rows of a span whose optional tokens follow each other, from the `first` one on: those whose tokens
    were sampled from `weights` have trials, alone or `in_block`."""
    drafted = span.token_ids[span.num_tokens - span.num_optional :]
    rows = rows_along(first, drafted)
    if view.grammar is not None:
        rows = [row._replace(allowed=mask) for row, mask in zip(rows, view.grammar.masks(drafted))]
    trials = [Trial(*each, in_block) for each in zip(drafted, weights)]
    return [*[row._replace(trial=trial) for row, trial in zip(rows, trials)], *rows[len(trials) :]]


def is_block_accepted(factor: float, mass: int, word: int) -> bool:
    """Tell whether tokens with this factor are accepted, where the residual behind them sums up to `mass` / 2^62."""
    return factor >= 1 or word * (mass + _MASS_ONE - int(factor * _MASS_ONE)) < mass << 64


def residual_weights(target_V: Weights, proposal_V: Weights, factor: float = 1.0) -> IntArray:
    """Return max(factor * p - q, 0) in 44 bits."""
    more_V = _excess(target_V, proposal_V, factor)
    most = more_V.max()
    return (more_V * (_RESIDUAL_ONE / most) if most > 0 else more_V).astype(np.int64)


def _excess(target_V: Weights, proposal_V: Weights, factor: float) -> npt.NDArray[np.float64]:
    """Return max(factor * p - q, 0), as shares."""
    more_V = factor * (target_V.astype(np.float64) / _total(target_V))
    more_V[: len(proposal_V)] -= proposal_V.astype(np.float64) / _total(proposal_V)
    return np.maximum(more_V, 0.0)


def _is_accepted(target_V: Weights, trial: Trial, word: int) -> bool:
    """Compare word / 2^64 with p(x) / q(x), in whole numbers of any size."""
    p, q = int(target_V[trial.token_id]), int(trial.weights_V[trial.token_id])
    return word * q * _total(target_V) < (p * _total(trial.weights_V) << 64)


def _total(weights_V: Weights) -> int:
    return int(weights_V.astype(np.int64).sum())
