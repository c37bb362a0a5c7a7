"""With `deterministic`, tokens and log-probabilities are bitwise the same: alone, batched, chunked, after a prefix."""

import random
from dataclasses import replace

import pytest

from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams

pytest.importorskip("ridgeline._native", reason="the native code is not built")

MODEL, VOCAB, PLACE = "python-1m", 4096, 3  # of the request among the others in a batch
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int8 W8A16": {"quantize": "int8", "quantize_inputs": "int16"},
    "int4": {"quantize": "int4"},
    "int4 W4A16": {
        "quantize": "int4",
        "quantize_group_size": 32,
        "quantize_zero_points": True,
        "quantize_inputs": "int16",
    },
    "KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "KV fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "KV int4": {"dtype": "bfloat16", "kv_dtype": "int4"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)  # within the step, by native code
EDITED = replace(SAMPLED, top_k=50, min_p=0.01, repetition_penalty=1.2, logit_bias={5: 1.5})  # by the sampler


def random_prompts(seed, *lengths):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


(PROMPT,) = random_prompts(1, 300)
OTHERS = random_prompts(2, 3, 149, 17, 64, 128, 31, 1)


def make(options, **limits):
    return LLM(
        MODEL, deterministic=True, num_threads=2, max_model_len=512, kv_cache_bytes=64 << 20, **options, **limits
    )


def completion(output):
    """All that was said of the sampled tokens."""
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def run(llm, params):
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return output


def run_in_a_batch(llm, params):
    """Among seven requests, each with parameters of its own."""
    prompts = [*OTHERS[:PLACE], PROMPT, *OTHERS[PLACE:]]
    kinds = (GREEDY, SAMPLED, replace(EDITED, logprobs=None), replace(GREEDY, prompt_logprobs=2, max_tokens=3))
    beside = [replace(kinds[i % len(kinds)], seed=i) for i in range(len(prompts))]
    beside[PLACE] = params
    return llm.generate(prompts, beside, use_tqdm=False)[PLACE]


@pytest.fixture(scope="module", params=FORMATS)
def options(request):
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def alone(options):
    """Answers of a fresh engine that is never given anything else, by parameters."""
    llm = make(options, enable_prefix_caching=False)
    return [(params, completion(run(llm, params))) for params in (GREEDY, SAMPLED, EDITED)]


def test_after_a_prefix_hit_and_in_a_batch(options, alone):
    llm = make(options)
    for params, expected in alone:
        assert completion(run_in_a_batch(llm, params)) == expected
        hit = run(llm, params)
        assert hit.num_cached_tokens > 0
        assert completion(hit) == expected


def test_at_another_chunking(options, alone):
    llm = make(options, max_num_batched_tokens=37, max_num_seqs=8, enable_prefix_caching=False)
    for params, expected in alone:
        assert completion(run(llm, params)) == expected
        assert completion(run_in_a_batch(llm, params)) == expected


def test_prompt_logprobs(options):
    params = replace(GREEDY, prompt_logprobs=5, max_tokens=1)
    expected = run(make(options), params).prompt_logprobs
    llm = make(options, max_num_batched_tokens=37, max_num_seqs=8)
    assert run(llm, params).prompt_logprobs == expected
    assert run_in_a_batch(llm, params).prompt_logprobs == expected


def test_when_preempted_and_on_one_thread(options, alone):
    llm = LLM(MODEL, deterministic=True, num_threads=1, max_model_len=512, kv_cache_bytes=64 << 20, **options)
    for params, expected in alone:
        assert completion(generate_with_preemption(llm, [PROMPT, *OTHERS], params)[0]) == expected
