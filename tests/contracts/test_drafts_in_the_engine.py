"""Drafts through the real engine: fewer steps, the same tokens, whatever memory the model has."""

import random
import time
from importlib.util import find_spec

import pytest
from tiny_models import build

import ridgeline.cache.groups.recurrent as recurrent_groups
from cache_invariants import check_cache
from drafting import Drafting
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams, SpeculationParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.core.speculation import proposer_names
from ridgeline.decoding.strategies import build_strategy
from ridgeline.decoding.strategies.autoregressive import Autoregressive

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
STORY = [1, 403, 407, 261, 378]
RECURRENT = ["mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "nemotron_h", "qwen3_next", "minimax"]


class Lookup(Drafting):
    """Guesses that what followed the last three, two or one tokens before follows again."""

    def draft(self, view, max_tokens):
        tokens = list(view.token_ids)
        for n in (3, 2, 1):
            for begin in range(len(tokens) - n - 1, -1, -1):
                if tokens[begin : begin + n] == tokens[-n:]:
                    return tokens[begin + n : begin + n + min(4, max_tokens)]
        return ()


def completions(outputs):
    return [(list(out.token_ids), out.text, out.finish_reason, out.logprobs) for o in outputs for out in o.outputs]


def assert_same_outputs(llm, plain, prompts):
    """Compare with outputs without drafts: alone, batched, from cached prefixes, preempted; greedy and seeded, some of
    several outputs.
    """
    for sampling in ({"temperature": 0, "logprobs": 2}, {"temperature": 0.9, "seed": 4, "top_p": 0.9, "n": 2}):
        params = SamplingParams(max_tokens=30, ignore_eos=True, presence_penalty=0.2, logit_bias={3: 0.5}, **sampling)
        expected = completions(plain.generate(prompts, params, use_tqdm=False))
        assert completions(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert completions(llm.generate(prompts[:1], params, use_tqdm=False)) == expected[: params.n]
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    before = llm.engine.loop.scheduler.stats().cache.prefix_hit_tokens
    expected = completions(plain.generate(prompts, greedy, use_tqdm=False))
    assert completions(generate_with_preemption(llm, prompts, greedy)) == expected
    assert llm.engine.loop.scheduler.stats().cache.prefix_hit_tokens > before


def with_drafts(llm, monkeypatch, generate):
    """Outputs and steps of `generate`, plain and with drafts."""
    scheduler, found = llm.engine.loop.scheduler, []
    for strategy in (scheduler.strategy, Lookup()):
        monkeypatch.setattr(scheduler, "strategy", strategy)
        before = scheduler.stats().num_steps
        outputs = generate()
        found.append((completions(outputs), scheduler.stats().num_steps - before))
        check_cache(scheduler.cache, {})
        assert all(group.used == 0 for group in scheduler.stats().cache.groups)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {300: 3.0}, "min_tokens": 30},
        {"temperature": 0, "allowed_token_ids": range(3, 300), "bad_words": [" and", "was a"]},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "n": 3},
        {"temperature": 0, "stop": " and"},
    ],
    ids=lambda options: "-".join(options),
)
def test_answers_of_a_real_model_are_the_same_in_fewer_steps(options, shared_data, monkeypatch):
    llm = LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, deterministic=True)
    params = SamplingParams(max_tokens=120, **options)
    alone, batch = [STORY], [STORY, STORY[:3], [1, 360, 266]]
    for prompts in (alone, batch):
        (plain, plain_steps), (drafted, steps) = with_drafts(
            llm, monkeypatch, lambda prompts=prompts: llm.generate(prompts, params, use_tqdm=False)
        )
        assert drafted == plain
        assert steps <= plain_steps
        if prompts == alone and options == {"temperature": 0}:
            assert steps < plain_steps


class Known(Drafting):
    """Guesses from the whole output, so that every step is as long as it may be."""

    def __init__(self, tokens):
        self.tokens = list(tokens)

    def draft(self, view, max_tokens):
        num_output = len(view.token_ids) - len(view.request.prompt_ids)
        return self.tokens[num_output : num_output + min(16, max_tokens)]


@pytest.mark.parametrize("max_tokens", [80, "within the step that finds the stop string"])
def test_times_and_counts_are_those_of_the_tokens_that_were_delivered(max_tokens, shared_data, monkeypatch):
    """A step of many tokens has some behind the stop string: they belong to no output."""
    llm = LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, deterministic=True)
    greedy = {"temperature": 0, "ignore_eos": True}
    (whole,) = llm.generate([STORY], SamplingParams(max_tokens=80, **greedy), use_tqdm=False)
    stop = whole.outputs[0].text.split()[8]
    (plain,) = llm.generate([STORY], SamplingParams(max_tokens=80, stop=stop, **greedy), use_tqdm=False)
    num_tokens = len(plain.outputs[0].token_ids)
    assert 2 < num_tokens < 40
    if max_tokens != 80:
        max_tokens = num_tokens + 2
    scheduler = llm.engine.loop.scheduler
    monkeypatch.setattr(scheduler, "strategy", Known(whole.outputs[0].token_ids))
    before = scheduler.stats().num_steps
    params = SamplingParams(max_tokens=max_tokens, stop=stop, **greedy)
    (drafted,) = llm.generate([STORY], params, use_tqdm=False)
    assert scheduler.stats().num_steps - before < num_tokens / 2
    assert completions([drafted]) == completions([plain])
    timings = drafted.outputs[0].timings
    assert timings.tpot_s == pytest.approx((timings.latency_s - timings.ttft_s) / (num_tokens - 1))
    _, records = llm.engine.loop.journal.outputs.read()
    assert records["num_output"].tolist() == [80, num_tokens, num_tokens]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", *RECURRENT])
def test_memory_of_every_kind_takes_tokens_back(family, tmp_path, monkeypatch):
    """A random model soon repeats itself; blocks are few, so that drafts and preemptions meet."""
    model = build(family, 3, tmp_path)
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        max_model_len=64,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        num_threads=1,
        deterministic=True,
        speculate="prediction",  # room for drafts in the cache
        num_speculative_tokens=4,
    )
    prompts = [row.tolist() for row in model.prompt(9, batch=3)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    plain, drafted = with_drafts(llm, monkeypatch, lambda: llm.generate(prompts, params, use_tqdm=False))
    assert drafted[0] == plain[0]
    assert drafted[1] < plain[1]
    preempted, drafted_and_preempted = with_drafts(
        llm, monkeypatch, lambda: generate_with_preemption(llm, prompts, params)
    )
    assert preempted[0] == drafted_and_preempted[0] == plain[0]


def real_strategy(name, adaptive, num_tokens=4):
    """What an engine that was asked to speculate would have."""
    config = EngineConfig.of(
        "any", speculate=name, adaptive_speculation=adaptive, num_speculative_tokens=num_tokens, prompt_lookup_min=1
    )
    return build_strategy("speculative", None, config, time.monotonic)


PROPOSED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 5},
    "processors": {
        "temperature": 0.7,
        "seed": 1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {300: 3.0},
        "min_p": 0.01,
        "min_tokens": 30,
    },
    "logprobs": {"temperature": 0, "logprobs": 5},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "n": {"temperature": 0.8, "seed": 3, "n": 3},
    "stop": {"temperature": 0, "stop": " and"},
}


FORCING = r"( [a-z]+){2,6} little dog ran to( [a-z]+){1,3} and said hello to( [A-Za-z,]+)*"


@pytest.fixture(scope="module")
def stories(shared_data):
    return LLM(str(shared_data / "models/stories260K"), dtype="float32", num_threads=1, deterministic=True)


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("name", proposer_names())
@pytest.mark.parametrize("options", PROPOSED.values(), ids=PROPOSED)
def test_a_proposer_changes_no_output(name, adaptive, options, stories, monkeypatch):
    grammar = {"structured_outputs": StructuredOutputsParams(regex=FORCING)} if name == "forced" else {}
    params = SamplingParams(max_tokens=100, **options, **grammar)
    prompts = [STORY, STORY[:3], [1, 360, 266], STORY]
    scheduler = stories.engine.loop.scheduler
    plain = stories.generate(prompts, params, use_tqdm=False)
    strategy = real_strategy(name, adaptive)
    monkeypatch.setattr(scheduler, "strategy", strategy)
    expected = [output.outputs[0].text.replace("a", "e", 3) for output in plain] if name == "prediction" else None
    drafted = stories.generate(prompts, params, prediction=expected, use_tqdm=False)
    assert completions(drafted) == completions(plain)
    assert [output.prompt_logprobs for output in drafted] == [output.prompt_logprobs for output in plain]
    check_cache(scheduler.cache, {})
    counts = strategy.drafts()[name]
    assert counts.num_accepted_tokens == sum(counts.num_accepted_per_position) <= counts.num_draft_tokens
    if not adaptive and "min_tokens" not in options:
        assert counts.num_accepted_tokens > 0


@pytest.mark.parametrize("name", proposer_names())
@pytest.mark.parametrize(
    "options", [{"block_size": 8}, {"block_size": 32, "kv_dtype": "int8"}, {"max_num_batched_tokens": 5}]
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe", *RECURRENT])
def test_a_proposer_changes_no_output_whatever_the_memory(family, options, name, tmp_path, monkeypatch):
    if family == "deepseek_v3" and "kv_dtype" in options:
        pytest.skip("latents are not kept as int8")
    model = build(family, 3, tmp_path)
    sizes = {"block_size": 4, "max_num_batched_tokens": 24} | options
    sizes |= {"max_model_len": 64, "max_num_seqs": 4, "num_threads": 1, "deterministic": True}
    prompts = [row.tolist() for row in model.prompt(9, batch=3)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    off = LLM(str(tmp_path), dtype="float32", **sizes)
    plain = completions(off.generate(prompts, params, use_tqdm=False))
    llm = LLM(str(tmp_path), dtype="float32", **sizes, speculate=name, num_speculative_tokens=6)
    assert completions(llm.generate(prompts, params, use_tqdm=False)) == plain
    monkeypatch.setattr(llm.engine.loop.scheduler, "strategy", real_strategy(name, adaptive=False, num_tokens=6))
    assert completions(llm.generate(prompts, params, use_tqdm=False)) == plain
    assert completions(generate_with_preemption(llm, prompts, params)) == plain
    check_cache(llm.engine.loop.scheduler.cache, {})


class Random(Drafting):
    """Guesses any number of tokens, none as well, the first of them right as often as not."""

    def __init__(self, outputs, max_tokens):
        self.outputs, self.max_tokens, self.random = outputs, max_tokens, random.Random(7)

    def draft(self, view, max_tokens):
        num_output = len(view.token_ids) - len(view.request.prompt_ids)
        known = next(tokens for prompt, tokens in self.outputs if prompt == list(view.request.prompt_ids))
        guess = list(known[num_output : num_output + self.random.randint(0, min(self.max_tokens, max_tokens))])
        if guess and self.random.random() < 0.7:
            guess[self.random.randrange(len(guess))] = 0
        return guess


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_state_keeps_what_was_right(family, backend, options, tmp_path, monkeypatch):
    """Any number of drafts, none in between, over checkpoints and chunks; a second turn goes on from the cache."""
    model = build(family, 3, tmp_path)
    sizes = {"block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 96} | options
    sizes |= {"max_num_seqs": 4, "num_threads": 2, "deterministic": backend == "native", "backend": backend}
    monkeypatch.setattr(recurrent_groups, "DECODE_CHECKPOINT_TOKENS", 16)
    llm = LLM(str(tmp_path), dtype="float32", speculate="prediction", num_speculative_tokens=5, **sizes)
    prompts = [row.tolist() for row in model.prompt(9, batch=3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = LLM(str(tmp_path), dtype="float32", **sizes).generate(prompts, params, use_tqdm=False)
    scheduler = llm.engine.loop.scheduler
    known = [(prompt, output.outputs[0].token_ids) for prompt, output in zip(prompts, plain)]
    monkeypatch.setattr(scheduler, "strategy", Random(known, 5))
    drafted = llm.generate(prompts, params, use_tqdm=False)
    assert scheduler.stats().num_steps < 60
    assert completions(drafted) == completions(plain)
    check_cache(scheduler.cache, {})
    turns = [[*prompt, *tokens] for prompt, tokens in known]
    again = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    monkeypatch.setattr(scheduler, "strategy", Autoregressive())
    second = llm.generate(turns, again, use_tqdm=False)
    if "enable_prefix_caching" not in options:
        assert all(output.num_cached_tokens >= 16 for output in second), "no checkpoint of the drafted output"
    llm.engine.loop.scheduler.cache.reset_prefix_cache()
    assert completions(second) == completions(llm.generate(turns, again, use_tqdm=False))


def test_models_without_a_log_take_predictions_and_no_drafts(tmp_path):
    """A recurrent state has a log where drafts are asked for; without it nothing of the cache is larger."""
    build("mamba2", 3, tmp_path)
    options = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 1 << 20}
    off, auto = LLM(str(tmp_path), **options), LLM(str(tmp_path), speculate="auto", **options)
    assert off.engine.loop.stats().drafts is None
    assert auto.engine.loop.stats().drafts is not None
    (states,), (with_log,) = (llm.engine.layout.groups for llm in (off, auto))
    assert states.max_logged == 0 < with_log.max_logged == 9
    assert states.bytes_per_sequence == sum(state.num_bytes for state in off.engine.program.states)
    assert with_log.bytes_per_sequence > states.bytes_per_sequence


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2}])
def test_a_prediction_saves_steps_though_speculation_is_off(options, shared_data):
    llm = LLM(
        str(shared_data / "models/stories260K"),
        dtype="float32",
        num_threads=1,
        deterministic=True,
        adaptive_speculation=False,
    )
    assert llm.engine.loop.scheduler.strategy.one_token
    params = SamplingParams(max_tokens=80, **options)
    plain = llm.generate([STORY], params, use_tqdm=False)
    steps = llm.engine.loop.scheduler.stats().num_steps
    edited = plain[0].outputs[0].text.replace(" was ", " is ")
    predicted = llm.generate([STORY], params, prediction=edited, use_tqdm=False)
    assert completions(predicted) == completions(plain)
    num_steps = llm.engine.loop.scheduler.stats().num_steps - steps
    assert num_steps < 80 - 10 / options.get("n", 1)
    drafted = predicted[0].outputs[0].timings.drafted
    assert (
        drafted.predicted
        == drafted.verified
        >= drafted.accepted
        == drafted.predicted_accepted
        > 40 / options.get("n", 1)
    )
    off = SamplingParams(max_tokens=80, speculation=SpeculationParams(enabled=False), **options)
    assert completions(llm.generate([STORY], off, prediction=edited, use_tqdm=False)) == completions(plain)
    assert llm.engine.loop.scheduler.stats().num_steps - steps - num_steps >= 80
