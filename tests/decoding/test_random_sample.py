"""Random sampling: the documented integer rule, exact frequencies, and no token of probability zero."""

import numpy as np
import pytest
from sampling_oracle import make_row, philox_word, softmax

from ridgeline.backends.step import StepOutput
from ridgeline.decoding.random_sample import integer_weights, random_sample, random_word
from ridgeline.decoding.sampling import Sampler


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63, 2**64 - 1])
@pytest.mark.parametrize("num_output", [0, 1, 4095])
def test_random_word_follows_the_documented_philox(seed, num_output):
    assert random_word(seed, num_output) == philox_word(seed, num_output)


def test_words_differ_by_seed_and_position():
    words = {random_word(seed, num_output) for seed in range(50) for num_output in range(50)}
    assert len(words) == 2500


def test_a_grid_of_u_gives_exactly_the_probabilities():
    p_V = np.array([1, 0, 2, 4, 0, 8, 1, 0]) / 16
    logits_V = np.where(p_V == 0, -np.inf, np.log(np.maximum(p_V, 1e-300))).astype(np.float32)
    num_u = 4096
    words = [(2 * j + 1) * 2**64 // (2 * num_u) for j in range(num_u)]
    tokens = random_sample(np.broadcast_to(logits_V, (num_u, 8)), words)
    counts = np.bincount(tokens, minlength=8)
    np.testing.assert_allclose(counts, p_V * num_u, atol=1)
    assert counts[p_V == 0].sum() == 0
    assert (np.diff(tokens) >= 0).all(), "tokens must come in ascending order of id as u grows"


def test_random_sample_is_the_documented_integer_rule():
    logits_RV = np.random.default_rng(1).normal(0, 4, (20, 50)).astype(np.float32)
    words = [random_word(7, i) for i in range(20)]
    expected = []
    for x_V, word in zip(logits_RV, words):
        weights = [int(w) for w in np.floor(np.exp(x_V - x_V.max()).astype(np.float64) * 2**44)]
        target, total, token = word * sum(weights) // 2**64, 0, -1
        while total <= target:
            token += 1
            total += weights[token]
        expected.append(token)
    assert random_sample(logits_RV, words).tolist() == expected


@pytest.mark.parametrize("word", [0, 2**63, 2**64 - 1])
def test_either_end_of_u_takes_a_token_with_probability(word):
    inf = np.inf
    logits_RV = np.float32([[-inf, -inf, 0.0, 1.0, -inf, -200.0], [-inf, -1e9, 5.0, 5.0, -1e9, -inf]])
    for token in random_sample(logits_RV, [word, word]).tolist():
        assert token in (2, 3)


def test_weights_cannot_overflow_on_the_widest_row():
    weights_RV = integer_weights(np.zeros((1, 2**19 - 1), dtype=np.float32))
    assert int(weights_RV.sum()) == (2**19 - 1) * 2**44


def test_sampled_frequencies_by_chi_square():
    logits_RV = np.float32([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.25]])
    num_rows = 8000
    sampled, _ = Sampler().sample(StepOutput(logits_RV), [make_row(seed=seed) for seed in range(num_rows)])
    observed = np.bincount([token.token_id for token in sampled], minlength=8)
    expected = softmax(logits_RV[0].astype(np.float64)) * num_rows
    assert ((observed - expected) ** 2 / expected).sum() < 24.3  # 99.9 % point of chi-square with 7 degrees of freedom


def test_successive_positions_of_one_seed_are_distributed_too():
    logits_RV = np.zeros((1, 4), dtype=np.float32)
    sampled, _ = Sampler().sample(StepOutput(logits_RV), [make_row(seed=3, num_output=i) for i in range(4000)])
    observed = np.bincount([token.token_id for token in sampled], minlength=4)
    assert ((observed - 1000) ** 2 / 1000).sum() < 16.3  # 99.9 %, 3 degrees of freedom
