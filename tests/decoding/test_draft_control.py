"""How many tokens are drafted, on a machine whose step times and a text whose acceptance the test decides."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.decoding.acceptance import Acceptance
from ridgeline.decoding.draft_control import (
    EXTRA_TOKENS,
    MAX_NAP_STEPS,
    MAX_SPACING,
    PEEK_STEPS,
    PURSE_SHARE,
    DraftControl,
)
from ridgeline.decoding.step_times import BETWEEN, TRIALS, StepTimes

# Seconds of a step of n sequences and e drafted tokens. A tiny model's steps wait for Python, and for more of it with
# drafts or behind them; its first steps of a shape take three times as long.
MACHINES = {
    "memory": lambda n, e: 0.010 + 0.0001 * (n + e),
    "ridge": lambda n, e: 0.010 * max(1, (n + e) / 8),
    "busy": lambda n, e: 0.004 * (n + e),
    "tiny": lambda n, e: 0.0003 + 0.00002 * (n + e) + (0.0001 if e else 0),
}


def asking_s(num_sequences):
    """Seconds that asking takes."""
    return 0.00003 + 0.00001 * num_sequences


ANY = ("any", 0)


class Simulation:
    """Decodes `num_sequences` of endless text, of which each drafted token is right with the chance `acceptance`.

    Who `peeks` compares drafts with what came, also those that no step verified; else nothing is learnt of these.
    """

    def __init__(self, machine, acceptance, num_sequences, *, noise=0.05, seed=1, ahead=1.0, peeks=True):
        self.control, self.random = DraftControl(), random.Random(seed)
        self.machine, self.acceptance, self.num_sequences, self.noise = machine, acceptance, num_sequences, noise
        self.asked, self.seen, self.drafted, self.slower, self.plain_s = 0, {}, 0, 1.0, 0.0
        self.num_rests, self.window, self.peeks, self.num_rested, self.tries = 0, [], peeks, 0, False
        self.ahead = (
            ahead  # what a step takes that is planned while another is computed, of the time of one that is not
        )

    def survivals(self):
        return [self.control.acceptance.survival(seq, ANY, 8) for seq in range(self.num_sequences)]

    def learn(self, seq, tried):
        """Take in how many of `tried` tokens of a draft are right."""
        right = 0
        while right < tried and self.random.random() < self.acceptance:
            right += 1
        self.control.acceptance.observe(seq, ANY, tried, right)
        return right

    def step(self):
        """(tokens gained, seconds, tokens drafted) of one step."""
        control, n, right_in_all, took_s = self.control, self.num_sequences, 0, 0.0
        lengths = [0] * n
        rests = control.rests(n)
        overlap = self.ahead if rests else 1.0
        if rests:
            self.num_rests, self.num_rested = self.num_rests + 1, self.num_rested + 1
            if self.num_rests >= control.peek_steps(n):
                seq, self.num_rests = self.random.randrange(n), 0
                if self.peeks:
                    self.learn(seq, 8)  # what is not verified is compared with what came, later
                control.peek(seq, control.acceptance.survival(seq, ANY, 8), n, 256)
                if not self.peeks and control.rests(n):
                    self.tries = control.tries(n, self.num_rested, 0, ANY)
        if not rests:
            self.asked += 1
            lengths = control.choose(n, self.survivals(), 256)
            if self.tries and not any(lengths):
                lengths[0] = 1
            for seq, length in enumerate(lengths):
                right_in_all += min(self.learn(seq, length or 8), length) if length or self.peeks else 0
            self.tries, self.num_rested = self.tries and right_in_all > 0, 0
            took_s = asking_s(n)
        before, self.drafted = self.drafted, sum(lengths)
        disturbed = self.random.uniform(1, 1 + self.noise) * self.slower
        disturbed *= 5 if self.random.random() < 0.02 else 1  # somebody else's turn
        self.plain_s += MACHINES[self.machine](n, 0) * disturbed * self.ahead
        seconds = MACHINES[self.machine](n, self.drafted) * disturbed * overlap
        if self.machine == "tiny":
            seconds += 0.0001 * (before > 0 == self.drafted)
            self.seen[self.drafted] = self.seen.get(self.drafted, 0) + 1
            seconds *= 3 if self.seen[self.drafted] <= 2 else 1
        if not rests:
            control.step(n, self.drafted, right_in_all, seconds + took_s, took_s)
            return n + right_in_all, seconds + took_s, self.drafted
        self.window.append(seconds)
        if len(self.window) >= control.window_steps or control.rests(n) != rests:
            control.step(n, 0, 0, statistics.median(self.window), None, len(self.window))
            self.window.clear()
        return n + right_in_all, seconds + took_s, self.drafted

    def run(self, num_steps):
        gained, seconds, drafted = zip(*(self.step() for _ in range(num_steps)), strict=True)
        return sum(gained) / sum(seconds), sum(drafted) / num_steps


def plain(machine, num_sequences, noise=0.05):
    return num_sequences / (MACHINES[machine](num_sequences, 0) * (1 + noise / 2) * 1.08)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 32])
@pytest.mark.parametrize(("ahead", "peeks"), [(1.0, True), (0.85, True), (1.0, False)])
def test_never_slower_than_without(machine, acceptance, num_sequences, ahead, peeks):
    simulation = Simulation(machine, acceptance, num_sequences, ahead=ahead, peeks=peeks)
    rate, _ = simulation.run(2000)
    assert rate >= 0.98 * 2000 * num_sequences / simulation.plain_s


@pytest.mark.parametrize(
    ("machine", "acceptance", "num_sequences"),
    [("memory", 0.8, 1), ("memory", 0.9, 4), ("ridge", 0.9, 1), ("tiny", 0.9, 1), ("tiny", 0.8, 1)],
)
def test_drafts_where_they_pay(machine, acceptance, num_sequences):
    """At least 80 % of what the best fixed length brings in hindsight."""
    simulation = Simulation(machine, acceptance, num_sequences)
    simulation.run(300)
    rate, _ = simulation.run(1500)
    best = max(
        num_sequences
        * sum(acceptance**j for j in range(k + 1))
        / (MACHINES[machine](num_sequences, num_sequences * k) + asking_s(num_sequences))
        for k in range(9)
    )
    best /= 1.025 * 1.08
    assert best > 1.4 * plain(machine, num_sequences)
    assert rate >= 0.8 * best


def test_a_machine_that_is_busy_gets_no_drafts_and_nobody_is_asked():
    simulation = Simulation("busy", 0.9, 16)
    simulation.run(500)
    before = simulation.asked
    _, drafted = simulation.run(2000)
    assert drafted < 0.5
    assert simulation.asked - before <= 3 * 2000 * PURSE_SHARE * MACHINES["busy"](16, 0) / asking_s(16)


def test_what_asking_takes_is_a_small_part_of_the_time_where_nothing_is_ever_right():
    simulation = Simulation("tiny", 0.0, 1, peeks=False)
    simulation.run(500)
    before = simulation.asked
    simulation.run(4000)
    assert simulation.asked - before >= 4000 / MAX_NAP_STEPS
    assert (simulation.asked - before) * asking_s(1) <= 1.5 * PURSE_SHARE * 4000 * MACHINES["tiny"](1, 0) * 1.1


def test_nobody_is_asked_where_a_look_at_the_drafts_says_that_none_is_right():
    simulation = Simulation("tiny", 0.0, 1)
    simulation.run(500)
    before = simulation.asked
    simulation.run(4000)
    assert simulation.asked == before


@pytest.mark.parametrize(("machine", "num_steps"), [("memory", 1500), ("tiny", 3000)])
def test_a_text_that_becomes_predictable_is_noticed(machine, num_steps):
    simulation = Simulation(machine, 0.0, 1)
    simulation.run(1000)
    simulation.acceptance = 0.95
    _, drafted = simulation.run(num_steps)
    assert drafted > 1


def test_a_machine_that_becomes_slower_changes_nothing():
    """All of its steps take three times as long: what drafts gain is what it was."""
    simulation = Simulation("memory", 0.9, 1)
    simulation.run(600)
    _, before = simulation.run(400)
    simulation.slower = 3.0
    simulation.run(50)
    _, after = simulation.run(400)
    assert after == pytest.approx(before, rel=0.15)


def known_times(num_steps=2 * TRIALS):
    times = StepTimes()
    for _ in range(num_steps):
        for extra, ratio in ((0, 1.0), (BETWEEN, 1.2), (1, 1.3), (2, 1.5), (8, 1.8)):
            times.observe(1, extra, 0.010 * ratio)
            if extra > 0:
                times.observe(1, extra, 0.010 * ratio, computed=True)
    return times


def test_ratios_lie_between_those_that_are_known_and_grow_beyond():
    times = known_times()
    assert times.plain_s(1) == pytest.approx(0.010)
    assert times.ratio(1, 2) == pytest.approx(1.5)
    assert times.ratio(1, 6) == pytest.approx(1.7)
    assert times.ratio(1, BETWEEN) == pytest.approx(1.2)
    assert times.ratio(1, 16) == pytest.approx(1.8 + 8 * 0.5 / 7)
    assert not times.knows(1, 6)
    assert not times.knows(2, 2)


def test_ratios_do_not_follow_the_machine():
    """Few steps without drafts are seen while it becomes slower, as drafts pay."""
    times = known_times(100)
    for step in range(300):
        times.observe(1, 8, 0.018 * 3)
        if step % 10 == 9:
            times.observe(1, 0, 0.010 * 3)
    assert times.ratio(1, 8) == pytest.approx(1.8, rel=0.1)
    assert times.plain_s(1) == pytest.approx(0.030, rel=0.1)


def test_one_step_that_somebody_else_disturbed_moves_little():
    times = known_times()
    times.observe(1, 0, 10.0)
    assert times.plain_s(1) < 0.012


def test_a_step_is_not_slowed_for_a_draft_that_does_not_pay_for_the_step_behind_it():
    """Two tokens at once take 1.5 steps, and the next one 1.2 instead of 1."""
    control = DraftControl(times=known_times())
    weak = [0.3, 0.28]
    control.peek(0, weak, 1, 8)
    assert control.rests(1)
    control.peek(0, [0.9, 0.9], 1, 8)
    assert not control.rests(1)
    assert control.choose(1, [[0.9, 0.9]], 8) == [2]
    control.step(1, 2, 2, 0.015, 0.0)
    assert control.choose(1, [weak], 8) == [2]


def test_what_lies_behind_a_rejected_token_was_not_tried():
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe(0, ANY, 8, 1)
    first, second, *_ = acceptance.survival(1, ANY, 8)
    assert first > 0.9
    assert second < 0.1
    untouched = acceptance.survival(1, ("any", 5), 8)
    assert untouched[0] == pytest.approx(0.5)
    all_or_nothing = Acceptance()
    for round_ in range(300):
        all_or_nothing.observe(0, ANY, 8, 8 * (round_ % 2))
    assert all_or_nothing.survival(1, ANY, 8)[7] > 0.4, "who is right once is right to the end"


def test_a_place_that_was_not_tried_is_trusted_as_the_one_before_it():
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.observe(0, ANY, 1, 1)
    chances = acceptance.survival(1, ANY, 4)
    assert chances[3] > 0.85
    for _ in range(50):
        acceptance.observe(0, ANY, 2, 1)
    assert acceptance.survival(1, ANY, 4)[1] < 0.2


def test_a_sequence_that_fares_worse_than_others_is_trusted_less():
    acceptance = Acceptance()
    for round_ in range(400):
        acceptance.observe(0, ANY, 1, int(round_ % 4 != 0))
        acceptance.observe(1, ANY, 1, 0)
    assert acceptance.survival(1, ANY, 1)[0] < 0.5 * acceptance.survival(0, ANY, 1)[0]
    acceptance.forget(1)
    assert acceptance.survival(1, ANY, 1) == acceptance.survival(2, ANY, 1)


def test_room_is_never_exceeded_and_prefixes_are_whole():
    control = DraftControl()
    for _ in range(20):
        control.times.observe(3, 0, 0.01)
    lengths = control.choose(3, [[0.9, 0.8, 0.7]] * 3, room=4)
    assert sum(lengths) <= 4
    assert all(0 <= length <= 3 for length in lengths)
    assert tuple(sorted(EXTRA_TOKENS)) == EXTRA_TOKENS


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_many_sequences_of_a_server_that_has_just_begun_lose_next_to_nothing(acceptance):
    """Beside the first steps of all, which are slow with drafts and without."""
    for seed in range(6):
        simulation = Simulation("tiny", acceptance, 32, seed=seed, ahead=0.85, peeks=False)
        rate, _ = simulation.run(250)
        assert rate >= 0.97 * 250 * 32 / simulation.plain_s


def test_few_sequences_may_lose_some_steps_at_first_also_behind_many():
    """What is not known of them has to be tried soon."""
    simulation = Simulation("tiny", 0.9, 32)
    simulation.run(60)
    simulation.num_sequences = 1
    _, drafted = simulation.run(100)
    assert drafted > 1


def test_what_does_not_pay_is_looked_at_more_and_more_rarely_where_a_model_would_draft_it():
    def looks(lag, num_steps=600):
        control, since, found = DraftControl(times=known_times()), 0, []
        for step in range(num_steps):
            since += 1
            if since >= control.peek_steps(1):
                control.peek(0, [0.3, 0.28], 1, 8, lag)
                found.append(step)
                since = 0
        return found

    assert len(looks(None)) > 3 * len(looks(0))
    control = DraftControl(times=known_times())
    for _ in range(9):
        control.peek(0, [0.3, 0.28], 1, 8, 0)
    assert control.peek_steps(1) == MAX_SPACING
    control.peek(0, [0.9, 0.9], 1, 8, 0)
    assert control.peek_steps(1) == PEEK_STEPS, "one that pays"


def test_the_first_call_of_a_model_tells_nothing_of_the_next_ones():
    """What it takes to begin is taken once: neither what drafts take nor what catching up does is learnt of it."""
    control, rounds = DraftControl(), 2 * TRIALS
    for _ in range(9):
        control.step(1, 0, 0.0, 0.010, None)
    taken = {"lag": 100, "drafting_s": 3.0, "computed": True, "round_s": 0.080}
    control.step(1, 1, 0.6, 0.400, 0.0, rounds, **taken)
    assert not control.times.knows(1, 1, computed=True)
    assert control.worth(100, 1, 1000) == 1
    control.step(1, 1, 0.6, 0.014, 0.0, rounds, 0, 0.002, computed=True, round_s=0.013)
    assert control.times.ratio(1, 1, computed=True) == pytest.approx(1.3, abs=0.1)


def test_what_catching_up_takes_is_what_the_draft_takes_longer():
    """Whatever the rounds behind it take; a draft that was disturbed is no measure."""
    control = DraftControl(times=known_times())
    for drafting_s in (0.5, 0.002):
        control.step(1, 1, 0.6, 0.013, 0.0, 8, 0, drafting_s, computed=True, round_s=0.013)
    control._drafting_s = 0.002
    control.step(1, 1, 0.6, 0.090, 0.0, 8, 200, 0.042, computed=True, round_s=0.013)
    assert control.worth(200, 1, 1000) == pytest.approx(1 - 4 / 64, rel=0.02), "four plain steps over 64 tokens"
    control.step(1, 1, 0.6, 0.090, 0.0, 8, 20, 9.0, computed=True, round_s=0.013)
    assert control.worth(200, 1, 1000) > 0.8


def test_steps_without_drafts_are_timed_again_by_rounds():
    control = DraftControl(times=known_times())
    control._awake = True
    control.step(1, 1, 0.9, 0.013, 0.0, 4, 0, 0.002, computed=True, round_s=0.013)
    assert not control.rests(1)
    control.step(1, 1, 0.9, 0.013, 0.0, 40, 0, 0.002, computed=True, round_s=0.013)
    assert control.rests(1)


def test_who_pays_stays_awake_while_steps_without_drafts_are_timed():
    control = DraftControl()
    for _ in range(4):
        control.step(1, 0, 0.0, 1.0, None)
    for _ in range(8):
        control.acceptance.observe(7, ANY, 2, 2)
    control.peek(7, [0.9, 0.8], 1, 64, 0)
    while not control.rests(1):
        control.step(1, 2, 1.5, 1.2, 0.0, drafting_s=0.1, computed=True)
    assert not control.tries(1, 8, 0, ANY), "nothing is to be learnt of it so soon"
    for _ in range(2):  # the first one is behind drafts
        control.step(1, 0, 0.0, 1.0, None)
    assert not control.rests(1)
    control.step(1, 0, 0.0, 1.0, 0.0)  # no draft paid
    assert control.rests(1) and not control.tries(1, 8, 0, ANY) and control.rests(1)


def paced_times(inside=0.8):
    """Times of a machine of which a step without drafts takes 10 ms, and `inside` of it by itself amid rounds."""
    times = known_times()
    for _ in range(5):
        for _ in range(4):
            times.paced(1, inside * 0.01)
            times.observe(1, 2, 0.014, computed=True, count=8)
        times.observe(1, 0, 0.01, count=8)
    return times


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_a_step_without_drafts_amid_rounds_says_how_fast_the_machine_is(slower):
    times = paced_times()
    assert times.is_paced(1) and times.plain_s(1) == pytest.approx(0.01, rel=0.05)
    for _ in range(20):
        times.paced(1, slower * 0.008)
        times.observe(1, 2, slower * 0.014, computed=True, count=8)
    assert times.plain_s(1) == pytest.approx(slower * 0.01, rel=0.05)
    assert times.ratio(1, 2, computed=True) == pytest.approx(1.4, rel=0.05)


def test_one_disturbed_step_amid_rounds_says_nothing():
    times = paced_times()
    times.paced(1, 0.08)
    assert times.plain_s(1) == pytest.approx(0.01, rel=0.05)


def test_behind_rounds_steps_without_drafts_alone_say_how_fast_the_machine_is():
    """None of the rounds is the newest: those steps that nobody drafted for are."""
    times = paced_times()
    for _ in range(40):
        times.observe(1, 0, 0.03, count=8)
    assert times.plain_s(1) == pytest.approx(0.03, rel=0.05)


def test_what_is_around_a_call_of_rounds_is_not_what_leaving_drafts_takes():
    """The step behind it renders what it brought."""
    control = DraftControl()
    for _ in range(8):
        control.step(1, 0, 0.0, 0.01, None, 8)
    for _ in range(8):
        control.step(1, 1, 0.8, 0.013, 0.0, 40, computed=True, round_s=0.0125)
        control.step(1, 0, 0.0, 0.028, None)
        control.step(1, 0, 0.0, 0.01, None, 8)
    assert control.times.ratio(1, BETWEEN) < 1.2


def test_what_one_sequence_takes_amid_rounds_says_nothing_of_several():
    """One decodes in rounds, and then four do without drafts."""
    times = known_times()
    for _ in range(8):
        times.observe(4, 0, 0.012, count=8)
    times.paced(1, 0.008)
    for _ in range(8):
        times.observe(4, 0, 0.012, count=8)
    assert times.plain_s(4) == pytest.approx(0.012, rel=0.05) and not times.is_paced(4)


COUNTS, CHANCES = st.sampled_from([1, 2, 3, 4, 5, 16, 18, 32]), [0.9, 0.8, 0.7, 0.6]
USES = st.one_of(
    st.tuples(st.just("plain"), COUNTS),
    st.tuples(st.just("paced"), COUNTS),
    st.tuples(st.just("rounds"), COUNTS, st.integers(1, 4), st.booleans(), st.integers(1, 40), st.integers(0, 40)),
    st.tuples(st.just("peek"), COUNTS, st.booleans()),
    st.tuples(st.just("asks"), COUNTS, st.booleans()),
)


@settings(max_examples=300)
@given(st.lists(USES, max_size=60))
def test_no_change_of_the_number_of_sequences_fails(uses):
    """Whatever is known of other numbers of sequences, and whatever not of this one."""
    control = DraftControl()
    for use, count, *rest in uses:
        if use == "plain":
            control.step(count, 0, 0.0, 0.01, None, 8)
        elif use == "paced":
            control.paced(count, 0.008)
        elif use == "rounds":
            extra, computed, rounds, lag = rest
            control.step(count, extra, 0.5, 0.013, 0.0, rounds, lag, 0.001, computed=computed, round_s=0.012)
            control.looked_up(count, extra, 1.0, 0.012, rounds)
        elif use == "peek":
            control.peek(1, CHANCES, count, 64, 9 if rest[0] else None)
            control.tries(count, 300, 9, ANY)
        else:
            asked = control.pays_instead(count, CHANCES, CHANCES, amid=rest[0], within=not rest[0])
            assert asked in (True, False)
            assert len(control.choose(count, [CHANCES] * count, 64, computed=rest[0])) == count
            control.best(count, CHANCES, computed=rest[0])
        assert control.rests(count) in (True, False) and control.peek_steps(count) >= 0 and control.window_steps > 0
        assert control.worth(9, count, 10) >= 0


def test_trials_are_as_rare_as_they_are_long():
    """With all that comes before what is drafted: choosing, and what a head reads."""
    control, share = DraftControl(), 0.005
    for _ in range(4):
        control.step(2, 0, 0.0, 1.0, None)
    for _ in range(40):
        control.acceptance.observe(7, ANY, 1, 0)
        control.step(2, 1, 0.0, 7.0, 3.0, computed=True, drafting_s=2.0)
    control.step(2, 0, 0.0, 1.0, None, 400)
    assert not control.tries(2, int(0.9 * 6 / share), 0, ANY)
    assert control.tries(2, int(1.1 * 6 / share), 0, ANY)


@pytest.mark.parametrize("num_decodes", [16, 32])
def test_what_is_new_is_tried_with_many_sequences_as_rarely_as_all(num_decodes):
    """A trial with them seldom pays, and there is one for each kind of draft: a server that begins would feel it."""
    control = DraftControl()
    for count in (num_decodes, 8):
        for _ in range(4):
            control.step(count, 0, 0.0, 1.0, None)
    assert not control.tries(num_decodes, 400, 0, ANY)
    assert control.tries(num_decodes, 600, 0, ANY)
    assert control.tries(8, 8, 0, ANY)


def test_a_model_is_told_once_in_a_thousand_steps_of_many_sequences():
    """However often one looks at what is there without it."""
    control = DraftControl()
    for seconds in (0.001, 0.1):
        for _ in range(4):
            control.step(16, 0, 0.0, seconds, None)
        control.looked(0.0003)
        assert 500 < control.looks_of_one(16) * control.peek_steps(16) <= 1500
    assert control.looks_of_one(16) > 1


def test_one_disturbed_call_does_not_end_trials():
    """What one call says of a step that is verified may be wrong: until there are four, nobody waits for the next."""
    control = DraftControl()
    for _ in range(4):
        control.step(1, 0, 0.0, 1.0, None)
    for _ in range(8):
        control.acceptance.observe(7, ANY, 1, 0)
    for count in range(5):  # the first one makes the head ready
        assert control.tries(1, 8, 0, ANY), count
        control.step(1, 1, 0.0, 4.0, 0.0, 2, drafting_s=0.1, computed=True, round_s=3.9)
        control.step(1, 0, 0.0, 1.0, None, 4000)
    assert not control.tries(1, 8, 0, ANY)


@pytest.mark.parametrize("num_sequences", [2, 4])
def test_what_one_sequence_saves_is_not_spent_on_several(num_sequences):
    """Several texts that nobody can draft, new ones each time, between some of which all drafts are right."""
    simulation = Simulation("tiny", 1.0, 1)
    simulation.run(300)
    seconds = plain_s = 0.0
    for _ in range(60):
        simulation.num_sequences, simulation.acceptance = num_sequences, 0.0
        before_s = simulation.plain_s
        rate, _ = simulation.run(40)
        seconds, plain_s = seconds + 40 * num_sequences / rate, plain_s + simulation.plain_s - before_s
        simulation.num_sequences, simulation.acceptance = 1, 1.0
        simulation.run(40)
        for seq in range(num_sequences):
            simulation.control.forget(seq)
    assert seconds <= 1.02 * plain_s


@pytest.mark.parametrize("count", [1, 8])
def test_looks_that_promise_nothing_are_rarer_until_one_promises(count):
    control, spacings = DraftControl(), list[int]()
    for _ in range(20):
        control.peek(0, [0.1], count, 64)
        spacings.append(control.peek_steps(count))
    assert spacings == sorted(spacings) and spacings[-1] == 4 * spacings[0]
    control.peek(0, [0.9], count, 64)
    assert control.peek_steps(count) <= spacings[0]
