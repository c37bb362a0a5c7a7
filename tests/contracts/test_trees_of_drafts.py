"""Trees of drafts through the real engine: the same tokens, whatever memory the model has."""

from importlib.util import find_spec

import pytest
from test_drafts_in_the_engine import completions
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, TreeOracle, known_outputs, prompts_of, verified
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.spec import families

pytestmark = pytest.mark.skipif(
    find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
)
NOT_AUTOREGRESSIVE = {"llada", "bert", "roberta", "xlm_roberta"}
FAMILIES = sorted(set(families.names()) - NOT_AUTOREGRESSIVE)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 4, "top_p": 0.95},
    "processors": {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_p": 0.02},
    "logprobs": {"temperature": 0.9, "seed": 2, "logprobs": 5},
    "n": {"temperature": 0.9, "seed": 3, "n": 3},
}


def on_is_off(model, prompts, params, max_draft_tokens=12, **options):
    """Compare outputs without drafts with those of trees: batched, preempted, from cached prefixes."""
    options = TINY | {"max_num_batched_tokens": 64} | options
    expected, known = known_outputs(LLM(model, **options), prompts, params)
    llm = LLM(model, **options, speculate="prediction", num_speculative_tokens=max_draft_tokens)  # room in the cache
    strategy = verified(llm, known, max_draft_tokens, oracle=TreeOracle)
    scheduler, branched, plan = llm.engine.loop.scheduler, [], llm.engine.loop.scheduler.plan

    def watched():
        planned = plan()
        branched.extend(span for span in (planned.spans if planned else ()) if span.parents)
        return planned

    scheduler.plan = watched
    assert completions(llm.generate(prompts, params, use_tqdm=False)) == completions(expected)
    assert completions(llm.generate(prompts, params, use_tqdm=False)) == completions(expected)
    assert completions(generate_with_preemption(llm, prompts, params)) == completions(expected)
    check_cache(scheduler.cache, {})
    assert all(group.used == 0 for group in scheduler.stats().cache.groups)
    counts = strategy.drafts()["oracle"]
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    return branched


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_changes_no_output_of_any_family(family, tmp_path):
    model = build(family, 3, tmp_path)
    branched = on_is_off(str(tmp_path), prompts_of(model), GREEDY)
    assert bool(branched) == (not any(type(state).__name__ == "RecurrentState" for state in model.lowered(64).states))


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_tree_changes_no_output_whatever_the_cache(family, kv_dtype, block_size, tmp_path):
    model = build(family, 3, tmp_path)
    assert on_is_off(str(tmp_path), prompts_of(model), GREEDY, block_size=block_size, kv_dtype=kv_dtype)


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
def test_a_tree_changes_no_output_however_it_is_sampled(sampling, tmp_path):
    model = build("llama", 3, tmp_path)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={3: 0.5}, **sampling)
    assert on_is_off(str(tmp_path), prompts_of(model), params)
