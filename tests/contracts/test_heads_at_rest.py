"""Hidden states that wait until a head drafts: it then drafts what it would had it taken them in step by step."""

import itertools
from importlib.util import find_spec

import oracle_heads
import pytest

from drafting import TINY, drafter_of, prompts_of
from ridgeline import LLM, SamplingParams
from ridgeline.decoding import model_drafts
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.drafters import eagle
from ridgeline.decoding.model_drafts import ModelDrafts

pytestmark = [
    pytest.mark.skipif(
        find_spec("ridgeline._native") is None, reason="only native code computes a row alike in every batch"
    ),
    pytest.mark.usefixtures("one_round"),  # each of which is looked at
]
TURN = 15  # plans, after which a drafter that rests begins to draft, or one that drafts begins to rest
HEADS = {
    "eagle": lambda model: oracle_heads.Eagle(model, 3, (0, 1, len(model.spec.layers) - 1)),
    "medusa": lambda model: oracle_heads.Medusa(model, "paper"),
}


def opened(kind, target, folder, monkeypatch, **options):
    """An engine whose head rests and drafts in turns; what it drafts behind which tokens; steps taken in at once."""
    resting = [True]
    monkeypatch.setattr(DraftControl, "rests", lambda self, num_decodes: resting[0])
    monkeypatch.setattr(DraftControl, "choose", lambda self, n, survivals, *_, **__: list(map(len, survivals)))
    sizes = TINY | {"num_threads": 2, "num_speculative_tokens": 3, "draft_quantize": "none"} | options
    llm = LLM(str(target.folder.path), **sizes, speculate=f"{kind}:{HEADS[kind](target).write(folder)}")
    scheduler, plans = llm.engine.loop.scheduler, itertools.count()
    plan = scheduler.plan

    def planned():
        rests = next(plans) // TURN % 2 == 0
        if resting[0] != rests and llm.engine.loop._in_flight:
            return None  # until what is in flight has landed
        resting[0] = rests
        return plan()

    scheduler.plan = planned
    drafter, drafts, together = drafter_of(llm), [], []
    draft, observe = drafter.draft, drafter.observe

    def drafting(asked, max_catch_up):
        found = draft(asked, max_catch_up)
        drafts.extend(
            (list(r.view.token_ids), list(found[key].token_ids)) for r in asked if (key := r.view.seq_id) in found
        )
        return found

    def observing(running, plan, taps):
        together.append(len(taps))
        observe(running, plan, taps)

    drafter.draft, drafter.observe = drafting, observing
    return llm, drafts, together


def churned(llm, prompts):
    """Outputs of requests of which some go on from a prefix, one is aborted, and some lose their blocks."""
    scheduler, steps = llm.engine.loop.scheduler, itertools.count(1)
    plan = scheduler.plan

    def planned():
        step, running = next(steps), scheduler.running()
        if step % 37 == 0 and running:
            scheduler.preempt(running[step % len(running)])
        if step == 35:
            llm.engine.loop.abort(running[-1].request.request_id)
        return plan()

    scheduler.plan = planned
    every = [*prompts, *[[*prompt, 5, 6] for prompt in prompts], prompts[0][:5]]
    params = [SamplingParams(temperature=0, max_tokens=20 + 2 * index, ignore_eos=True) for index in range(len(every))]
    outputs = llm.generate(every, params, use_tqdm=False)
    outputs += llm.generate(
        [[*o.prompt_token_ids, *o.outputs[0].token_ids][:30] for o in outputs], params[0], use_tqdm=False
    )
    scheduler.plan = plan
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", HEADS)
def test_what_is_taken_in_late_is_drafted_from_as_if_it_had_been_at_once(kind, target, tmp_path, monkeypatch):
    """Over prefix hits, chunks, preemption, an abort, and sequences that come and go."""
    options = {"max_num_batched_tokens": 5, "max_num_seqs": 5}
    late, drafts, together = opened(kind, target, tmp_path / "late", monkeypatch, **options)
    outputs = churned(late, prompts_of(target))
    assert max(together) > 5
    assert len(drafts) > 5
    observe = ModelDrafts.observe

    def at_once(self, *told):
        observe(self, *told)
        self.is_behind = True

    monkeypatch.setattr(ModelDrafts, "observe", at_once)
    eager, expected, together = opened(kind, target, tmp_path / "eager", monkeypatch, **options)
    assert churned(eager, prompts_of(target)) == outputs
    off = churned(LLM(str(target.folder.path), **TINY | options), prompts_of(target))
    for one, other in zip(outputs[: len(outputs) // 2], off):  # the aborted one has another length
        assert one[: len(other)] == other[: len(one)]
    assert max(together) <= 2  # of plans in flight
    assert drafts == expected
    for llm in (late, eager):
        assert llm.engine.loop.scheduler.strategy._model.failures == 0
        assert not drafter_of(llm)._hidden


def test_hidden_states_that_wait_are_bounded(target, tmp_path, monkeypatch):
    """Of a long rest the latest are drafted from; the more sequences there are, the fewer of each."""
    monkeypatch.setattr(eagle, "MAX_HIDDEN", 24)
    llm, drafts, _ = opened("eagle", target, tmp_path, monkeypatch)
    monkeypatch.setattr(ModelDrafts, "is_behind", property(lambda self: True, lambda self, value: None), raising=False)
    drafter, held = drafter_of(llm), []
    observe = drafter.observe

    def observing(running, plan, taps):
        observe(running, plan, taps)
        of_each = [sum(map(len, hidden.chunks)) for hidden in drafter._hidden.values()]
        assert of_each == [hidden.end - hidden.first for hidden in drafter._hidden.values()]
        held.append(sum(of_each))

    drafter.observe = observing
    params = SamplingParams(temperature=0, max_tokens=38, ignore_eos=True)
    outputs = llm.generate(prompts_of(target), params, use_tqdm=False)
    off = LLM(str(target.folder.path), **TINY).generate(prompts_of(target), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in off]
    assert 12 < max(held) <= 24
    assert any(len(tokens) > 25 for tokens, _ in drafts)
    assert llm.engine.loop.scheduler.strategy._model.failures == 0


def test_of_too_many_that_nobody_asked_for_the_latest_are_there(target, tmp_path, monkeypatch):
    """A head that rests takes in nothing, whoever comes and goes, and drafts from what is left."""
    monkeypatch.setattr(model_drafts, "MAX_UNSEEN", 24)
    llm, drafts, together = opened("eagle", target, tmp_path, monkeypatch, max_num_seqs=5)
    model, held = llm.engine.loop.scheduler.strategy._model, []
    observe = model.observe

    def observing(*told):
        before = len(together)
        observe(*told)
        rows = [len(taps_TW) for _, taps in model._unseen for taps_TW in taps]
        held.append((len(model._unseen), model._num_unseen, sum(rows), len(together) - before))

    model.observe = observing
    outputs = churned(llm, prompts_of(target))
    off = churned(LLM(str(target.folder.path), **TINY | {"max_num_seqs": 5}), prompts_of(target))
    for one, other in zip(outputs[: len(outputs) // 2], off):  # the aborted one has another length
        assert one[: len(other)] == other[: len(one)]
    assert all(count == 1 or rows <= 24 for count, rows, _, _ in held)
    assert all(rows == counted and not taken_in for _, rows, counted, taken_in in held)
    assert max(held)[0] > 1
    assert len(drafts) > 3
    assert model.failures == 0
