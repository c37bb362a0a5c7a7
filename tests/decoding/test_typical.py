"""Typical acceptance: the rule of the paper, on chains and trees, for requests that nobody can ask for again."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from test_draft_models import drafts_of, noisy

from ridgeline import LLM, SamplingParams
from ridgeline.core.step import SampleRow, Span
from ridgeline.decoding.rejection import typical, with_typical

ROW = SampleRow(0, 0, SamplingParams(temperature=1.0), 1, 0, (), (), ())


def weights_of(*shares):
    return np.array([round(share * 2**20) for share in shares], dtype=np.float32)


def test_a_token_is_typical_above_the_smaller_of_two_bounds():
    peaked = weights_of(0.89, 0.06, 0.05)  # 0.3 exp(-H) is 0.197
    assert 0.3 * math.exp(-sum(-p * math.log(p) for p in (0.89, 0.06, 0.05))) > 0.09
    assert typical(peaked, [0], 2**64 - 1) == 0
    assert typical(peaked, [1], 0) == 0  # not accepted: what the word takes
    assert typical(peaked, [2], 2**64 - 1) == 2  # sampled, and the same by chance
    assert typical(weights_of(0.9, 0.1), [1], 0) == 1
    flat = weights_of(*[0.01] * 100)  # 0.3 exp(-H) is 0.003
    assert typical(flat, [77], 0) == 77
    assert typical(weights_of(*[0.01] * 99, 0.002, 0.008), [99], 0) == 0


def test_the_first_typical_one_of_several_counts():
    weights_V = weights_of(0.02, 0.4, 0.5, 0.08)
    assert typical(weights_V, [0, 2, 1], 0) == 2
    assert typical(weights_V, [3, 0], 2**64 - 1) == 3  # neither is: the last token is what the word takes


def test_rows_know_what_was_drafted_behind_them():
    chain = Span(0, 5, (7, 8, 9), 3, num_optional=2)
    assert [list(row.typical) for row in with_typical(chain, [ROW] * 3)] == [[8], [9], []]
    tree = Span(0, 5, (7, 1, 2, 3, 4), 5, num_optional=4, parents=(0, 1, 0, 3))
    assert [list(row.typical) for row in with_typical(tree, [ROW] * 5)] == [[1, 3], [2], [], [4], []]


@pytest.fixture
def engines(shared_data, tmp_path):
    target = str(shared_data / "models/stories260K")
    common = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    draft = {"speculate": f"draft:{noisy(target, tmp_path, 0.15)}", "num_speculative_tokens": 3}
    draft |= {"adaptive_speculation": False}

    def opened(**options):
        return LLM(target, **common, **draft, **options)

    return SimpleNamespace(plain=LLM(target, **common), opened=opened)


def test_more_is_accepted_of_requests_without_a_seed_and_others_keep_their_outputs(engines):
    prompts = [[1, 403, 407], [1, 360, 266]]
    free = SamplingParams(max_tokens=120, temperature=1.0, ignore_eos=True)
    bound = [SamplingParams(max_tokens=40, temperature=t, seed=s) for t, s in ((0, None), (0.9, 3))]
    rates = []
    for options in ({}, {"rejection_sample_method": "typical"}):
        llm = engines.opened(**options)
        llm.generate(prompts, free, use_tqdm=False)
        drafted, accepted = drafts_of(llm)
        rates.append(accepted / drafted)
        for params in bound:
            found, expected = (each.generate(prompts, params, use_tqdm=False) for each in (llm, engines.plain))
            assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert rates[1] > rates[0] + 0.1
    assert "lossy" in llm.engine.info.choices["rejection_sample_method"].reason


def test_deterministic_mode_goes_without(engines):
    prompts, params = [[1, 403, 407]], SamplingParams(max_tokens=40, temperature=1.0)
    llm = engines.opened(rejection_sample_method="typical", deterministic=True)
    found, expected = (each.generate(prompts, params, use_tqdm=False) for each in (llm, engines.plain))
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
