"""Only whole events pass, every byte passes once, and it costs nothing where chunks are events."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.http.sse import EventScanner, EventTooLarge

STREAMS = st.lists(
    st.sampled_from(
        [b"\n", b"\r\n", b"\r", b"data: x", b"id: 1", b": ping", b"data: [DONE]", b"\n\n", b"\r\n\r\n", b"\xff"]
    ),
    max_size=14,
).map(b"".join)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def ends_an_event(data: bytes) -> bool:
    """By the book: split into lines by CRLF, LF or CR; the last line is empty and so is the one before its end."""
    lines = re.split(rb"\r\n|\n|\r", data)
    return len(lines) >= 2 and lines[-1] == b"" and lines[-2] == b""


def events_in(data: bytes) -> int:
    """Blocks of lines that are not empty and are followed by one that is."""
    lines = re.split(rb"\r\n|\n|\r", data)[:-1]
    count, in_block = 0, False
    for line in lines:
        if line:
            in_block = True
        elif in_block:
            count, in_block = count + 1, False
    return count


@settings(max_examples=250, deadline=None)
@given(STREAMS, st.lists(st.integers(0, 10_000), max_size=8))
def test_what_passes_is_whole_events_and_nothing_is_lost(data: bytes, places: list[int]) -> None:
    scanner = EventScanner()
    passed, fed = b"", 0
    for piece in cut(data, places):
        ready = scanner.feed(piece)
        passed += ready
        fed += len(piece)
        assert scanner.pending == fed - len(passed)
        assert not ready or ends_an_event(passed), passed
    assert passed + scanner.rest() == data
    assert scanner.pending == 0


@settings(max_examples=250, deadline=None)
@given(STREAMS, st.lists(st.integers(0, 10_000), max_size=8))
def test_a_split_neither_delays_an_event_nor_changes_the_count(data: bytes, places: list[int]) -> None:
    whole, split = EventScanner(), EventScanner()
    passed = b"".join(split.feed(piece) for piece in cut(data, places))
    at_once = whole.feed(data)
    assert whole.events == split.events == events_in(data)
    # A CRLF cut in two may leave its LF for the next event, nothing else.
    assert passed.rstrip(b"\r\n") == at_once.rstrip(b"\r\n")


@pytest.mark.parametrize("data", [b"data: 1\n\n", b"data: 1\n\ndata: 2\n\n", b": ping\n\n", b"event: a\ndata: b\n\n"])
def test_a_chunk_of_whole_events_is_returned_as_it_is(data: bytes) -> None:
    scanner = EventScanner()
    assert scanner.feed(data) is data
    assert scanner.events == data.count(b"\n\n")
    crlf = data.replace(b"\n", b"\r\n")
    assert scanner.feed(crlf) is crlf


def test_a_partial_event_waits_for_its_end() -> None:
    scanner = EventScanner()
    assert scanner.feed(b"data: 1\n\ndata: ") == b"data: 1\n\n"
    assert scanner.pending == 6
    assert scanner.feed(b"2\n") == b""
    assert scanner.feed(b"\ndata: 3") == b"data: 2\n\n"
    assert scanner.rest() == b"data: 3"
    assert scanner.events == 2


def test_a_crlf_is_one_line_end_even_where_it_is_cut() -> None:
    scanner = EventScanner()
    assert scanner.feed(b"data: 1\r") == b""
    assert scanner.feed(b"\n") == b""
    assert scanner.feed(b"data: 2\r") == b""
    assert scanner.feed(b"\n\r") == b"data: 1\r\ndata: 2\r\n\r"
    assert scanner.feed(b"\ndata: 3\n\n") == b"\ndata: 3\n\n"
    assert scanner.events == 2


def test_an_event_without_an_end_has_a_bound() -> None:
    scanner = EventScanner(max_event=10)
    scanner.feed(b"data: 1\n\n")
    scanner.feed(b"data: 2345")
    with pytest.raises(EventTooLarge, match="10 bytes"):
        scanner.feed(b"6")


def test_an_event_in_many_pieces_comes_out_whole() -> None:
    scanner = EventScanner()
    for _ in range(50_000):
        scanner.feed(b"x")
    assert len(scanner.feed(b"\n\n")) == 50_002
