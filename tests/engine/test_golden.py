"""stories260K writes the published story, however it is scheduled: alone, batched, chunked, cached, preempted."""

import json

import pytest

from cache_invariants import check_cache
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.engine.request import FinishReason


@pytest.fixture(scope="module")
def story(shared_data):
    golden = json.loads((shared_data / "models/stories260K/golden_greedy.json").read_text())
    return golden["prompt_ids"], golden["ids"]


@pytest.fixture
def make_llm(shared_data, backend):
    def make(**options):
        model = str(shared_data / "models/stories260K")
        return LLM(model, dtype="float32", num_threads=1, backend=backend, **options)

    return make


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def generate(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_alone_and_after_a_prefix_hit(make_llm, story, block_size):
    prompt, ids = story
    llm = make_llm(block_size=block_size)
    assert generate(llm, [prompt], greedy(200)) == [ids]
    (warm,) = llm.generate([prompt + ids[:100]], greedy(100), use_tqdm=False)
    assert warm.outputs[0].token_ids == ids[100:]
    assert warm.usage.cached_tokens == 101 // block_size * block_size
    assert warm.usage.prompt_tokens == 101


def test_in_chunks_of_seven(make_llm, story):
    prompt, ids = story
    llm = make_llm(max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=False)
    assert generate(llm, [prompt + ids[:90]], greedy(110)) == [ids[90:]]
    assert llm.engine.loop.journal.totals().num_steps == 13 + 109  # 91 tokens in chunks of 7, then one by one


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 5, "block_size": 8}])
def test_in_a_batch_of_sixteen_mixed_requests(make_llm, story, options):
    """Half continue the story from different places; the others sample, stop and branch beside them."""
    prompt, ids = story
    llm = make_llm(**options)
    others = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=20 + i, n=1 + i % 3, repetition_penalty=1.1)
        for i in range(8)
    ]
    prompts = [prompt + ids[: 11 * i] for i in range(8)] + [prompt + ids[: 5 * i] for i in range(8)]
    outputs = llm.generate(prompts, [greedy(200 - 11 * i) for i in range(8)] + others, use_tqdm=False)
    for i in range(8):
        assert outputs[i].outputs[0].token_ids == ids[11 * i :]
    check_cache(llm.engine.loop.scheduler.cache, {})


def test_under_forced_preemption_every_third_step(make_llm, story):
    prompt, ids = story
    prompts = [prompt + ids[: 20 * i] for i in range(4)]
    outputs = generate_with_preemption(make_llm(block_size=8), prompts, greedy(60))
    assert [output.outputs[0].token_ids for output in outputs] == [ids[20 * i : 20 * i + 60] for i in range(4)]


def test_in_a_cache_too_small_for_the_batch(make_llm, story):
    prompt, ids = story
    llm = make_llm(block_size=8, max_model_len=208, kv_cache_bytes=320 * 208 * 2 * 5 * 4 // 5)
    assert generate(llm, [prompt] * 4, [greedy(200, seed=i) for i in range(4)]) == [ids] * 4


def test_seeded_samples_survive_batching_and_preemption(make_llm, story):
    prompt, ids = story
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, n=3, ignore_eos=True)

    def completions(llm, around):
        outputs = llm.generate([prompt + ids[:30], *around], [params] + [greedy(50)] * len(around), use_tqdm=False)
        return [output.token_ids for output in outputs[0].outputs]

    alone = completions(make_llm(), [])
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert (
        completions(make_llm(max_num_batched_tokens=7, max_num_seqs=6), [prompt + ids[:k] for k in (3, 50, 9)]) == alone
    )


def test_text_is_the_published_story(make_llm, story):
    prompt, _ = story
    llm = make_llm()
    (output,) = llm.generate([prompt], greedy(200), use_tqdm=False)
    text = output.outputs[0].text
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert output.outputs[0].finish_reason == FinishReason.LENGTH
    streamed = "".join(delta.text for delta in llm.stream(prompt, greedy(200)))
    assert streamed == text
