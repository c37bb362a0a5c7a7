"""Verifying natively: the tokens of `decoding/rejection.py` at every ISA level, and the target's distribution.

`python tests/native/test_verify.py` does 100,000 rounds of the Python rules as well.
"""

import math
import sys

import numpy as np
import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import SampleRow, Trial
from ridgeline.decoding import rejection
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.sampling import Sampler

_native = pytest.importorskip("ridgeline._native", reason="the native backend is not built")

LEVELS = _native.runnable_levels()
BEST = _native.best_level()
SAMPLER = Sampler()
RARE = 1e-6
V = 4
rng = np.random.default_rng(11)
# Logits of the next token after each token: a likely draft of the first is accepted in part, so what follows counts.
TARGET = np.array([[0, 0, 0, 0], [1, 0.5, 0, -2], [1.2, 0.2, 0, -2], [0.5, 1, 0, -2]], np.float32)
DRAFTER = np.array([[1.4, 0, 0, -1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], np.float32)
PARAMS = SamplingParams(temperature=1.0, max_tokens=100)


def columns(count, params, seeds, num_output, logit_row):
    temperature = np.full(count, params.temperature, np.float32)
    shape = (np.full(count, params.top_k, np.int32), np.full(count, params.top_p), np.full(count, params.min_p))
    words = np.broadcast_to(seeds, count).astype(np.uint64), np.broadcast_to(num_output, count).astype(np.uint64)
    return (np.asarray(logit_row, dtype=np.int64), temperature, *shape, *words)


def told(level, x_RV, params, seed=0):
    """(tokens, what they were sampled from)."""
    found = np.empty_like(x_RV)
    tokens = _native.sample(level, x_RV, *columns(len(x_RV), params, seed, 0, range(len(x_RV))), told=found)
    return tokens, found


# ---- the same numbers as the Python rules


def drawn_case(numbers):
    """Logits of p and q, the parameters of p, and the length of q's vocabulary."""
    size = int(numbers.choice([1, 2, 5, 33, 256, 300, 1000, 4100]))
    count = int(numbers.integers(1, 6))
    p_RV = numbers.normal(0, numbers.choice([0.5, 2, 6]), (count, size)).astype(np.float32)
    q_RV = (p_RV + numbers.normal(0, numbers.choice([0, 1e-6, 0.7, 3]), p_RV.shape)).astype(np.float32)
    params = SamplingParams(
        temperature=float(numbers.choice([0.3, 0.8, 1.0])),
        top_k=int(numbers.choice([-1, -1, 1, 3, 40])),
        top_p=float(numbers.choice([1.0, 0.95, 0.5])),
        min_p=float(numbers.choice([0.0, 0.05])),
    )
    return p_RV, np.ascontiguousarray(q_RV[:, : size - int(numbers.integers(0, min(size, 3)))]), params


def test_tokens_are_those_of_the_python_rules_at_every_level():
    numbers, differs = np.random.default_rng(5), 0
    for seed in range(300):
        p_RV, q_RV, params = drawn_case(numbers)
        count = len(p_RV)
        tokens, weights = told(BEST, q_RV, SamplingParams(temperature=0.9, top_p=0.97), seed ^ rejection.PROPOSAL)
        (_, target), first = told(BEST, p_RV, params), int(numbers.integers(0, 1000))
        trials = [Trial(token, one) for token, one in zip(tokens, weights)]
        alone = [rejection.verify(target[i], trials[i], seed, first + i) for i in range(count)]
        block = rejection.verify_block(target, trials, seed, first)
        differs += alone != block
        given = columns(count, params, seed, first + np.arange(count), range(count))
        for lengths, expected in (([0] * count, alone), ([count] + [-1] * (count - 1), block)):
            rows = np.stack([np.arange(count), tokens, lengths], axis=1).astype(np.int64)
            for level in LEVELS:
                found = _native.sample(level, p_RV, *given, trials=rows, trial_weights=weights)
                assert found == expected, (seed, level, lengths)
    assert differs > 20


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_row_is_sampled_from_is_what_the_sampler_weighs(level):
    numbers = np.random.default_rng(6)
    for seed in range(60):
        p_RV, _, params = drawn_case(numbers)
        tokens, weights = told(level, p_RV, params, seed)
        assert tokens == _native.sample(level, p_RV, *columns(len(p_RV), params, seed, 0, range(len(p_RV))))
        for i in range(len(p_RV)):
            row = SampleRow(0, i, params, seed, 0, (), (), (), tells_weights=True)
            expected = SAMPLER._weigh(p_RV, row)
            assert np.allclose(weights[i], expected, rtol=2**-20, atol=1) or params.top_p < 1  # its cut may differ
            assert weights[i][tokens[i]] > 0
            assert (weights[i] == np.floor(weights[i])).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_block_ends_before_a_row_that_is_not_finite(level, bad):
    x_RV = rng.normal(0, 1, (3, 40)).astype(np.float32)
    tokens, weights = told(level, x_RV, SamplingParams())
    target = [told(level, x_RV[i : i + 1], SamplingParams())[1][0] for i in range(bad)]
    spoiled = x_RV.copy()
    spoiled[bad, 7] = np.nan
    rows = np.array([[i, token, 3 if i == 0 else -1] for i, token in enumerate(tokens)])
    given = columns(3, SamplingParams(), 4, np.arange(3), range(3))
    found = _native.sample(level, spoiled, *given, trials=rows, trial_weights=weights)
    trials = [Trial(token, one) for token, one in zip(tokens[:bad], weights)]
    assert found[:bad] == (rejection.verify_block(target, trials, 4, 0) if bad else [])
    assert found[bad] == -1


def test_trials_that_do_not_fit_are_refused():
    x_RV, weights = np.zeros((3, 8), np.float32), np.ones((2, 8), np.float32)
    given, none = columns(3, PARAMS, 0, 0, range(3)), np.zeros((2, 8), np.float32)
    for rows, q in (
        ([[0, 1, 2], [2, 1, -1]], weights),  # not behind each other
        ([[0, 1, 2], [1, 1, 0]], weights),  # a block that ends early
        ([[0, 1, 3], [1, 1, -1]], weights),
        ([[0, 1, -1], [1, 1, 0]], weights),
        ([[0, 8, 0], [1, 1, 0]], weights),
        ([[0, 1, 0], [3, 1, 0]], weights),
        ([[0, 1, 0], [1, 1, 0]], none),
    ):
        with pytest.raises(ValueError, match=r"drafted token|follow each other"):
            _native.sample(BEST, x_RV, *given, trials=np.array(rows), trial_weights=q)


# ---- the distribution of three tokens: two drafted ones verified, then plain decoding


def drafts(count):
    """(tokens [count, 2], what they were sampled from [count, 2, V]), as drafters draw them; rounds are seeds."""
    seeds, last, tokens, weights = np.arange(count, dtype=np.uint64), np.zeros(count, np.int64), [], []
    for i in range(2):
        q = np.empty((V, V), np.float32)
        _native.sample(BEST, DRAFTER, *columns(V, PARAMS, 0, 0, range(V)), told=q)
        given = columns(count, PARAMS, seeds ^ np.uint64(rejection.PROPOSAL), 1 + i, last)
        weights.append(q[last])
        last = np.array(_native.sample(BEST, DRAFTER, *given))
        tokens.append(last)
    return np.stack(tokens, axis=1), np.stack(weights, axis=1)


def completed(verified, tokens, seeds):
    """(counts of three tokens, how many drafted ones were accepted), with plain decoding behind what was rejected."""
    count = len(tokens)
    right = verified[:, :2] == tokens
    num_right = np.where(right[:, 0], 1 + right[:, 1], 0)
    outputs, at = verified.copy(), np.arange(count)
    for i in (1, 2):
        late = at[num_right < i]
        given = columns(len(late), PARAMS, seeds[late], 1 + i, outputs[late, i - 1])
        outputs[late, i] = _native.sample(BEST, TARGET, *given)
    counts = np.zeros((V, V, V))
    np.add.at(counts, tuple(outputs.T), 1)
    return counts, num_right.mean()


def native_rounds(count, block):
    tokens, weights = drafts(count)
    seeds, logit_rows = np.arange(count, dtype=np.uint64), np.zeros((count, 3), np.int64)
    logit_rows[:, 1:] = tokens
    given = columns(3 * count, PARAMS, np.repeat(seeds, 3), np.tile([1, 2, 3], count), logit_rows.ravel())
    rows = np.empty((count, 2, 3), np.int64)
    rows[:, :, 0], rows[:, :, 1] = 3 * np.arange(count)[:, None] + [0, 1], tokens
    rows[:, :, 2] = (2, -1) if block else (0, 0)
    trials = {"trials": rows.reshape(-1, 3), "trial_weights": weights.reshape(-1, V)}
    verified = np.array(_native.sample(BEST, TARGET, *given, **trials)).reshape(count, 3)
    return completed(verified, tokens, seeds)


def python_rounds(count, bonus_row=2):
    """Block verification as Python does it; the token behind accepted drafts is sampled from row `bonus_row`."""
    tokens, weights = drafts(count)
    (_, target), verified = told(BEST, TARGET, PARAMS), np.empty((count, 3), np.int64)
    for n, (two, q) in enumerate(zip(tokens.tolist(), weights)):
        last = [0, *two]
        rows = rejection.verify_block([target[0], target[two[0]]], [Trial(t, w) for t, w in zip(two, q)], n, 1)
        verified[n] = [*rows, rejection.sample(target[last[bonus_row]], random_word(n, 3))]
    return completed(verified, tokens, np.arange(count, dtype=np.uint64))


def fits(counts):
    after = [one / one.astype(np.float64).sum() for one in told(BEST, TARGET, PARAMS)[1]]
    expected = np.einsum("a,ab,bc->abc", after[0], np.array(after), np.array(after)) * counts.sum()
    if counts[expected == 0].any():
        return False
    return is_likely(counts, expected) and is_likely(counts.sum(axis=2), expected.sum(axis=2))


def is_likely(counts, expected):
    """Chi-squared, its tail by Wilson and Hilferty."""
    inside = expected > 0
    statistic, freedom = ((counts - expected)[inside] ** 2 / expected[inside]).sum(), inside.sum() - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2)) > RARE


def test_a_million_rounds_have_the_targets_joint_distribution_and_a_block_accepts_more():
    accepted = {}
    for block in (False, True):
        counts, accepted[block] = native_rounds(1_000_000, block)
        assert fits(counts), block
    assert accepted[True] > accepted[False] + 0.002


def test_python_rounds_of_a_block_have_it_too():
    assert fits(python_rounds(16_000)[0])


def residual_of_the_whole(monkeypatch):
    """The residual is that of p, not of what is left of it."""
    residual = rejection.residual_weights
    monkeypatch.setattr(rejection, "residual_weights", lambda p, q, factor=1.0: residual(p, q))


def word_used_twice(monkeypatch):
    """Both decisions on a block have one random number."""
    monkeypatch.setattr(rejection, "random_word", lambda seed, n: random_word(seed, 1))


def not_capped(monkeypatch):
    """More than everything is accepted of a likely beginning."""
    monkeypatch.setattr(rejection, "min", lambda kept, most: min(kept, 1.9), raising=False)


@pytest.mark.parametrize("bug", [residual_of_the_whole, word_used_twice, not_capped])
def test_a_wrong_rule_is_caught(bug, monkeypatch):
    bug(monkeypatch)
    assert not fits(python_rounds(16_000)[0])


def test_a_bonus_from_the_wrong_row_is_caught():
    assert not fits(python_rounds(4000, bonus_row=1)[0])


if __name__ == "__main__":
    sys.stdout.write(f"block, in Python: {fits(python_rounds(100_000)[0])}\n")
