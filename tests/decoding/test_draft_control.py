"""How many tokens are drafted, on a machine whose step times and a text whose acceptance the test decides."""

import random

import pytest

from ridgeline.decoding.draft_control import EXTRA_TOKENS, MAX_NAP_STEPS, Acceptance, DraftControl, StepTimes

MEMORY_BOUND, RIDGE, BUSY = "memory", "ridge", "busy"
STEP_S = {
    MEMORY_BOUND: lambda num_tokens: 0.010 + 0.0001 * num_tokens,
    RIDGE: lambda num_tokens: 0.010 * max(1, num_tokens / 8),
    BUSY: lambda num_tokens: 0.004 * num_tokens,
}


ANY = ("any", 0)


class Simulation:
    """Decodes `num_sequences` of endless text, of which each drafted token is right with the chance `acceptance`."""

    def __init__(self, machine, acceptance, num_sequences, *, noise=0.05, seed=1):
        self.control, self.random = DraftControl(), random.Random(seed)
        self.machine, self.acceptance, self.num_sequences, self.noise = machine, acceptance, num_sequences, noise
        self.asked = 0

    def step(self):
        """(tokens gained, seconds, tokens drafted) of one step."""
        control, drafted, gained = self.control, 0, self.num_sequences
        lengths = [0] * self.num_sequences
        if not control.rests:
            self.asked += 1
            survivals = [control.acceptance.survival(seq, ANY, 8) for seq in range(self.num_sequences)]
            lengths = control.choose(self.num_sequences, survivals, 256)
            for seq, length in enumerate(lengths):
                tried, right = length or 8, 0  # what is not verified is compared with what came, later
                while right < tried and self.random.random() < self.acceptance:
                    right += 1
                control.acceptance.observe(seq, ANY, tried, right)
                gained += min(right, length)
                drafted += length
        seconds = STEP_S[self.machine](self.num_sequences + drafted) * self.random.uniform(1, 1 + self.noise)
        control.step(self.num_sequences + drafted, seconds)
        return gained, seconds, drafted

    def run(self, num_steps):
        gained, seconds, drafted = zip(*(self.step() for _ in range(num_steps)), strict=True)
        return sum(gained) / sum(seconds), sum(drafted) / num_steps


def plain(machine, num_sequences, noise=0.05):
    return num_sequences / (STEP_S[machine](num_sequences) * (1 + noise / 2))


@pytest.mark.parametrize("machine", STEP_S)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 32])
def test_never_slower_than_without(machine, acceptance, num_sequences):
    rate, _ = Simulation(machine, acceptance, num_sequences).run(2000)
    assert rate >= 0.98 * plain(machine, num_sequences)


@pytest.mark.parametrize(
    ("machine", "acceptance", "num_sequences"), [("memory", 0.8, 1), ("memory", 0.9, 4), ("ridge", 0.9, 1)]
)
def test_drafts_where_a_step_waits_for_memory(machine, acceptance, num_sequences):
    """At least 85 % of what the best fixed length brings in hindsight."""
    simulation = Simulation(machine, acceptance, num_sequences)
    simulation.run(300)
    rate, _ = simulation.run(1500)
    best = (
        max(
            num_sequences * sum(acceptance**j for j in range(k + 1)) / STEP_S[machine](num_sequences * (1 + k))
            for k in range(9)
        )
        / 1.025
    )
    assert best > 1.5 * plain(machine, num_sequences)
    assert rate >= 0.85 * best


def test_a_machine_that_is_busy_gets_no_drafts_and_proposers_rest():
    simulation = Simulation("busy", 0.9, 16)
    simulation.run(500)
    before = simulation.asked
    _, drafted = simulation.run(1000)
    assert drafted < 1
    assert simulation.asked - before <= 4 * 1000 / MAX_NAP_STEPS


def test_a_text_that_becomes_predictable_is_noticed():
    simulation = Simulation("memory", 0.0, 1)
    simulation.run(1000)
    simulation.acceptance = 0.95
    _, drafted = simulation.run(1500)
    assert drafted > 1


def test_a_machine_that_becomes_slower_moves_all_times():
    times = StepTimes()
    for _ in range(50):
        for num_tokens in (1, 2, 4, 9):
            times.observe(num_tokens, 0.01 + 0.001 * num_tokens)
    for _ in range(50):
        times.observe(1, 0.022)
    assert times.expected_s(9) == pytest.approx(0.038, rel=0.15)


def test_one_step_that_somebody_else_disturbed_moves_little():
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 0.01)
    times.observe(1, 10.0)
    assert times.expected_s(1) < 0.013


def test_what_lies_behind_a_rejected_token_was_not_tried():
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe(0, ANY, 8, 1)
    first, second, *_ = acceptance.survival(1, ANY, 8)
    assert first > 0.9
    assert second < 0.1
    untouched = acceptance.survival(1, ("any", 5), 8)
    assert untouched[0] == pytest.approx(0.5)


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
    for _ in range(10):
        control.times.observe(3, 0.01)
    lengths = control.choose(3, [[0.9, 0.8, 0.7]] * 3, room=4)
    assert sum(lengths) <= 4
    assert all(0 <= length <= 3 for length in lengths)
    assert tuple(sorted(EXTRA_TOKENS)) == EXTRA_TOKENS
