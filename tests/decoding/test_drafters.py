"""What guards a strategy from a drafter: tries of one token more, fewer and fewer while drafts do not pay."""

from ridgeline.decoding.draft_control import DRAFTING_WAIT, MAX_WAIT, Probes


def waits(probes, drafts, rounds):
    """How many rounds lie between two tries."""
    tried = [number for number in range(rounds) if probes.due(drafts)]
    return [later - earlier for earlier, later in zip(tried, tried[1:])]


def test_drafts_that_do_not_pay_are_tried_less_and_less_often():
    found = waits(Probes(), False, 400)
    assert found[:3] == [8, 16, 32]
    assert set(found[2:]) == {MAX_WAIT}


def test_longer_drafts_are_tried_at_a_steady_pace_while_drafts_pay():
    assert set(waits(Probes(), True, 100)) == {DRAFTING_WAIT}


def test_a_change_of_mind_is_tried_soon():
    probes = Probes()
    waits(probes, False, 400)
    assert waits(probes, True, 40)[0] == DRAFTING_WAIT
    assert [probes.due(False) for _ in range(4)] == [False, False, False, True]
