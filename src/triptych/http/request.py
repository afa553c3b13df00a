"""What a handler sees of one request: its head, its body as it comes, and the one answer it may give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from triptych.http.collect import Collector
from triptych.http.errors import BodyTooLarge, ClientGone, ServerSideError
from triptych.http.head import CHUNKED, Header, RequestHead, find, header_lines, status_line

if TYPE_CHECKING:
    from triptych.http.connection import Connection

Buffer = bytes | bytearray | memoryview
BUFFERS = (bytes, bytearray, memoryview)

_JOIN_BELOW = 65_536
"""Bytes up to which head and body are copied into one write; above, they are handed over as they are."""


class Request(Collector):
    """One request and its answer. Made by the server; used by one task.

    `path` and `query` are raw, `headers` have lower-case names, `content_length` is None for a chunked body; `taken`
    counts what `body_chunks` gave out.
    Answer with `respond`, or with `start`, `send`... and `finish`. Every method that writes raises ClientGone once the
    client has left, UnsafeHeaderError for headers that would split the answer, RuntimeError when called out of order.
    """

    __slots__ = (
        "_chunked",
        "_collecting",
        "_connection",
        "_error",
        "_expect",
        "_limit",
        "_remaining",
        "_waiter",
        "body_ended",
        "bytes_sent",
        "content_length",
        "finished",
        "headers",
        "keep_alive",
        "method",
        "path",
        "query",
        "started",
        "taken",
        "target",
        "version",
    )

    def __init__(self, head: RequestHead, connection: Connection) -> None:
        Collector.__init__(self)
        self.method = head.method
        self.target = head.target
        self.path = head.path
        self.query = head.query
        self.version = head.version
        self.headers: list[Header] = head.headers
        self.content_length: int | None = head.length if head.length != CHUNKED else None
        self.keep_alive = head.keep_alive
        self.started = False
        self.finished = False
        self.bytes_sent = 0
        self.taken = 0
        self.body_ended = False
        self._connection = connection
        self._expect = head.expect_continue
        self._limit = -1
        self._collecting = False
        self._error: ServerSideError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunked = False
        self._remaining = -1

    def __repr__(self) -> str:
        state = "finished" if self.finished else "answering" if self.started else "waiting"
        return f"<Request {self.method} {self.path} from {self.peer}: {state}>"

    @property
    def peer(self) -> str:
        """Address of the client, without its port."""
        return self._connection.peer

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return self._connection.scheme

    @property
    def origin_target(self) -> bytes:
        """The target without scheme and authority, in the form in which an origin server is asked (RFC 9112, 3.2.1)."""
        if self.target[:1] == b"/":
            return self.target
        path = self.path.encode("ascii")
        return b"%b?%b" % (path, self.query) if self.query else path

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._connection.gone

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header called `name` (lower case), or None."""
        return find(self.headers, name)

    # --- the body ----------------------------------------------------------------------------------------------

    async def read_body(self, limit: int) -> bytes:
        """The whole body, at most `limit` bytes. Raises BodyTooLarge once it is known, BodyTimeout, BadRequest."""
        if (self.content_length or 0) > limit:
            raise BodyTooLarge(limit)
        if self.collected > limit:
            raise BodyTooLarge(limit)
        if not self.body_ended:
            self._limit = limit
            self._collecting = True
            await self._more_body()
            self._collecting = False
        if self._error is not None:
            raise self._error
        return self._take()

    def body_chunks(self, limit: int) -> BodyChunks:
        """The body as it comes, `bytes` at a time, the client held back while nobody takes; same errors."""
        if (self.content_length or 0) > limit:
            raise BodyTooLarge(limit)
        self._limit = limit
        return BodyChunks(self)

    async def _more_body(self) -> None:
        """Wait until there is more to take: all of the body when collecting, else any of it."""
        if self._error is not None:
            raise self._error
        connection = self._connection
        if self._expect:
            self._expect = False
            if not self.started and not self.collected:
                connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._waiter = connection.loop.create_future()
        connection.want_body(True)
        try:
            await self._waiter
        finally:
            self._waiter = None
            connection.want_body(False)

    def feed(self, data: bytes | memoryview) -> None:
        """From the connection: bytes of the body. A memoryview is valid during this call only."""
        if self._error is not None:
            return
        size = self._add(data)
        waiter = self._waiter
        if waiter is not None:
            if not self._collecting:
                if not waiter.done():
                    waiter.set_result(None)
            elif size > self._limit:
                self.fail(BodyTooLarge(self._limit))

    def feed_end(self) -> None:
        """From the connection: the body is whole."""
        self.body_ended = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: ServerSideError) -> None:
        """From the connection: there will be no more of the body."""
        self._drop()
        self._error = error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    @property
    def buffered(self) -> int:
        """Bytes of the body that have come and were not taken."""
        return self.collected

    @property
    def collecting(self) -> bool:
        """Whether the handler waits for the whole body, so that no back-pressure is due."""
        return self._collecting

    # --- the answer --------------------------------------------------------------------------------------------

    async def respond(self, status: int, headers: Sequence[Header], body: Buffer | Sequence[Buffer] = b"") -> None:
        """The whole answer. `content-length` is computed; framing headers among `headers` are left out."""
        connection = self._begin()
        parts: Sequence[Buffer] = (body,) if isinstance(body, BUFFERS) else body
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        bodiless = status in (204, 304)
        head = self._head(status, headers, b"" if bodiless else b"content-length: %d\r\n" % length)
        self.finished = True
        if bodiless or self.method == "HEAD":
            connection.write(b"".join(head))
        elif length <= _JOIN_BELOW:
            self.bytes_sent = length
            connection.write(b"".join((*head, *parts)))
        else:
            self.bytes_sent = length
            connection.writelines((b"".join(head), *parts))
        if connection.write_paused:
            await connection.drained()

    async def start(self, status: int, headers: Sequence[Header], *, length: int | None = None) -> None:
        """Begin a streamed answer of `length` bytes, or of unknown length (chunked; HTTP/1.0: until the end)."""
        connection = self._begin()
        framing = b""
        if status in (204, 304):
            self._remaining = 0
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
            self._remaining = length
        elif self.version == "1.1":
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = self.method != "HEAD"
        else:
            self.keep_alive = False
        connection.write(b"".join(self._head(status, headers, framing)))

    async def send(self, data: Buffer) -> None:
        """Bytes of a streamed answer. Waits only while the client does not take what was sent (WriteStalled)."""
        self._send(data)
        if self._connection.write_paused:
            await self._connection.drained()

    def _send(self, data: Buffer) -> None:
        connection = self._connection
        if not self.started or self.finished:
            raise RuntimeError("send() outside start() and finish()")
        size = len(data)
        if not size or self.method == "HEAD":
            return
        self.bytes_sent += size
        if self._chunked:
            if size <= _JOIN_BELOW:
                connection.write(b"".join((b"%x\r\n" % size, data, b"\r\n")))
            else:
                connection.writelines((b"%x\r\n" % size, data, b"\r\n"))
        else:
            if self._remaining >= 0:
                if size > self._remaining:
                    raise RuntimeError("more bytes than the answer's content-length")
                self._remaining -= size
            connection.write(data)

    def send_nowait(self, data: Buffer) -> bool:
        """Like `send` without waiting; False when the client is behind and `drained()` should be awaited."""
        connection = self._connection
        size = len(data)
        if self._chunked and 0 < size <= _JOIN_BELOW and not self.finished and type(data) is bytes:
            # The short way for an event of a stream.
            transport = connection._transport
            if transport is None or connection.gone:
                raise ClientGone("the client has left")
            try:
                transport.write(b"%x\r\n%b\r\n" % (size, data))
            except RuntimeError:
                raise ClientGone("the client has left") from None  # closed by the last write, which failed
            self.bytes_sent += size
        else:
            self._send(data)
        return not connection.write_paused

    async def drained(self) -> None:
        """Wait until the client has taken enough of what was sent. Raises WriteStalled, ClientGone."""
        await self._connection.drained()

    async def finish(self) -> None:
        """End a streamed answer. Raises RuntimeError when bytes of its declared length are missing."""
        connection = self._connection
        if not self.started or self.finished:
            raise RuntimeError("finish() outside start() and finish()")
        if self.method != "HEAD":
            if self._remaining > 0:
                raise RuntimeError(f"{self._remaining} bytes of the answer's content-length are missing")
            if self._chunked:
                connection.write(b"0\r\n\r\n")
        self.finished = True
        if connection.write_paused:
            await connection.drained()

    def abort(self) -> None:
        """Give up the answer: what was sent still goes out, then the connection closes without a clean end."""
        self.finished = True
        self._connection.close()

    def _begin(self) -> Connection:
        connection = self._connection
        if self.started:
            raise RuntimeError("the answer was started already")
        if connection.gone:
            raise ClientGone("the client has left")
        return connection

    def _head(self, status: int, headers: Sequence[Header], framing: bytes) -> tuple[bytes, ...]:
        """The head of the answer in pieces; the answer has begun then."""
        connection = self._connection
        line = status_line(status)
        lines = header_lines(headers)
        if not self.body_ended or connection.last_request:
            self.keep_alive = False
        if not self.keep_alive:
            tail = b"connection: close\r\n\r\n"
        elif self.version == "1.0":
            tail = b"connection: keep-alive\r\n\r\n"
        else:
            tail = b"\r\n"
        date = connection.server.date_line() if find(headers, b"date") is None else b""
        self.started = True
        return line, lines, date, framing, tail


class BodyChunks:
    """Async iterator over a request body; see `Request.body_chunks`."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __aiter__(self) -> BodyChunks:
        return self

    async def __anext__(self) -> bytes:
        request = self._request
        while not request.buffered:
            if request.body_ended:
                raise StopAsyncIteration
            await request._more_body()
        data = request._take()
        request._connection.relieve()
        request.taken += len(data)
        if request.taken > request._limit:
            raise BodyTooLarge(request._limit)
        return data
