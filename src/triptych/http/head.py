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
_TARGET_BYTES = bytes(b for b in range(0x21, 0x7F) if b != 0x23)
_ABSOLUTE = re.compile(rb"https?://[^/?#@]+(?=[/?]|$)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection", b"host"))
_READ_HERE = _FRAMING | {b"expect"}
_CACHED_LINE = 256
_MAX_HEADERS = 256


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

    __slots__ = ("_append", "_complete", "_headers", "_parser", "_parts", "_size", "_tail", "limit")

    # httptools looks for all of its callbacks each time a parser is made, which costs less where they are found.
    on_url = on_status = on_body = on_message_begin = on_message_complete = None
    on_chunk_header = on_chunk_complete = None
    _kind: type[httptools.HttpRequestParser] | type[httptools.HttpResponseParser]

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._complete = False
        # Of a head that comes in pieces:
        self._parser: httptools.HttpRequestParser | httptools.HttpResponseParser | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""

    @property
    def started(self) -> bool:
        """Whether some of a head has come, but not all."""
        return self._size > 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if value and value[-1] <= 0x20:
            value = value.rstrip(b" \t")  # llhttp leaves it there
        self._append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._complete = True

    def _feed(self, data: bytes, at: int) -> tuple[bytes, list[Header], int] | None:
        """Feed `data[at:]`; returns start line, headers and the offset behind the head once it is whole."""
        parser = self._parser
        end = data.find(b"\r\n\r\n", at)
        if end >= 0:
            end += 4
        if parser is None and end >= 0 and data[at] > 0x20:
            # The usual case, a whole head at once.
            parser = self._begin()
        else:
            if parser is None:
                # Empty lines before a start line are skipped (RFC 9112 section 2.2).
                size = len(data)
                while at < size and data[at] in b"\r\n":
                    at += 1
                if at == size:
                    return None
                parser = self._parser = self._begin()
            # The blank line may have begun in what was fed before, or been one of those skipped.
            seam = (self._tail + data[at : at + 3]).find(b"\r\n\r\n")
            found = at + seam - len(self._tail) if seam >= 0 else data.find(b"\r\n\r\n", at)
            end = -1 if seam < 0 and found < 0 else found + 4
        block = data[at:end] if end >= 0 else data[at:]
        self._size += len(block)
        if self._size > self.limit:
            raise ParseError(f"header section is larger than {self.limit} bytes", 431)
        try:
            parser.feed_data(block)
        except httptools.HttpParserUpgrade:
            pass  # the head is complete; other protocols are not spoken here
        except httptools.HttpParserError as error:
            raise ParseError(str(error) or "malformed head") from None
        if end < 0:
            self._parts.append(block)
            self._tail = (self._tail + block)[-3:]
            return None
        if not self._complete:
            raise ParseError("malformed head")
        if len(self._headers) > _MAX_HEADERS:
            raise ParseError(f"more than {_MAX_HEADERS} headers", 431)
        if self._parts:
            self._parts.append(block)
            block = b"".join(self._parts)
            self._parts = []
            self._tail = b""
        self._parser = None
        self._size = 0
        return block[: block.find(b"\r\n")], self._headers, end

    def _begin(self) -> httptools.HttpRequestParser | httptools.HttpResponseParser:
        self._complete = False
        self._headers: list[Header] = []
        self._append = self._headers.append
        return self._kind(self)


class RequestHeadReader(_HeadReader):
    """`feed(data, at)` returns `(head, end)` once a head is whole, else None; raises ParseError."""

    __slots__ = ()
    _kind = httptools.HttpRequestParser

    def feed(self, data: bytes, at: int) -> tuple[RequestHead, int] | None:
        found = self._feed(data, at)
        if found is None:
            return None
        line, headers, end = found
        head = RequestHead()
        # Few lines occur and all of them often, but a long one should not stay in memory.
        split = _request_line_parts if len(line) <= _CACHED_LINE else _request_line_parts.__wrapped__
        head.method, head.target, head.path, head.query, head.version = split(line)
        head.headers = headers
        modern = head.version == "1.1"
        length, head.keep_alive, hosts, expects = _framing(headers, modern)
        head.length = 0 if length == UNTIL_EOF else length
        head.expect_continue = expects and modern
        if hosts != 1 and (hosts or modern):
            raise ParseError("a request needs exactly one host header")
        return head, end


class ResponseHeadReader(_HeadReader):
    """`feed(data, at, method)` returns `(head, end)` once a head is whole, else None; raises ParseError.

    `method` is that of the request answered: HEAD answers have no body.
    """

    __slots__ = ()
    _kind = httptools.HttpResponseParser

    def feed(self, data: bytes, at: int, method: bytes) -> tuple[ResponseHead, int] | None:
        found = self._feed(data, at)
        if found is None:
            return None
        line, headers, end = found
        head = ResponseHead()
        split = _status_line_parts if len(line) <= _CACHED_LINE else _status_line_parts.__wrapped__
        head.version, head.status, head.reason = split(line)
        head.headers = headers
        head.length, head.keep_alive, _, _ = _framing(headers, head.version == "1.1")
        if method == b"HEAD" or head.status < 200 or head.status in (204, 304):
            head.length = 0
        return head, end


@lru_cache(maxsize=256)
def _request_line_parts(line: bytes) -> tuple[str, bytes, str, bytes, str]:
    """Method, target, path, query and version of a line that llhttp has accepted."""
    parts = line.split(b" ")  # one space each: llhttp allows more of them
    version = parts[-1]
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise ParseError("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
    if len(parts) != 3 or b"#" in parts[1]:
        raise ParseError("malformed request line")
    method, target, _ = parts
    if method == b"CONNECT":
        raise ParseError("CONNECT is not supported", 501)
    path = target
    if not path.startswith(b"/"):
        match = _ABSOLUTE.match(path)
        if match is not None:
            path = path[match.end() :]
            if not path.startswith(b"/"):
                path = b"/" + path
        elif path != b"*":
            raise ParseError("request target is neither a path nor an http address")
    path, _, query = path.partition(b"?")
    return method.decode("ascii"), target, path.decode("ascii"), query, version[5:].decode("ascii")


@lru_cache(maxsize=256)
def _status_line_parts(line: bytes) -> tuple[str, int, bytes]:
    """Version, status and reason of a line that llhttp has accepted."""
    if not line.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        raise ParseError("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
    status = int(line[9:12])
    if status < 100:
        raise ParseError("status code out of range")
    return line[5:8].decode("ascii"), status, line[13:]


def _framing(headers: list[Header], modern: bool) -> tuple[int, bool, int, bool]:
    """From the headers: length of the body, whether the connection outlives the message, number of `host` headers,
    whether `100-continue` is expected. `modern`: HTTP/1.1. Raises ParseError."""
    length = UNTIL_EOF
    lengths = hosts = 0
    closes = keeps = expects = False
    for name, value in headers:
        if name not in _READ_HERE:
            continue
        if name == b"content-length":
            if _LENGTH.fullmatch(value) is None:
                raise ParseError("content-length is not a number")
            length = int(value)
            lengths += 1
        elif name == b"host":
            hosts += 1
        elif name == b"connection":
            tokens = [token.strip(b" \t") for token in value.lower().split(b",")]
            closes = closes or b"close" in tokens
            keeps = keeps or b"keep-alive" in tokens
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise ParseError("transfer-encoding other than chunked is not supported", 501)
            if not modern:
                raise ParseError("transfer-encoding in an HTTP/1.0 message")
            length = CHUNKED
            lengths += 1
        else:
            expects = value.lower() == b"100-continue"
    if lengths > 1:
        raise ParseError("the length of the body is given more than once")
    return length, not closes and (modern or keeps), hosts, expects


# --- writing ---------------------------------------------------------------------------------------------------


def _status_lines() -> MappingProxyType[int, bytes]:
    lines = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode("ascii")) for s in HTTPStatus}
    return MappingProxyType(lines)


_STATUS_LINES = _status_lines()


_USUAL = frozenset(
    b"accept authorization content-type date server server-timing user-agent x-request-id".split()
)  # names of nearly every message that need no check


@lru_cache(maxsize=1024)
def _check_name(name: bytes) -> bool:
    """True for a header that only this package may write; raises where the name is no token."""
    if _TOKEN.fullmatch(name) is None:
        raise UnsafeHeaderError(f"header name {name!r} is not a token")
    return name.lower() in _FRAMING


def header_lines(headers: Iterable[Header]) -> bytes:
    """`headers` as lines, without those that belong to one hop (`content-length`, `transfer-encoding`, `connection`,
    `host`), which the caller writes. Raises UnsafeHeaderError."""
    parts: list[bytes] = []
    count = 0
    for name, value in headers:
        if name in _USUAL or not _check_name(name):
            parts += (name, b": ", value, b"\r\n")
            count += 1
    block = b"".join(parts)
    # One CR and one LF a line and no NUL, or some value holds what ends a line.
    if len(block) - len(block.translate(None, b"\r\n\0")) != 2 * count:
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
    # Few targets occur and all of them often, but a long one should not stay in memory.
    return (_request_line if len(target) <= _CACHED_LINE else _request_line.__wrapped__)(method, target)


@lru_cache(maxsize=256)
def _request_line(method: bytes, target: bytes) -> bytes:
    if not target or target.translate(None, _TARGET_BYTES) or _TOKEN.fullmatch(method) is None:
        raise UnsafeHeaderError(f"request line {method!r} {target[:80]!r} is not valid")
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def find(headers: Sequence[Header], name: bytes) -> bytes | None:
    """The first value of the header called `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None
