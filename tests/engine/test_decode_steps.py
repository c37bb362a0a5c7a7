"""Decode steps that follow one another are planned without asking anew: the plans are those of asking anew."""

import pytest
from engine_fakes import Driver, make_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.request import FinishReason

LAYOUTS = {
    "full": ((12,), (None,)),
    "hybrid": ((12, 9), (None, 5)),
    "recurrent": ((6,), ("recurrent",)),
    "full_and_recurrent": ((12, 5), (None, "recurrent")),
}


class Asked(Autoregressive):
    one_token = False


def as_lists(plan):
    """What a plan says, without the promise that it follows another."""
    tables = [[(table.first_token, list(table.blocks)) for table in tables] for tables in plan.tables]
    spans = tuple(span._replace(token_ids=list(span.token_ids)) for span in plan.spans)
    return plan._replace(follows=0, token_ids=(), tables=(), spans=spans, samples=tuple(plan.samples)), tables


requests = st.lists(
    st.tuples(
        st.integers(0, 6),  # after so many steps
        st.lists(st.integers(1, 9), min_size=1, max_size=9),
        st.sampled_from(
            [{}, {}, {"n": 2}, {"ignore_eos": False}, {"min_tokens": 4}, {"repetition_penalty": 1.5}, {"logprobs": 1}]
        ),
        st.integers(1, 12),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(deadline=None, derandomize=True, max_examples=60)
@given(requests=requests, num_seqs=st.integers(2, 4), preempts=st.sets(st.integers(0, 30), max_size=2))
def test_plans_are_those_of_asking_anew(kind, requests, num_seqs, preempts):
    blocks, windows = LAYOUTS[kind]
    layout = make_layout(blocks, windows, max_span_tokens=6)
    options = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 6, "policy": "priority", "max_model_len": 24}
    quick, asked = (Driver(layout, strategy=strategy, **options) for strategy in (Autoregressive(), Asked()))
    seen = {quick: [], asked: []}
    for driver in seen:
        submit = driver.executor.submit
        driver.executor.submit = lambda plan, driver=driver, submit=submit: (
            seen[driver].append(as_lists(plan)),
            submit(plan),
        )
        for step in range(300):
            for number, (after, prompt, more, max_tokens, priority) in enumerate(requests):
                if after == step:
                    more = {"max_tokens": max(max_tokens, more.get("min_tokens", 1)), **more}
                    driver.add(str(number), prompt, priority=priority, **more)
            running = driver.scheduler.running()
            if step in preempts and running:
                driver.scheduler.preempt(running[0])
            if not driver.step() and step > 6:
                break
            driver.check()
        driver.run()
        driver.assert_answers()
    for one, other in zip(seen[quick], seen[asked], strict=True):
        assert one == other


def test_nothing_is_asked_while_the_same_sequences_decode():
    class Counting(Autoregressive):
        num_asked = 0

        def next_span(self, view, max_tokens, *, score_all):
            self.num_asked += 1
            return super().next_span(view, max_tokens, score_all=score_all)

    strategy = Counting()
    driver = Driver(make_layout((64,)), strategy=strategy, max_num_seqs=3)
    for name in "abc":
        driver.add(name, [ord(name)], max_tokens=20)
    driver.add("waits", [1], max_tokens=20)
    driver.run()
    driver.assert_answers()
    assert strategy.num_asked < 12
    assert sum(plan.follows > 0 for plan in driver.executor.plans) > 30
    assert {plan.decisions.head_waits for plan in driver.executor.plans[2:18]} == {"slots"}


@pytest.mark.parametrize("kind", ["full", "hybrid"])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(requests=requests, depth=st.integers(1, 3), disturbed=st.dictionaries(st.integers(0, 30), st.booleans()))
def test_runs_in_flight_are_cut_anywhere(kind, requests, depth, disturbed):
    """By preemption, an abort, an end or somebody who comes: what the cache was not told yet is told, and no more."""
    blocks, windows = LAYOUTS[kind]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 24}
    driver = Driver(make_layout(blocks, windows), depth=depth, chains=depth > 1, **options)
    for step in range(300):
        for number, (after, prompt, more, max_tokens, _) in enumerate(requests):
            if after == step:
                driver.add(str(number), prompt, **{"max_tokens": max(max_tokens, more.get("min_tokens", 1)), **more})
        running = driver.scheduler.running()
        if running and disturbed.get(step) is True:
            driver.scheduler.preempt(running[-1])
        elif running and step in disturbed:
            driver.take(driver.scheduler.finish(running[0].request.request_id, None, FinishReason.ABORT))
        driver.check()
        if not driver.step() and step > 6:
            break
        driver.check()
    driver.assert_answers(skip=driver.cut_short())
    driver.check()


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_the_cache_is_told_where_it_changes_alone(monkeypatch, windows):
    driver = Driver(make_layout((64,) * len(windows), windows), depth=2, chains=True)
    driver.add("a", [1, 2, 3], max_tokens=41)
    commit, told = driver.cache.commit, []
    monkeypatch.setattr(driver.cache, "commit", lambda *args: (told.append(args[2]), commit(*args))[1])
    driver.run()
    driver.assert_answers()
    assert {count % 4 for count in told[2:-1]} == {0}
    assert told[2:-1] == list(range(told[2], 44, 4)), "whole blocks, of which the window of 5 leaves one as each ends"


def test_the_cache_is_told_the_rest_before_another_kind_of_step_is_planned():
    driver = Driver(make_layout((64,)))
    driver.add("a", [1, 2, 3], max_tokens=20)
    driver.add("b", [4], max_tokens=20)
    for _ in range(8):
        driver.step()
    known = {seq.seq_id: seq.num_computed for seq in driver.scheduler.running()}
    held = driver.cache._sequences
    assert any(held[seq_id].computed < count for seq_id, count in known.items()), "it lags"
    driver.add("c", [7, 8], max_tokens=3)
    plan = driver.scheduler.plan()
    assert len(plan.spans) == 3
    assert {seq_id: held[seq_id].computed for seq_id in known} == known
