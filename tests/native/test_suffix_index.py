"""The index of lookup drafts against a search through all places, its memory against its bound."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("ridgeline._native")
LENGTHS = [2, 3, 4, 6, 8]
TEXT = st.lists(st.integers(0, 3), max_size=60)


def brute_force(documents, text, max_tokens, factor, min_probability, lengths=LENGTHS, *, own=False):
    """(tokens, length of the match, agreement, score) by looking at every place of every document."""
    places = []
    for document in documents:
        for end in range(lengths[0], len(document)):
            matched = 0
            while matched < min(end, len(text), lengths[-1]) and document[end - 1 - matched] == text[-1 - matched]:
                matched += 1
            places.append((matched, document, end))
    best = max((matched for matched, *_ in places), default=0)
    if best < lengths[0]:
        return None
    alive = [(document, end) for matched, document, end in reversed(places) if matched == best]
    tokens, probability, score, agreement = [], 1.0, 0.0, 0.0
    while len(tokens) < min(max_tokens, int(factor * best)):
        i = len(tokens)

        def following(place, i=i):
            whole = place[0] + tokens if own else place[0]
            return whole[place[1] + i] if place[1] + i < len(whole) else None

        votes = Counter(token for place in alive if (token := following(place)) is not None)
        if not votes:
            break
        token, count = votes.most_common(1)[0]  # of equals the first that was counted: the latest place's
        probability *= count / len(alive)
        if probability < min_probability:
            break
        agreement = agreement or count / len(alive)
        alive = [place for place in alive if following(place) == token]
        tokens.append(token)
        score += probability
    return (tokens, best, pytest.approx(agreement), pytest.approx(score)) if tokens else None


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=32),
    limits=st.tuples(st.integers(1, 10), st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    asked=st.sets(st.integers(0, 32)),
)
def test_a_text_finds_its_own_longest_match_whenever_it_is_asked(text, limits, asked):
    index = native.SuffixIndex(LENGTHS, 1000)
    for known in sorted(asked | {len(text)}):
        index.extend(text[index.num_tokens : known])
        assert index.find_own(*limits) == brute_force([text[:known]], text[:known], *limits, own=True)


@settings(max_examples=150, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=5),
    text=TEXT,
    max_documents=st.integers(1, 5),
)
def test_a_pool_finds_what_followed_in_the_documents_that_are_left(documents, text, max_documents):
    pool = native.SuffixIndex(LENGTHS, 1000, max_documents)
    for document in documents:
        pool.extend(document)
        pool.close()
    left = documents[-max_documents:]
    assert pool.num_tokens == sum(len(document) + 1 for document in left)
    assert pool.find(text, 6, 1.0, 0.1) == brute_force(left, text, 6, 1.0, 0.1)


def test_a_pool_in_bounded_memory_forgets_whole_documents_the_oldest_first():
    rng = random.Random(3)
    pool, documents = native.SuffixIndex(LENGTHS, 100), []
    for _ in range(400):
        document = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        documents.append(document)
        pool.extend(document)
        pool.close()
        while sum(len(each) + 1 for each in documents) > 100:
            del documents[0]
        assert pool.num_tokens == sum(len(each) + 1 for each in documents)
        text = [rng.randrange(4) for _ in range(8)]
        found, expected = pool.find(text, 4, 1.0, 0.0), brute_force(documents, text, 4, 1.0, 0.0)
        assert (found is None) == (expected is None)
        if found is not None:  # among so many places of so few tokens only the latest are compared
            assert found[1] <= expected[1]
    assert pool.num_bytes <= 128 * (4 + 8 * len(LENGTHS))


def test_what_is_longer_than_the_index_is_remembered_by_its_end():
    pool = native.SuffixIndex([2], 20)
    pool.extend(list(range(100)))
    pool.close()
    assert pool.num_tokens <= 20
    assert pool.find([95, 96], 3, 2.0, 0.0)[0] == [97, 98, 99]
    assert pool.find([50, 51], 3, 2.0, 0.0) is None


def test_a_lookup_in_one_repeated_token_goes_round():
    index = native.SuffixIndex(LENGTHS, 1 << 20)
    index.extend([7] * 100_000)
    assert index.find_own(16, 4.0, 0.1) == ([7] * 16, 8, 1.0, 16.0)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "max_documents"), [([], 9, 1), ([0], 9, 1), ([3, 2], 9, 1), ([2], 1, 1), ([2], 9, 0)]
)
def test_bounds_that_make_no_sense_are_refused(lengths, max_tokens, max_documents):
    with pytest.raises(ValueError, match="rise"):
        native.SuffixIndex(lengths, max_tokens, max_documents)
    with pytest.raises(ValueError, match="0 or more"):
        native.SuffixIndex([2], 9).extend([-1])
