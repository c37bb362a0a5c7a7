"""A draft model through the real engine: no output changes, both caches stay sound, and a good drafter is believed."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafts_in_the_engine import PROPOSED, STORY, completions
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, prompts_of
from families import tiny_config
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.decoding.model_drafts import MAX_FAILURES
from ridgeline.weights.folder import BUNDLED_MODELS

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)


def noisy(source, folder, amount):
    """A copy of a model that agrees with it more often than not."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for file in Path(folder).glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * amount
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def drafter_of(llm):
    """The draft model of an engine."""
    return llm.engine.loop.scheduler.strategy._model.drafter


def drafts_of(llm):
    """(drafted, accepted) tokens since the start."""
    stats = llm.engine.loop.scheduler.strategy.drafts()["draft"]
    return stats.num_draft_tokens, stats.num_accepted_tokens


def check_caches(llm):
    """Nothing is held once all requests have ended."""
    drafter = drafter_of(llm)
    assert not drafter._residents
    assert not drafter._silent
    for cache in (llm.engine.loop.scheduler.cache, drafter._cache):
        check_cache(cache, {})
        assert all(group.used == 0 for group in cache.stats().groups)


def drafts_for_itself(folder, max_tokens, **options):
    """Three prompts, their parameters, what comes of them without drafts, and an engine whose model drafts too."""
    model = build("llama", 3, folder)
    prompts = [row.tolist() for row in model.prompt(9, batch=3)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    plain = completions(LLM(str(folder), **TINY).generate(prompts, params, use_tqdm=False))
    return prompts, params, plain, LLM(str(folder), **TINY | options, speculate=f"draft:{folder}", **FIXED)


@pytest.fixture(scope="module")
def stories(shared_data, tmp_path_factory):
    """(plain, drafting with a fixed length, drafting as it pays), the draft model being a noisy copy."""
    target = str(shared_data / "models/stories260K")
    draft = noisy(target, tmp_path_factory.mktemp("draft"), 0.1)
    common = {"dtype": "float32", "num_threads": 1, "deterministic": True, "max_num_seqs": 8}
    speculate = {"speculate": f"draft:{draft}", "num_speculative_tokens": 4}
    return (
        LLM(target, **common),
        LLM(target, **common, **speculate, adaptive_speculation=False),
        LLM(target, **common, **speculate),
    )


@pytest.mark.parametrize("options", PROPOSED.values(), ids=PROPOSED)
def test_a_draft_model_changes_no_output(options, stories):
    params = SamplingParams(max_tokens=60, **options)
    prompts = [STORY, STORY[:3], [1, 360, 266], STORY]
    plain, *drafting = stories
    expected = plain.generate(prompts, params, use_tqdm=False)
    for llm in drafting:
        before = drafts_of(llm)
        found = llm.generate(prompts, params, use_tqdm=False)
        assert completions(found) == completions(expected)
        assert [output.prompt_logprobs for output in found] == [output.prompt_logprobs for output in expected]
        check_caches(llm)
    drafted, accepted = (now - then for now, then in zip(drafts_of(drafting[0]), before, strict=True))
    if llm is drafting[0]:
        assert 0 < accepted < drafted


def test_a_draft_model_is_right_at_times(stories):
    drafted, accepted = drafts_of(stories[1])
    assert 0.2 * drafted < accepted < drafted


def test_requests_without_a_seed_are_verified_by_rejection_unless_they_are_to_match(shared_data, tmp_path):
    """More is accepted than by `match`; seeded and greedy requests keep their outputs, as does deterministic mode."""
    target = str(shared_data / "models/stories260K")
    draft = noisy(target, tmp_path, 0.15)
    common = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    speculate = {"speculate": f"draft:{draft}", "num_speculative_tokens": 3, "adaptive_speculation": False}
    matches = {"draft_sample_method": "match"}
    prompts = [STORY, STORY[:3], [1, 360, 266]]
    rates, outputs = [], []
    for options in (matches, {}, {"deterministic": True}):
        llm = LLM(target, **common, **speculate, **options)
        unseeded = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True)
        outputs.append([completions(llm.generate(prompts, unseeded, use_tqdm=False))])
        drafted, accepted = drafts_of(llm)
        rates.append(accepted / drafted)
        for params in (
            SamplingParams(max_tokens=40, temperature=0.9, seed=3),
            SamplingParams(max_tokens=40, temperature=0),
        ):
            outputs[-1].append([tokens for tokens, *_ in completions(llm.generate(prompts, params, use_tqdm=False))])
        check_caches(llm)
    matched, rejected, deterministic = outputs
    assert rejected[0] != matched[0] == deterministic[0]
    assert rejected[1:] == matched[1:] == deterministic[1:]
    assert rates[1] > rates[0] + 0.02


FAMILIES = ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe"]
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 5, "draft_quantize": "none"}


@pytest.mark.parametrize(
    "options", [{}, {"kv_dtype": "int8", "block_size": 32}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_itself_drafts_what_it_will_say(family, options, tmp_path):
    """So positions, random numbers and keys and values of a draft are those of the text, whatever memory there is."""
    if family == "deepseek_v3" and "kv_dtype" in options:
        pytest.skip("latents are not kept as int8")
    model = build(family, 3, tmp_path)
    sizes = TINY | options
    prompts = [row.tolist() for row in model.prompt(9, batch=3)]
    plain, drafting = LLM(str(tmp_path), **sizes), LLM(str(tmp_path), **sizes, speculate=f"draft:{tmp_path}", **FIXED)
    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
        expected = completions(plain.generate(prompts, params, use_tqdm=False))
        assert completions(drafting.generate(prompts, params, use_tqdm=False)) == expected
        drafted, accepted = drafts_of(drafting)
        assert drafted == accepted > (30 if family == "llama" else 3)  # others declare 24 tokens
        check_caches(drafting)


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_sequences_and_lost_blocks_change_no_output(family, one_round, tmp_path):
    model = build(family, 3, tmp_path / "target")
    draft = noisy(tmp_path / "target", tmp_path / "draft", 0.05)
    prompts = [row.tolist() for row in model.prompt(9, batch=3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = completions(LLM(str(tmp_path / "target"), **TINY).generate(prompts, params, use_tqdm=False))
    drafting = LLM(str(tmp_path / "target"), **TINY, speculate=f"draft:{draft}", **FIXED)
    assert completions(generate_with_preemption(drafting, prompts, params)) == plain
    check_caches(drafting)
    drafter = drafter_of(drafting)
    draft_once, rounds = drafter.draft, []

    def losing(asked, max_catch_up):
        rounds.append(len(asked))
        if len(rounds) % 3 == 0:
            drafter._evict(set())
        return draft_once(asked, max_catch_up)

    drafter.draft = losing
    assert completions(drafting.generate(prompts, params, use_tqdm=False)) == plain
    assert len(rounds) > 3
    check_caches(drafting)


def test_a_cache_for_few_sequences_drafts_for_few(tmp_path):
    """The draft model's cache holds one sequence: the others go on without, and it changes hands when one has ended."""
    prompts, params, plain, drafting = drafts_for_itself(tmp_path, 40)
    drafter = drafter_of(drafting)
    cache = drafter._cache
    held = [cache._pools[0].allocate() for _ in range(cache.num_free_blocks()[0] - 16)]
    assert completions(drafting.generate(prompts, params, use_tqdm=False)) == plain
    assert len(held) > 16
    drafted, accepted = drafts_of(drafting)
    assert drafted == accepted > 20


def test_a_full_batch_is_drafted_for(tmp_path):
    """Rows of drafts are beside one row for each sequence."""
    prompts, params, plain, drafting = drafts_for_itself(tmp_path, 20, max_num_seqs=3)
    assert completions(drafting.generate(prompts, params, use_tqdm=False)) == plain
    drafted, accepted = drafts_of(drafting)
    assert drafted == accepted > 20


def test_a_prompt_is_not_delayed_and_its_draft_model_catches_up_in_chunks(tmp_path):
    build("llama", 3, tmp_path)
    prompt = [3 + i % 50 for i in range(50)]
    drafting = LLM(str(tmp_path), **TINY | {"max_num_batched_tokens": 16}, speculate=f"draft:{tmp_path}", **FIXED)
    companion = drafter_of(drafting)._companion
    sizes, first = [], []
    compute = companion.compute

    def watched(plan):
        sizes.append(plan.num_tokens)
        if not first:
            first.extend(drafting.engine.loop.scheduler.running()[0].token_ids[len(prompt) :])
        return compute(plan)

    companion.compute, companion.chain = watched, None
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    drafting.generate([prompt], params, use_tqdm=False)
    assert len(first) == 1, "the draft model computed before the first token was out"
    assert max(sizes) <= 16
    assert sum(size > 1 for size in sizes[:5]) >= 3


def test_a_second_request_finds_its_prefix_in_the_draft_models_cache(tmp_path):
    build("llama", 3, tmp_path)
    drafting = LLM(str(tmp_path), **TINY, speculate=f"draft:{tmp_path}", **FIXED)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for _ in range(2):
        drafting.generate([[3 + i % 50 for i in range(40)]], params, use_tqdm=False)
    assert drafter_of(drafting)._cache.stats().prefix_hit_tokens >= 36


def test_a_failing_draft_model_harms_no_request_and_is_left_alone(tmp_path):
    prompts, params, plain, drafting = drafts_for_itself(tmp_path, 30)
    companion, calls = drafter_of(drafting)._companion, []
    compute = companion.compute

    def failing(plan):
        calls.append(1)
        if len(calls) % 4 == 0 or len(calls) > 20:
            raise MemoryError("planted")
        return compute(plan)

    companion.compute, companion.chain = failing, None
    assert completions(drafting.generate(prompts, params, use_tqdm=False)) == plain
    num_calls = len(calls)
    assert num_calls > 4 + MAX_FAILURES
    assert completions(drafting.generate(prompts, params, use_tqdm=False)) == plain
    assert len(calls) < num_calls + 4 * MAX_FAILURES
    check_caches(drafting)


def test_beyond_the_draft_models_context_there_are_no_drafts(tmp_path):
    model = build("llama", 3, tmp_path / "target")
    shutil.copytree(tmp_path / "target", tmp_path / "draft")
    config = json.loads((tmp_path / "draft/config.json").read_text()) | {"max_position_embeddings": 24}
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    (prompt,) = [row.tolist() for row in model.prompt(9, batch=1)]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    (plain,) = LLM(str(tmp_path / "target"), **TINY).generate([prompt], params, use_tqdm=False)
    drafting = LLM(str(tmp_path / "target"), **TINY, speculate=f"draft:{tmp_path / 'draft'}", **FIXED)
    (found,) = drafting.generate([prompt], params, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert 0 < drafts_of(drafting)[0] <= 24 - 9
    choice = drafting.engine.info.choices["draft_max_model_len"]
    assert (choice.value, choice.reason) == ("24", "no drafts for what is longer")


def test_both_caches_hold_as_many_tokens_of_what_was_asked_for(tmp_path):
    build("llama", 3, tmp_path)
    drafting = LLM(str(tmp_path), **TINY, speculate=f"draft:{tmp_path}", kv_cache_bytes=1 << 20)
    own, draft = drafting.engine.layout, drafter_of(drafting)._cache.layout
    assert own.groups[0].num_blocks == draft.groups[0].num_blocks
    assert own.total_bytes + draft.total_bytes <= 1 << 20


def test_tokens_that_the_draft_model_lacks_silence_it_for_their_sequence(tmp_path):
    """A longer table at either side is fine: ids beyond the shorter one are neither computed nor drafted."""
    prompts, params, plain, drafting = drafts_for_itself(tmp_path, 30)
    companion = drafter_of(drafting)._companion
    largest = max(max(prompts[1]), max(plain[1][0]))
    companion.vocab_size = largest  # one less than the second sequence uses
    assert completions(drafting.generate(prompts, params, use_tqdm=False)) == plain
    check_caches(drafting)


@pytest.mark.parametrize("rejects", [False, True])
def test_tokens_that_the_model_lacks_are_never_drafted(rejects, one_round, tmp_path):
    """Padding at the end of the draft model's vocabulary, here likelier than most tokens, is not verified."""
    folder = tmp_path / "padded"
    shutil.copytree(BUNDLED_MODELS / "python-1m", folder)
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"]
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([table, 1.02 * table[200:264]])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size + 64}))
    options = {"max_model_len": 128, "num_threads": 1, "deterministic": not rejects}
    method = {"draft_sample_method": "probabilistic"} if rejects else {}
    drafting = LLM("python-1m", **options, **method, **FIXED, speculate=f"draft:{folder}")
    drafter, sampled, drafted = drafter_of(drafting), [], []
    compute, draft = drafter._companion.compute, drafter.draft

    def computing(plan):
        result = compute(plan)
        sampled.extend(token.token_id for token in result.samples)
        return result

    def watched(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        drafted.extend(token for one in drafts.values() for token in one.token_ids)
        assert all(len(weights_V) <= size for one in drafts.values() for weights_V in one.weights)
        return drafts

    drafter._companion.compute, drafter._companion.chain, drafter.draft = computing, None, watched
    prompts = ["def read(path):", "class Stack:", "import os"]
    params = SamplingParams(temperature=1.0, seed=None if rejects else 1, max_tokens=60, ignore_eos=True)
    outputs = drafting.generate(prompts, params, use_tqdm=False)
    assert max(sampled) >= size > max(drafted)
    assert drafting.engine.loop.scheduler.strategy._model.failures == 0
    assert [len(output.outputs[0].token_ids) for output in outputs] == [60] * 3
    if not rejects:
        plain = LLM("python-1m", **options).generate(prompts, params, use_tqdm=False)
        assert completions(outputs) == completions(plain)


@pytest.mark.parametrize(("family", "seed"), [("qwen3_next", 1), ("jamba", 3)])
def test_recurrent_states_take_back_what_a_draft_model_got_wrong(family, seed, tmp_path):
    """A model of attention drafts at random: nearly every span is cut after its first token."""
    model = build(family, seed, tmp_path / family)
    size = model.spec.vocab_size
    build("llama", next(s for s in range(99) if tiny_config("llama", s)["vocab_size"] == size), tmp_path / "llama")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = LLM(str(tmp_path / family), **TINY).generate(prompts_of(model), params, use_tqdm=False)
    fixed = {"adaptive_speculation": False, "num_speculative_tokens": 3}
    drafting = LLM(str(tmp_path / family), **TINY, **fixed, speculate=f"draft:{tmp_path / 'llama'}")
    drafted = drafting.generate(prompts_of(model), params, use_tqdm=False)
    assert completions(drafted) == completions(plain)
    assert drafts_of(drafting)[0] > 30
    check_caches(drafting)


def test_models_that_do_not_fit_together_are_refused_by_name(tmp_path, shared_data):
    build("llama", 3, tmp_path / "llama")
    build("mamba2", 3, tmp_path / "mamba2")
    llama, mamba, story = (str(path) for path in (tmp_path / "llama", tmp_path / "mamba2", "python-1m"))
    for target, draft, message in (
        (mamba, llama, "cannot verify drafts of draft:.*its layers are all recurrent"),
        (llama, mamba, "cannot draft"),
        (str(shared_data / "models/stories260K"), story, "python-1m cannot draft for .*: token 0 is .* need the same"),
        (llama, str(tmp_path / "nowhere"), "nowhere"),
        (llama, story, "no tokenizers to compare"),
    ):
        with pytest.raises((ConfigError, ModelLoadError), match=message) as caught:
            LLM(target, dtype="float32", num_threads=1, speculate=f"draft:{draft}")
        assert "\n" not in str(caught.value)
    for speculate, message in (
        ("draft", "draft lacks its model; write draft:MODEL"),
        ("ngram:python-1m", "ngram needs no model"),
        ("draft:a,draft:b", "name one"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(llama, speculate=speculate)


def test_what_drafts_takes_few_bits_and_changes_no_output():
    """By itself 8 bits; the model's own scheme where it has one, and none where that is asked for."""
    params, prompts = SamplingParams(temperature=0, max_tokens=24), ["def read_lines(path):", "class Stack:"]
    options = {"max_model_len": 128, "num_threads": 1, "deterministic": True}
    plain = completions(LLM("python-9m", **options).generate(prompts, params, use_tqdm=False))
    sizes = {}
    for scheme in ("none", "auto", "int8", "int4"):
        llm = LLM("python-9m", **options, speculate="draft:python-1m", draft_quantize=scheme)
        assert completions(llm.generate(prompts, params, use_tqdm=False)) == plain
        sizes[scheme] = llm.engine.info.choices["draft_model"].reason
    weight_bytes = {
        scheme: int(re.search(r"([\d,]+) bytes", each)[1].replace(",", "")) for scheme, each in sizes.items()
    }
    assert weight_bytes["none"] > 1.5 * weight_bytes["auto"] == 1.5 * weight_bytes["int8"] > weight_bytes["int4"]
    with pytest.raises(ConfigError, match=r"draft_quantize must be one of auto, none, .*int8.*, got 'int3'"):
        LLM("python-9m", speculate="draft:python-1m", draft_quantize="int3")
