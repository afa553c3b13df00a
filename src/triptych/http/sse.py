"""Where server-sent events end, sans-IO: lets a relay pass on whole events only.

Goal: next to nothing for the usual chunk, which is one or more whole events (it is returned as it is), and linear in
the bytes fed whatever the split.
"""

from __future__ import annotations

import re

from triptych.http.errors import HttpError

# A line end is CRLF, LF or CR; an event ends with its last line and a blank one. Line ends are matched atomically, or
# one CRLF would be taken for two.
_EVENT_END = re.compile(rb"(?<=[^\r\n])(?>\r\n|\n|\r){2,}")

_EDGE = 4
"""Bytes of what is kept that an event's end may have begun in."""


class EventTooLarge(HttpError):
    """An event has grown over the limit without ending. `ready`: what ended before it in the same bytes."""

    ready: bytes = b""


class EventScanner:
    """Splits a stream of bytes at the ends of events.

    `feed(data)` returns the bytes up to the last end of an event that is known, possibly `b""`; the rest is kept until
    its event ends. `events` counts the blocks that ended in a blank line (comment blocks are among them). What is kept
    is at most `max_event` bytes: EventTooLarge.
    """

    __slots__ = ("_edge", "_kept", "_kept_size", "events", "max_event")

    def __init__(self, max_event: int = 16_777_216) -> None:
        self.max_event = max_event
        self.events = 0
        self._kept: list[bytes] = []
        self._kept_size = 0
        self._edge = b""

    @property
    def pending(self) -> int:
        """Bytes of an event that has not ended."""
        return self._kept_size

    def feed(self, data: bytes) -> bytes:
        """More of the stream; returns what may be passed on."""
        if not self._kept:
            at = data.find(b"\n\n")
            if at > 0 and at == len(data) - 2 and data.find(b"\r") < 0 and data[0] != 0x0A:
                # The usual case, exactly one event.
                self.events += 1
                return data
        return self._scan(data)

    def rest(self) -> bytes:
        """Take what is kept: the event that did not end."""
        rest = b"".join(self._kept)
        self._clear()
        return rest

    def _scan(self, data: bytes) -> bytes:
        edge = self._edge
        window = edge + data if edge else data
        end = 0
        for match in _EVENT_END.finditer(window):
            self.events += 1
            end = match.end()
        if not end:
            self._keep(data, window)
            return b""
        end -= len(edge)
        ready = data if end == len(data) else data[:end]
        if self._kept:
            self._kept.append(ready)
            ready = b"".join(self._kept)
            self._clear()
        if end < len(data):
            rest = data[end:]
            try:
                self._keep(rest, rest)
            except EventTooLarge as error:
                error.ready = ready
                raise
        return ready

    def _keep(self, data: bytes, window: bytes) -> None:
        if not data:
            return
        self._kept_size += len(data)
        if self._kept_size > self.max_event:
            raise EventTooLarge(f"an event is larger than {self.max_event} bytes")
        self._kept.append(data)
        self._edge = window[-_EDGE:]

    def _clear(self) -> None:
        self._kept.clear()
        self._kept_size = 0
        self._edge = b""
