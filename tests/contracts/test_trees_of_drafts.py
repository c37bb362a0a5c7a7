"""Trees of drafts through the real engine: the same tokens, whatever memory the model has."""

import random
from importlib.util import find_spec
from itertools import product
from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_drafts_in_the_engine import completions
from test_pitfalls_of_outputs import adapted, tiny
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, Known, TreeOracle, known_outputs, prompts_of, verified
from planting import World
from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.backends.probe import find_native
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import EngineConfig
from ridgeline.core.params import StructuredOutputsParams
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import SampledToken, Span
from ridgeline.decoding.proposers.lookahead import Lookahead, _Window
from ridgeline.decoding.trees import KNOWN, best_ways, tree_of, with_tree
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


def on_is_off(model, prompts, params, max_draft_tokens=12, *, preempts=True, **options):
    """Compare outputs without drafts with those of trees: batched, from cached prefixes, preempted."""
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
    if preempts:
        assert completions(generate_with_preemption(llm, prompts, params)) == completions(expected)
    check_cache(scheduler.cache, {})
    assert all(group.used == 0 for group in scheduler.stats().cache.groups)
    counts = strategy.drafts()["oracle"]
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    return branched


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared_data):
    return World(tmp_path_factory.mktemp("trees"), shared_data)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512bf16"])
def test_a_tree_changes_no_output_at_any_level(isa, dtype, tmp_path):
    """Also where threads share the heads of few tokens, and the experts of a mixture."""
    if isa not in find_native().module.runnable_levels():
        pytest.skip(f"this machine does not run {isa}")
    for family in ("gemma3_text", "deepseek_v3"):
        model = build(family, 3, tmp_path / family)
        options = {"isa": isa, "dtype": dtype, "num_threads": 2}
        assert on_is_off(str(tmp_path / family), prompts_of(model), GREEDY, preempts=False, **options)


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
def test_a_tree_changes_no_output_however_it_is_sampled(sampling, tmp_path):
    model = build("llama", 3, tmp_path)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={3: 0.5}, **sampling)
    assert on_is_off(str(tmp_path), prompts_of(model), params)


def test_a_tree_is_cut_where_the_grammar_forbids_it_and_goes_on_elsewhere():
    options = {"max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 4, "deterministic": True}
    plain = LLM("python-1m", **options)
    rule = StructuredOutputsParams(regex=r"(ab|c){2,5}\.[0-9]{3}")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, structured_outputs=rule)
    scheduler, known = plain.engine.loop.scheduler, Known()
    scheduler.strategy = known
    expected = plain.generate(["def f(x):", "x = {"], params, use_tqdm=False)
    strategy = verified(plain, known, 12, oracle=TreeOracle)
    assert completions(plain.generate(["def f(x):", "x = {"], params, use_tqdm=False)) == completions(expected)
    assert strategy.drafts()["oracle"].num_accepted_tokens > 0


def test_rows_of_a_tree_have_the_adapter_of_their_sequence(world):
    folder, adapters = adapted(world)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 3
    options = TINY | {"adapters": adapters, "max_num_batched_tokens": 64}
    model = tiny(world)
    given = {"adapter": ["a", "b", None]}
    off, known = known_outputs(LLM(folder, **options), prompts_of(model), params, **given)
    llm = LLM(folder, **options)
    strategy = verified(llm, known, 12, oracle=TreeOracle)
    assert completions(llm.generate(prompts_of(model), params, use_tqdm=False, **given)) == completions(off)
    assert strategy.drafts()["oracle"].num_accepted_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_both_backends_compute_a_tree_alike(family, tmp_path):
    """Random trees over the same text: the reference's logits, the same tokens."""
    model = build(family, 3, tmp_path)
    found = []
    for backend in ("native", "reference"):
        options = TINY | {"max_num_batched_tokens": 64, "backend": backend, "deterministic": backend == "native"}
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
        _, known = known_outputs(LLM(str(tmp_path), **options), prompts_of(model), params)
        llm = LLM(str(tmp_path), **options)
        strategy = verified(llm, known, 12, oracle=TreeOracle)
        found.append(llm.generate(prompts_of(model), params, use_tqdm=False))
        assert strategy.drafts()["oracle"].num_accepted_tokens > 0
    for one, other in zip(*found, strict=True):
        ours, theirs = (output.outputs[0].logprobs for output in (one, other))
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
        assert [e.logprob for e in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-4)


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 9, "max_num_seqs": 5}, {"enable_prefix_caching": False}, {"max_num_seqs": 2}]
)
def test_a_tree_without_room_is_shortened(options, tmp_path):
    model = build("llama", 3, tmp_path)
    on_is_off(str(tmp_path), prompts_of(model), GREEDY, preempts=False, **options)


def test_where_blocks_lack_the_first_branch_is_left(tmp_path, monkeypatch):
    model = build("llama", 3, tmp_path)
    turns = random.Random(1)
    branch = CacheManager.branch
    monkeypatch.setattr(
        CacheManager, "branch", lambda self, *given: None if turns.random() < 0.5 else branch(self, *given)
    )
    assert on_is_off(str(tmp_path), prompts_of(model), GREEDY)


WAYS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6)


@given(ways=WAYS, seed=st.integers(0, 2**16))
def test_a_tree_has_every_way_once_and_stays_one_however_it_is_cut(ways, seed):
    token_ids, parents = tree_of(ways)
    found = ways_of(token_ids, parents)
    assert sorted(found.values()) == sorted({tuple(way[: end + 1]) for way in ways for end in range(len(way))})
    span = with_tree(Span(0, 7, [9], 1), token_ids, parents)
    while span.num_optional:
        assert span.depths() == [0, *(len(way) for way in ways_of(span.token_ids[1:], parents_of(span)).values())]
        assert span.end == 8 + max(span.depths()[1:])
        joined = [span.token_ids[i] for b in span.branches() for i in range(b.begin, b.end)]
        assert joined == list(span.token_ids)
        for begin, end, before in span.branches():
            assert [*before, *range(begin, end)][-1] == end - 1
            assert span.depths()[begin] == len(before)
            assert all(span.depths()[i] == span.depths()[i - 1] + 1 for i in range(begin + 1, end))
        span = span.shortened(1)


def ways_of(token_ids, parents):
    """The tokens on the way to each token of a tree, by its index."""
    found = {KNOWN: ()}
    for index, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        assert parent < index
        found[index] = (*found[parent], token)
    del found[KNOWN]
    return found


def parents_of(span):
    known = span.num_tokens - span.num_optional
    return [parent - known for parent in span.parents] if span.parents else range(-1, span.num_optional - 1)


@given(
    chances=st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), min_size=1, max_size=3),
    count=st.integers(1, 12),
)
def test_the_best_ways_are_the_likeliest_and_none_lacks_its_parent(chances, count):
    chances = [sorted(ranks, reverse=True) for ranks in chances]
    every = {}
    for depth in range(1, len(chances) + 1):
        for way in product(*(range(len(ranks)) for ranks in chances[:depth])):
            every[way] = prod(chances[at][rank] for at, rank in enumerate(way))
    found = best_ways(chances, count)
    assert [value for value, _ in found] == pytest.approx(sorted(every.values(), reverse=True)[:count])
    for index, (_, way) in enumerate(found):
        assert len(way) == 1 or way[:-1] in [before for _, before in found[:index]]


def test_lookahead_drafts_what_the_model_has_made(tmp_path):
    """Its n-grams are accepted, it has them from the model alone, and nothing is left of a sequence that has ended."""
    model = build("llama", 3, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    plain = LLM(str(tmp_path), **TINY)
    options = {"adaptive_speculation": False, "num_speculative_tokens": 16, "lookahead_ngram": 3}
    llm = LLM(str(tmp_path), **TINY | {"max_num_batched_tokens": 64}, speculate="lookahead", **options)
    expected = completions(plain.generate(prompts_of(model), params, use_tqdm=False))
    assert completions(llm.generate(prompts_of(model), params, use_tqdm=False)) == expected
    strategy = llm.engine.loop.scheduler.strategy
    assert strategy.drafts()["lookahead"].num_accepted_tokens > 5
    assert not strategy._proposers["lookahead"]._windows


def test_lookahead_takes_what_was_sampled_behind_its_columns():
    """By hand: two columns of two levels, one step, the n-grams of both, and the window a place on."""
    proposer = Lookahead(2, 2, 4)
    view = SimpleNamespace(seq_id=1, token_ids=[7, 8, 9])
    proposer._windows[1] = window = _Window([[1, 2], [3, 4]])
    draft = proposer.propose(view, 8)
    assert sorted(ways_of(draft.token_ids, draft.parents).values()) == [(1,), (1, 2), (1, 2, 4), (1, 3)]
    span = with_tree(Span(1, 2, [9], 1), draft.token_ids, draft.parents)
    behind = {(): 50, (1,): 51, (1, 3): 53, (1, 2): 52, (1, 2, 4): 54}
    ways = {-1: ()} | ways_of(draft.token_ids, draft.parents)
    sampled = [SampledToken(1, behind[ways[index - 1]]) for index in range(5)]
    proposer.observe(view, span, sampled)
    assert {first: list(rest) for first, rest in window.ngrams.items()} == {1: [(3, 53)], 2: [(4, 54)]}
    assert window.levels == [[3, 4], [53, 54]]
    view.token_ids.append(1)
    again = proposer.propose(view, 8)
    assert (3, 53) in ways_of(again.token_ids, again.parents).values()


def test_nobody_gets_lookahead_unasked():
    assert "lookahead" not in SpeculationConfig(speculate="auto").proposers()
    given = {"method": "lookahead", "num_speculative_tokens": 12, "lookahead_window": 3}
    config = EngineConfig.of("any", speculative_config=given)
    assert config.speculation.proposers() == ("lookahead",)
    assert config.speculation.lookahead_window == 3
