"""Incremental detokenizer: streaming text equals whole text, no split characters, no leaked stop strings."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.text.detokenizer import IncrementalDetokenizer

NAMES = ["qwen2", "llama_spm", "stories"]
WORDS = ["a", "b", "ab", "aba", " ", "\n", "é", "世", "🦙", "</s>", "the", " the", "\u200d", "�"]


def detokenize(tokenizer, prompt_ids, output_ids, **options):
    """The text of a finished output."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, **options)
    return detokenizer.feed(output_ids) + detokenizer.flush()


def whole_text(tokenizer, prompt_ids, output_ids, skip=True):
    """The definition, taken literally: decode everything, drop what the prompt alone gives."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    after = tokenizer.decode([*prompt_ids, *output_ids], skip_special_tokens=skip)
    return after[len(os.path.commonprefix([before, after])) :]  # noqa: RUF071


def stream(tokenizer, prompt_ids, output_ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, **options)
    deltas = [detokenizer.feed([token_id]) for token_id in output_ids]
    return [*deltas, detokenizer.flush()], detokenizer


def cut(text, stops, include):
    """First complete stop string, found by growing the text one character at a time."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            found = max(matches, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def interesting(tokenizer):
    """Ids worth mixing: specials, single bytes, pieces of characters, words, ids without a token."""
    texts = [*WORDS, "Hello 🦙🦙 世界 ñ", "កាន់តែ", "\ufffd\ufffd", "  x  "]
    ids = {token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False)}
    partial = [
        i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_bytes(i).decode("utf-8", "replace")
    ]
    spaces = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b" ", b"  ")]
    unknown = [tokenizer.vocab_size, tokenizer.vocab_size + 7]
    return st.one_of(
        st.sampled_from([*sorted(ids), *spaces, *sorted(tokenizer.special_ids), *unknown]),
        st.sampled_from(partial),
        st.integers(0, tokenizer.vocab_size - 1),
    )


@pytest.mark.parametrize("name", ["qwen2", "llama-spm"])
def test_published_vectors_stream_as_they_decode(name, vectors, request):
    tokenizer = request.getfixturevalue(name.replace("-", "_"))
    for text, ids in vectors(name):
        assert "".join(stream(tokenizer, [], ids)[0]) == tokenizer.decode(ids) == text
        for split in range(len(ids)):
            prompt_ids, output_ids = ids[:split], ids[split:]
            streamed = "".join(stream(tokenizer, prompt_ids, output_ids)[0])
            assert streamed == detokenize(tokenizer, prompt_ids, output_ids)
            assert streamed == whole_text(tokenizer, prompt_ids, output_ids)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_after_any_prompt(tokenizer, interesting, data, skip):
    prompt_ids = data.draw(st.lists(interesting, max_size=12))
    output_ids = data.draw(st.lists(interesting, max_size=24))
    deltas, detokenizer = stream(tokenizer, prompt_ids, output_ids, skip_special_tokens=skip)
    assert "".join(deltas) == whole_text(tokenizer, prompt_ids, output_ids, skip)
    assert "".join(deltas) == detokenize(tokenizer, prompt_ids, output_ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(output_ids) and detokenizer.stop_found is None


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_valid_text_has_no_replacement_characters(tokenizer, data):
    text = data.draw(st.text(st.sampled_from("aé世🦙 \n👩‍🚀ក"), max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt_ids = tokenizer.encode("hi:", add_special_tokens=False)
    deltas, _ = stream(tokenizer, prompt_ids, ids)
    assert "".join(deltas).endswith(text)
    assert not any("\ufffd" in delta for delta in deltas)


@given(data=st.data(), include=st.booleans())
@settings(max_examples=300, deadline=None)
def test_stop_strings(tokenizer, interesting, data, include):
    prompt_ids = data.draw(st.lists(interesting, max_size=4))
    words = data.draw(st.lists(st.sampled_from(WORDS), max_size=16))
    output_ids = tokenizer.encode("".join(words), add_special_tokens=False) + data.draw(
        st.lists(interesting, max_size=6)
    )
    text = detokenize(tokenizer, prompt_ids, output_ids)
    piece = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda p: text[p[0] : p[0] + p[1]])
    stop = st.one_of(piece, st.text(st.sampled_from("ab é世🦙"), min_size=1, max_size=4)).filter(bool)
    stops = data.draw(st.lists(stop, min_size=1, max_size=4))
    deltas, detokenizer = stream(tokenizer, prompt_ids, output_ids, stop=stops, include_stop=include)
    expected, found = cut(text, stops, include)
    assert "".join(deltas) == expected
    assert detokenizer.stop_found == found
    settled, _ = stream(tokenizer, prompt_ids, output_ids)
    for count in range(1, detokenizer.num_tokens):  # until a stop string is complete: all is shown but a begun one
        text = "".join(settled[:count])
        begun = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        assert "".join(deltas[:count]) == text[: len(text) - begun]
    at_once = IncrementalDetokenizer(tokenizer, prompt_ids, stop=stops, include_stop=include)
    assert at_once.feed(output_ids) + at_once.flush() == expected
    assert (at_once.stop_found, at_once.num_tokens) == (found, detokenizer.num_tokens)


def test_stop_string_at_every_position(tokenizer):
    text = "Once upon a time 🦙, in 世界."
    prompt_ids = tokenizer.encode("x", add_special_tokens=False)
    output_ids = tokenizer.encode(text, add_special_tokens=False)
    full = detokenize(tokenizer, prompt_ids, output_ids)
    for start in range(len(full)):
        for end in range(start + 1, len(full) + 1):
            stop = full[start:end]
            deltas, detokenizer = stream(tokenizer, prompt_ids, output_ids, stop=[stop])
            assert "".join(deltas) == full[: full.index(stop)]
            assert detokenizer.stop_found == stop


def test_stop_string_that_never_comes_is_released(stories):
    ids = stories.encode("one two", add_special_tokens=False)
    deltas, detokenizer = stream(stories, [1], ids, stop=["two three"])
    assert "".join(deltas[:-1]) == "one " and deltas[-1] == "two"
    assert detokenizer.stop_found is None


def test_ids_after_the_stop_string_are_not_taken(stories):
    ids = stories.encode("one two three", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(stories, [1], stop=["two"])
    assert detokenizer.feed(ids) == "one "
    assert stories.decode(ids[: detokenizer.num_tokens]) == "one two"
    assert detokenizer.feed(ids) == detokenizer.flush() == ""


def test_first_complete_stop_string_wins_whatever_the_order(stories):
    ids = stories.encode("abcd", add_special_tokens=False)
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        deltas, detokenizer = stream(stories, [1], ids, stop=stops)
        assert ("".join(deltas), detokenizer.stop_found) == ("a", "bc")
    deltas, detokenizer = stream(stories, [1], ids, stop=["c", "bc"])
    assert ("".join(deltas), detokenizer.stop_found) == ("a", "bc")


def test_min_tokens_lets_early_stop_strings_pass(stories):
    ids = [token_id for _ in range(4) for token_id in stories.encode("ab", add_special_tokens=False)[1:]]
    text = detokenize(stories, [1, *stories.encode("x")], ids)
    per_token = len(text) // len(ids)
    for min_tokens in range(len(ids)):
        deltas, detokenizer = stream(stories, [1, *stories.encode("x")], ids, stop=["b"], min_tokens=min_tokens)
        num_tokens = next(n for n in range(max(1, min_tokens), len(ids) + 1) if text[n * per_token - 1] == "b")
        assert (detokenizer.stop_found, detokenizer.num_tokens) == ("b", num_tokens)
        assert "".join(deltas) == text[: num_tokens * per_token - 1]


def test_a_stop_string_passed_over_by_min_tokens_is_not_held_back(stories):
    ids = stories.encode("xab", add_special_tokens=False)
    deltas, _ = stream(stories, [], ids, stop=["b", "long one"], min_tokens=len(ids) + 1)
    assert "".join(deltas[:-1]) == "xab"


def test_first_word_keeps_its_space_after_a_prompt_and_loses_it_at_the_start(llama_spm):
    hello = llama_spm.encode("Hello", add_special_tokens=False)
    assert detokenize(llama_spm, [1, *hello], hello) == " Hello"
    assert detokenize(llama_spm, [], hello) == detokenize(llama_spm, [1], hello) == "Hello"
    assert detokenize(llama_spm, [1], hello, skip_special_tokens=False) == " Hello"


def test_character_begun_by_the_prompt_belongs_to_the_output(qwen2, llama_spm):
    for tokenizer in (qwen2, llama_spm):
        ids = tokenizer.encode("x ឿ", add_special_tokens=False)
        assert [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids[-2:]] == ["�", "�"]
        assert detokenize(tokenizer, ids[:-1], ids[-1:]) == "ឿ"
        deltas, _ = stream(tokenizer, ids[:-2], ids[-2:])
        assert "".join(deltas) == "ឿ" and deltas[0] == ""
        assert set(detokenize(tokenizer, ids[:-2], ids[-2:-1])) == {"�"}


def test_each_id_is_decoded_a_bounded_number_of_times(tokenizer):
    class Counting:
        num_decoded = 0

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, skip_special_tokens=True):
            self.num_decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

    for text in ("Once upon a time there was a llama. " * 50, "🦙" * 300):
        ids = tokenizer.encode(text, add_special_tokens=False)
        counting = Counting()
        stream(counting, ids, ids, stop=["never"])
        assert counting.num_decoded <= 3 * 2 * len(ids)  # prompt and output
