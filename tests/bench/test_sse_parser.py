"""The event stream parser: the standard's rules, and that the network may cut the bytes anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.bench import sse
from ridgeline.bench.sse import SSEEvent, SSEParser

STREAM = (
    "\ufeff: a comment\r\n"
    "data: first\r\n\r\n"
    "event: error\ndata: two\ndata:lines\n\n"
    "id: 7\rretry: 10\rdata:  one space kept\r\r"
    "event: dropped for want of data\n\n"
    "data\n\n"
    "data: snowman ☃ and 日本\n\n"
    "data: [DONE]\r\n\r\n"
    "data: cut off"
).encode()
EVENTS = [
    SSEEvent("message", "first"),
    SSEEvent("error", "two\nlines"),
    SSEEvent("message", " one space kept"),
    SSEEvent("message", ""),
    SSEEvent("message", "snowman ☃ and 日本"),
    SSEEvent("message", "[DONE]"),
]


def parse(*chunks):
    parser = SSEParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_whole_stream_at_once():
    assert parse(STREAM) == EVENTS


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_cut_at_every_byte(cut):
    assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS


def test_byte_by_byte():
    assert parse(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cut_in_many_places(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse(*(STREAM[low:high] for low, high in zip(edges, edges[1:]))) == EVENTS


def test_an_event_is_out_with_its_last_byte():
    parser = SSEParser()
    assert parser.feed(b"data: x\r\n\r") == [SSEEvent("message", "x")]
    assert parser.feed(b"\ndata: y\n\n") == [SSEEvent("message", "y")]


@pytest.mark.parametrize("endless", [b"data: " + b"x" * 120, b"data: xxxxxxxxxxxxxxxxxx\n" * 6])
def test_an_endless_event_is_refused(monkeypatch, endless):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        parse(endless)


def test_many_events_may_be_longer_than_one_may_be(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    assert len(parse(b"data: xxxxxxxxxxxxxxxxxx\n\n" * 50)) == 50
