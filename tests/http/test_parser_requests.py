"""What is a request, and what is refused; each case whole, in every split, and with trailing data."""

from __future__ import annotations

import httptools
import pytest

from tests.http.feeding import TRAILING, Message, every_way, parse_request, refusals
from triptych.http import head
from triptych.http.errors import ParseError
from triptych.http.head import CHUNKED, RequestHead
from triptych.http.parser import END, RequestParser


def head_of(message: Message) -> RequestHead:
    (head,) = message.heads
    assert isinstance(head, RequestHead)
    return head


def check(data: bytes, body: bytes = b"", **expected: object) -> None:
    for split, message in every_way(parse_request, data, trailing=TRAILING):
        assert message.ended, split
        assert message.body == body, split
        head = head_of(message)
        for name, value in expected.items():
            assert getattr(head, name) == value, (split, name)


def test_a_request_without_a_body_ends_with_its_head() -> None:
    check(
        b"GET /v1/models?a=b&c HTTP/1.1\r\nHost: h:1\r\nX-One:  two words \t\r\nEmpty:\r\n\r\n",
        method="GET",
        target=b"/v1/models?a=b&c",
        path="/v1/models",
        query=b"a=b&c",
        version="1.1",
        headers=[(b"host", b"h:1"), (b"x-one", b"two words"), (b"empty", b"")],
        length=0,
        keep_alive=True,
        expect_continue=False,
    )


def test_a_fixed_length_body_is_exactly_as_long_as_declared() -> None:
    check(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello", b"hello", length=5, method="POST")


def test_a_chunked_body_is_decoded_and_its_trailers_are_dropped() -> None:
    check(
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: Chunked\r\n\r\n"
        b'3\r\nabc\r\n00A;name="v"\r\n0123456789\r\n0\r\nx-trailer: 1\r\n\r\n',
        b"abc0123456789",
        length=CHUNKED,
    )


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"connection: keep-alive\r\n", True),
        (b"1.1", b"connection: Close\r\n", False),
        (b"1.1", b"connection: x, close , y\r\n", False),
        (b"1.1", b"connection: keep-alive\r\nconnection: close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"connection: keep-alive\r\n", True),
        (b"1.0", b"connection: keep-alive, close\r\n", False),
    ],
)
def test_whether_a_connection_outlives_a_request(version: bytes, connection: bytes, keep_alive: bool) -> None:
    check(b"GET / HTTP/%b\r\nhost: h\r\n%b\r\n" % (version, connection), keep_alive=keep_alive)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a/%2e%2E/b?x=%20?y", "/a/%2e%2E/b", b"x=%20?y"),
        (b"http://other.example:8/a?b", "/a", b"b"),
        (b"HTTPS://other.example", "/", b""),
        (b"http://other.example?q", "/", b"q"),
        (b"*", "*", b""),
        (b"//double//slash", "//double//slash", b""),
    ],
)
def test_targets_are_split_raw(target: bytes, path: str, query: bytes) -> None:
    check(b"OPTIONS %b HTTP/1.1\r\nhost: h\r\n\r\n" % target, target=target, path=path, query=query)


def test_an_expectation_counts_in_http_1_1_only() -> None:
    check(b"GET / HTTP/1.1\r\nhost: h\r\nexpect: 100-Continue\r\n\r\n", expect_continue=True)
    check(b"GET / HTTP/1.0\r\nexpect: 100-continue\r\n\r\n", expect_continue=False)
    check(b"GET / HTTP/1.1\r\nhost: h\r\nexpect: something\r\n\r\n", expect_continue=False)


def test_an_upgrade_is_not_taken_up_and_what_follows_is_http() -> None:
    check(
        b"POST / HTTP/1.1\r\nhost: h\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"content-length: 2\r\n\r\nok",
        b"ok",
        length=2,
        keep_alive=True,
    )


def test_empty_lines_before_a_request_line_are_skipped() -> None:
    check(b"\r\n\r\nGET / HTTP/1.1\r\nhost: h\r\n\r\n", method="GET")


REFUSED = {
    "both lengths": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
    "both, the other way": b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
    "the same length twice": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\n",
    "a list of lengths": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3, 3\r\n\r\n",
    "a signed length": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: +3\r\n\r\n",
    "a negative length": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -3\r\n\r\n",
    "a hexadecimal length": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0x3\r\n\r\n",
    "a length with underscores": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1_0\r\n\r\n",
    "an empty length": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length:\r\n\r\n",
    "a length beyond reason": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %b\r\n\r\n" % (b"9" * 19),
    "a length with a space in it": b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1 2\r\n\r\n",
    "chunked not last": b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, identity\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, chunked\r\n\r\n",
    "chunked in two headers": b"POST / HTTP/1.1\r\nhost: h\r\n" + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\r\n b\r\n\r\n",
    "a folded header with a tab": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\r\n\tb\r\n\r\n",
    "a space before the first header": b"GET / HTTP/1.1\r\n host: h\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nhost : h\r\n\r\n",
    "a tab before the colon": b"GET / HTTP/1.1\r\nhost\t: h\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\0b\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nhost: h\r\nx\0y: ab\r\n\r\n",
    "a bare CR in a value": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\rb\r\n\r\n",
    "CR CR LF": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\r\r\n\r\n",
    "a bare LF behind a header": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\ny: b\r\n\r\n",
    "a bare LF behind the request line": b"GET / HTTP/1.1\nhost: h\r\n\r\n",
    "a head that ends in LF LF": b"GET / HTTP/1.1\r\nhost: h\r\n\n",
    "bare LF throughout": b"GET / HTTP/1.1\nhost: h\n\n",
    "a control character in a value": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\x01\r\n\r\n",
    "DEL in a value": b"GET / HTTP/1.1\r\nhost: h\r\nx: a\x7f\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\nhost: h\r\n: a\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nhost: h\r\nx\r\n\r\n",
    "a name in brackets": b"GET / HTTP/1.1\r\nhost: h\r\n[x]: a\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "two spaces before the target": b"GET  / HTTP/1.1\r\nhost: h\r\n\r\n",
    "two spaces before the version": b"GET /  HTTP/1.1\r\nhost: h\r\n\r\n",
    "a space behind the version": b"GET / HTTP/1.1 \r\nhost: h\r\n\r\n",
    "a tab for a space": b"GET\t/ HTTP/1.1\r\nhost: h\r\n\r\n",
    "a lower-case method": b"get / HTTP/1.1\r\nhost: h\r\n\r\n",
    "an unknown method": b"BREW / HTTP/1.1\r\nhost: h\r\n\r\n",
    "a relative target": b"GET models HTTP/1.1\r\nhost: h\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\nhost: h\r\n\r\n",
    "a target in UTF-8": b"GET /\xc3\xa4 HTTP/1.1\r\nhost: h\r\n\r\n",
    "user names in an absolute target": b"GET http://u:p@h/ HTTP/1.1\r\nhost: h\r\n\r\n",
    "another scheme": b"GET ftp://h/ HTTP/1.1\r\nhost: h\r\n\r\n",
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "RTSP": b"OPTIONS * RTSP/1.0\r\nhost: h\r\n\r\n",
    "garbage": b"hello\r\n\r\n",
}
REFUSED_AS = {
    501: {
        "CONNECT": b"CONNECT h:443 HTTP/1.1\r\nhost: h\r\n\r\n",
        "another coding": b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    },
    505: {
        "HTTP/0.9": b"GET /\r\n\r\n",
        "HTTP/2.0": b"GET / HTTP/2.0\r\nhost: h\r\n\r\n",
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_could_mean_two_things_is_refused_in_every_split(name: str) -> None:
    assert refusals(parse_request, REFUSED[name]) <= {400, 501, 505}


@pytest.mark.parametrize(("status", "name"), [(s, n) for s, cases in REFUSED_AS.items() for n in cases])
def test_what_is_http_but_not_spoken_here_is_told_so(status: int, name: str) -> None:
    assert refusals(parse_request, REFUSED_AS[status][name]) == {status}


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n0\r\n\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b"1_0\r\na\r\n",
        b" 1\r\na\r\n0\r\n\r\n",
        b"1 \r\na\r\n0\r\n\r\n",
        b"1\na\r\n0\r\n\r\n",
        b"1\ra\r\n0\r\n\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"1;\x00\r\na\r\n0\r\n\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"1\r\na0\r\n\r\n",
        b"1\r\na\rX",
        b"\r\n",
        b"1;" + b"a" * 300 + b"\r\n",
        b"1000000000000000\r\n",
        b"0\r\n x: folded\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nx : y\r\n\r\n",
        b"0\r\nx: y\nz: w\r\n\r\n",
        b"0\r\nx: \x00\r\n\r\n",
        b"0\r\n\n",
    ],
)
def test_a_chunked_body_that_could_mean_two_things_is_refused_in_every_split(body: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    assert refusals(lambda pieces: parse_request([head, *pieces]), body) == {400}


def test_extensions_of_chunks_and_trailers_have_a_bound() -> None:
    head = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    parse_request([head, *[b"1;%b\r\na\r\n" % (b"x" * 200)] * 80])
    with pytest.raises(ParseError, match="extensions"):
        parse_request([head, *[b"1;%b\r\na\r\n" % (b"x" * 200)] * 90])
    with pytest.raises(ParseError, match="trailers"):
        parse_request([head, b"0\r\n", *[b"x: y\r\n"] * 2000])


def test_a_head_over_the_limit_is_refused_as_soon_as_it_is_known() -> None:
    parser = RequestParser(1000)
    parser.feed(b"GET / HTTP/1.1\r\nhost: h\r\nx: ")
    with pytest.raises(ParseError, match="1000 bytes") as caught:
        parser.feed(b"a" * 1000)
    assert caught.value.status == 431
    with pytest.raises(ParseError) as caught:
        parse_request([b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"a" * 1000)], limit=1000)
    assert caught.value.status == 431


def test_the_number_of_headers_has_a_bound() -> None:
    head = b"GET / HTTP/1.1\r\nhost: h\r\n%b\r\n"
    assert parse_request([head % (b"x: y\r\n" * 255)]).ended
    with pytest.raises(ParseError, match="256 headers") as caught:
        parse_request([head % (b"x: y\r\n" * 256)])
    assert caught.value.status == 431


def test_malformed_heads_are_refused_before_they_end() -> None:
    with pytest.raises(ParseError):
        parse_request([b"GET / HTTP/1.1\r\nbad header"])


def test_pipelined_requests_come_one_at_a_time() -> None:
    first = b"POST /1 HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\nab"
    second = b"POST /2 HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\ncd\r\n0\r\n\r\n"
    parser = RequestParser(65_536)
    events = parser.feed(first + second + first[:30])
    assert [type(e) for e in events] == [RequestHead, bytes, type(END)]
    assert parser.feed(first[30:40]) == []
    events = parser.next_message()
    assert isinstance(events[0], RequestHead)
    assert events[0].path == "/2"
    assert events[1:] == [b"cd", END]
    assert parser.next_message() == []
    assert parser.started
    events = parser.feed(first[40:])
    assert events[1:] == [b"ab", END]
    parser.next_message()
    assert not parser.started


def test_bytes_of_a_body_may_go_past_the_parser() -> None:
    parser = RequestParser(65_536)
    parser.feed(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\nabc")
    assert parser.left == 7
    assert not parser.skip(4)
    assert parser.feed(b"hijGET") == [b"hij", END]
    assert parser.rest == b"GET"


def test_a_long_request_line_is_not_kept_in_memory() -> None:
    before = head._request_line_parts.cache_info().currsize
    check(b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"q" * 400), path="/" + "q" * 400)
    assert head._request_line_parts.cache_info().currsize == before


def test_llhttp_is_as_strict_as_this_package_relies_on() -> None:
    """If a new httptools were lenient by default, the cases above would pass through the wrong gate."""

    class Callbacks:
        pass

    for data in (REFUSED["a folded header"], REFUSED["a bare CR in a value"], REFUSED["both lengths"]):
        with pytest.raises(httptools.HttpParserError):
            httptools.HttpRequestParser(Callbacks()).feed_data(data)
