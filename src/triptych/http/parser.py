"""Whole messages, sans-IO: bytes in, events out. One parser for each role of a connection.

An event is a head (`RequestHead`, `ResponseHead`), `bytes` of the body, or `END`. A parser stops at `END`: bytes that
follow wait in `rest` until `next_message()` is called, so that one message is dealt with at a time (h11's PAUSED).

A caller that reads a fixed-length body past the parser (straight into its own memory) tells it with `skip(n)`; at most
`left` bytes may go past it.
"""

from __future__ import annotations

import enum
from typing import Final

from triptych.http.chunked import ChunkDecoder
from triptych.http.errors import ParseError
from triptych.http.head import (
    CHUNKED,
    UNTIL_EOF,
    RequestHead,
    RequestHeadReader,
    ResponseHead,
    ResponseHeadReader,
)


class End(enum.Enum):
    """The one event that ends a message."""

    END = "end"


END: Final = End.END

RequestEvent = RequestHead | bytes | End
ResponseEvent = ResponseHead | bytes | End


class _Body:
    """The framing of one body; `left` is the bytes to come of a fixed-length one, `chunks` the decoder of a chunked one
    that has not ended."""

    __slots__ = ("chunks", "ended", "left", "rest")

    def __init__(self) -> None:
        self.left = 0
        self.ended = False
        self.rest = b""
        self.chunks: ChunkDecoder | None = None

    def _begin_body(self, length: int) -> None:
        self.left = length
        if length == CHUNKED:
            self.chunks = ChunkDecoder()

    def _feed_body(self, data: bytes, at: int, events: list[RequestEvent] | list[ResponseEvent]) -> None:
        left = self.left
        if left >= 0:
            end = at + left
            if left:
                piece = data if at == 0 and end >= len(data) else data[at:end]
                if piece:
                    events.append(piece)
                    self.left = left = left - len(piece)
            if left:
                return
        elif self.chunks is not None:
            pieces: list[bytes] = []
            try:
                end = self.chunks.feed(data, at, pieces)
            except ParseError as error:
                error.events = (*events, *pieces)
                raise
            if pieces:
                events.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if end < 0:
                return
            self.chunks = None
        else:
            if at < len(data):
                events.append(data[at:] if at else data)
            return
        events.append(END)
        self.ended = True
        self.rest = data[end:]

    def skip(self, size: int) -> bool:
        """Count `size` body bytes that did not come through `feed`; True when the message ends with them."""
        self.left -= size
        assert self.left >= 0
        self.ended = self.left == 0
        return self.ended


class RequestParser(_Body):
    """The server's side. Raises ParseError from `feed` and `next_message`; unusable afterwards."""

    __slots__ = ("_in_body", "_reader")

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__()
        self._reader = RequestHeadReader(max_header_bytes)
        self._in_body = False

    @property
    def started(self) -> bool:
        """Whether a byte of a message has come that has not ended."""
        return self._in_body or self._reader.started

    def feed(self, data: bytes) -> list[RequestEvent]:
        """The events of `data`, none behind END."""
        if self.ended:
            self.rest += data
            return []
        events: list[RequestEvent] = []
        at = 0
        if not self._in_body:
            found = self._reader.feed(data, 0)
            if found is None:
                return events
            head, at = found
            end = at + head.length
            if at <= end <= len(data):
                # The usual case, a whole message at once.
                self._in_body = self.ended = True
                if end < len(data):
                    self.rest = data[end:]
                return [head, data[at:end], END] if at < end else [head, END]
            events.append(head)
            self._in_body = True
            self._begin_body(head.length)
        self._feed_body(data, at, events)
        return events

    def next_message(self) -> list[RequestEvent]:
        """Go on behind END: the events of what waited in `rest`."""
        assert self.ended
        self.ended = self._in_body = False
        data = self.rest
        if not data:
            return []
        self.rest = b""
        return self.feed(data)


class ResponseParser(_Body):
    """The client's side: one response at a time. Informational heads (1xx) come as heads without END.

    Raises ParseError from `feed` and `eof`; unusable afterwards.
    """

    __slots__ = ("_in_body", "_method", "_reader", "keep_alive")

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__()
        self.keep_alive = False
        self._reader = ResponseHeadReader(max_header_bytes)
        self._in_body = False
        self._method = b"GET"

    def begin(self, method: bytes) -> None:
        """Expect the response to a request of this method."""
        self.ended = self._in_body = False
        self.rest = b""
        self._method = method

    def feed(self, data: bytes) -> list[ResponseEvent]:
        """The events of `data`, none behind END."""
        if self.ended:
            self.rest += data
            return []
        events: list[ResponseEvent] = []
        at = 0
        while not self._in_body:
            found = self._reader.feed(data, at, self._method)
            if found is None:
                return events
            head, at = found
            if head.status == 101:
                raise ParseError("an upgrade that nobody asked for")
            events.append(head)
            if head.status >= 200:
                self._in_body = True
                self.keep_alive = head.keep_alive and head.length != UNTIL_EOF
                end = at + head.length
                if at <= end <= len(data):
                    # The usual case, a whole message at once.
                    self.ended = True
                    self.rest = data[end:]
                    if at < end:
                        events.append(data[at:end])
                    events.append(END)
                    return events
                self._begin_body(head.length)
        self._feed_body(data, at, events)
        return events

    def eof(self) -> bool:
        """The peer will send no more: True when that ends the message as it should be, False when it was cut."""
        if self._in_body and not self.ended and self.left == UNTIL_EOF:
            self.ended = True
        return self.ended
