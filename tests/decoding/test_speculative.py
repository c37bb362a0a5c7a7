"""Several proposers in one strategy: the draft that gains most is verified, the others are compared with what came."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import DraftStats, SampledToken, Span, StepPlan, StepResult
from ridgeline.decoding.draft_control import LOOK_SHARE, LOOK_SHARE_OF_FEW, DraftControl
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategies.speculative import Speculative, build
from ridgeline.decoding.strategy import Room

PERIOD = 7


class Says:
    """Always drafts the text, from `shift` tokens further on."""

    def __init__(self, shift):
        self.shift, self.asked, self.forgotten = shift, 0, []

    def propose(self, view, max_tokens):
        self.asked += 1
        known = len(view.token_ids) + self.shift
        return Draft([(known + i) % PERIOD for i in range(max_tokens)], 0)

    def forget(self, view):
        self.forgotten.append(view.seq_id)


def sequence(seq_id=0, **more):
    own = {"seq_id": seq_id, "token_ids": [0, 1, 2], "num_computed": 2, "seed": 0, "grammar": None}
    asked = {
        "prompt_ids": [0, 1],
        "params": SamplingParams(max_tokens=10_000),
        "max_tokens": 10_000,
        "stop_ids": (),
        "adapter": 0,
        "pooling": None,
        "prediction_ids": (),
        "salt": "",
    }
    request = SimpleNamespace(**asked | {name: value for name, value in more.items() if name in asked})
    given = own | {name: value for name, value in more.items() if name not in asked}
    return SimpleNamespace(**given, request=request)


class Machine:
    """Decodes the text 0 1 2 .. 6 0 1 .. with a strategy; a step of m tokens takes 10 ms and 0.1 ms a token."""

    def __init__(self, proposers, control, max_draft_tokens=4):
        self.now_s = 0.0
        self.strategy = Speculative(proposers, max_draft_tokens, control, lambda: self.now_s)
        self.views = [sequence()]

    def step(self, room=64):
        strategy, views = self.strategy, self.views
        strategy.begin(views, Room(room, room))
        spans = [strategy.next_span(view, 1 + room, score_all=False) for view in views]
        rows = [row for view, span in zip(views, spans) for row in strategy.rows(view, span, 0)]
        plan = StepPlan(1, tuple(spans), (), (), tuple(rows))
        self.now_s += 0.010 + 0.0001 * plan.num_tokens
        for view, span in zip(views, spans):
            first = len(view.token_ids)
            sampled = [SampledToken(view.seq_id, (first + i) % PERIOD) for i in range(1 + span.num_optional)]
            accepted = strategy.accept(view, span, sampled)
            view.token_ids += [token.token_id for token in accepted.tokens]
            view.num_computed = span.start + accepted.num_final
            assert view.num_computed == len(view.token_ids) - 1
        strategy.observe(plan, StepResult(1, ()), 0.0)
        return spans


def test_steps_that_are_planned_ahead_are_timed_one_by_one():
    """Where drafts are not asked for the next step is planned while one is computed, which then takes less."""
    now_s = 0.0
    control = DraftControl()
    strategy, views = Speculative({"right": Says(0)}, 4, control, lambda: now_s), [sequence()]
    num_in_flight = num_ahead = 0
    while strategy.ahead(views) or num_in_flight:
        if strategy.ahead(views) and num_in_flight < 2:
            strategy.begin(views, Room(64, 64))
            num_in_flight += 1
            num_ahead += num_in_flight == 2
            continue
        now_s += 0.010
        plan = StepPlan(1, (Span(0, 2, (2,), 1),), (), (), (), follows=1)
        strategy.observe(plan, StepResult(1, ()), 0.010)
        num_in_flight -= 1
    strategy.begin(views, Room(64, 64))
    assert num_ahead > 10
    assert abs(control.times.plain_s(1) - 0.010) < 1e-9


def test_counts_of_a_round_are_those_of_what_was_verified():
    """A draft of four of which one is right: what lies behind the rejected one was drafted, and not accepted."""

    class OneRight(Says):
        def propose(self, view, max_tokens):
            known = len(view.token_ids)
            return Draft([known % PERIOD, 99, (known + 2) % PERIOD, (known + 3) % PERIOD], 0)

    machine = Machine({"one": OneRight(0)}, None)
    machine.step()
    assert machine.strategy.drafts() == {"one": DraftStats(1, 4, 1, (1,))}
    assert machine.views[0].token_ids == [0, 1, 2, 3, 4]


def test_a_draft_for_which_there_was_no_room_is_not_counted():
    machine = Machine({"right": Says(0)}, None)
    machine.step(room=2)
    assert machine.strategy.drafts() == {"right": DraftStats(1, 2, 2, (1, 1))}
    machine.step(room=0)
    assert machine.strategy.drafts() == {"right": DraftStats(1, 2, 2, (1, 1))}


def test_the_proposer_that_is_right_is_found_wherever_it_stands():
    for names in (("right", "wrong"), ("wrong", "right")):
        proposers = {name: Says({"right": 0, "wrong": 1}[name]) for name in names}
        machine = Machine(proposers, DraftControl())
        for _ in range(300):
            machine.step()
        before = machine.strategy.drafts()
        for _ in range(100):
            machine.step()
        after = machine.strategy.drafts()
        assert after["right"].num_drafts - before["right"].num_drafts > 80  # some are timed without
        assert after["wrong"].num_drafts == before["wrong"].num_drafts


def test_what_is_forced_is_drafted_whatever_else_promises_more():
    class Forced(Says):
        def propose(self, view, max_tokens):
            return super().propose(view, 1) if len(view.token_ids) % 3 == 0 else None

    config = EngineConfig.of("python-1m", speculate="ngram,forced,prediction")
    built = build(None, config, lambda: 0.0)
    assert next(iter(built._proposers)) == "forced"  # whatever the order that was asked for
    machine = Machine({"forced": Forced(0), "right": Says(0)}, DraftControl())
    for _ in range(300):
        machine.step()
    drafts = machine.strategy.drafts()
    assert drafts["forced"].num_drafts > 30 < drafts["right"].num_drafts


def test_without_control_the_first_proposer_with_a_guess_is_taken():
    class Silent(Says):
        def propose(self, view, max_tokens):
            return None

    machine = Machine({"silent": Silent(0), "first": Says(1), "second": Says(0)}, None)
    for _ in range(5):
        machine.step()
    drafts = machine.strategy.drafts()
    assert drafts["first"].num_drafts == 5
    assert drafts["second"].num_drafts == drafts["silent"].num_drafts == 0


def test_an_end_is_told_to_every_proposer():
    proposers = {"a": Says(0), "b": Says(1)}
    machine = Machine(proposers, DraftControl())
    machine.step()
    machine.strategy.forget(machine.views[0])
    assert proposers["a"].forgotten == proposers["b"].forgotten == [0]
    assert not machine.strategy._unverified._drafts


class Slow(Says):
    """Is always wrong, and takes long to say so."""

    def __init__(self, machine):
        super().__init__(1)
        self.machine = machine

    def propose(self, view, max_tokens):
        self.machine.now_s += 0.005
        return super().propose(view, max_tokens)


@pytest.mark.parametrize(("count", "share"), [(2, LOOK_SHARE_OF_FEW), (4, LOOK_SHARE_OF_FEW), (8, LOOK_SHARE)])
def test_looking_at_drafts_that_never_pay_takes_a_small_part_of_the_time_of_several_sequences(count, share):
    machine = Machine({}, DraftControl())
    slow = Slow(machine)
    machine.strategy = Speculative({"slow": slow}, 4, DraftControl(), lambda: machine.now_s)
    machine.views = [sequence(i) for i in range(count)]
    for _ in range(2000):
        machine.step()
    asked, began_s = slow.asked, machine.now_s
    for _ in range(4000):
        machine.step()
    looked_s = (slow.asked - asked) * 0.005
    assert 0 < looked_s <= 1.2 * share * (machine.now_s - began_s)


def test_steps_at_rest_count_as_often_as_they_were_made():
    """Also where those who run change before a rest is over: else what may be lost grows with steps that never were."""
    told = [0]

    class Told(DraftControl):
        def step(self, num_decodes, extra, gained, seconds, asking_s, num_steps=1, *others, **kind):
            told[0] += num_steps
            super().step(num_decodes, extra, gained, seconds, asking_s, num_steps, *others, **kind)

    for every in (10_000, 25, 11):
        machine, made = Machine({"wrong": Says(1)}, Told()), 0
        told[0] = 0
        for number in range(3000):
            if number % every == 0:
                machine.views = list(machine.views)
            machine.step()
            made += 1
            assert told[0] <= made
        assert told[0] >= 0.5 * made or every == 11
        assert machine.strategy.ahead(machine.views)


@pytest.mark.parametrize(("count", "least", "most"), [(2, 0.5, 0.7), (5, 0.0, 0.1), (20, 0.0, 0.1)])
def test_of_many_sequences_that_come_and_go_few_steps_are_timed_at_rest(count, least, most):
    """What one takes is known, and whoever comes or goes would begin the timing anew. Of few it is timed anew."""
    machine = Machine({"wrong": Says(1)}, DraftControl())
    machine.views = [sequence(i) for i in range(count)]
    timed = []
    for number in range(3000):
        if number % 7 == 0:
            machine.views = list(machine.views)
        machine.step()
        timed.append(machine.strategy._window.num_begun > 0)
    assert least <= sum(timed[1000:]) / 2000 <= most


def test_a_trial_among_many_sequences_asks_one_of_them():
    """All of them tell no more, and asking takes as long for each."""

    class Drafter:
        asked: ClassVar[list[int]] = []

        def max_tokens(self, view):
            return 0 if view.seq_id == 3 else 8

        def lag(self, view):
            return 20 - view.seq_id if view.seq_id != 3 else 0

        def draft(self, asked, max_catch_up):
            self.asked += [request.view.seq_id for request in asked]
            return {}

    strategy = Speculative({}, 4, DraftControl(), lambda: 0.0, ("draft", Drafter()))
    guessed = []
    guess = strategy._model.guess
    strategy._model.guess = lambda view, *rest: guessed.append(view.seq_id) or guess(view, *rest)
    strategy._tries = True
    strategy._draft([sequence(i) for i in range(12)], 64, 64)
    assert guessed == Drafter.asked == [11], "who lags least of those that can be drafted for"
