"""The native sampling kernel: the same token at every ISA level, that of the documented rule and of the Sampler."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_steps import step_batch

from ridgeline.backends.step import StepOutput
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import SampleRow
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.sampling import Sampler

_native = pytest.importorskip("ridgeline._native", reason="the native backend is not built")

LEVELS = _native.runnable_levels()
SAMPLER = Sampler()
VOCAB = 151_936
MAX_SAMPLED_VOCAB = 2**19 - 1
NEAR = 2.0**-20  # of the mass: closer to a step than this, the last bit of exp may decide
INF, NAN = np.inf, np.nan


def make_row(row=0, seed=0, num_output=0, **params):
    return SampleRow(row, row, SamplingParams(**params), seed, num_output, (), (), ())


def native_tokens(level, x_RV, rows):
    sampling = SAMPLER.sampling_metadata(rows)
    assert len(sampling.logit_row) == len(rows)
    columns = (
        sampling.logit_row,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.num_output,
    )
    masks = sampling.masks_MW if len(sampling.masks_MW) else None
    return _native.sample(level, np.asarray(x_RV, dtype=np.float32), *columns, masks)


def tokens_alike(x_RV, rows):
    """The tokens, once it is known that every level samples the same."""
    by_level = {level: native_tokens(level, x_RV, rows) for level in LEVELS}
    assert all(tokens == by_level[LEVELS[0]] for tokens in by_level.values()), by_level
    return by_level[LEVELS[0]]


def sampled(x_RV, rows):
    decided, _ = SAMPLER.sample(StepOutput(torch.from_numpy(np.asarray(x_RV, dtype=np.float32))), rows)
    assert all((token.error is None) == (token.token_id >= 0) for token in decided)
    return [token.token_id for token in decided]


def by_the_rule(x_V, row):
    """(token, whether the last bit of exp could change it), in exact integers from a correctly rounded float32 exp."""
    params = row.params
    if params.greedy:
        return int(x_V.argmax()), False
    remaining = np.ones(len(x_V), dtype=bool)
    if params.top_k > 0:
        remaining[np.argsort(-x_V, kind="stable")[params.top_k :]] = False
    z_V = x_V / np.float32(params.temperature)
    if params.min_p > 0:
        remaining &= z_V >= z_V.max() + np.float32(np.log(params.min_p))
    exp_V = np.exp((z_V - z_V.max()).astype(np.float64)).astype(np.float32)
    weights_V = np.where(remaining, np.floor(exp_V.astype(np.float64) * 2**44), 0).astype(np.int64)
    near = False
    if params.top_p < 1:
        total = int(weights_V.sum())
        numerator, denominator = params.top_p.as_integer_ratio()
        need = -(-numerator * total // denominator)
        order = np.lexsort((np.arange(len(x_V)), np.where(remaining, -z_V, INF)))
        mass_V = weights_V[order].cumsum()
        near = bool((np.abs(mass_V - need) < NEAR * total).any())
        weights_V[order[mass_V - weights_V[order] >= need]] = 0
    cdf_V = weights_V.cumsum()
    target = random_word(row.seed, row.num_output) * int(cdf_V[-1]) // 2**64
    near |= bool((np.abs(cdf_V - target) < NEAR * cdf_V[-1]).any())
    return int(np.searchsorted(cdf_V, target, side="right")), near


@st.composite
def cases(draw):
    num_columns = draw(st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 1000, 4096, 5000])))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    x_V = numbers.normal(draw(st.sampled_from([-30, 0, 20])), draw(st.sampled_from([0.01, 1, 4, 20])), num_columns)
    x_V = x_V.astype(np.float32)
    if draw(st.booleans()):
        x_V = (x_V * 4).round() / np.float32(4)  # ties, and both zeros
    x_V[numbers.random(num_columns) < draw(st.sampled_from([0, 0, 0.4]))] = -INF
    x_V[draw(st.integers(0, num_columns - 1))] = draw(st.sampled_from([-2.0, 0.0, 25.0]))
    row = make_row(
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        num_output=draw(st.integers(0, 5000)),
        temperature=draw(st.sampled_from([0.0, 2e-5, 0.25, 0.7, 1.0, 1.9, 100.0])),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 2, 7, 50, 255, 256, 1024, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1 - 2**-53, 0.999, 0.9, 0.5, 0.05, 1e-300, 5e-324])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0])),
    )
    return x_V, row


@settings(deadline=None, max_examples=600)
@given(case=cases())
def test_tokens_follow_the_rule_and_equal_the_samplers(case):
    x_V, row = case
    [token] = tokens_alike(x_V[None], [row])
    assert x_V[token] > -INF
    expected, near = by_the_rule(x_V, row)
    if not near:
        assert token == expected
        assert sampled(x_V[None], [row]) == [token]


def wide_logits(seed):
    """Rows of a vocabulary's width: peaked, broad, flat, tied as bfloat16, sorted, half excluded."""
    numbers = np.random.default_rng(seed)
    x_RV = numbers.normal(0, [[2.5], [4], [0.1], [2.5], [1], [2.5]], (6, VOCAB)).astype(np.float32)
    x_RV[::3, numbers.integers(0, VOCAB, 300)] += numbers.exponential(5, 300).astype(np.float32)
    x_RV[3] = torch.from_numpy(x_RV[3]).bfloat16().float().numpy()
    x_RV[4].sort()
    x_RV[5, numbers.random(VOCAB) < 0.5] = -INF
    return x_RV


def test_a_whole_vocabulary():
    x_RV = wide_logits(1)
    fields = [{}, {"top_k": 40}, {"top_k": 1024}, {"top_k": 20_000}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.02}]
    fields += [{"temperature": 0.0}, {"temperature": 0.6, "top_k": 50, "top_p": 0.95, "min_p": 0.01}]
    rows = [make_row(row=i, seed=11 * i + j, **each) for i in range(len(x_RV)) for j, each in enumerate(fields)]
    tokens = tokens_alike(x_RV, rows)
    different = [i for i, pair in enumerate(zip(tokens, sampled(x_RV, rows))) if pair[0] != pair[1]]
    assert len(different) <= 1, "only the last bit of exp may decide, once in many thousand tokens"
    for token, row in zip(tokens, rows):
        expected, near = by_the_rule(x_RV[row.row], row)
        assert token == expected or near


def test_nearly_all_random_rows_are_those_of_the_sampler():
    numbers = np.random.default_rng(3)
    x_RV = numbers.normal(0, 3, (50, 3000)).astype(np.float32)
    choices = {"temperature": [0.5, 1.0, 1.3], "top_k": [0, 30], "top_p": [0.8, 1.0], "min_p": [0.0, 0.03]}
    rows = [
        make_row(row=i % 50, seed=i, **{name: numbers.choice(values).item() for name, values in choices.items()})
        for i in range(4000)
    ]
    equal = np.equal(tokens_alike(x_RV, rows), sampled(x_RV, rows))
    assert equal.mean() > 0.999


@pytest.mark.parametrize("num_columns", [1, 5, 300, 5000])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_one_bad_logit_spoils_its_row_alone(num_columns, bad):
    places = sorted({0, num_columns // 2, num_columns - 1})
    x_RV = np.random.default_rng(0).normal(0, 1, (len(places) + 1, num_columns)).astype(np.float32)
    for row, place in enumerate(places):
        x_RV[row, place] = bad
    for fields in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        rows = [make_row(row=i, **fields) for i in range(len(x_RV))]
        tokens = tokens_alike(x_RV, rows)
        assert tokens[:-1] == [-1] * len(places)
        assert tokens[-1] >= 0
        assert tokens == sampled(x_RV, rows)


@pytest.mark.parametrize("num_columns", [1, 300, 5000])
def test_a_row_of_nothing_but_minus_infinity_has_no_token(num_columns):
    x_RV = np.full((1, num_columns), -INF)
    rows = [make_row(**fields) for fields in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3})]
    assert tokens_alike(x_RV, rows) == [-1] * 5


@pytest.mark.parametrize("most", [3e38, -3e38])
def test_a_temperature_that_leaves_nothing_finite_is_an_error(most):
    x_RV = np.full((1, 300), -3.3e38, dtype=np.float32)
    x_RV[0, 7] = most
    rows = [make_row(temperature=2e-5), make_row(temperature=1.0), make_row(temperature=2e-5, top_p=0.5)]
    assert tokens_alike(x_RV, rows) == [-1, 7, -1]
    assert sampled(x_RV, rows) == [-1, 7, -1]


@pytest.mark.parametrize("num_columns", [3, 256, 300, 5000])
def test_ties_go_to_the_lowest_id(num_columns):
    x_RV = np.full((2, num_columns), -1.0, dtype=np.float32)
    x_RV[0, 1::2] = 2.0
    x_RV[1, 1:] = 0.0
    x_RV[1, 1] = -0.0
    rows = [make_row(row=i, temperature=0.0) for i in range(2)]
    assert tokens_alike(x_RV, rows) == [1, 1]
    # Of the tied largest, top_k and top_p keep the lowest ids: the n-th of the odd ones, and no other, can come last.
    for remaining in (1, 2, 5, 100):
        remaining = min(remaining, num_columns // 2)
        rows = [make_row(seed=seed, top_k=remaining) for seed in range(200)]
        assert max(tokens_alike(x_RV, rows)) <= 2 * remaining - 1
        rows = [
            make_row(seed=seed, temperature=0.01, top_p=(remaining - 0.5) / (num_columns // 2)) for seed in range(200)
        ]
        tokens = tokens_alike(x_RV, rows)
        assert max(tokens) <= 2 * remaining - 1
        assert len(set(tokens)) > remaining / 2


def test_sums_of_the_widest_row_do_not_overflow():
    x_RV = np.zeros((1, MAX_SAMPLED_VOCAB), dtype=np.float32)
    rows = [make_row(seed=seed) for seed in range(20)] + [make_row(seed=seed, top_p=0.75) for seed in range(20)]
    total = MAX_SAMPLED_VOCAB * 2**44
    remaining = -(-3 * total // 4 // 2**44)
    words = [random_word(seed, 0) for seed in range(20)]
    expected = [(word * total >> 64) >> 44 for word in words] + [
        (word * remaining * 2**44 >> 64) >> 44 for word in words
    ]
    assert max(expected) > 2**18
    assert tokens_alike(x_RV, rows) == expected


def test_words_near_a_step_are_decided_by_exact_weights():
    """Two weights whose estimates are off to different sides: steps between tokens are misplaced by a percent or two of
    one, so that some of these words would find a neighbour."""
    numbers, num_each = np.random.default_rng(2), MAX_SAMPLED_VOCAB // 9
    for pair in range(40):
        high = np.float32(-numbers.uniform(0.01, 8))
        low = np.float32(high - numbers.uniform(0.01, 1))
        x_V = np.full(MAX_SAMPLED_VOCAB, -40, dtype=np.float32)
        x_V[0], x_V[1 : num_each + 1], x_V[num_each + 1 : 2 * num_each + 1] = 0, high, low
        weights = [int(np.float32(np.exp(np.float64(x))) * 2.0**44) for x in (high, low)]
        of_high = 2**44 + num_each * weights[0]
        total = of_high + num_each * weights[1]
        needed = -(-int(0.875 * 8) * total // 8) - of_high
        rows, expected = [], []
        for seed, top_p in zip(range(40 * pair, 40 * pair + 40), itertools.cycle((1.0, 0.875))):
            inside = total if top_p == 1 else of_high - -needed // weights[1] * weights[1]
            target = random_word(seed, 0) * inside >> 64
            rest, weight, first = (target - 2**44, weights[0], 1)
            if target >= of_high:
                rest, weight, first = (target - of_high, weights[1], num_each + 1)
            rows.append(make_row(seed=seed, top_p=top_p))
            expected.append(max(0, first + rest // weight))
        assert native_tokens(LEVELS[-1], x_V[None], rows) == expected
        assert native_tokens(LEVELS[pair % len(LEVELS)], x_V[None], rows[:8]) == expected[:8]


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1), num_output=st.one_of(st.integers(0, 10**6), st.integers(2**64 - 3, 2**64 - 1)))
def test_the_random_word_is_that_of_philox(seed, num_output):
    num_columns = 2**18  # equal weights: the token is the word's first 18 bits
    x_RV = np.zeros((1, num_columns), dtype=np.float32)
    tokens = native_tokens(LEVELS[0], x_RV, [make_row(seed=seed, num_output=num_output)])
    assert tokens == [random_word(seed, num_output) >> 46]


def test_wrong_arrays_are_refused():
    x_RV, row = np.zeros((2, 4), dtype=np.float32), make_row()
    sampling = SAMPLER.sampling_metadata([row])
    columns = [
        sampling.logit_row,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.num_output,
    ]
    level = LEVELS[0]
    with pytest.raises(ValueError, match="one length, 1, got 2"):
        _native.sample(level, x_RV, *columns[:-1], np.zeros(2, dtype=np.uint64))
    for bad_row in (-1, 2):
        with pytest.raises(ValueError, match=f"logit row {bad_row} is not one of 2"):
            _native.sample(level, x_RV, np.array([bad_row]), *columns[1:])
    with pytest.raises(ValueError, match="1 to 524287 logits, got 524288"):
        _native.sample(level, np.zeros((1, MAX_SAMPLED_VOCAB + 1), dtype=np.float32), *columns)
    with pytest.raises(ValueError, match="got 0"):
        _native.sample(level, np.zeros((1, 0), dtype=np.float32), *columns)
    with pytest.raises(TypeError):
        _native.sample(level, x_RV.astype(np.float64), *columns)
    with pytest.raises(ValueError, match="'riscv' does not run here"):
        _native.sample("riscv", x_RV, *columns)


@settings(max_examples=60)
@given(
    st.integers(1, 700) | st.integers(4000, 9000),
    st.integers(0, 10),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.7, 2.0]),
)
def test_masked_rows_are_those_of_the_sampler(num_columns, missing_words, seed, temperature):
    """Of tokens that a grammar allows; those beyond the mask's words it does not. Every level samples the same, and of
    equal logits, of which half of the rows have many."""
    rng = np.random.default_rng(seed)
    x_RV = rng.normal(0, 4, (4, num_columns)).astype(np.float32)
    x_RV[:2] = x_RV[:2].round()
    num_words = max(1, -(-num_columns // 64) - missing_words)
    rows = []
    for i, density in enumerate((0.02, 0.5, 1.0, 0.9)):
        bits = rng.random(64 * num_words) < density
        bits[rng.integers(min(num_columns, 64 * num_words))] = True
        mask = np.packbits(bits, bitorder="little").view(np.uint64)
        options = {"top_k": 5 * (i % 2), "top_p": (1.0, 0.8)[i // 2], "min_p": (0.0, 0.01)[i % 2]}
        rows.append(make_row(i, seed=i, temperature=temperature, **options)._replace(allowed=mask))
    tokens = tokens_alike(x_RV, rows)
    assert tokens == sampled(x_RV, rows)
    for token, row in zip(tokens, rows):
        assert int(row.allowed[token // 64]) >> token % 64 & 1


@pytest.mark.parametrize("num_allowed", [1, 60, 300, 9_000])
@pytest.mark.parametrize("top_k", [2, 16, 17, 50, 700])
def test_the_largest_of_tokens_that_lie_together(top_k, num_allowed):
    """All in a few of a row's groups, some in its end, which is part of no group; half of the rows have equal ones."""
    rng = np.random.default_rng(top_k + num_allowed)
    x_RV = rng.normal(0, 4, (8, 10_100)).astype(np.float32)
    x_RV[:4] = x_RV[:4].round()
    bits = np.zeros(158 * 64, dtype=bool)
    bits[1000 : 1000 + num_allowed] = bits[10_090:10_093] = True
    mask = np.packbits(bits, bitorder="little").view(np.uint64)
    rows = [make_row(i, seed=i, temperature=3.0, top_k=top_k)._replace(allowed=mask) for i in range(8)]
    tokens = tokens_alike(x_RV, rows)
    assert tokens == sampled(x_RV, rows)
    assert bits[tokens].all()


def test_a_mask_without_tokens_and_a_bad_logit_behind_one():
    x_RV = np.zeros((3, 100), dtype=np.float32)
    x_RV[1, 90] = NAN
    masks = [np.zeros(2, dtype=np.uint64), np.asarray([1, 0], dtype=np.uint64), np.asarray([2, 0], dtype=np.uint64)]
    rows = [make_row(i, temperature=0)._replace(allowed=mask) for i, mask in enumerate(masks)]
    assert tokens_alike(x_RV, rows) == sampled(x_RV, rows) == [-1, -1, 1]


def tape_tokens(level, num_threads, x_RV, rows):
    """The tokens of a step of nothing but sampling."""
    tape = _native.Tape(level, _native.Pool(num_threads))
    tape.sample(x_RV.shape[1])
    batch = step_batch(sampling=SAMPLER.sampling_metadata(rows), token_ids_T=[0], logit_rows_R=range(len(x_RV)))
    tokens, times = np.full(len(rows), -2), np.zeros(1)  # with a clock, no thread runs the step alone
    tape.run(batch.block, x_RV, 0, 1, tokens, times)
    return tokens.tolist()


ALONE_OR_SHARED = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"min_p": 0.01, "temperature": 1.7},
    {"top_k": 5},
    {"temperature": 1e-44},
    {"top_p": 0.5, "temperature": 3.0},
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_columns", [4095, 4096, 4097, 9000])
def test_threads_that_share_a_row_find_its_token(level, num_columns):
    x_RV = np.random.default_rng(num_columns).standard_normal((len(ALONE_OR_SHARED), num_columns)).astype(np.float32)
    rows = [make_row(r, seed=r, num_output=r, **params) for r, params in enumerate(ALONE_OR_SHARED)]
    masks = np.random.default_rng(0).integers(0, 2**63, (2, 80), dtype=np.uint64)
    rows[2], rows[6] = rows[2]._replace(allowed=masks[0]), rows[6]._replace(allowed=np.zeros_like(masks[1]))
    alone = [native_tokens(level, x_RV, [row])[0] for row in rows]
    assert len(set(alone)) > 4 and alone[6] == -1
    for row, token in zip(rows, alone):
        assert tape_tokens(level, 2, x_RV, [row]) == [token]
    for num_threads in (2, 3, 8):
        assert tape_tokens(level, num_threads, x_RV, rows) == alone


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_threads_that_share_a_row_see_a_bad_logit(bad):
    x_RV = np.random.default_rng(0).standard_normal((1, 5000)).astype(np.float32)
    x_RV[0, 4999] = bad
    if bad == -INF:
        x_RV[:] = bad
    assert tape_tokens(LEVELS[-1], 2, x_RV, [make_row()]) == [-1]


@pytest.mark.parametrize("level", LEVELS)
def test_the_likeliest_tokens_are_those_of_the_largest_logits_in_their_order(level):
    """Ties go to the lower token; rows that are not finite, or no longer than the list, have none."""
    rng = np.random.default_rng(5)
    for vocab_size, count in itertools.product((65, 100, 4096, 50_001), (1, 16, 64)):
        listing = _native.Likeliest(level, vocab_size)
        for values in (rng.standard_normal(vocab_size), rng.integers(-2, 3, vocab_size), np.zeros(vocab_size)):
            x_V = values.astype(np.float32)
            assert listing.of(x_V[None], 0, count) == np.argsort(-x_V, kind="stable")[:count].tolist()
            x_V[vocab_size // 2] = NAN
            assert listing.of(x_V[None], 0, count) == []
    x_1V = np.arange(100, dtype=np.float32)[None]
    listing = _native.Likeliest(level, 100)
    assert listing.of(x_1V, 0, 100) == [] and listing.of(x_1V, 0, 99) == list(range(99, 0, -1))
    narrow = np.zeros((1, 99), dtype=np.float32)
    for wrong, error in (
        ((narrow, 0, 4), "one logit for each token"),
        ((x_1V, 1, 4), "no row"),
        ((x_1V, 0, 0), "a token at least"),
    ):
        with pytest.raises(ValueError, match=error):
            listing.of(*wrong)
    with pytest.raises(ValueError, match="so many tokens"):
        _native.Likeliest(level, MAX_SAMPLED_VOCAB + 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab_size", [97, 4096, 50_001])
def test_the_likeliest_tokens_are_listed_from_the_maxima_that_sampling_left_beside_the_logits(level, vocab_size):
    """Of a greedy row that a mask does not bind, or they are found in the logits alone."""
    begin = -(-vocab_size // 32) * 32
    rng, x_RW = np.random.default_rng(7), np.ones((4, begin + vocab_size // 16 + 1), dtype=np.float32)
    x_RW[:, :vocab_size] = rng.standard_normal((4, vocab_size))
    x_RV = x_RW[:, :vocab_size]
    every = np.full(-(-vocab_size // 64), 2**64 - 1, dtype=np.uint64)
    bound = np.full_like(every, 2**64 - 2)
    masks = (every, bound, None, every)  # the last row shares the logits of the first, which leaves them alone
    rows = [make_row(r % 3, temperature=0)._replace(allowed=mask) for r, mask in enumerate(masks)]
    sampler = Sampler()
    sampling = sampler.sampling_metadata(rows)
    sampler.write_masks(sampling)
    tape = _native.Tape(level, _native.Pool(2))
    tape.sample(vocab_size)
    batch = step_batch(sampling=sampling, token_ids_T=[0], logit_rows_R=range(4))
    x_RW[2, -1] = 0  # no step wrote it
    tokens = np.full(4, -2)
    tape.run(batch.block, x_RW, 0, 1, tokens, np.zeros(1))
    assert tokens[0] == x_RV[0].argmax() == tokens[3] and x_RW[:3, -1].tolist() == [1, 0, 0]
    listing = _native.Likeliest(level, vocab_size)
    for row, count in itertools.product(range(3), (1, 16, 64)):
        assert listing.of(x_RW, row, count) == np.argsort(-x_RV[row], kind="stable")[:count].tolist()
    x_RW[0, begin:-1] = x_RW[1, begin:-1] = INF  # no logit reaches such a floor, where it is asked for
    assert listing.of(x_RW, 1, 4) == np.argsort(-x_RV[1], kind="stable")[:4].tolist()
    if vocab_size > 4000:
        assert listing.of(x_RW, 0, 4) != np.argsort(-x_RV[0], kind="stable")[:4].tolist()
