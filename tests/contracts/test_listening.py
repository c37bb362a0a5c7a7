"""Hidden states that are told in some steps alone: the tokens are the same, and the drafter begins anew."""

from importlib.util import find_spec
from itertools import cycle

import pytest
from test_chains import speculate
from tiny_models import build

from cache_invariants import check_cache
from drafting import TINY, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.decoding import draft_control, model_drafts
from ridgeline.decoding.draft_control import DraftControl

pytestmark = pytest.mark.skipif(find_spec("ridgeline._native") is None, reason="the native backend is not built")
MANY = dict.fromkeys(("max_model_len", "max_num_batched_tokens"), 256)


def idle(monkeypatch, num_steps):
    """Have the next look at drafts come behind `num_steps()` steps, as the drafter is told."""
    real = model_drafts.ModelDrafts.observe
    monkeypatch.setattr(model_drafts.ModelDrafts, "observe", lambda self, *args: real(self, *args[:4], num_steps()))


@pytest.mark.parametrize("count", [1, 3])
def test_hidden_states_that_nobody_listens_to_change_no_token(count, tmp_path, monkeypatch):
    """For some steps they are not told: nothing is drafted, and then the drafter begins anew."""
    model = build("llama", 3, tmp_path / "model")
    monkeypatch.setattr(model_drafts, "MAX_ROUNDS_S", 1e-9)  # several rounds always tell them
    turns = cycle([False] * 12 + [True] * 9)
    monkeypatch.setattr(DraftControl, "rests", lambda *_: False)
    monkeypatch.setattr(
        DraftControl, "choose", lambda _, count, survivals, *__, **___: [min(3, len(s)) for s in survivals]
    )
    monkeypatch.setattr(model_drafts, "TOLD_ALWAYS", 0)
    idle(monkeypatch, lambda: 99 if next(turns) else 0)
    prompts = prompts_of(model, count)
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=150) for i in range(count)]
    expected = LLM(str(model.folder.path), **TINY | MANY).generate(prompts, params, use_tqdm=False)
    options = TINY | MANY | {"num_speculative_tokens": 3, "draft_quantize": "none"}
    llm, told = LLM(str(model.folder.path), **options, speculate=speculate(model, "eagle", tmp_path / "head")), []
    observe = llm.engine.loop.scheduler.strategy.observe

    def observing(plan, result, seconds):
        told.append((result.taps_TW is not None, max(span.num_optional for span in plan.spans)))
        observe(plan, result, seconds)

    llm.engine.loop.scheduler.strategy.observe = observing
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    check_cache(llm.engine.loop.scheduler.cache, {})
    tells = [each for each, _ in told]
    silent = tells.index(False)
    assert any(drafted for _, drafted in told[:silent]), "it drafted before"
    again = silent + tells[silent:].index(True)
    assert any(drafted for _, drafted in told[again:]), "and behind"


def tries(control, *_):
    control._awake = True
    return True


@pytest.mark.parametrize(("looks", "least", "most"), [(1, 0.25, 0.7), (2, 0.1, 0.23)])
def test_many_that_rest_are_told_before_they_are_looked_at(looks, least, most, monkeypatch):
    """And one always. What is drafted for many needs the newest token's hidden state, which was not told all along, nor
    before a look that is not at the head's drafts."""
    monkeypatch.setattr(DraftControl, "tries", tries)
    monkeypatch.setattr(draft_control, "SHARE_OF_MORE", 0.2)  # who is asked at a look has what it takes
    monkeypatch.setattr(DraftControl, "peek_steps", lambda *_: 120)
    monkeypatch.setattr(DraftControl, "looks_of_one", lambda *_: looks)
    llm, told, made = LLM("python-9m", speculate="eagle", max_num_seqs=16, num_threads=1), [], []
    strategy = llm.engine.loop.scheduler.strategy
    observe, draft = strategy.observe, model_drafts.ModelDrafts.draft

    def observing(plan, result, seconds):
        told.append(result.taps_TW is not None)
        observe(plan, result, seconds)

    def drafting(self, asked, max_catch_up):
        found = draft(self, asked, max_catch_up)
        made.append((len(told), len(asked), len(found)))
        return found

    monkeypatch.setattr(strategy, "observe", observing, raising=False)
    monkeypatch.setattr(model_drafts.ModelDrafts, "draft", drafting)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=900, ignore_eos=True)
    llm.generate([f"x{i} = " for i in range(16)], params, use_tqdm=False)
    late = [(asked, found) for step, asked, found in made if step > 200]
    assert least < sum(told) / len(told) < most
    assert late and all(asked == found for asked, found in late)
    for count, always in ((4, False), (1, True)):
        told.clear()
        llm.generate([f"x{i} = " for i in range(count)], params, use_tqdm=False)
        assert all(told[4:]) == always


def test_steps_of_many_that_rest_are_not_told_to_a_draft_model(monkeypatch):
    """It hears no hidden states, and what it did not draft is nothing to it; what it drafted comes back to it."""
    monkeypatch.setattr(DraftControl, "tries", tries)
    monkeypatch.setattr(draft_control, "SHARE_OF_MORE", 0.2)
    monkeypatch.setattr(DraftControl, "peek_steps", lambda *_: 120)
    llm, told, steps = LLM("python-9m", speculate="draft:python-1m", max_num_seqs=16, num_threads=1), [], []
    strategy, real = llm.engine.loop.scheduler.strategy, model_drafts.ModelDrafts.observe
    observe = strategy.observe

    def observing(plan, result, seconds):
        steps.append(any(span.num_optional for span in plan.spans))
        observe(plan, result, seconds)

    def telling(self, running, plan, *rest):
        told.append(any(span.num_optional for span in plan.spans))
        real(self, running, plan, *rest)

    monkeypatch.setattr(strategy, "observe", observing, raising=False)
    monkeypatch.setattr(model_drafts.ModelDrafts, "observe", telling)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=900, ignore_eos=True)
    llm.generate([f"x{i} = " for i in range(16)], params, use_tqdm=False)
    assert sum(told) == sum(steps) > 0, "every draft is told of"
    assert len(told) < 0.7 * len(steps)
