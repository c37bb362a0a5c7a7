"""Early exit: the first layers of a model draft what a model of these layers alone says, and change no output."""

import copy
from importlib.util import find_spec

import pytest
import torch
from test_drafts_in_the_engine import assert_same_outputs
from test_heads import FIXED, GREEDY, recorded
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from planting import World
from ridgeline import LLM
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.explain.rounds import break_even

pytestmark = [
    pytest.mark.skipif(
        find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
    ),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
MODELS = [("llama", 3), ("gemma3_text", 1), ("deepseek_v3", 14), ("qwen3_moe", 2)]  # full, sliding, latent, experts


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared_data):
    return World(tmp_path_factory.mktemp("early-exit"), shared_data)


def model_of(world, family, seed):
    return world.once((family, seed), lambda: build(family, seed, world.folder / f"{family}-{seed}"))


def first_layers(model, count):
    """transformers' model of the first layers, the final norm and the head."""
    cut = copy.deepcopy(model.oracle)
    cut.model.layers = cut.model.layers[:count]
    cut.config.num_hidden_layers = cut.model.config.num_hidden_layers = count
    return cut


@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_the_first_layers_draft_what_a_model_of_them_says(family, seed, world):
    model = model_of(world, family, seed)
    count = model.config["num_hidden_layers"] - 1
    assert count > 0
    llm = LLM(str(model.folder.path), **TINY, speculate=f"early-exit:{count}", **FIXED)
    found = recorded(llm)
    llm.generate(prompts_of(model), GREEDY, use_tqdm=False)
    assert max(len(drafted) for _, drafted in found) == 3
    cut = first_layers(model, count)
    for token_ids, drafted in found[::4]:
        text = list(token_ids)
        for token_id in drafted:
            with torch.no_grad():
                logits = cut(torch.tensor([text]), use_cache=False).logits[0, -1]
            assert token_id == int(logits.argmax())
            text.append(token_id)
    assert len(found) > 20


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 5}], ids=["", "chunked"])
@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_it_changes_no_output(family, seed, options, world):
    """Alone, batched, in chunks, from cached prefixes, preempted; greedy and seeded, with several outputs."""
    model = model_of(world, family, seed)
    folder = str(model.folder.path)
    llm, plain = LLM(folder, **TINY | FIXED | options, speculate="early-exit:1"), LLM(folder, **TINY)
    assert_same_outputs(llm, plain, prompts_of(model))
    stats = llm.engine.loop.scheduler.strategy.drafts()["early-exit"]
    assert stats.num_draft_tokens > 0
    cache = drafter_of(llm)._companion.cache
    check_cache(cache, {})
    assert all(group.used == 0 for group in cache.stats().groups)


def test_a_step_of_fewer_layers_costs_less(world):
    folder = str(model_of(world, "llama", 3).folder.path)
    rounds = {}
    for speculate in ("ngram", "early-exit:1"):
        found = break_even(EngineConfig.of(folder, speculate=speculate), "this", 12)[1]
        rounds[speculate] = next(r.ratio for r in found if (r.weights, r.batch, r.drafts) == ("as stored", 1, 1))
    assert 0 < rounds["early-exit:1"] - rounds["ngram"] < 1


@pytest.mark.parametrize("count", ["", "0", "-1", "two", "1.5", "99"])
def test_a_number_of_layers_that_cannot_draft_is_refused(count, world):
    folder = str(model_of(world, "llama", 3).folder.path)
    with pytest.raises(ConfigError, match=r"early-exit.*(layers draft, fewer than all|lacks its model)"):
        LLM(folder, **TINY, speculate=f"early-exit:{count}")


def test_recurrent_layers_cannot_draft(world):
    model = model_of(world, "jamba", 3)
    with pytest.raises(ConfigError, match="recurrent"):
        LLM(str(model.folder.path), **TINY, speculate=f"early-exit:{model.config['num_hidden_layers'] - 1}")
