"""Heads and predictors over every kind of model and memory, with drafts that are right as often as not: on is off.

A random head is seldom right, so what it drafts is replaced by what will come, or by something else, where it is
sampled: its states and its cache are what its own drafts would make of them.
"""

import random
from collections import Counter
from importlib.util import find_spec

import oracle_heads
import pytest
from test_pitfalls_of_outputs import adapted
from tiny_models import build

import ridgeline.cache.groups.recurrent as recurrent_groups
from cache_invariants import check_cache
from drafting import TINY, Known, drafter_of, known_outputs, prompts_of
from planting import World
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.decoding.drafters.medusa import Medusa
from ridgeline.decoding.trees import KNOWN
from ridgeline.explain.rounds import BATCHES, break_even

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 4, "draft_quantize": "none"}
MODELS = [  # full, sliding, latent, experts; recurrent states beside attention
    ("llama", 3), ("gemma3_text", 1), ("gemma3_text", 2), ("deepseek_v3", 3), ("qwen3_moe", 2),
    ("qwen3_next", 1), ("jamba", 3), ("nemotron_h", 1), ("bamba", 2),
]  # fmt: skip
PREDICTING = [("deepseek_v3", 3), ("deepseek_v3", 16), ("qwen3_next", 1), ("qwen3_next", 19)]
HEADS = [(*model, kind) for model in MODELS for kind in ("eagle", "medusa")]
HEADS += [(*model, "mtp") for model in PREDICTING]
SAMPLING = {
    "greedy": {"temperature": 0, "logprobs": 5},
    "processors": {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}, "min_p": 0.02},
    "n": {"temperature": 0.9, "seed": 4, "n": 3, "top_p": 0.9, "logprobs": 1},
    "min_tokens": {"temperature": 0, "min_tokens": 12, "stop_token_ids": list(range(0, 90, 7))},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared_data):
    return World(tmp_path_factory.mktemp("heads"), shared_data)


def completions(outputs):
    return [(list(c.token_ids), c.text, c.finish_reason, c.logprobs) for o in outputs for c in o.outputs]


def model_of(world, family, seed):
    return world.once((family, seed), lambda: build(family, seed, world.folder / f"{family}-{seed}"))


def head_of(world, kind, model, name):
    """A head's folder, in the form of `--speculate`."""
    if kind == "mtp":
        return kind
    head = oracle_heads.Medusa(model, "paper", 4) if kind == "medusa" else oracle_heads.Eagle(model, 1, ())
    return f"{kind}:{world.once((kind, name), lambda: head.write(world.folder / f'{kind}-{name}'))}"


def folder_of(world, kind, model, name):
    """The model's folder: for a predictor one that has it."""
    if kind != "mtp":
        return str(model.folder.path)
    predictor = oracle_heads.Predictor(model)
    return str(world.once((kind, name), lambda: predictor.write(world.folder / f"mtp-{name}")))


def often_right(llm, known):
    """Replace what a head samples by what will come, as often as not."""
    drafter, vocab_size = drafter_of(llm), llm.engine.spec.vocab_size

    def said(view, num_output):
        place = random.Random(f"{num_output} {Known.key(view)}")
        text = known.of(view)
        is_right = place.random() < 0.7 and num_output < len(text)
        return text[num_output] if is_right else place.randrange(vocab_size)

    if isinstance(drafter, Medusa):
        draft = drafter.draft

        def replaced(asked, max_catch_up):
            drafts = draft(asked, max_catch_up)
            for request in [request for request in asked if request.view.seq_id in drafts]:
                done = len(request.view.token_ids) - len(request.view.request.prompt_ids)
                tree, depths, siblings = drafts[request.view.seq_id], {KNOWN: 0}, Counter()
                for index, parent in enumerate(tree.parents):  # of one place no two are alike, and one may be right
                    depths[index] = depths[parent] + 1
                    first = said(request.view, done + depths[parent])
                    tree.token_ids[index] = (first + siblings[parent]) % vocab_size
                    siblings[parent] += 1
            return drafts

        drafter.draft = replaced
        return
    run, chain_of = drafter._run, {}
    compute = drafter._companion.compute

    def watched(spans, copies, chains, *more):
        chain_of.update({chain.view.seq_id: chain for chain in chains})
        return run(spans, copies, chains, *more)

    def computed(plan):
        result = compute(plan)
        tokens = [
            token._replace(token_id=said(chain_of[row.seq_id].view, row.num_output))
            for token, row in zip(result.samples, plan.samples, strict=True)
        ]
        return result._replace(samples=tuple(tokens))

    drafter._run, drafter._companion.compute, drafter._companion.chain = watched, computed, None


def drafting(model, speculate, known, **options):
    llm = LLM(model, **TINY | FIXED | {"speculate": speculate} | options)
    often_right(llm, known)
    return llm


def assert_drafted(llm, method):
    """Some drafts were right and some wrong, and nothing of them is left."""
    scheduler, drafter = llm.engine.loop.scheduler, drafter_of(llm)
    stats = scheduler.strategy.drafts()[method]
    assert 0.1 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert scheduler.strategy._model.failures == 0
    assert not drafter._hidden
    for cache in (scheduler.cache, drafter._companion.cache):
        check_cache(cache, {})
        assert all(group.used == 0 for group in cache.stats().groups)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}, {"kv_dtype": "int8", "block_size": 32}],
    ids=["", "chunked", "int8 KV"],
)
@pytest.mark.parametrize(("family", "seed", "kind"), HEADS)
def test_a_head_changes_no_output(family, seed, options, kind, world, monkeypatch):
    """Alone and batched, from cached prefixes and preempted with drafts in flight, checkpoints every 16 tokens."""
    if family == "deepseek_v3" and "kv_dtype" in options:
        pytest.skip("latents are not kept as int8")
    monkeypatch.setattr(recurrent_groups, "DECODE_CHECKPOINT_TOKENS", 16)
    model = model_of(world, family, seed)
    folder, prompts = folder_of(world, kind, model, f"{family}-{seed}"), prompts_of(model)
    speculate = head_of(world, kind, model, f"{family}-{seed}")
    plain = LLM(folder, **TINY | options)
    for sampling in SAMPLING.values() if not options else list(SAMPLING.values())[:2]:
        params = SamplingParams(max_tokens=30, **{"ignore_eos": True} | sampling)
        off, known = known_outputs(plain, prompts, params)
        llm = drafting(folder, speculate, known, **options)
        assert completions(llm.generate(prompts, params, use_tqdm=False)) == completions(off)
        assert completions(llm.generate(prompts[:1], params, use_tqdm=False)) == completions(off[:1])
        if params.n == 1 and "min_tokens" not in sampling:
            assert completions(generate_with_preemption(llm, prompts, params)) == completions(off)
        assert_drafted(llm, kind)


@pytest.mark.parametrize(
    ("family", "seed", "kind"),
    [head for head in HEADS if head[:2] in [("llama", 3), ("gemma3_text", 1), ("jamba", 3), ("qwen3_next", 1)]]
    + [("deepseek_v3", 16, "mtp")],
)
def test_a_second_turn_finds_what_it_finds_without_a_head(family, seed, kind, world, monkeypatch):
    """Prefix hits are as long; the head has no hidden states of them, and drafts from the text behind."""
    monkeypatch.setattr(recurrent_groups, "DECODE_CHECKPOINT_TOKENS", 8)
    model = model_of(world, family, seed)
    folder = folder_of(world, kind, model, f"{family}-{seed}")
    first = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    plain = LLM(folder, **TINY)
    off, known = known_outputs(plain, prompts_of(model), first)
    turns = [[*prompt, *o.outputs[0].token_ids, 5, 6] for prompt, o in zip(prompts_of(model), off)]
    plain = LLM(folder, **TINY)  # its cache has the first turn alone
    plain.generate(prompts_of(model), first, use_tqdm=False)
    second = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = plain.generate(turns, second, use_tqdm=False)
    for turn, output in zip(turns, expected):
        known.outputs[tuple(turn), 0, 0] = list(output.outputs[0].token_ids)
    llm = drafting(folder, head_of(world, kind, model, f"{family}-{seed}"), known)
    assert completions(llm.generate(prompts_of(model), first, use_tqdm=False)) == completions(off)
    found = llm.generate(turns, second, use_tqdm=False)
    assert completions(found) == completions(expected)
    assert [o.num_cached_tokens for o in found] == [o.num_cached_tokens for o in expected]
    assert all(o.num_cached_tokens >= 16 for o in found)
    assert_drafted(llm, kind)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_rows_of_adapters_beside_a_head(kind, world):
    """The head is not adapted, the rows that verify it are."""
    folder, adapters = world.once("adapters", lambda: adapted(world))
    model = world.once("tiny", lambda: None)
    names, params = ["a", None, "b"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    off, known = known_outputs(LLM(folder, **TINY, adapters=adapters), prompts_of(model), params, adapter=names)
    llm = drafting(folder, head_of(world, kind, model, "adapted"), known, adapters=adapters)
    assert completions(llm.generate(prompts_of(model), params, adapter=names, use_tqdm=False)) == completions(off)
    assert_drafted(llm, kind)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_stop_string_inside_accepted_tokens(kind, world):
    """What a step brought behind it is in no output, no count and no log-probability."""
    folder, prompts = world.shared_data / "models/stories260K", [[1, 403, 407, 261, 378], [1, 403, 407]]
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 128}
    plain = LLM(str(folder), **TINY | sizes)
    whole = plain.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    words = whole[0].outputs[0].text.split()
    source = type("Sizes", (), {"spec": plain.engine.spec})
    for stop, shown in ((f"{words[7]} {words[8]}", False), (whole[0].outputs[0].text[40:47], True)):
        params = SamplingParams(
            temperature=0, max_tokens=60, stop=stop, include_stop_str_in_output=shown, logprobs=2, ignore_eos=True
        )
        off, known = known_outputs(plain, prompts, params)
        llm = drafting(str(folder), head_of(world, kind, source, "stories"), known, **sizes)
        assert completions(llm.generate(prompts, params, use_tqdm=False)) == completions(off)
        _, records = llm.engine.loop.journal.outputs.read()
        assert sorted(records["num_output"].tolist()) == sorted(len(o.outputs[0].token_ids) for o in off)
        assert_drafted(llm, kind)


def test_a_head_without_its_own_output_head_shares_that_of_a_model_whose_embedding_is_tied(world):
    """It drafts what a plain implementation drafts with that table."""
    model = model_of(world, "qwen3", 1)
    assert model.spec.head.tied
    speculate = head_of(world, "eagle", model, "qwen3-1")
    llm = LLM(str(model.folder.path), **TINY | FIXED | {"speculate": speculate})
    head = oracle_heads.Eagle(model, 1, ())
    assert "lm_head.weight" not in head.t
    drafter, wrong, count = drafter_of(llm), [], []
    draft = drafter.draft

    def compared(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        for view in [request.view for request in asked if request.view.seq_id in drafts]:
            drafted = list(drafts[view.seq_id].token_ids)
            count.append(1)
            if drafted != head.greedy(view.token_ids, len(drafted)):
                wrong.append(view.token_ids)
        return drafts

    drafter.draft = compared
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(str(model.folder.path), **TINY).generate(prompts_of(model), params, use_tqdm=False)
    assert completions(llm.generate(prompts_of(model), params, use_tqdm=False)) == completions(plain)
    assert not wrong
    assert len(count) > 20


def test_what_heads_cost_is_in_the_price_of_a_round(world):
    """An EAGLE head is computed for every drafted token, Medusa heads once, and no draft is longer than there are."""
    model = model_of(world, "llama", 3)
    rounds = {}
    for speculate in ("ngram", *(head_of(world, kind, model, "llama-3") for kind in ("eagle", "medusa"))):
        _, found = break_even(EngineConfig.of(str(model.folder.path), speculate=speculate), "this", 32)
        rounds[speculate.partition(":")[0]] = {(r.drafts, r.batch): r.ratio for r in found if r.weights == "as stored"}
    assert max(drafts for drafts, _ in rounds["medusa"]) == 4
    for batch in BATCHES:
        eagle, medusa = (
            [rounds[kind][drafts, batch] - rounds["ngram"][drafts, batch] for drafts in (1, 2, 4)]
            for kind in ("eagle", "medusa")
        )
        assert eagle[2] - eagle[1] == pytest.approx(2 * (eagle[1] - eagle[0])) and eagle[1] > eagle[0] > 0
        assert medusa == pytest.approx([medusa[0]] * 3) and medusa[0] > 0
