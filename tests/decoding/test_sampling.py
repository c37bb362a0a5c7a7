"""The Sampler as the executor sees it: against the oracle, alone as in any batch, greedy, errors, log-probabilities."""

from dataclasses import replace
from types import SimpleNamespace

import array_api_compat.numpy
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from sampling_oracle import edited, inverse_cdf, make_row, probabilities

from ridgeline.backends.step import StepOutput
from ridgeline.core.step import PromptLogprobRow
from ridgeline.decoding import sampling
from ridgeline.decoding.processors import load_processors
from ridgeline.decoding.random_sample import random_word
from ridgeline.decoding.sampling import Sampler

SAMPLER = Sampler()
NEAR = 1e-5  # closer than this to a step of the CDF, fp32 and the float64 oracle may disagree
INF, NAN = np.inf, np.nan


def zeros(*shape):
    return np.zeros(shape, dtype=np.float32)


def tokens(logits_RV, rows):
    sampled, _ = SAMPLER.sample(StepOutput(logits_RV), rows)
    assert all(token.error is None for token in sampled)
    return [token.token_id for token in sampled]


# Grids exact in binary: what ties in float64 ties in fp32.
quarters = st.integers(-8, 8).map(lambda i: i / 4)
ids = st.lists(st.integers(0, 11), max_size=8)
params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 3, 7, 50]),
        "top_p": st.sampled_from([0.05, 0.33, 0.5, 0.8, 0.97, 1.0]),
        "min_p": st.sampled_from([0.0, 0.07, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": quarters,
        "frequency_penalty": quarters,
        "logit_bias": st.dictionaries(st.integers(0, 11), st.integers(-100, 100).map(lambda i: i / 4), max_size=4),
        "min_tokens": st.sampled_from([0, 4]),
        "prompt_ids": ids,
        "output_ids": ids,
        "stop_ids": st.lists(st.integers(0, 11), max_size=2),
        "seed": st.integers(-(2**63), 2**64 - 1),
    }
)
logits = st.lists(st.integers(-20, 20).map(lambda i: i / 4), min_size=12, max_size=12)


@settings(deadline=None, max_examples=400)
@given(x_V=logits, fields=params)
def test_token_equals_the_oracle(x_V, fields):
    row = make_row(**fields)
    p_V, margin = probabilities(x_V, row)
    expected, distance = inverse_cdf(p_V, random_word(row.seed, row.num_output) / 2**64)
    assume(margin > NEAR and distance > NEAR)
    assert tokens(np.float32([x_V]), [row]) == [expected]


@settings(deadline=None, max_examples=100)
@given(x_V=logits, fields=params)
def test_greedy_equals_the_oracle(x_V, fields):
    row = make_row(**{**fields, "temperature": 0.0})
    assert tokens(np.float32([x_V]), [row]) == [int(edited(x_V, row).argmax())]


@settings(deadline=None, max_examples=60)
@given(x_V=logits, fields=params)
def test_no_token_outside_the_oracles_support(x_V, fields):
    rows = [make_row(**{**fields, "seed": seed}) for seed in range(40)]
    p_V, margin = probabilities(x_V, rows[0])
    assume(margin > NEAR)
    assert all(p_V[token] > 0 for token in tokens(np.float32([x_V]), rows))


def many_rows(num_rows, vocab_size):
    """Rows of every path and mixture, some of them with tied (bf16) logits."""
    rng = np.random.default_rng(5)
    x_RV = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    x_RV[::2] = x_RV[::2].astype(bfloat16)
    rows = [
        make_row(
            row=i,
            seed=int(rng.integers(2**62)),
            temperature=float(rng.choice([0.0, 0.6, 1.0, 1.7])),
            top_k=int(rng.choice([0, 3, 40, 900, 5000])),
            top_p=float(rng.choice([0.3, 0.9, 1.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            logit_bias={7: 20.0} if i % 5 == 0 else {},
            logprobs=[None, 0, 4][i % 3],
            prompt_ids=rng.integers(0, vocab_size, 30).tolist(),
            output_ids=rng.integers(0, vocab_size, i).tolist(),
        )
        for i in range(num_rows)
    ]
    return x_RV, rows


@pytest.mark.parametrize("vocab_size", [700, 20011])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab_size):
    x_RV, rows = many_rows(30, vocab_size)
    before_RV = x_RV.copy()
    together, _ = SAMPLER.sample(StepOutput(x_RV), rows)
    backwards, _ = SAMPLER.sample(StepOutput(x_RV), rows[::-1])
    assert backwards == together[::-1]
    for i, row in enumerate(rows):
        alone, _ = SAMPLER.sample(StepOutput(x_RV[i : i + 1].copy()), [make_row_at_zero(row)])
        assert alone == (together[i],)
    assert np.array_equal(x_RV, before_RV), "the raw logits are the caller's"


def make_row_at_zero(row):
    return type(row)(row.seq_id, 0, row.params, row.seed, row.num_output, row.prompt_ids, row.output_ids, row.stop_ids)


def test_candidates_and_whole_vocabulary_give_the_same_token(monkeypatch):
    x_RV, rows = many_rows(30, 3000)
    narrow, _ = SAMPLER.sample(StepOutput(x_RV), rows)
    monkeypatch.setattr(sampling, "_NARROW_K", 0)
    assert SAMPLER.sample(StepOutput(x_RV), rows)[0] == narrow


def test_several_sequences_on_one_logit_row_draw_apart():
    x_RV = zeros(3, 1000)
    sampled = tokens(x_RV, [make_row(row=1, seq_id=i, seed=i) for i in range(20)])
    assert len(set(sampled)) > 15
    assert sampled == [tokens(x_RV, [make_row(row=2, seed=i)])[0] for i in range(20)]


def test_a_token_depends_on_seed_and_position_only():
    x_RV = zeros(1, 5000)
    sampled = {(seed, i): tokens(x_RV, [make_row(seed=seed, num_output=i)])[0] for seed in (1, 2) for i in (0, 1)}
    assert len(set(sampled.values())) == 4
    assert sampled[1, 1] == tokens(x_RV, [make_row(seed=1, num_output=1, prompt_ids=(3,), output_ids=(4,))])[0]


@pytest.mark.parametrize("vocab_size", [3, 200, 20011])
def test_greedy_ties_go_to_the_lowest_id(vocab_size):
    x_RV = zeros(2, vocab_size)
    x_RV[1, 1:] = 2.0
    assert tokens(x_RV, [make_row(row=0, temperature=0), make_row(row=1, temperature=1e-5)]) == [0, 1]


def test_all_greedy_rows_take_no_copy_and_no_softmax(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("greedy rows need none of this")

    for name in ("random_sample", "largest", "_apply", "_own"):
        monkeypatch.setattr(sampling, name, refuse)
    x_RV = np.eye(4, dtype=np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(array_api_compat.numpy, "take", refuse)
        # Truncations do not move the maximum, so a greedy row skips them.
        assert tokens(x_RV, [make_row(row=i, temperature=0, top_k=2, top_p=0.5, min_p=0.1) for i in range(4)]) == [
            0,
            1,
            2,
            3,
        ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_100_forces_and_forbids(temperature):
    x_RV = np.float32([[9.0, 0.0, 1.0, 8.0]])
    forced = [make_row(seed=seed, temperature=temperature, logit_bias={1: 100.0}) for seed in range(50)]
    assert set(tokens(x_RV, forced)) == {1}
    forbidden = [make_row(seed=seed, temperature=temperature, logit_bias={0: -100.0}) for seed in range(50)]
    assert 0 not in tokens(x_RV, forbidden)


def test_min_tokens_holds_back_the_end():
    x_RV = np.float32([[0.0, 50.0, 1.0]])
    early = make_row(temperature=0, min_tokens=2, num_output=1, stop_ids=(1,))
    late = make_row(temperature=0, min_tokens=2, num_output=2, stop_ids=(1,))
    assert tokens(x_RV, [early, late]) == [2, 1]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"logprobs": 2}])
@pytest.mark.parametrize("broken", [[0.0, NAN, 1.0, 2.0], [0.0, INF, 1.0, 2.0], [-INF] * 4, [NAN] * 4])
def test_a_row_that_is_not_finite_fails_alone(broken, fields):
    good = [3.0, -INF, 1.0, 2.0]
    x_RV = np.float32([good, broken, good])
    rows = [make_row(row=i, seed=4, **fields) for i in range(3)]
    sampled, _ = SAMPLER.sample(StepOutput(x_RV), rows)
    assert [token.error is None for token in sampled] == [True, False, True]
    assert sampled[1].logprob is None
    alone, _ = SAMPLER.sample(StepOutput(x_RV[:1]), rows[:1])
    assert (sampled[0].token_id, sampled[0].logprob) == (alone[0].token_id, alone[0].logprob)
    assert sampled[2].token_id == alone[0].token_id


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 1}, {"top_p": 0.5}])
def test_a_row_with_every_token_excluded_fails_alone(fields):
    x_RV = zeros(2, 2)
    excluded = make_row(row=0, min_tokens=1, stop_ids=(0, 1), **fields)
    sampled, _ = SAMPLER.sample(StepOutput(x_RV), [excluded, make_row(row=1, **fields)])
    assert sampled[0].error is not None
    assert sampled[1].error is None


def test_logprobs_are_of_the_raw_distribution():
    x_RV = np.random.default_rng(8).normal(0, 3, (40, 3000)).astype(np.float32)
    x_RV[::2] = x_RV[::2].astype(bfloat16)
    rows = [
        make_row(row=i, seed=i, temperature=1.5, top_k=30, logit_bias={5: 9.0}, repetition_penalty=1.2, logprobs=i % 6)
        for i in range(40)
    ]
    prompt_rows = [PromptLogprobRow(seq_id=0, row=i, token_id=i, num_top=3) for i in range(40)]
    sampled, prompt = SAMPLER.sample(StepOutput(x_RV), rows, prompt_rows)
    reported = [(i, token.token_id, i % 6, token.logprob) for i, token in enumerate(sampled)]
    reported += [(row.row, row.token_id, row.num_top, found) for row, found in zip(prompt_rows, prompt)]
    for i, token_id, num_top, found in reported:
        raw_V = x_RV[i].astype(np.float64)
        logprob_V = raw_V - raw_V.max() - np.log(np.exp(raw_V - raw_V.max()).sum())
        order = np.argsort(-raw_V, kind="stable")[:num_top]
        assert found.token_id == token_id
        assert found.logprob == pytest.approx(logprob_V[token_id], abs=2e-5)
        assert found.rank == 1 + int((raw_V > raw_V[token_id]).sum())
        assert [top_id for top_id, _ in found.top] == order.tolist()
        assert [value for _, value in found.top] == pytest.approx(logprob_V[order].tolist(), abs=2e-5)


def test_logprobs_none_asks_for_none_and_zero_for_the_chosen_one():
    sampled, prompt = SAMPLER.sample(
        StepOutput(np.eye(2, dtype=np.float32)), [make_row(temperature=0), make_row(row=1, temperature=0, logprobs=0)]
    )
    assert sampled[0].logprob is None
    assert sampled[1].logprob is not None
    assert sampled[1].logprob.top == ()
    assert sampled[1].logprob.rank == 1
    assert prompt == ()


def sampling_backend(x_RV, sampling):
    """What a backend that samples gives back, with the reference's own tokens."""
    sampled = []
    for i, logit_row in enumerate(sampling.logit_row.tolist()):
        row = make_row(
            row=logit_row,
            seed=int(sampling.seed[i]),
            num_output=int(sampling.num_output[i]),
            temperature=float(sampling.temperature[i]),
            top_k=int(sampling.top_k[i]),
            top_p=float(sampling.top_p[i]),
            min_p=float(sampling.min_p[i]),
        )
        sampled.append(SAMPLER.sample(StepOutput(x_RV), [row])[0][0].token_id)
    return StepOutput(x_RV, np.array(sampled, dtype=np.int64))


def test_tokens_of_a_sampling_backend_are_those_of_the_sampler():
    x_RV, rows = many_rows(40, 2000)
    x_RV[3], x_RV[8, 5], x_RV[12, 6] = -INF, NAN, INF
    # Half of the rows without edits.
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}}
    rows[::2] = [row._replace(params=replace(row.params, **plain)) for row in rows[::2]]
    sampling = SAMPLER.sampling_metadata(rows)
    assert 0 < len(sampling.logit_row) < len(rows)
    assert SAMPLER.sample(sampling_backend(x_RV, sampling), rows) == SAMPLER.sample(StepOutput(x_RV), rows)


def test_drawn_rows_without_logprobs_do_not_read_the_logits():
    rows = [make_row(row=i, temperature=i % 2) for i in range(4)]
    sampled, _ = SAMPLER.sample(StepOutput(zeros(0, 0), np.array([5, 6, -1, 8])), rows)
    assert [token.token_id for token in sampled] == [5, 6, -1, 8]
    assert [token.error is None for token in sampled] == [True, True, False, True]


def test_rows_to_draw_hold_the_parameters():
    rows = [
        make_row(row=4, seed=-1, num_output=7, temperature=1e-6, top_k=-1),
        make_row(row=2, seed=2**64 - 1, temperature=0.7, top_k=2**31 - 1, top_p=0.9, min_p=0.1, logprobs=3),
    ]
    sampling = SAMPLER.sampling_metadata(rows)
    assert sampling.logit_row.tolist() == [4, 2]
    assert sampling.temperature.tolist() == [0.0, float(np.float32(0.7))]
    assert (sampling.top_k.tolist(), sampling.top_p.tolist(), sampling.min_p.tolist()) == (
        [0, 2**31 - 1],
        [1, 0.9],
        [0, 0.1],
    )
    assert (sampling.seed.tolist(), sampling.num_output.tolist()) == ([2**64 - 1, 2**64 - 1], [7, 0])


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 2.0}},
        {"min_tokens": 3, "num_output": 2},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "output_ids": (1,)},
        {"frequency_penalty": 0.5, "output_ids": (1,)},
    ],
)
def test_rows_with_edits_are_left_to_the_sampler(fields):
    row = make_row(**fields)
    assert len(SAMPLER.sampling_metadata([row]).logit_row) == 0
    assert any(processor.uses(row) for processor in load_processors())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 8},
        {"row": 5},
        {"params": make_row(top_k=9).params},
        {"banned_ids": (1,)},
        {"stop_ids": (2,)},
        {"output_ids": (1, 2)},
        {"allowed": np.array([6], dtype=np.uint64)},
        {"typical": (4,)},
        {"tells_weights": True},
    ],
)
@pytest.mark.parametrize("more", [{}, {"min_tokens": 9}, {"presence_penalty": 0.5}])
def test_rows_of_a_step_like_the_last_one_have_the_metadata_of_a_step_of_their_own(fields, more):
    """Whatever the last one is found by: each row, and those behind it, by turns as usual and with something else."""
    sampler = Sampler()
    usual = [make_row(row=i, seed=7, num_output=8 + i, temperature=0.5, **more) for i in range(2)]
    other = [usual[0]._replace(num_output=12), usual[1]._replace(**{"num_output": 13} | fields)]
    for rows in (usual, [row._replace(num_output=row.num_output + 2) for row in usual], other, other, usual):
        found, fresh = sampler.sampling_metadata(rows), Sampler().sampling_metadata(rows)
        for name in ("logit_row", "temperature", "top_k", "top_p", "min_p", "seed", "num_output", "mask_row"):
            np.testing.assert_array_equal(getattr(found, name), getattr(fresh, name))
        assert found.masks_MW.shape == fresh.masks_MW.shape


def test_masks_that_allow_all_are_written_once_and_others_whenever_they_change():
    """Also those of the rows behind a draft, which the same grammar checks and which are no `allowed` of its own."""
    every, some = np.full(2, 2**64 - 1, np.uint64), np.array([5, 6], np.uint64)
    checkers = [SimpleNamespace(allowed=every.copy(), is_open=True) for _ in range(3)]
    rows = [make_row(temperature=0)._replace(allowed=one.allowed, checker=one) for one in checkers]
    rows.append(rows[0]._replace(allowed=some.copy()))
    sampler = Sampler()
    sampling = sampler.sampling_metadata(rows)
    sampling.masks_MW[:] = 9
    copied = replace(sampling, masks_MW=np.full_like(sampling.masks_MW, 9), open_masks={})
    for number, bound in enumerate(([], [1], [1], [0, 2], [2], [], [])):
        rows[3].allowed[:] = number
        for i, one in enumerate(checkers):
            one.allowed[:], one.is_open = some if i in bound else every, i not in bound
        for written in (sampling, copied):
            sampler.write_masks(written)
            assert written.masks_MW.tolist() == [row.allowed.tolist() for row in rows]
    sampling.masks_MW[1] = 9
    sampler.write_masks(sampling)
    assert sampling.masks_MW[1].tolist() == [9, 9], "it is known to allow all"


def test_a_step_without_rows():
    assert SAMPLER.sample(StepOutput(zeros(0, 10)), []) == ((), ())


def test_prompt_rows_without_samples():
    sampled, prompt = SAMPLER.sample(
        StepOutput(zeros(1, 4)), [], [PromptLogprobRow(seq_id=3, row=0, token_id=2, num_top=0)]
    )
    assert sampled == ()
    assert prompt[0].logprob == pytest.approx(np.log(0.25))
    assert (prompt[0].rank, prompt[0].top) == (1, ())
