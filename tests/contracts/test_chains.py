"""A drafter's steps in one native call: the drafts, and what they were sampled from, are those of a step at a time."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import oracle_heads
import pytest
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.weights.folder import ModelFolder

pytestmark = [
    pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="the native backend is not built"),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 5, "draft_quantize": "none"}
FAMILIES = ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe"]
EAGLE = "eagle"
PREDICTORS = {"mtp of deepseek_v3": ("deepseek_v3", 16), "mtp of qwen3_next": ("qwen3_next", 1)}
REJECTS = {"draft_sample_method": "probabilistic", "deterministic": False}


def speculate(model, drafter, folder):
    if drafter in PREDICTORS:
        return "mtp"
    if drafter != EAGLE:
        return f"draft:{model.folder.path}"
    head = oracle_heads.Eagle(model, 3, (0, 1, len(model.spec.layers) - 1), "midlayer.")
    return f"eagle:{head.write(folder)}"


def recorded(model, drafting, params, *, chained, **options):
    """(what was drafted in each round, the outputs, how many rounds were one call)."""
    llm = LLM(str(model.folder.path), **TINY | FIXED | options, speculate=drafting)
    strategy, drafter, found, calls = llm.engine.loop.scheduler.strategy, drafter_of(llm), [], []
    strategy._by_rule = lambda rule, view: rule in strategy._rules and not view.request.params.greedy  # seeded ones too
    draft, chain = drafter.draft, drafter._companion.chain

    def recording(asked, max_catch_up):
        drafts = draft(asked, max_catch_up)
        found.append({key: (list(one.token_ids), [*one.weights]) for key, one in drafts.items()})
        return drafts

    def counted(*args, **more):
        chained = chain(*args, **more)
        calls.append(chained is not None)
        return chained

    drafter.draft, drafter._companion.chain = recording, counted if chained else None
    outputs = llm.generate(prompts_of(model, len(params)), params, use_tqdm=False)
    check_cache(drafter._cache)
    return found, [output.outputs[0].token_ids for output in outputs], sum(calls)


def tokens_of(drafts):
    return {key: tokens for key, (tokens, _) in drafts.items()}


def some_params(**others):
    """Drafts of several lengths in a round: outputs end at different places."""
    return [SamplingParams(max_tokens=n, ignore_eos=True, seed=n, **others) for n in (9, 30, 17, 24)]


@pytest.mark.parametrize("options", [{}, {"block_size": 16}, REJECTS], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, EAGLE, *PREDICTORS])
def test_a_chain_drafts_what_single_steps_draft(family, options, tmp_path):
    model = build(*PREDICTORS.get(family, ("llama" if family == EAGLE else family, 3)), tmp_path / "target")
    drafting = speculate(model, family, tmp_path)
    if family in PREDICTORS:
        model = replace(model, folder=ModelFolder.open(oracle_heads.Predictor(model).write(tmp_path / "both")))
    for params in (some_params(temperature=0), some_params(temperature=0.9, top_p=0.95)):
        found, outputs, num_chains = recorded(model, drafting, params, chained=True, **options)
        expected, plain, _ = recorded(model, drafting, params, chained=False, **options)
        assert num_chains > 3
        assert [tokens_of(one) for one in found] == [tokens_of(one) for one in expected]
        for one, other in zip(found, expected):
            for key, (_, weights) in one.items():
                for chained, single in zip(weights, other[key][1], strict=True):
                    assert np.allclose(chained, single, rtol=2**-20, atol=1)  # the last bit of exp
        assert outputs == plain
        assert len({len(tokens) for one in found for tokens, _ in one.values()}) > 1
        told = any(weights for one in found for _, weights in one.values())
        assert told == ("draft_sample_method" in options and params[0].temperature > 0)


def test_rows_that_are_not_sampled_natively_take_a_step_at_a_time(tmp_path):
    model = build("llama", 3, tmp_path)
    params = some_params(temperature=0.9, repetition_penalty=1.2)
    found, _, num_chains = recorded(model, speculate(model, "llama", tmp_path), params, chained=True)
    assert num_chains == 0
    assert any(tokens for one in found for tokens, _ in one.values())


def test_a_chain_beyond_its_blocks_is_refused(tmp_path):
    model = build("llama", 3, tmp_path)
    llm = LLM(str(model.folder.path), **TINY | FIXED, speculate=speculate(model, "llama", tmp_path))
    drafter, raised = drafter_of(llm), []
    chain = drafter._companion.chain

    def too_long(plan, lengths, *, tells):
        with pytest.raises(ValueError, match="beyond its blocks"):
            chain(plan, [1000 for _ in lengths], tells=tells)
        raised.append(True)
        return

    drafter._companion.chain = too_long
    llm.generate(prompts_of(model, 1), SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    assert raised
