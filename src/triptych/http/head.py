"""Message heads, sans-IO: bytes to `RequestHead`/`ResponseHead` by llhttp, and headers to bytes.

llhttp (httptools) reads only heads. It is fed exactly the bytes of one head, so what follows (a body, the next
request) never reaches it and it cannot be talked into another protocol; a body's length is decided here. On top of
llhttp's strict mode this refuses: HTTP/0.9 and 2.0 lines, CONNECT, more than one space in the request line, transfer
codings other than `chunked` (and any in HTTP/1.0), a missing or second `Host`, fragments in targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType

import httptools

from triptych.http.errors import ParseError, UnsafeHeaderError

Header = tuple[bytes, bytes]
"""Name in lower case and value without surrounding white space."""

UNTIL_EOF = -1
CHUNKED = -2
"""Values of a body's `length` besides a number of bytes."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[\x21-\x22\x24-\x7e]+")
_ABSOLUTE = re.compile(rb"https?://[^/?#@]+", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection"))


class RequestHead:
    """`length`: bytes of the body that follows, or CHUNKED. `path` and `query` are raw."""

    __slots__ = ("expect_continue", "headers", "keep_alive", "length", "method", "path", "query", "target", "version")

    method: str
    target: bytes
    path: str
    query: bytes
    version: str
    headers: list[Header]
    length: int
    keep_alive: bool
    expect_continue: bool


class ResponseHead:
    """`length`: bytes of the body that follows, CHUNKED or UNTIL_EOF; already 0 where the status forbids a body."""

    __slots__ = ("headers", "keep_alive", "length", "reason", "status", "version")

    status: int
    reason: bytes
    version: str
    headers: list[Header]
    length: int
    keep_alive: bool


class _HeadReader:
    """Finds the end of one head at a time and has llhttp read it. Reusable once a head came out."""

    __slots__ = ("_complete", "_line", "_parser", "_size", "_tail", "_url", "headers", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reset()

    def _reset(self) -> None:
        self.headers: list[Header] = []
        self._url = b""
        self._line = b""
        self._tail = b""
        self._size = 0
        self._complete = False
        self._parser: httptools.HttpRequestParser | httptools.HttpResponseParser | None = None

    @property
    def started(self) -> bool:
        """Whether any byte of a head has come."""
        return self._size > 0

    def _new_parser(self) -> httptools.HttpRequestParser | httptools.HttpResponseParser:
        raise NotImplementedError

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._complete = True

    def _feed(self, data: bytes, at: int) -> int:
        """Feed `data[at:]`; returns the offset behind the head, or -1 while it has not ended."""
        parser = self._parser
        if parser is None:
            parser = self._parser = self._new_parser()
        end = data.find(b"\r\n\r\n", at)
        if end >= 0:
            end += 4
        if self._tail:
            # The blank line may have begun in what was fed before.
            seam = (self._tail + data[at : at + 3]).find(b"\r\n\r\n")
            if seam >= 0:
                end = at + seam + 4 - len(self._tail)
        piece = data if at == 0 and end == len(data) else data[at : end if end >= 0 else len(data)]
        self._size += len(piece)
        if self._size > self.limit:
            raise ParseError(f"header section is larger than {self.limit} bytes", 431)
        if not self._line.endswith(b"\n"):
            eol = piece.find(b"\n")
            self._line += piece if eol < 0 else piece[: eol + 1]
        try:
            parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # the head is complete; other protocols are not spoken here
        except httptools.HttpParserError as error:
            raise ParseError(str(error) or "malformed head") from None
        if end < 0:
            self._tail = (self._tail + piece)[-3:]
            return -1
        if not self._complete:
            raise ParseError("malformed head")
        return end


def _token_list(value: bytes) -> list[bytes]:
    return [token.strip(b" \t") for token in value.lower().split(b",")]


def _length(value: bytes) -> int:
    if _LENGTH.fullmatch(value) is None:
        raise ParseError("content-length is not a number")
    return int(value)


class RequestHeadReader(_HeadReader):
    """`feed(data, at)` returns `(head, end)` once a head is whole, else None; raises ParseError."""

    __slots__ = ()

    def _new_parser(self) -> httptools.HttpRequestParser:
        return httptools.HttpRequestParser(self)

    def feed(self, data: bytes, at: int) -> tuple[RequestHead, int] | None:
        if not self._size:
            # Empty lines before a request line are skipped (RFC 9112 section 2.2).
            size = len(data)
            while at < size and data[at] in b"\r\n":
                at += 1
            if at == size:
                return None
        end = self._feed(data, at)
        if end < 0:
            return None
        head = self._head()
        self._reset()
        return head, end

    def _head(self) -> RequestHead:
        head = RequestHead()
        assert isinstance(self._parser, httptools.HttpRequestParser)
        method = self._parser.get_method()
        target = self._url
        line = self._line
        version = line[-5:-2]
        if version not in (b"1.1", b"1.0"):
            raise ParseError("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
        if line != b"%b %b HTTP/%b\r\n" % (method, target, version) or _TARGET.fullmatch(target) is None:
            raise ParseError("malformed request line")
        if method == b"CONNECT":
            raise ParseError("CONNECT is not supported", 501)
        head.method = method.decode("ascii")
        head.target = target
        head.version = "1.1" if version == b"1.1" else "1.0"
        _split_target(head, target)
        self._frame(head)
        return head

    def _frame(self, head: RequestHead) -> None:
        modern = head.version == "1.1"
        keep_alive = modern
        length = hosts = 0
        lengths = codings = 0
        head.expect_continue = False
        headers = self.headers
        for i, (name, value) in enumerate(headers):
            if value[-1:] in (b" ", b"\t"):
                value = value.rstrip(b" \t")
                headers[i] = (name, value)
            if name == b"content-length":
                length = _length(value)
                lengths += 1
            elif name == b"host":
                hosts += 1
            elif name == b"connection":
                tokens = _token_list(value)
                if b"close" in tokens:
                    keep_alive = modern = False
                elif b"keep-alive" in tokens and head.version == "1.0":
                    keep_alive = True
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise ParseError("transfer-encoding other than chunked is not supported", 501)
                codings += 1
                length = CHUNKED
            elif name == b"expect":
                head.expect_continue = value.lower() == b"100-continue" and head.version == "1.1"
        if lengths > 1 or codings > 1 or (lengths and codings):
            raise ParseError("the length of the body is given more than once")
        if codings and head.version == "1.0":
            raise ParseError("transfer-encoding in an HTTP/1.0 request")
        if hosts != 1 and not (hosts == 0 and head.version == "1.0"):
            raise ParseError("a request needs exactly one host header")
        head.headers = headers
        head.length = length
        head.keep_alive = keep_alive


def _split_target(head: RequestHead, target: bytes) -> None:
    if not target.startswith(b"/"):
        match = _ABSOLUTE.match(target)
        if match is not None:
            target = target[match.end() :]
            if not target.startswith(b"/"):
                target = b"/" + target
        elif target != b"*":
            raise ParseError("request target is neither a path nor an http address")
    path, _, query = target.partition(b"?")
    head.path = path.decode("latin-1")
    head.query = query


class ResponseHeadReader(_HeadReader):
    """`feed(data, at, method)` returns `(head, end)` once a head is whole, else None; raises ParseError.

    `method` is that of the request answered: HEAD answers have no body.
    """

    __slots__ = ()

    def _new_parser(self) -> httptools.HttpResponseParser:
        return httptools.HttpResponseParser(self)

    def feed(self, data: bytes, at: int, method: bytes) -> tuple[ResponseHead, int] | None:
        if at == len(data):
            return None
        end = self._feed(data, at)
        if end < 0:
            return None
        head = self._head(method)
        self._reset()
        return head, end

    def _head(self, method: bytes) -> ResponseHead:
        head = ResponseHead()
        assert isinstance(self._parser, httptools.HttpResponseParser)
        line = self._line
        if not line.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
            raise ParseError("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
        status = self._parser.get_status_code()
        if not 100 <= status <= 999:
            raise ParseError("status code out of range")
        head.status = status
        head.reason = line[13:-2]
        head.version = line[5:8].decode("ascii")
        self._frame(head)
        if method == b"HEAD" or status < 200 or status in (204, 304):
            head.length = 0
        return head

    def _frame(self, head: ResponseHead) -> None:
        modern = head.version == "1.1"
        keep_alive = modern
        closes = False
        length = UNTIL_EOF
        lengths = codings = 0
        headers = self.headers
        for i, (name, value) in enumerate(headers):
            if value[-1:] in (b" ", b"\t"):
                value = value.rstrip(b" \t")
                headers[i] = (name, value)
            if name == b"content-length":
                length = _length(value)
                lengths += 1
            elif name == b"connection":
                tokens = _token_list(value)
                closes = closes or b"close" in tokens
                keep_alive = keep_alive or b"keep-alive" in tokens
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise ParseError("transfer-encoding other than chunked")
                codings += 1
                length = CHUNKED
        if lengths > 1 or codings > 1 or (lengths and codings):
            raise ParseError("the length of the body is given more than once")
        if codings and not modern:
            raise ParseError("transfer-encoding in an HTTP/1.0 response")
        head.headers = headers
        head.length = length
        head.keep_alive = keep_alive and not closes


# --- writing ---------------------------------------------------------------------------------------------------


def _status_lines() -> MappingProxyType[int, bytes]:
    lines = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode("ascii")) for s in HTTPStatus}
    return MappingProxyType(lines)


_STATUS_LINES = _status_lines()


@lru_cache(maxsize=1024)
def _check_name(name: bytes) -> bool:
    """True for a framing header, which only this package may write; raises where the name is no token."""
    if _TOKEN.fullmatch(name) is None:
        raise UnsafeHeaderError(f"header name {name!r} is not a token")
    return name.lower() in _FRAMING


def header_lines(headers: Iterable[Header]) -> bytes:
    """`headers` as lines, without those that frame the message (`content-length`, `transfer-encoding`,
    `connection`), which the caller writes. Raises UnsafeHeaderError."""
    lines = [b"%b: %b\r\n" % header for header in headers if not _check_name(header[0])]
    block = b"".join(lines)
    # One CR and one LF a line and no NUL, or some value holds what ends a line.
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
        raise UnsafeHeaderError("a header value holds CR, LF or NUL")
    return block


def status_line(status: int) -> bytes:
    """The status line of an answer; unregistered codes have an empty reason."""
    line = _STATUS_LINES.get(status)
    if line is None:
        if not 200 <= status <= 999:
            raise ValueError(f"{status} is not a final status code")
        return b"HTTP/1.1 %d \r\n" % status
    return line


def request_line(method: bytes, target: bytes) -> bytes:
    """The request line. Raises UnsafeHeaderError on a method or target that would break out of it."""
    if _TOKEN.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise UnsafeHeaderError(f"request line {method!r} {target[:80]!r} is not valid")
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def find(headers: Sequence[Header], name: bytes) -> bytes | None:
    """The first value of the header called `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None
