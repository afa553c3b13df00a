"""What is a response, where it ends, and what is refused; each case whole, in every split, and with trailing data."""

from __future__ import annotations

import pytest

from tests.http.feeding import Message, every_way, parse_response, refusals, splits
from triptych.http.errors import ParseError
from triptych.http.head import UNTIL_EOF, ResponseHead
from triptych.http.parser import ResponseParser


def check(data: bytes, body: bytes = b"", method: bytes = b"GET", **expected: object) -> None:
    def parse(pieces: list[bytes]) -> Message:
        return parse_response(pieces, method)

    for split, message in every_way(parse, data, trailing=b"HTTP/1.1 200 OK\r\n\r\n"):
        assert message.ended, split
        assert message.body == body, split
        head = message.heads[-1]
        assert isinstance(head, ResponseHead)
        for name, value in expected.items():
            assert getattr(head, name) == value, (split, name)


def test_a_response_of_fixed_length() -> None:
    check(
        b"HTTP/1.1 201 Made It\r\nContent-Length: 3\r\nX: y \r\n\r\nabc",
        b"abc",
        status=201,
        reason=b"Made It",
        version="1.1",
        headers=[(b"content-length", b"3"), (b"x", b"y")],
        length=3,
        keep_alive=True,
    )


def test_a_chunked_response() -> None:
    check(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc", keep_alive=True)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.1 200 \xc3\xa4"])
def test_a_reason_may_be_missing_or_anything(head: bytes) -> None:
    check(head + b"\r\ncontent-length: 0\r\n\r\n", status=200)


@pytest.mark.parametrize(
    ("method", "status"), [(b"HEAD", b"200 OK"), (b"GET", b"204 No Content"), (b"GET", b"304 Not Modified")]
)
@pytest.mark.parametrize("framing", [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b""])
def test_some_responses_have_no_body_whatever_their_headers_say(method: bytes, status: bytes, framing: bytes) -> None:
    check(b"HTTP/1.1 %b\r\n%b\r\n" % (status, framing), method=method, length=0)


def test_informational_responses_come_before_the_one() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    data = early + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nz"
    check(data, b"z", status=200)
    assert [h.status for h in parse_response([data]).heads] == [100, 103, 200]  # type: ignore[union-attr]


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    for version in (b"1.0", b"1.1"):
        data = b"HTTP/%b 200 OK\r\n\r\nall of it" % version
        for split, pieces in splits(data):
            message = parse_response(pieces, eof=True)
            assert message.body == b"all of it", split
            assert message.ended
            assert message.heads[0].length == UNTIL_EOF


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_a_response_that_is_cut_is_not_taken_for_a_whole_one(data: bytes) -> None:
    for split, pieces in splits(data):
        assert not parse_response(pieces, eof=True).ended, split


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive, Close\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200 OK\r\n", False),
    ],
)
def test_whether_a_connection_can_be_used_again(head: bytes, keep_alive: bool) -> None:
    parser = ResponseParser(65_536)
    parser.begin(b"GET")
    parser.feed(head + b"\r\n")
    assert parser.keep_alive is keep_alive


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"\x00\x01\x02",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 x\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"RTSP/1.0 200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\nx: y\n\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\rset-cookie: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_a_response_is_refused_in_every_split(data: bytes) -> None:
    assert 0 not in refusals(parse_response, data)


def test_a_head_over_the_limit_is_refused() -> None:
    with pytest.raises(ParseError) as caught:
        parse_response([b"HTTP/1.1 200 OK\r\nx: ", b"a" * 2000], limit=1000)
    assert caught.value.status == 431


def test_a_parser_serves_one_response_after_another() -> None:
    parser = ResponseParser(65_536)
    for method, body in ((b"GET", b"abc"), (b"HEAD", b""), (b"GET", b"abc")):
        parser.begin(method)
        events = parser.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n" + body)
        assert b"".join(e for e in events if isinstance(e, bytes)) == body
        assert parser.ended
        assert not parser.rest
