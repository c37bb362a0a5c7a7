"""Rounds of drafting and verifying in one native call: what comes of them is what comes of a round at a time."""

from importlib.util import find_spec
from itertools import cycle

import oracle_heads
import pytest
from test_chains import speculate
from test_draft_models import noisy
from test_heads import recorded
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, drafter_of, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.decoding import model_drafts
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.drafters import draft as drafting_by_model
from ridgeline.decoding.strategies import speculative
from ridgeline.engine.journal import timed_steps

pytestmark = pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="the native backend is not built")
FIXED = {"adaptive_speculation": False, "num_speculative_tokens": 3, "draft_quantize": "none"}
FAMILIES = ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe"]
CASES = [("llama", "early-exit"), *((family, drafter) for family in FAMILIES for drafter in ("draft", "eagle"))]
MANY = dict.fromkeys(("max_model_len", "max_num_batched_tokens"), 256)


@pytest.fixture
def at_most(monkeypatch):
    """How many rounds a step has, however long they take."""

    def set_most(most):
        monkeypatch.setattr(model_drafts, "MAX_ROUNDS", most)
        monkeypatch.setattr(model_drafts, "MAX_ROUNDS_S", 3600.0 if most > 1 else 1e-9)

    return set_most


def opened(model, drafter, folder, **options):
    drafts = "early-exit:2" if drafter == "early-exit" else speculate(model, drafter, folder)
    return LLM(str(model.folder.path), **TINY | MANY | FIXED | options, speculate=drafts)


def mixed_params(count, **others):
    """Greedy and sampled requests, of different lengths."""
    temperatures = [0.0, 0.7, 1.0]
    return [
        SamplingParams(temperature=temperatures[i % 3], seed=i, max_tokens=21 + 9 * i, ignore_eos=True, **others)
        for i in range(count)
    ]


def outcome(llm, prompts, params):
    """(tokens of each output, counts of drafts, rounds that each step had)."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    loop, drafter = llm.engine.loop, drafter_of(llm)
    check_cache(loop.scheduler.cache, {})
    check_cache(drafter._cache)
    tokens = [each.token_ids for output in outputs for each in output.outputs]
    return tokens, dict(loop.scheduler.strategy.drafts()), loop.journal.steps.read()[1]["num_rounds"].tolist()


@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_rounds_bring_what_steps_of_one_bring(family, drafter, at_most, tmp_path):
    """One request, whose drafts are the very same ones, and several, of which one ends earlier than another."""
    model = build(family, 3, tmp_path / "model")
    for count in (1, 3):
        prompts, params = prompts_of(model, count), mixed_params(count)
        plain = LLM(str(model.folder.path), **TINY | MANY)
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
        found = []
        for most in (1, 5):
            at_most(most)
            found.append(outcome(opened(model, drafter, tmp_path / "head"), prompts, params))
        (tokens, stats, alone), (together, stats_again, rounds) = found
        assert tokens == together == expected
        assert max(alone) == 1 < max(rounds) <= 5
        assert count > 1 or stats == stats_again


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_rounds_reject_what_steps_of_one_do(family, drafter, at_most, tmp_path):
    """Without a seed all random numbers are those of their places: the same drafts are accepted, and the same tokens
    come in place of the others. The head has half of the model's tokens."""
    model = build(family, 3, tmp_path / "model")
    drafts = speculate(model, drafter, tmp_path / "head")
    options = TINY | MANY | FIXED | {"deterministic": False, "draft_sample_method": "probabilistic"}
    for count in (1, 2):
        params = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=90, ignore_eos=True)] * count
        found = []
        for most in (1, 6):
            at_most(most)
            llm = LLM(str(model.folder.path), **options, speculate=drafts)
            strategy, weighed = llm.engine.loop.scheduler.strategy, []
            strategy.accept = counted(strategy.accept, strategy._drafts, weighed)
            found.append((*outcome(llm, prompts_of(model, count), params), weighed))
        (tokens, stats, alone, weighed), (together, stats_again, rounds, _) = found
        assert tokens == together and stats == stats_again
        assert max(alone) == 1 < max(rounds) <= 6
        assert any(weighed), "drafts told what they were sampled from"
        each = stats[drafter]
        assert 0 < each.num_accepted_tokens <= each.num_draft_tokens
        assert drafter == "draft" or each.num_accepted_tokens < each.num_draft_tokens  # that one is the model itself


def test_distributions_that_are_too_large_to_be_told_each_round_leave_steps_of_one(at_most, tmp_path, monkeypatch):
    model = build("llama", 3, tmp_path / "model")
    options = TINY | MANY | FIXED | {"deterministic": False, "draft_sample_method": "probabilistic"}
    monkeypatch.setattr(drafting_by_model, "MAX_TOLD", 3 * model.spec.vocab_size)
    at_most(6)
    for count, most in ((1, 6), (2, 1)):
        llm = LLM(str(model.folder.path), **options, speculate=speculate(model, "eagle", tmp_path / "head"))
        params = [SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)] * count
        *_, rounds = outcome(llm, prompts_of(model, count), params)
        assert max(rounds) <= most
        assert count > 1 or max(rounds) > 1


def counted(accept, drafts, weighed):
    def accepting(view, span, sampled):
        weighed.append(span.num_optional > 0 and len(drafts[view.seq_id].weights) > 0)
        return accept(view, span, sampled)

    return accepting


@pytest.mark.parametrize(
    "options", [{"kv_dtype": "int8"}, {"quantize": "int4"}, {"block_size": 16}, {"num_threads": 2}], ids=str
)
def test_rounds_over_other_memory(options, at_most, tmp_path):
    model = build("llama", 3, tmp_path / "model")
    prompts, params = prompts_of(model), mixed_params(3)
    expected = LLM(str(model.folder.path), **TINY | MANY | options).generate(prompts, params, use_tqdm=False)
    at_most(8)
    tokens, _, rounds = outcome(opened(model, "eagle", tmp_path / "head", **options), prompts, params)
    assert tokens == [output.outputs[0].token_ids for output in expected] and max(rounds) > 1


def test_a_token_that_stops_ends_its_rounds(at_most, tmp_path):
    """What is behind it is neither computed further nor heard of."""
    model = build("llama", 3, tmp_path / "model")
    prompt = prompts_of(model, 1)
    whole = LLM(str(model.folder.path), **TINY | MANY).generate(
        prompt, SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    token_ids = whole[0].outputs[0].token_ids
    at = next(i for i in range(9, 40) if token_ids[i] not in token_ids[:i])
    at_most(32)
    llm = opened(model, "draft", tmp_path / "head")
    stopping = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True, stop_token_ids=[token_ids[at]])
    tokens, stats, rounds = outcome(llm, prompt, stopping)
    assert tokens[0][:at] == token_ids[:at] and len(tokens[0]) <= at + 1
    assert stats["draft"].num_drafts <= at and sum(rounds) <= at + 2


def test_what_a_round_cannot_sample_is_a_step_of_one(at_most, tmp_path):
    model = build("llama", 3, tmp_path / "model")
    prompts = prompts_of(model)
    at_most(8)
    llm = opened(model, "draft", tmp_path / "head")
    plain = LLM(str(model.folder.path), **TINY | MANY)
    for others in ({"logprobs": 2}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3, 9]}):
        params = mixed_params(3, **others)
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
        tokens, _, rounds = outcome(llm, prompts, params)
        assert tokens == expected and set(rounds) == {1}


def test_a_message_ends_the_rounds(at_most, tmp_path, monkeypatch):
    """A request that comes meanwhile is in the next plan; a step that nobody waits for goes on."""
    model = build("llama", 3, tmp_path / "model")
    at_most(8)
    llm = opened(model, "draft", tmp_path / "head")
    executor, prompts, params = llm.engine.executor, prompts_of(model, 1), mixed_params(1)
    expected, _, rounds = outcome(llm, prompts, params)
    assert max(rounds) > 1
    calm = executor.hurry
    monkeypatch.setattr(executor, "hurry", lambda asked: calm(True))
    tokens, _, hurried = outcome(llm, prompts, params)
    assert tokens == expected and set(hurried[len(rounds) :]) == {1}


def test_blocks_that_lack_leave_one_round(at_most, tmp_path):
    """Whoever needs the blocks gets them, and all texts are as they are with room."""
    model = build("llama", 3, tmp_path / "model")
    prompts, params = prompts_of(model), mixed_params(3)
    expected = LLM(str(model.folder.path), **TINY | MANY).generate(prompts, params, use_tqdm=False)
    at_most(8)
    wide = opened(model, "draft", tmp_path / "head")
    per_block = wide.engine.layout.total_bytes // wide.engine.layout.groups[0].num_blocks
    few = opened(model, "draft", tmp_path / "head", max_model_len=64, kv_cache_bytes=40 * per_block)
    tokens, _, rounds = outcome(few, prompts, params)
    assert tokens == [output.outputs[0].token_ids for output in expected]
    assert few.engine.loop.scheduler.stats().num_preemptions > 0 and max(rounds) > 1


def test_who_waits_gets_blocks_before_rounds_do(at_most, tmp_path, monkeypatch):
    """A request for whose prompt there is room is admitted at once; rounds that did not come keep nothing."""
    model = build("llama", 3, tmp_path / "model")
    prompts = prompts_of(model, 2)
    at_most(30)
    wide = opened(model, "draft", tmp_path / "head", max_model_len=48)
    per_block = wide.engine.layout.total_bytes // wide.engine.layout.groups[0].num_blocks
    engine = opened(model, "draft", tmp_path / "head", max_model_len=48, kv_cache_bytes=26 * per_block).engine
    calm, cache = engine.executor.hurry, engine.loop.scheduler.cache
    monkeypatch.setattr(engine.executor, "hurry", lambda asked: calm(True))
    engine.loop.submit(engine.intake.request(prompts[0], SamplingParams(temperature=0, max_tokens=38, ignore_eos=True)))
    for _ in range(3):
        engine.loop.step()
    assert engine.loop.journal.spans.read()[1]["num_further"].tolist() == [0, 0, 29]
    assert cache.num_free_blocks() == (13 - 5,)
    engine.loop.submit(engine.intake.request(prompts[1], SamplingParams(max_tokens=2)))
    engine.loop.step()
    assert len(engine.loop.scheduler.running()) == 2
    monkeypatch.undo()
    while engine.loop.step():
        pass
    check_cache(cache, {})


def test_a_drafter_that_fails_within_a_step_leaves_plain_ones(at_most, tmp_path, monkeypatch):
    model = build("llama", 3, tmp_path / "model")
    at_most(8)
    llm = opened(model, "eagle", tmp_path / "head")
    prompts, params = prompts_of(model), mixed_params(3)
    expected, _, _ = outcome(llm, prompts, params)

    def broken(view, last):
        raise RuntimeError("no more")

    monkeypatch.setattr(drafter_of(llm), "went_on", broken)
    tokens, _, _ = outcome(llm, prompts, params)
    assert tokens == expected


def test_a_journal_of_rounds_is_replayed(at_most, tmp_path):
    from ridgeline.explain.replaying import replay

    model = build("llama", 3, tmp_path / "model")
    at_most(8)
    llm = opened(model, "draft", tmp_path / "head", journal=str(tmp_path / "journal"))
    _, _, rounds = outcome(llm, prompts_of(model), mixed_params(3))
    llm.engine.loop.close()
    found = replay(tmp_path / "journal")
    assert found.difference == "" and found.num_steps == len(rounds) and max(rounds) > 1


def test_rounds_are_timed_as_so_many_steps(at_most, tmp_path):
    model = build("llama", 3, tmp_path / "model")
    at_most(4)
    llm = opened(model, "draft", tmp_path / "head")
    outcome(llm, prompts_of(model, 1), mixed_params(1))
    journal = llm.engine.loop.journal
    steps = journal.steps.read()[1]
    spans = journal.spans.read()[1]
    several = spans[spans["num_further"] > 0]
    assert len(several) and set((several["num_tokens"] - several["num_further"]).tolist()) == {4}
    loads = [load for load, _, _ in timed_steps(steps, spans, 1)]
    expected = sum(sum(count for count, _ in load.spans) * rounds for load, rounds in zip(loads, steps["num_rounds"]))
    assert journal.totals().num_computed_tokens == expected


@pytest.mark.parametrize("options", [{}, {"block_size": 16}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rounds_of_lookups_bring_what_steps_of_one_bring(family, options, at_most, tmp_path):
    """Texts that go round, until they do not: what is looked up natively is what Python would look up."""
    model = build(family, 3, tmp_path / "model")
    sizes = TINY | MANY | {"adaptive_speculation": False, "num_speculative_tokens": 6} | options
    sizes["suffix_decoding_max_cached_requests"] = 0
    params = [SamplingParams(temperature=0, max_tokens=150 + 10 * i, ignore_eos=True) for i in range(3)]
    plain, prompts = LLM(str(model.folder.path), **TINY | MANY | options), prompts_of(model)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
    counts, rounds = [], []
    for most, count in ((1, 1), (8, 1), (8, 3)):
        at_most(most)
        llm = LLM(str(model.folder.path), **sizes, speculate="suffix")
        outputs = llm.generate(prompts[:count], params[:count], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected[:count]
        check_cache(llm.engine.loop.scheduler.cache, {})
        counts.append(llm.engine.loop.scheduler.strategy.drafts()["suffix"])
        rounds.append(max(llm.engine.loop.journal.steps.read()[1]["num_rounds"]))
    assert rounds[0] == 1 < rounds[1] <= 8
    assert counts[1].num_accepted_tokens > 60 and counts[0].num_accepted_tokens > 60


def test_lookups_end_where_most_of_a_draft_is_wrong(at_most, tmp_path, monkeypatch):
    """An index that says what does not come has one more round, not all."""
    model = build("llama", 3, tmp_path / "model")
    at_most(8)
    options = {"adaptive_speculation": False, "num_speculative_tokens": 6, "suffix_decoding_max_cached_requests": 0}
    llm = LLM(str(model.folder.path), **TINY | MANY | options, speculate="suffix")
    prompt, params = (
        [*prompts_of(model, 1)[0]] * 4,
        SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True),
    )
    llm.generate([prompt], params, use_tqdm=False)
    steps, stats = llm.engine.loop.journal.steps.read()[1], llm.engine.loop.scheduler.strategy.drafts()["suffix"]
    assert stats.num_draft_tokens > 3 * stats.num_accepted_tokens
    assert max(steps["num_rounds"]) <= 2


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_rounds_of_a_model_end_where_its_text_repeats_itself(drafter, at_most, tmp_path, monkeypatch):
    """So what is looked up is drafted next, and the index has of the rounds what it would have had of steps of one."""
    model = build("llama", 3, tmp_path / "model")
    options = TINY | MANY | {"suffix_decoding_max_cached_requests": 0, "num_speculative_tokens": 6}
    drafts = speculate(model, drafter, tmp_path / "head")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = LLM(str(model.folder.path), **TINY | MANY).generate(prompts_of(model, 1), params, use_tqdm=False)
    monkeypatch.setattr(DraftControl, "rests", lambda *_: False)
    monkeypatch.setattr(
        DraftControl, "choose", lambda _, count, survivals, *__, **___: [min(4, len(s)) for s in survivals]
    )
    found = []
    for least in (8, 1000):
        monkeypatch.setattr(model_drafts, "gains_more", lambda *given, **_: given[2].num_tokens >= least)  # noqa: B023
        monkeypatch.setattr(speculative, "gains_more", lambda _, view, guess, *__: guess.num_tokens >= 6)
        at_most(60)
        llm = LLM(str(model.folder.path), **options, speculate=f"suffix,{drafts}")
        proposer, looked = llm.engine.loop.scheduler.strategy._proposers["suffix"], []
        proposer.propose = beside_a_new_index(proposer, looked)
        outputs = llm.generate(prompts_of(model, 1), params, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
        assert looked and all(same for same in looked)
        check_cache(drafter_of(llm)._cache)
        found.append(llm.engine.loop.scheduler.strategy.drafts())
    ended, went_on = found
    assert ended["suffix"].num_accepted_tokens > went_on["suffix"].num_accepted_tokens
    assert 0 < ended[drafter].num_drafts < went_on[drafter].num_drafts


def test_a_head_has_the_hidden_states_of_what_was_looked_up(at_most, tmp_path, monkeypatch):
    """Lookups, of several rounds, and the head take turns: it drafts what a plain implementation drafts of all text."""
    model = build("llama", 3, tmp_path / "model")
    head = oracle_heads.Eagle(model, 3, (0, 1, len(model.spec.layers) - 1), "midlayer.")
    turns = cycle([True, False])
    monkeypatch.setattr(DraftControl, "rests", lambda *_: False)
    monkeypatch.setattr(
        DraftControl, "choose", lambda _, count, survivals, *__, **___: [min(4, len(s)) for s in survivals]
    )
    monkeypatch.setattr(model_drafts, "gains_more", lambda *_, **__: False)
    monkeypatch.setattr(speculative, "gains_more", lambda *_: next(turns))
    monkeypatch.setattr(speculative, "GROWING_ROUNDS", 8)
    at_most(5)
    options = (
        TINY
        | MANY
        | {"suffix_decoding_max_cached_requests": 0, "draft_quantize": "none", "enable_prefix_caching": False}
    )
    llm = LLM(str(model.folder.path), **options, speculate=f"suffix,eagle:{head.write(tmp_path / 'head')}")
    found = recorded(llm)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (180, 150)]
    for prompts in (prompts_of(model, 1), prompts_of(model, 2)):
        llm.generate(prompts, params[: len(prompts)], use_tqdm=False)
    strategy, rounds = llm.engine.loop.scheduler.strategy, llm.engine.loop.journal.steps.read()[1]["num_rounds"]
    assert strategy.drafts()["suffix"].num_accepted_tokens > 60 and max(rounds) == 5
    assert len(found) > 10
    for token_ids, drafted in found:
        assert drafted == head.greedy(token_ids, len(drafted))


REPEATING = [case for case in CASES if case not in {("gemma3_text", "draft"), ("deepseek_v3", "draft")}]  # their texts
LOOKED_UP = {"suffix_decoding_max_cached_requests": 0, "num_speculative_tokens": 6, "draft_quantize": "none"}


@pytest.fixture
def within(monkeypatch):
    """Rounds of a model that look up whatever matches, of which a draft has `longest` tokens at most."""

    def looks_up(longest, least=1):
        monkeypatch.setattr(DraftControl, "rests", lambda *_: False)
        monkeypatch.setattr(
            DraftControl, "choose", lambda _, count, survivals, *__, **___: [min(3, len(s)) for s in survivals]
        )
        monkeypatch.setattr(DraftControl, "best", lambda *_, **__: longest)
        monkeypatch.setattr(model_drafts, "MIN_LONGEST", 0)
        monkeypatch.setattr(model_drafts, "REPEATED", 1)
        monkeypatch.setattr(model_drafts, "gains_more", lambda *given, **_: given[2].num_tokens >= least)
        monkeypatch.setattr(speculative, "gains_more", lambda *_: False)

    return looks_up


@pytest.mark.parametrize("options", [{}, {"block_size": 16}, {"kv_dtype": "int8"}, {"num_threads": 2}], ids=str)
@pytest.mark.parametrize(("family", "drafter"), REPEATING)
def test_what_is_looked_up_amid_rounds_of_a_model_changes_no_token(family, drafter, options, at_most, within, tmp_path):
    """More tokens than the rounds' own, fewer and as many; texts that end within them; greedy and at a temperature."""
    if family == "deepseek_v3" and "kv_dtype" in options:
        pytest.skip("latents are not kept as int8")
    model = build(family, 3, tmp_path / "model")
    sizes = TINY | MANY | LOOKED_UP | options
    drafts = speculate(model, drafter, tmp_path / "head") if drafter != "early-exit" else "early-exit:2"
    plain = LLM(str(model.folder.path), **TINY | MANY | options)
    prompt, looked_up = [prompts_of(model, 1)[0] * 2], 0
    for longest, most, count in ((12, 60, 180), (2, 60, 97), (3, 7, 90)):
        at_most(most)
        within(longest)
        llm = LLM(str(model.folder.path), **sizes, speculate=f"suffix,{drafts}")
        for temperature in (0.0, 0.4):
            params = SamplingParams(temperature=temperature, seed=7, max_tokens=count, ignore_eos=True)
            expected = plain.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
            assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected
            check_cache(llm.engine.loop.scheduler.cache, {})
            check_cache(drafter_of(llm)._cache)
        stats = llm.engine.loop.scheduler.strategy.drafts()
        assert max(llm.engine.loop.journal.steps.read()[1]["num_rounds"]) <= most
        assert stats[drafter].num_drafts > 0
        looked_up += stats["suffix"].num_drafts
    assert looked_up > 5


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_a_drafter_has_what_was_looked_up_amid_its_rounds(drafter, at_most, within, tmp_path):
    """It drafts behind them what it drafts where it computed all text by itself."""
    model = build("llama", 3, tmp_path / "model")
    sizes = TINY | MANY | LOOKED_UP | {"enable_prefix_caching": False}
    drafts = speculate(model, drafter, tmp_path / "head")
    params = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    found = []
    for longest, most in ((12, 6), (5, 4), (0, 1)):
        at_most(most)
        within(longest, least=1 if longest else 1000)
        llm = LLM(str(model.folder.path), **sizes, speculate=f"suffix,{drafts}")
        made, draft = {}, drafter_of(llm).draft

        def drafting(asked, *rest, draft=draft, made=made):
            known = [tuple(request.view.token_ids) for request in asked]
            drafts = draft(asked, *rest)
            made.update(zip(known, [tuple(each.token_ids) for each in drafts.values()]))
            return drafts

        drafter_of(llm).draft = drafting
        llm.generate(prompts_of(model, 1), params, use_tqdm=False)
        found.append((made, llm.engine.loop.scheduler.strategy.drafts()["suffix"].num_accepted_tokens))
    (many, gained), (some, gained_again), (alone, nothing) = found
    assert min(gained, gained_again) > 30 and nothing == 0
    for made in (many, some):
        pairs = [zip(made[known], alone[known], strict=False) for known in made.keys() & alone.keys()]
        assert len(pairs) > 2 and all(one == other for pair in pairs for one, other in pair)


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_a_round_without_drafts_amid_a_models_changes_no_token(drafter, options, at, at_most, tmp_path, monkeypatch):
    """It comes amid them, or last; the drafter goes on behind it with the same drafts as where it computed all by
    itself."""
    model = build("llama", 3, tmp_path / "model")
    at_most(5)
    head = oracle_heads.Eagle(model, 3, (0, 1, len(model.spec.layers) - 1), "midlayer.")
    drafts = f"eagle:{head.write(tmp_path / 'head')}" if drafter == "eagle" else speculate(model, drafter, tmp_path)
    watched = model_drafts._watched
    monkeypatch.setattr(model_drafts, "_watched", lambda rounds, *rest: watched(rounds, *rest)._replace(plain_round=at))
    prompt = prompts_of(model, 1)
    for temperature in (0.0, 0.4):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=120, ignore_eos=True)
        plain = LLM(str(model.folder.path), **TINY | MANY | options)
        expected = plain.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        llm, landed = LLM(str(model.folder.path), **TINY | MANY | FIXED | options, speculate=drafts), []
        strategy = llm.engine.loop.scheduler.strategy
        observe = strategy.observe

        def observing(plan, result, seconds, landed=landed, observe=observe):
            landed.append((plan.spans, result, seconds))
            observe(plan, result, seconds)

        strategy.observe = observing
        tokens, stats, rounds = outcome(llm, prompt, params)
        assert tokens == [expected] and max(rounds) == 5
        text, compared = [*prompt[0], *expected], 0
        for spans, result, seconds in landed:
            behind = [span for span, _ in next(iter(result.further.values()), ())]
            if len(behind) < at:
                continue
            assert [span.num_optional > 0 for span in behind] == [index != at - 1 for index in range(len(behind))]
            assert 0 < result.plain_s < result.rounds_s <= seconds
            assert result.drafted(seconds)[0] == len(behind)
            for span in (*spans, *behind):
                drafted = [each for each in span.token_ids[1:] if each >= 0]
                if drafter == "eagle" and temperature == 0 and not options and drafted:
                    assert drafted == head.greedy(text[: span.start + 1], len(drafted))
                    compared += 1
        assert compared > 10 or drafter == "draft" or temperature or options
        each = stats[drafter]
        assert drafter == "eagle" or each.num_accepted_tokens > 0.9 * each.num_draft_tokens  # that one is the model


def test_times_of_lookups_are_not_those_of_a_models_rounds(at_most, within, tmp_path):
    model = build("llama", 3, tmp_path / "model")
    at_most(60)
    within(12)
    drafts = speculate(model, "eagle", tmp_path / "head")
    llm = LLM(str(model.folder.path), **TINY | MANY | LOOKED_UP, speculate=f"suffix,{drafts}")
    strategy, landed = llm.engine.loop.scheduler.strategy, []
    observe = strategy.observe

    def observing(plan, result, seconds):
        landed.append((result, seconds, [span.matched for span, _ in next(iter(result.further.values()), ())]))
        observe(plan, result, seconds)

    strategy.observe = observing
    llm.generate(prompts_of(model, 1), SamplingParams(temperature=0, max_tokens=180, ignore_eos=True), use_tqdm=False)
    several = [each for each in landed if each[0].lookups.num_steps]
    assert several
    rows = sum(len(result.samples) for result, *_ in landed)  # of each step's first round
    for result, *_ in landed:
        rows += sum(span.num_tokens for span, _ in next(iter(result.further.values()), ()))
    assert llm.engine.loop.journal.totals().num_sampled_tokens == rows
    for result, seconds, matched in several:
        assert result.lookups.num_steps == sum(each > 0 for each in matched) < result.num_rounds == 1 + len(matched)
        assert 0 < result.lookups.seconds < result.rounds_s <= seconds
        count, round_s = result.drafted(seconds)
        assert count == result.num_rounds - result.lookups.num_steps - (result.plain_s > 0)
        assert round_s == pytest.approx((result.rounds_s - result.lookups.seconds - result.plain_s) / count)
        assert result.lookups.num_drafted == sum(
            span.num_optional for span, _ in next(iter(result.further.values())) if span.matched > 0
        )


def beside_a_new_index(proposer, looked):
    """`propose`, after which `looked` has whether an index of the text as it is finds the same."""
    propose, limits = proposer.propose, (24, proposer._factor, proposer._min_probability)

    def proposing(view, max_tokens):
        draft = propose(view, max_tokens)
        index = proposer._index(proposer._lengths, 2**16)
        index.extend(list(view.token_ids))
        looked.append(index.find_own(*limits) == proposer._texts[view.seq_id].find_own(*limits))
        return draft

    return proposing


def test_nothing_is_planned_ahead_of_drafts_beside_who_was_admitted(tmp_path, monkeypatch):
    """The control rests where two run, which it has not seen yet, as one of them has a draft in flight."""
    model = build("llama", 3, tmp_path / "model")
    options = {"adaptive_speculation": True, "num_speculative_tokens": 4, "num_threads": 2}
    llm = opened(model, "draft", tmp_path / "head", **options)
    engine, prompts, params = llm.engine, prompts_of(model, 2), mixed_params(2)
    plain = LLM(str(model.folder.path), **TINY | MANY)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
    found, drafted = {}, False
    monkeypatch.setattr(DraftControl, "rests", lambda _, count: count > 1)
    monkeypatch.setattr(DraftControl, "choose", lambda _, count, survivals, room, **__: [2 for _ in survivals])

    def deliver(deltas):
        for delta in deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
            assert delta.finish is None or delta.finish.error is None

    monkeypatch.setattr(engine.loop, "_deliver", deliver)
    requests = [engine.intake.request(prompt, each) for prompt, each in zip(prompts, params)]
    engine.loop.submit(requests[0])
    while engine.loop.step():
        if not drafted and engine.loop.scheduler.strategy.drafts()["draft"].num_drafts > 2:
            drafted = True
            engine.loop.submit(requests[1])
    assert drafted and [found[request.request_id] for request in requests] == expected


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_rounds_go_on_with_weights_that_were_replaced(drafter, at_most, tmp_path):
    model = build("llama", 3, tmp_path / "model")
    other = noisy(tmp_path / "model", tmp_path / "other", 0.05)
    prompts, params = prompts_of(model, 1), mixed_params(1)
    expected = LLM(str(other), **TINY | MANY).generate(prompts, params, use_tqdm=False)
    at_most(8)
    llm = opened(model, drafter, tmp_path / "head")
    outcome(llm, prompts, params)
    llm.update_weights(str(other))
    before = llm.engine.loop.journal.steps.num_written
    tokens, _, rounds = outcome(llm, prompts, params)
    assert tokens == [output.outputs[0].token_ids for output in expected]
    assert max(rounds[before:]) > 1
