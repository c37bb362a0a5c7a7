"""Proposers: found by their file, never beyond what was asked, and right about what has stood before."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ridgeline.decoding.proposers as folder
from ridgeline import SamplingParams, SpeculationParams
from ridgeline.core.speculation import SpeculationConfig, proposer_names
from ridgeline.decoding.proposers import build_proposer
from ridgeline.decoding.proposers.ngram import MAX_CANDIDATES, Ngram
from ridgeline.decoding.proposers.prediction import Prediction
from ridgeline.decoding.proposers.suffix import MAX_POOLS

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def view(tokens, seq_id=0, prediction=(), num_prompt=1, salt="", adapter=0, pool=True):
    request = SimpleNamespace(
        prompt_ids=tokens[:num_prompt],
        prediction_ids=prediction,
        salt=salt,
        adapter=adapter,
        params=SamplingParams(speculation=SpeculationParams(pool=pool)),
    )
    return SimpleNamespace(seq_id=seq_id, token_ids=tokens, request=request, grammar=None)


def longest_match(tokens, shortest, longest):
    """(length, end) of the longest earlier match of the last tokens, the last among equals, by trying all."""
    found = (0, 0)
    for end in range(shortest, len(tokens)):
        length = 0
        while length < min(longest, end) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
            length += 1
        if length >= shortest:
            found = max(found, (length, end))
    return found


def test_the_names_are_the_files():
    files = {path.stem for path in Path(folder.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(proposer_names()) == files


@pytest.mark.parametrize("name", proposer_names())
@settings(max_examples=60, deadline=None)
@given(text=TEXT, max_tokens=st.integers(1, 12))
def test_a_draft_is_as_long_as_asked_at_most_and_its_evidence_a_small_number(name, text, max_tokens):
    proposer = build_proposer(name, SpeculationConfig(speculate=name))
    for known in range(1, len(text) + 1):
        draft = proposer.propose(view(text[:known], prediction=text[::-1]), max_tokens)
        assert draft is None or (1 <= len(draft.token_ids) <= max_tokens and 0 <= draft.evidence < 64)
    proposer.forget(view(text, pool=False))
    assert proposer.propose(view([9]), max_tokens) is None


@settings(max_examples=200, deadline=None)
@given(text=TEXT, shortest=st.integers(1, 3), more=st.integers(0, 3), asked=st.sets(st.integers(1, 60)))
def test_the_longest_match_is_found_whenever_it_is_asked_for(text, shortest, more, asked):
    """In texts of fewer places than are compared at most."""
    text = text[: MAX_CANDIDATES + 1]
    proposer = Ngram(shortest, shortest + more)
    for known in sorted(n for n in asked if n <= len(text)):
        tokens = text[:known]
        length, end = longest_match(tokens, shortest, shortest + more)
        draft = proposer.propose(view(tokens), 5)
        if not length:
            assert draft is None
        else:
            following = [*tokens[end:]]
            assert draft.evidence == length - shortest
            assert draft.token_ids == [following[i % len(following)] for i in range(5)]


def test_sequences_do_not_see_each_other():
    proposer = Ngram(1, 3)
    assert proposer.propose(view([1, 2, 1], seq_id=1), 1).token_ids == [2]
    assert proposer.propose(view([5, 1], seq_id=2), 1) is None


def test_a_lookup_in_one_repeated_token_is_bounded():
    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    proposer = Ngram(2, 64)
    tokens = Counted([7] * 5000)
    proposer.propose(view(tokens), 8)
    Counted.reads = 0
    tokens.append(7)
    proposer.propose(view(tokens), 8)
    assert Counted.reads < 5000


def rounds(text, output, max_tokens=8):
    """How many rounds a prediction of `text` takes for the output, and how many drafts were wrong from the start."""
    proposer, known, wrong, num_rounds = Prediction(), 1, 0, 0
    while known < len(output):
        num_rounds += 1
        draft = proposer.propose(view([99, *output[:known]], prediction=text), max_tokens)
        right = 0
        if draft is not None:
            while right < len(draft.token_ids) and [*output, -1][known + right] == draft.token_ids[right]:
                right += 1
            wrong += right == 0
        known += right + 1
    return num_rounds, wrong


WORDS = [random.Random(1).randrange(40) for _ in range(200)]  # tokens come again, as words do
EDITS = {
    "none": (WORDS, 0),
    "a word changed": ([*WORDS[:80], 77, *WORDS[81:]], 0),
    "words inserted": ([*WORDS[:80], 77, 78, 79, *WORDS[80:]], 2),
    "words removed": ([*WORDS[:80], *WORDS[84:]], 1),
    "begun elsewhere": (WORDS[50:], 1),
    "a passage moved": ([*WORDS[:40], *WORDS[100:140], *WORDS[40:100], *WORDS[140:]], 5),
}


@pytest.mark.parametrize(("output", "max_wrong"), EDITS.values(), ids=EDITS)
def test_a_prediction_finds_its_way_back_after_an_edit(output, max_wrong):
    num_rounds, wrong = rounds(WORDS, output)
    assert wrong <= max_wrong
    assert num_rounds <= len(output) / 9 + 2 + 3 * max_wrong + 2


def test_a_prediction_that_is_over_drafts_nothing_and_others_see_none():
    proposer = Prediction()
    assert proposer.propose(view([1, 5, 6], prediction=[5, 6]), 4) is None
    assert proposer.propose(view([1, 5], seq_id=1, prediction=[5, 6, 7]), 1).token_ids == [6]
    assert proposer.propose(view([1, 5], seq_id=2), 4) is None


def test_a_prediction_of_one_repeated_token_is_searched_in_bounds():
    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    text = Counted([7] * 5000)
    proposer = Prediction()
    proposer.propose(view([0, 7, 8], prediction=text), 8)
    Counted.reads = 0
    proposer.propose(view([0, 7, 8, 9, 7, 7], prediction=text), 8)
    assert Counted.reads < 2000


def ended(proposer, seq_id, output, **more):
    """Let a sequence of a prompt and this output come and go."""
    whole = view([90, 91, 92, *output], seq_id=seq_id, num_prompt=3, **more)
    proposer.propose(whole, 4)
    proposer.forget(whole)


@pytest.fixture
def suffix():
    pytest.importorskip("ridgeline._native")
    return build_proposer("suffix", SpeculationConfig(speculate="suffix"))


def test_a_finished_output_is_drafted_from_and_a_prompt_is_not(suffix):
    ended(suffix, 1, [5, 6, 7, 8, 9])
    assert suffix.propose(view([1, 2, 5, 6, 7], seq_id=2), 4).token_ids == [8, 9]
    assert suffix.propose(view([1, 2, 90, 91], seq_id=3), 4) is None


@pytest.mark.parametrize("other", [{"salt": "theirs"}, {"adapter": 1}])
def test_outputs_of_another_salt_or_adapter_change_no_draft(suffix, other):
    """Whether a step accepts several tokens can be seen from outside: it must not tell what others have got."""
    alone = build_proposer("suffix", SpeculationConfig(speculate="suffix"))
    ended(suffix, 1, [5, 6, 7, 8, 9])
    mine = [1, 5, 6, 7, 8, 5, 6]
    for known in range(1, len(mine) + 1):
        asked = view(mine[:known], seq_id=2, **other)
        assert suffix.propose(asked, 4) == alone.propose(asked, 4)


def test_a_request_may_keep_out_of_the_pool(suffix):
    ended(suffix, 1, [5, 6, 7, 8, 9], pool=False)
    assert suffix.propose(view([1, 5, 6, 7], seq_id=2), 4) is None
    ended(suffix, 3, [5, 6, 7, 8, 9])
    assert suffix.propose(view([1, 5, 6, 7], seq_id=4, pool=False), 4) is None
    assert suffix.propose(view([1, 5, 6, 7], seq_id=5), 4) is not None


def test_pools_are_bounded_and_the_one_not_used_for_longest_goes(suffix):
    for tenant in range(MAX_POOLS + 1):
        ended(suffix, tenant, [5, 6, 7], salt=str(tenant))
    known = [1, 5, 6]
    assert suffix.propose(view(known, seq_id=100, salt="0"), 1) is None
    assert suffix.propose(view(known, seq_id=101, salt="1"), 1).token_ids == [7]


def test_a_prompt_is_read_once_and_each_token_after_it():
    """What a step adds is what is read, however long the text: lookup must not scan the context every step."""
    pytest.importorskip("ridgeline._native")
    proposer, read = build_proposer("suffix", SpeculationConfig(speculate="suffix")), []

    class Text(list):
        def __getitem__(self, place):
            found = super().__getitem__(place)
            read.append(len(found) if isinstance(place, slice) else 1)
            return found

    tokens = Text(range(5000))
    for _ in range(10):
        proposer.propose(view(tokens), 4)
        tokens.append(7)
    assert sum(read) <= 5000 + 10 * (1 + 24)
