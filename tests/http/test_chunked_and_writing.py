"""The chunk decoder against llhttp's on arbitrary input, and what may not be written."""

from __future__ import annotations

from itertools import pairwise

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.http.chunked import ChunkDecoder
from triptych.http.errors import ParseError, UnsafeHeaderError
from triptych.http.head import header_lines, request_line, status_line

HEAD = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
ALPHABET = st.sampled_from(
    [
        b"0\r\n",
        b"\r\n",
        b"\r",
        b"\n",
        b"3",
        b"a",
        b"1\r\nx\r\n",
        b"5\r\nhello\r\n",
        b";e=1",
        b" ",
        b"0\r\n\r\n",
        b"t: v\r\n",
    ]
)


class Reference:
    """llhttp's opinion."""

    def __init__(self) -> None:
        self.body = b""
        self.ended = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended = True


def decode(pieces: list[bytes]) -> tuple[bytes, bool]:
    decoder = ChunkDecoder()
    out: list[bytes] = []
    for piece in pieces:
        payload = decoder.whole(piece)
        if payload is not None:
            out.append(payload)
        elif decoder.feed(piece, 0, out) >= 0:
            return b"".join(out), True
    return b"".join(out), False


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 10_000), max_size=6))
def test_what_was_encoded_is_decoded_whatever_the_split(chunks: list[bytes], places: list[int]) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    assert decode(cut(data, places)) == (b"".join(chunks), True)


@settings(max_examples=250, deadline=None)
@given(st.lists(ALPHABET, max_size=12).map(b"".join), st.lists(st.integers(0, 10_000), max_size=4))
def test_nothing_is_accepted_that_llhttp_reads_otherwise(data: bytes, places: list[int]) -> None:
    try:
        body, ended = decode(cut(data, places))
    except ParseError:
        return
    reference = Reference()
    parser = httptools.HttpRequestParser(reference)
    parser.feed_data(HEAD)
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:
        # llhttp read on behind the end, or is stricter about a beginning that has not ended yet.
        assert not ended or reference.ended
    if ended:
        assert reference.ended
    assert reference.body.startswith(body) or body.startswith(reference.body)


@settings(max_examples=150, deadline=None)
@given(st.lists(ALPHABET, max_size=12).map(b"".join), st.lists(st.integers(0, 10_000), max_size=6))
def test_a_split_changes_nothing(data: bytes, places: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> object:
        try:
            return decode(pieces)
        except ParseError:
            return "refused"

    whole, split = outcome([data]), outcome(cut(data, places))
    assert whole == split


def test_the_end_of_a_body_is_found_inside_what_was_fed() -> None:
    decoder = ChunkDecoder()
    out: list[bytes] = []
    assert decoder.feed(b"..1\r\na\r\n0\r", 2, out) == -1
    assert decoder.feed(b"..\n\r\nGET", 2, out) == 5
    assert out == [b"a"]


@pytest.mark.parametrize(
    "data", [b"1\r\na\r", b"1\r\na\r\n0", b"2\r\na\r\n", b"0\r\n\r\n", b"1;e\r\na\r\n", b"1\r\naX\n", b"g\r\n"]
)
def test_the_short_way_takes_exactly_one_chunk_or_nothing(data: bytes) -> None:
    assert ChunkDecoder().whole(data) is None
    assert ChunkDecoder().whole(b"1\r\na\r\n") == b"a"


def test_the_short_way_waits_for_a_chunk_that_has_begun() -> None:
    decoder = ChunkDecoder()
    out: list[bytes] = []
    decoder.feed(b"9\r\n", 0, out)
    assert decoder.whole(b"1\r\na\r\n") is None
    assert decoder.feed(b"1\r\na\r\n...\r\n", 0, out) == -1
    assert b"".join(out) == b"1\r\na\r\n..."


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: x", b"a\rb", b"a\nb", b"a\0b", b"\r\n"])
def test_a_value_that_would_split_the_message_is_not_written(value: bytes) -> None:
    with pytest.raises(UnsafeHeaderError):
        header_lines([(b"ok", b"fine"), (b"x", value)])


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\nb", b"a\n", b"\xc3\xa4", b"a\0"])
def test_a_name_that_is_no_token_is_not_written(name: bytes) -> None:
    with pytest.raises(UnsafeHeaderError):
        header_lines([(name, b"v")])


def test_headers_of_one_hop_are_left_to_the_writer() -> None:
    lines = header_lines(
        [
            (b"content-length", b"5"),
            (b"Transfer-Encoding", b"chunked"),
            (b"connection", b"close"),
            (b"host", b"h"),
            (b"x", b""),
        ]
    )
    assert lines == b"x: \r\n"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        (b"GET", b"/a b"),
        (b"GET", b""),
        (b"GET", b"/a\r\nx: y"),
        (b"GET", b"/\xff"),
        (b"G T", b"/"),
        (b"", b"/"),
        (b"GET", b"/#f"),
    ],
)
def test_a_request_line_that_would_break_is_not_written(method: bytes, target: bytes) -> None:
    with pytest.raises(UnsafeHeaderError):
        request_line(method, target)


def test_status_lines() -> None:
    assert status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"
    for status in (0, 199, 1000):
        with pytest.raises(ValueError, match="status"):
            status_line(status)
