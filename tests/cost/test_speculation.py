"""Tokens of a round against counting all its outcomes, and the speed-ups of the literature's examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.cost.speculation import speedup, tokens_per_round

SHARES = st.lists(st.floats(0, 1), max_size=6)


@given(SHARES)
def test_a_round_is_the_mean_of_its_outcomes(acceptance):
    expected, reached = 0.0, 1.0
    for accepted, share in enumerate(acceptance):
        expected += reached * (1 - share) * (accepted + 1)
        reached *= share
    expected += reached * (len(acceptance) + 1)
    assert tokens_per_round(acceptance) == pytest.approx(expected)


@given(st.floats(0, 0.99), st.integers(0, 12))
def test_equal_shares_have_the_closed_form(share, drafts):
    closed = (1 - share ** (drafts + 1)) / (1 - share)
    assert tokens_per_round([share] * drafts) == pytest.approx(closed)


def test_speedup_by_hand():
    assert speedup([0.8] * 4, 0.11) == pytest.approx(3.3616 / 1.44)
    assert speedup([], 0.5) == 1
    assert speedup([0.1] * 4, 0.2) < 1
