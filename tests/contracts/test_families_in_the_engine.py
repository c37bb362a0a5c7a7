"""Every family in the engine: chunked, batched, cached and preempted log-probabilities equal the oracle's."""

import pytest
import torch
from tiny_models import LONG_PROMPT, build

from cache_invariants import check_cache
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.spec import families

NUM_PROMPT = 30
NUM_OUTPUT = LONG_PROMPT - NUM_PROMPT
NOT_AUTOREGRESSIVE = {"llada", "bert", "roberta", "xlm_roberta"}  # their engine tests are their own
BOUND = 1e-4  # of the largest logit


@pytest.mark.parametrize("seed", [100, 101])
@pytest.mark.parametrize("family_name", sorted(set(families.names()) - NOT_AUTOREGRESSIVE))
def test_engine_log_probabilities_equal_the_oracles(family_name, seed, backend, tmp_path):
    model = build(family_name, seed, tmp_path)
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        max_model_len=LONG_PROMPT,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=7,
        num_threads=1,
        backend=backend,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, logprobs=0, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    prompts = [row.tolist() for row in model.prompt(NUM_PROMPT, batch=3)]
    prompts.append(prompts[0][:20] + prompts[1][:10])  # shares a prefix with the first

    chunked = llm.generate(prompts, scored, use_tqdm=False)
    for output in chunked:
        check_against_oracle(model, output)

    cached = llm.generate(prompts, params, use_tqdm=False)
    hits = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.usage.cached_tokens >= 16 for output in hits)
    preempted = generate_with_preemption(llm, prompts, params)
    for again in (cached, hits, preempted):
        for output in again:
            check_against_oracle(model, output)
    check_cache(llm.engine.loop.scheduler.cache, {})


def check_against_oracle(model, output):
    completion = output.outputs[0]
    tokens = output.prompt_token_ids + completion.token_ids
    assert len(tokens) == LONG_PROMPT
    logits_TV = model.oracle_logits(torch.tensor([tokens]))[0]
    expected_TV = logits_TV.log_softmax(-1)
    bound = BOUND * logits_TV.abs().max().item()
    scored = output.prompt_logprobs or [None] * NUM_PROMPT
    for position, logprob in enumerate([*scored, *completion.logprobs]):
        if logprob is not None:
            assert logprob.token_id == tokens[position]
            assert abs(logprob.logprob - expected_TV[position - 1, tokens[position]].item()) <= bound
    best_T = expected_TV[NUM_PROMPT - 1 : -1].amax(-1)
    for best, logprob in zip(best_T.tolist(), completion.logprobs, strict=True):
        assert best - logprob.logprob <= bound
