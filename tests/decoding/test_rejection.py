"""Rejection sampling: the outcome has the target's distribution, whatever the drafts, and no other rule passes.

`python tests/decoding/test_rejection.py` does ten times as many rounds.
"""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ridgeline import SamplingParams
from ridgeline.backends.step import StepOutput
from ridgeline.core.step import SampleRow, Span, Trial
from ridgeline.decoding import rejection
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.sampling import Sampler
from ridgeline.decoding.strategies.speculative import Speculative

ROUNDS = 100_000  # of the rule alone; through strategy and sampler an 80th, which catches a wrong row
RARE = 1e-6  # a fair rule fails a test once in so many seeds, and the seeds are fixed


def weights(values):
    values = np.asarray(values, dtype=np.float64)
    return np.floor((values / values.max() * 2**44).astype(np.float32))


def shares(some, size):
    dense = np.zeros(size)
    dense[: len(some)] = some / some.astype(np.float64).sum()
    return dense


def chi2_tail(statistic, freedom):
    """The chance of a larger chi-squared, by Wilson and Hilferty: within a factor of 2 where it matters."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def fits(counts, expected):
    """Whether counts of outcomes are those of a distribution; what cannot happen must not."""
    counts, expected = np.asarray(counts).ravel(), np.asarray(expected).ravel() * np.sum(counts)
    if counts[expected == 0].any():
        return False
    inside = expected > 0
    statistic = ((counts[inside] - expected[inside]) ** 2 / expected[inside]).sum()
    return chi2_tail(statistic, max(inside.sum() - 1, 1)) > RARE


def softmax(logits):
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


rng = np.random.default_rng(7)
TABLES = {
    "alike": (softmax(rng.normal(0, 1, 8)), softmax(rng.normal(0, 1, 8) * 0.2)),
    "apart": (softmax(rng.normal(0, 3, 16)), softmax(rng.normal(0, 3, 16))),
    "disjoint": ([1, 2, 3, 0, 0, 0], [0, 0, 0, 1, 1, 2]),
    "q has zeros": (softmax(rng.normal(0, 1, 8)), [0, 0, 4, 1, 0, 1, 0, 0]),
    "p has zeros": ([0, 3, 0, 1, 2, 0, 0, 1], softmax(rng.normal(0, 1, 8))),
    "equal": (TABLE := softmax(rng.normal(0, 2, 8)), TABLE),
}


def rounds_of(p, q, count, verify=rejection.verify):
    """(outcomes, how many drafts were accepted) of `count` rounds with words of seed 3."""
    counts, accepted = np.zeros(64, dtype=np.int64), 0
    for n in range(count):
        drafted = rejection.sample(q, random_word(3 ^ rejection.PROPOSAL, n))
        outcome = verify(p, Trial(drafted, q), 3, n)
        counts[outcome] += 1
        accepted += outcome == drafted
    return counts, accepted


def check(p, q, count, verify=rejection.verify):
    counts, accepted = rounds_of(weights(p), weights(q), count, verify)
    p_V, q_V = shares(weights(p), 64), shares(weights(q), 64)
    kept = np.minimum(p_V, q_V).sum()
    spread = math.sqrt(max(kept * (1 - kept) / count, 1e-18))
    return fits(counts, p_V) and abs(accepted / count - kept) <= 5 * spread + 1e-9


@pytest.mark.parametrize("name", TABLES)
def test_the_outcome_is_the_targets_and_acceptance_the_best_there_is(name):
    assert check(*TABLES[name], ROUNDS // len(TABLES))


def without_residual(target, trial, seed, num_output):
    """Redraws from the whole target."""
    if rejection._is_accepted(target, trial, random_word(seed ^ rejection.ACCEPTANCE, num_output)):
        return trial.token_id
    return rejection.sample(target, random_word(seed ^ rejection.RESIDUAL, num_output))


def upside_down(target, trial, seed, num_output):
    """Accepts with q / p."""
    swapped = Trial(trial.token_id, target)
    if rejection._is_accepted(trial.weights_V, swapped, random_word(seed ^ rejection.ACCEPTANCE, num_output)):
        return trial.token_id
    residual = rejection.residual_weights(target, trial.weights_V)
    return rejection.sample(residual, random_word(seed ^ rejection.RESIDUAL, num_output))


def word_used_twice(target, trial, seed, num_output):
    """Accepts by the word that the draft was sampled with."""
    if rejection._is_accepted(target, trial, random_word(seed ^ rejection.PROPOSAL, num_output)):
        return trial.token_id
    residual = rejection.residual_weights(target, trial.weights_V)
    return rejection.sample(residual, random_word(seed ^ rejection.RESIDUAL, num_output))


def two_sided_residual(target, trial, seed, num_output):
    """Samples from |p - q|, over the tokens of p."""
    if rejection._is_accepted(target, trial, random_word(seed ^ rejection.ACCEPTANCE, num_output)):
        return trial.token_id
    p_V, q_V = shares(target, 64), shares(trial.weights_V, 64)
    return rejection.sample(weights(np.abs(p_V - q_V)), random_word(seed ^ rejection.RESIDUAL, num_output))


@pytest.mark.parametrize("bug", [without_residual, upside_down, word_used_twice, two_sided_residual])
def test_a_wrong_rule_is_caught(bug):
    assert not check(*TABLES["apart"], 5000, bug)


def test_a_token_that_the_target_lacks_is_never_accepted():
    p, q = weights([0, 1, 2]), weights([5, 1, 1])
    assert all(rejection.verify(p, Trial(0, q), 1, n) != 0 for n in range(200))


def test_a_token_that_the_target_likes_more_is_always_accepted():
    p, q = weights([8, 1]), weights([1, 8])
    assert all(rejection.verify(p, Trial(0, q), 1, n) == 0 for n in range(200))


# ---- through the strategy's rows and the sampler: two drafted tokens and the bonus token

V = 4
TARGET = rng.normal(0, 1.5, (V, V)).astype(np.float32)  # logits of the next token after each token
DRAFTER = (TARGET + rng.normal(0, 1.5, (V, V))).astype(np.float32)
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=100)


def view_of(n):
    request = SimpleNamespace(params=PARAMS, prompt_ids=[0], stop_ids=(), adapter=0)
    return SimpleNamespace(seq_id=0, seed=n, token_ids=[0, 0], grammar=None, request=request)


def drafted_tokens(sampler, n):
    """Two tokens of the drafter with what they were sampled from, as `DraftModel` samples them."""
    tokens, told = [], []
    for i in range(2):
        last = tokens[-1] if tokens else 0
        row = SampleRow(0, 0, PARAMS, n ^ rejection.PROPOSAL, 1 + i, [0], (), (), tells_weights=True)
        ((sampled,), _) = sampler.sample(StepOutput(DRAFTER[last : last + 1]), [row])
        tokens.append(sampled.token_id)
        told.append(sampled.weights)
    return tokens, told


def three_tokens(count, misplace=lambda rows, told: rows):
    """Counts [V, V, V] of the first three tokens of `count` rounds, plain decoding after what was rejected."""
    sampler = Sampler()
    strategy = Speculative({}, 8, None, lambda: 0.0, ("draft", None), rules=("reject",))
    counts = np.zeros((V, V, V), dtype=np.int64)
    for n in range(count):
        view = view_of(n)
        tokens, told = drafted_tokens(sampler, n)
        strategy._drafts[0] = Draft(tokens, 0, "draft", told)
        span = Span(0, 1, [0, *tokens], 3, num_optional=2)
        rows = misplace(list(strategy.rows(view, span, 0)), told)
        logits = TARGET[[0, *tokens]]
        (sampled, _) = sampler.sample(StepOutput(logits), rows)
        out = [token.token_id for token in strategy.accept(view, span, sampled).tokens]
        while len(out) < 3:
            row = SampleRow(0, 0, PARAMS, n, 1 + len(out), [0], (), ())
            ((token,), _) = sampler.sample(StepOutput(TARGET[out[-1] : out[-1] + 1]), [row])
            out.append(token.token_id)
        counts[tuple(out)] += 1
    return counts


def joint():
    """The target's distribution of three tokens, after temperature and top-p."""
    sampler = Sampler()
    row = SampleRow(0, 0, PARAMS, 0, 1, [0], (), (), tells_weights=True)
    after = []
    for last in range(V):
        ((token,), _) = sampler.sample(StepOutput(TARGET[last : last + 1]), [row])
        after.append(shares(token.weights, V))
    return np.einsum("a,ab,bc->abc", after[0], np.array(after), np.array(after))


def test_three_tokens_of_a_round_have_the_targets_joint_distribution():
    assert fits(three_tokens(ROUNDS // 80), joint())


def first_rows_weights(rows, told):
    """q of the wrong row."""
    return [rows[0], rows[1]._replace(trial=rows[1].trial._replace(weights_V=told[0])), rows[2]]


def bonus_from_the_row_before(rows, told):
    return [*rows[:2], rows[2]._replace(row=1)]


def never_the_residual(rows, told):
    """Rows that sample plainly: a draft is accepted if it is what was sampled, but with other random numbers."""
    return [row._replace(trial=None) for row in rows]


@pytest.mark.parametrize("bug", [first_rows_weights, bonus_from_the_row_before])
def test_rows_that_are_mixed_up_are_caught(bug):
    assert not fits(three_tokens(600, bug), joint())


def test_verifying_writes_to_no_logits_and_tells_the_log_probabilities_of_the_raw_ones():
    view, sampler = view_of(3), Sampler()
    view.request.params = replace(PARAMS, logprobs=2)
    strategy = Speculative({}, 8, None, lambda: 0.0, ("draft", None), rules=("reject",))
    tokens, told = drafted_tokens(sampler, 3)
    strategy._drafts[0] = Draft(tokens, 0, "draft", told)
    rows = strategy.rows(view, Span(0, 1, [0, *tokens], 3, num_optional=2), 0)
    logits = TARGET[[0, *tokens]]
    (sampled, _) = sampler.sample(StepOutput(logits), rows)
    assert [row.trial is not None for row in rows] == [True, True, False]
    assert np.array_equal(logits, TARGET[[0, *tokens]])
    expected = [math.log(softmax(TARGET[last])[token.token_id]) for last, token in zip([0, *tokens], sampled)]
    assert [token.logprob.logprob for token in sampled] == pytest.approx(expected, abs=1e-5)


def test_plain_rows_are_right_as_well():
    assert fits(three_tokens(400, never_the_residual), joint())


if __name__ == "__main__":
    for table in TABLES:
        sys.stdout.write(f"{table}: {check(*TABLES[table], 10 * ROUNDS // len(TABLES))}\n")
    sys.stdout.write(f"three tokens: {fits(three_tokens(ROUNDS), joint())}\n")
