"""What steps with and without drafts take, as it is learnt from them."""

import pytest

from ridgeline.decoding.step_times import BETWEEN, TRIALS, StepTimes


def test_windows_of_steps_that_were_disturbed_say_nothing_of_a_plain_step():
    """Beside rounds few are timed: most of them may have been disturbed, and none is too short."""
    times = StepTimes()
    for _ in range(4):
        times.observe(1, 0, 1.0)
    for window_s in (2.0, 1.2, 1.2, 3.0, 2.5):
        times.paced(1, 1.0)
        times.observe(1, 0, window_s)
    assert times.plain_s(1) == pytest.approx(1.2)


def test_what_longer_drafts_of_a_model_take_follows_each_step_of_one():
    times = StepTimes()
    for _ in range(8):
        times.observe(1, 0, 0.01)
    for extra in [*[1] * TRIALS, *[3] * TRIALS]:
        times.observe(1, extra, 0.01 * (1 + 0.1 * extra), computed=True)
    assert [times.ratio(1, extra, computed=True) for extra in (2, 5)] == pytest.approx([1.2, 1.5])
    for _ in range(400):
        before = times.ratio(1, 5, computed=True)
        times.observe(1, 3, 0.02, computed=True)
        assert times.ratio(1, 5, computed=True) >= before
    assert times.ratio(1, 3, computed=True) > 1.6


def test_a_call_of_many_rounds_that_was_disturbed_moves_little():
    """All of its rounds were: it is one observation, not a hundred."""
    times = StepTimes()
    for _ in range(4):
        times.observe(1, 0, 1.0)
    for _ in range(TRIALS):
        times.observe(1, 1, 1.2, computed=True, count=64)
    times.observe(1, 1, 5.0, computed=True, count=128)
    assert 1.2 < times.ratio(1, 1, computed=True) < 1.3
    for _ in range(12):
        times.observe(1, 1, 1.6, computed=True, count=128)
    assert times.ratio(1, 1, computed=True) == pytest.approx(1.6, rel=0.02)


def test_numbers_of_many_sequences_are_learnt_as_one():
    times = StepTimes()
    for count in (17, 16, 19, 18):
        times.observe(count, 0, 1.0)
    assert [count for count in range(12, 24) if times.knows(count, 0)] == [16, 17, 18, 19]
    assert times.plain_s(19) == 1.0


def test_sizes_that_a_model_drafts_lie_on_a_line():
    """A few rounds of one size that were slow do not make it look worse than a larger one."""
    times = StepTimes()
    for _ in range(64):
        for extra, ratio in ((0, 1.0), (1, 1.4), (4, 2.6)):
            times.observe(1, extra, 0.010 * ratio, computed=True)
    assert times.ratio(1, 2, computed=True) == pytest.approx(1.8, abs=0.05)
    assert times.ratio(1, 6, computed=True) == pytest.approx(3.4, abs=0.1)
    times.observe(1, 2, 0.040, computed=True, count=TRIALS)
    assert 1.7 < times.ratio(1, 2, computed=True) < 2.1 < times.ratio(1, 4, computed=True)


def test_a_lookup_that_is_not_known_is_no_faster_than_a_step_that_asks():
    times = StepTimes()
    for _ in range(9):
        times.observe(1, 0, 0.010)
        times.observe(1, BETWEEN, 0.025)
    assert times.ratio(1, 4) >= 2.4
    assert times.ratio(1, 4, computed=True) < 1.2, "rounds of a model overlap nothing either, and need not"


def test_the_first_steps_of_a_shape_say_nothing():
    times = StepTimes()
    for extra in (0, 4):
        for step in range(TRIALS):
            times.observe(1, extra, 1.0 if step < 2 else 0.010 * (1 + extra / 4))
    assert times.ratio(1, 4) == pytest.approx(2.0)
