"""A parallel draft model: one step drafts what the model says behind mask tokens, and changes no output."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from test_drafts_in_the_engine import assert_same_outputs
from test_heads import FIXED, GREEDY, recorded
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from planting import World
from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculative_config import speculation_options
from ridgeline.explain.rounds import break_even

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
MODELS = [("llama", 3), ("gemma3_text", 1), ("qwen3_moe", 2)]
MASK = 7


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared_data):
    return World(tmp_path_factory.mktemp("parallel"), shared_data)


def with_mask(model, folder, **keys):
    """The model as one that was trained to draft in parallel: its config names a mask token."""
    shutil.copytree(model.folder.path, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return str(folder)


def pair(world, family, seed):
    """(a tiny model, and the folder of the same one as a parallel draft model)."""
    model = world.once((family, seed), lambda: build(family, seed, world.folder / f"{family}-{seed}"))
    draft = world.folder / f"{family}-{seed}-parallel"
    return model, with_mask(model, draft, pard_token=MASK, spd_type="pard")


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_a_step_drafts_what_the_model_says_behind_masks(family, seed, key, world, tmp_path):
    model, _ = pair(world, family, seed)
    llm = LLM(
        str(model.folder.path), **TINY, speculate=f"parallel:{with_mask(model, tmp_path, **{key: MASK})}", **FIXED
    )
    found = recorded(llm)
    llm.generate(prompts_of(model), GREEDY, use_tqdm=False)
    assert max(len(drafted) for _, drafted in found) == 3
    for token_ids, drafted in found[::4]:
        masked = torch.tensor([[*token_ids, *[MASK] * (len(drafted) - 1)]])
        with torch.no_grad():
            logits = model.oracle(masked, use_cache=False).logits[0, -len(drafted) :]
        assert list(drafted) == logits.argmax(-1).tolist()
    assert len(found) > 20


def test_a_draft_is_one_step(world):
    model, draft = pair(world, *MODELS[0])
    llm = LLM(str(model.folder.path), **TINY, speculate=f"parallel:{draft}", **FIXED)
    drafter, plans, rounds = drafter_of(llm), [], recorded(llm)
    compute = drafter._companion.compute
    drafter._companion.compute = lambda plan: (plans.append(plan), compute(plan))[1]
    llm.generate(prompts_of(model, 1), GREEDY, use_tqdm=False)
    assert rounds
    assert len(plans) == len(rounds)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 5}], ids=["", "chunked"])
@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_it_changes_no_output(family, seed, options, world):
    """Alone, batched, in chunks, from cached prefixes, preempted; greedy and seeded, with several outputs."""
    model, draft = pair(world, family, seed)
    folder = str(model.folder.path)
    llm, plain = LLM(folder, **TINY | FIXED | options, speculate=f"parallel:{draft}"), LLM(folder, **TINY)
    assert_same_outputs(llm, plain, prompts_of(model))
    stats = llm.engine.loop.scheduler.strategy.drafts()["parallel"]
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens > 0  # its first token is the target's own
    cache = drafter_of(llm)._cache
    check_cache(cache, {})
    assert all(group.used == 0 for group in cache.stats().groups)


def test_drafts_that_are_verified_by_rejection_tell_what_each_token_is_from(world):
    model, draft = pair(world, *MODELS[0])
    rejects = {"draft_sample_method": "probabilistic", "deterministic": False}
    llm = LLM(str(model.folder.path), **TINY | FIXED | rejects, speculate=f"parallel:{draft}")
    drafter, found = drafter_of(llm), []
    one_draft = drafter.draft

    def recording(asked, max_catch_up):
        drafts = one_draft(asked, max_catch_up)
        found.extend((list(r.view.token_ids), drafts[r.view.seq_id]) for r in asked if r.view.seq_id in drafts)
        return drafts

    drafter.draft = recording
    llm.generate(prompts_of(model), SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True), use_tqdm=False)
    for token_ids, drafted in found[::4]:
        masked = torch.tensor([[*token_ids, *[MASK] * (len(drafted.token_ids) - 1)]])
        with torch.no_grad():
            logits = model.oracle(masked, use_cache=False).logits[0, -len(drafted.token_ids) :]
        for weights_V, row in zip(drafted.weights, logits, strict=True):
            told = torch.tensor(weights_V, dtype=torch.float64)
            assert torch.allclose(told / told.sum(), torch.softmax(row.double() / 0.7, -1), atol=2e-5)
    assert len(found) > 10


def test_a_draft_costs_about_a_step_however_long_it_is(world):
    model, draft = pair(world, *MODELS[0])
    rounds = {}
    for kind in ("parallel", "draft"):
        config = EngineConfig.of(str(model.folder.path), speculate=f"{kind}:{draft}")
        found = [r for r in break_even(config, "this", 12)[1] if (r.weights, r.batch) == ("as stored", 1)]
        rounds[kind] = {r.drafts: r.ratio for r in found}
    assert rounds["parallel"][1] == pytest.approx(rounds["draft"][1], rel=0.1)
    assert rounds["parallel"][8] < rounds["draft"][8] - 3


def test_a_model_without_a_mask_is_refused(world, tmp_path):
    model, _ = pair(world, *MODELS[0])
    folder = str(model.folder.path)
    with pytest.raises(ConfigError, match="not trained to draft in parallel"):
        LLM(folder, **TINY, speculate=f"parallel:{folder}")
    for mask in (-1, 10**6, "7", True):
        with pytest.raises(ConfigError, match="pard_token"):
            LLM(folder, **TINY, speculate=f"parallel:{with_mask(model, tmp_path, pard_token=mask)}")


def test_vllms_key_asks_for_it():
    drafted = speculation_options({"method": "draft_model", "model": "small", "parallel_drafting": True})
    assert drafted == {"speculate": "parallel:small"}
    drafted = speculation_options({"model": "small", "parallel_drafting": False})
    assert drafted == {"speculate": "draft:small"}
    for wrong in ({"method": "eagle3", "model": "head"}, {"method": "ngram"}):
        with pytest.raises(ConfigError, match="parallel_drafting"):
            speculation_options(wrong | {"parallel_drafting": True})
    with pytest.raises(ConfigError, match="parallel_drafting"):
        speculation_options({"model": "small", "parallel_drafting": "yes"})
