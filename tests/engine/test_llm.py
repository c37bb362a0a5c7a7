"""The offline API: shapes and names as a vLLM user expects them, and one clear error for a wrong request."""

import gc
import json
import sys

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ContextLengthError, ModelLoadError, RequestError
from ridgeline.engine.llm import AHEAD

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(shared_data, backend):
    return LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, backend=backend)


def test_prompts_in_every_form_give_the_same_answer(llm):
    text = "Once upon a time"
    ids = llm.get_tokenizer().encode(text)
    forms = [text, [text], ids, [ids], {"prompt": text}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    completions = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert {len(completion) for completion in completions} == {1}
    assert len({tuple(completion[0].outputs[0].token_ids) for completion in completions}) == 1
    assert completions[0][0].prompt == text
    assert completions[0][0].prompt_token_ids == ids


def test_results_carry_tokens_logprobs_usage_and_timings(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, n=2)
    (output,) = llm.generate("Lily", params, use_tqdm=False)
    first, second = output.outputs
    assert (first.index, second.index) == (0, 1)
    assert first.token_ids == second.token_ids
    assert len(first.logprobs) == 5
    for token_id, logprob in zip(first.token_ids, first.logprobs, strict=True):
        assert logprob.token_id == token_id
        assert logprob.rank == 1
        assert len(logprob.top) == 3
        assert logprob.top[0] == (token_id, logprob.logprob)
    assert first.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in first.logprobs))
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
    assert output.finished
    assert output.usage.completion_tokens == 10
    assert 0 <= first.timings.queue_s <= first.timings.ttft_s <= first.timings.latency_s
    assert first.timings.tpot_s > 0


def test_stop_strings_end_the_text_and_the_computation(llm):
    (output,) = llm.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=60, stop=["named", "never"]), use_tqdm=False
    )
    completion = output.outputs[0]
    assert completion.text == ", there was a little girl "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "named")
    assert len(completion.token_ids) < 20
    assert llm.engine.loop.scheduler.running() == ()


def test_stop_token_ids_are_reported(llm):
    ids = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[ids[3]])
    completion = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == ids[: ids.index(ids[3]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[3])


def test_params_may_differ_by_prompt(llm):
    outputs = llm.generate(
        ["Tom", "Lily"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]


def test_a_stream_left_early_frees_its_blocks(llm):
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=100))
    next(stream)
    stream.close()
    assert not (llm.engine.loop.scheduler.running() or llm.engine.loop.scheduler.stats().num_waiting)
    assert llm.engine.loop.stats().cache.groups[0].used == 0


def test_streams_and_batches_do_not_take_each_others_tokens(llm):
    alone = ["".join(delta.text for delta in llm.stream(prompt, GREEDY)) for prompt in ("Tom", "Lily")]
    first, second = llm.stream("Tom", GREEDY), llm.stream("Lily", GREEDY)
    texts = [next(first).text, next(second).text]
    (batch,) = llm.generate("Tom", GREEDY, use_tqdm=False)
    texts[0] += "".join(delta.text for delta in first)
    texts[1] += "".join(delta.text for delta in second)
    assert texts == alone
    assert batch.outputs[0].text == alone[0]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": []}, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [-1]}, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [512]}, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [1.5]}, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [True]}, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [1] * 512}, GREEDY, ContextLengthError, "messages"),
        ("x", SamplingParams(max_tokens=512), ContextLengthError, "messages"),
        ("x", SamplingParams(logit_bias={512: 1.0}), RequestError, "logit_bias"),
        ("x", SamplingParams(stop_token_ids=[512]), RequestError, "stop_token_ids"),
        ("x", SamplingParams(n=65), RequestError, "n"),
    ],
)
def test_a_wrong_request_is_one_clear_error_and_nothing_runs(llm, prompt, params, error, param):
    if prompt == []:
        prompt = [[]]
    with pytest.raises(error) as caught:
        llm.generate(prompt, params, use_tqdm=False)
    assert caught.value.param == param
    assert not (llm.engine.loop.scheduler.running() or llm.engine.loop.scheduler.stats().num_waiting)


def test_wrong_counts_of_params_and_priorities(llm):
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(RequestError, match="1 prompts but 2 priorities"):
        llm.generate(["a"], GREEDY, priority=[1, 2], use_tqdm=False)
    with pytest.raises(RequestError, match="priority must be between"):
        llm.generate(["a"], GREEDY, priority=[2**31], use_tqdm=False)


def test_a_model_without_chat_template_says_so(llm):
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "int3"}, "dtype must be"),
        ({"block_size": 12}, "block_size must be a power of two"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "max_num_batched_tokens"),
        ({"kv_cache_bytes": 1000}, "lower max_model_len or give the cache more memory"),
        ({"scheduling_policy": "lottery"}, "policy must be"),
    ],
)
def test_settings_that_cannot_be_honoured(shared_data, options, match):
    if "kv_cache_bytes" in options:
        options = {**options, "max_model_len": 512}
    with pytest.raises(ConfigError, match=match):
        LLM(str(shared_data / "models/stories260K"), **options)


def test_a_vocabulary_too_large_to_draw_from(shared_data, tmp_path):
    config = json.loads((shared_data / "models/stories260K/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2**19}))
    with pytest.raises(ConfigError, match="has 524,288 tokens, and sampling takes at most 524,287"):
        LLM(str(tmp_path), num_threads=1, max_model_len=64)


def test_a_missing_model_folder(tmp_path):
    with pytest.raises(ModelLoadError):
        LLM(str(tmp_path / "nothing"))


def test_an_unstated_context_shrinks_to_the_cache(shared_data):
    llm = LLM(str(shared_data / "models/stories260K"), dtype="float32", kv_cache_bytes=1280 * 200)
    assert llm.engine.info.max_model_len == 128
    assert "of the declared 512" in llm.engine.info.choices["max_model_len"].reason


def test_bfloat16_runs_and_nearly_agrees(shared_data):
    llm = LLM(str(shared_data / "models/stories260K"), dtype="bfloat16", num_threads=1)
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert output.outputs[0].text.startswith(", there was a little")


def test_an_iterator_of_prompts_is_drawn_as_it_is_read(llm):
    """A million prompts: they are made one by one, and no more are begun than the window has room for."""
    drawn, most = 0, AHEAD * llm.engine.info.max_num_seqs
    prompts = ["Once upon a time", "Lily", "The big dog ran"]

    def million():
        nonlocal drawn
        for drawn in range(1, 1_000_001):
            yield prompts[drawn % 3]

    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    outputs = llm.generate(million(), GREEDY)
    assert drawn == 0, "nothing is drawn before it is asked for"
    for number in range(1, 3 * most):
        output = next(outputs)
        assert output.prompt == prompts[number % 3] and output.finished, "in the order of the prompts"
        assert output.outputs[0].token_ids == expected[number % 3]
        assert number <= drawn < number + most
    outputs.close()
    assert not llm._inboxes and all(group.used == 0 for group in llm.engine.loop.stats().cache.groups)


def test_an_iterator_holds_finished_outputs_behind_a_long_one_within_its_bound(llm):
    """The first prompt outlasts all others that may be begun beside it."""
    drawn, most = 0, AHEAD * llm.engine.info.max_num_seqs
    eos = llm.engine.info.generation.eos_token_ids[0]

    def prompts():
        nonlocal drawn
        for drawn in range(1, 10 * most):
            yield "Once upon a time" if drawn == 1 else [eos] * 100

    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(prompts(), params)
    next(outputs)
    assert drawn <= most
    outputs.close()


def test_an_iterator_raises_at_the_prompt_that_is_wrong(llm):
    outputs = llm.generate(iter(["Lily", [10**6]]), GREEDY)
    with pytest.raises(RequestError, match="token ids must be from 0"):
        list(outputs)
    assert not llm._inboxes


def test_an_iterator_has_one_set_of_parameters(llm):
    for more in ({"sampling_params": [GREEDY]}, {"adapter": ["a"]}):
        with pytest.raises(RequestError, match="one sampling_params and one adapter"):
            llm.generate(iter(["Lily"]), **more)


def test_memory_does_not_grow_with_the_prompts_of_an_iterator(shared_data):
    """Once the prefix cache is full: nothing is kept of a prompt that was read, not one block of Python's memory."""
    llm = LLM(str(shared_data / "models/stories260K"), num_threads=1, max_model_len=64, kv_cache_bytes=2**18)
    count = 800
    outputs = llm.generate(([5 + n % 500, 5 + n // 500] * 20 for n in range(4 * count)), SamplingParams(max_tokens=1))

    def num_blocks() -> int:
        """What is in use when as many more were read."""
        assert all(next(outputs).finished for _ in range(count))
        gc.collect()
        return sys.getallocatedblocks()

    num_blocks()
    before = num_blocks()
    assert llm.engine.loop.stats().cache.groups[0].total < count, "or the cache still fills"
    grown = num_blocks() - before
    assert grown < count / 2, f"{grown} more blocks after {count} more prompts"
