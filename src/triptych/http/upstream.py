"""One connection to an upstream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from triptych.http.errors import (
    CutError,
    GarbageError,
    HeaderTooLarge,
    ParseError,
    ResetError,
    UpstreamError,
    UpstreamTimeout,
)
from triptych.http.parser import END, ResponseParser
from triptych.http.response import Response

if TYPE_CHECKING:
    from triptych.http.client import Pool


class UpstreamConnection(asyncio.Protocol):
    """Client side of one connection: one exchange at a time."""

    __slots__ = (
        "_closed",
        "_fresh",
        "_got_bytes",
        "_parser",
        "_reading_paused",
        "_room_waiter",
        "_transport",
        "busy",
        "deadline",
        "idle_since",
        "loop",
        "patience",
        "pool",
        "response",
        "reused",
        "waiting_for",
        "write_paused",
        "written",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.loop = pool.loop
        self.reused = False
        self.busy = True
        self.idle_since = 0.0
        self.deadline = math.inf
        self.waiting_for = ""
        self.patience = math.inf
        self.write_paused = False
        self.written = False
        self.response: Response | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser(pool.max_header_bytes)
        self._room_waiter: asyncio.Future[None] | None = None
        self._reading_paused = False
        self._got_bytes = False
        self._fresh = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "active" if self.busy else "idle"
        return f"<UpstreamConnection to {self.pool.origin}: {state}>"

    # --- from the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None or self._closed:
            self.abort()  # an upstream that speaks unasked
            return
        self._got_bytes = True
        # The head is waited for once: neither bytes of it nor informational heads buy an upstream more time.
        self._fresh = self._fresh or response.status > 0
        chunks = self._parser.chunks
        if chunks is not None and (payload := chunks.whole(data)) is not None:
            # The short way for an event of a stream.
            if response.sink is not None:
                response.pour(payload)
            elif not response.feed(payload):
                self._hold_back()
            return
        fault: ParseError | None = None
        try:
            events: Sequence[object] = self._parser.feed(data)
        except ParseError as error:
            events, fault = error.events, error
        for event in events:
            if type(event) is bytes:
                if not response.feed(event):
                    self._hold_back()
            elif event is END:
                self._end(response)
            elif event.status >= 200:  # type: ignore[attr-defined]
                response.feed_head(event)  # type: ignore[arg-type]
        if fault is not None:
            kind = HeaderTooLarge if fault.status == 431 else GarbageError
            self._fail(kind(self.pool.origin, fault.message))

    def eof_received(self) -> bool:
        self._lost(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(exc)
        self._transport = None

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self._give_room()

    # --- one exchange ------------------------------------------------------------------------------------------

    def begin(self, method: bytes) -> Response:
        """Use the connection for one request of this method; returns its response, which has no head yet."""
        self.written = False
        self._got_bytes = False
        self._parser.begin(method)
        self.response = Response(self)
        return self.response

    @property
    def usable(self) -> bool:
        """Whether the transport is there and nobody is closing it."""
        return not self._closed and self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hand bytes to the transport; on a lost connection nothing happens, the response says so."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def writelines(self, batch: list[bytes | bytearray | memoryview]) -> None:
        """Like `write`, several buffers at once."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(batch)

    async def room(self) -> None:
        """Until there is room to write again, or the connection is closed."""
        if self._closed or not self.write_paused:
            return
        self._room_waiter = self.loop.create_future()
        try:
            await self._room_waiter
        finally:
            self._room_waiter = None

    def wait_for(self, what: str, seconds: float) -> None:
        """Fail with UpstreamTimeout unless it comes within `seconds`; the sweep starts the clock."""
        self.waiting_for = what
        self.patience = seconds
        self._fresh = True

    def sweep(self, now: float) -> None:
        """Called by the client every so often: has the upstream been waited for too long?

        Clocks are read here only, not each time bytes come; a deadline may be seen up to two sweeps late.
        """
        if self._fresh:
            self._fresh = False
            self.deadline = now + self.patience
        elif now >= self.deadline and self.patience != math.inf:
            self._fail(UpstreamTimeout(self.pool.origin, self.waiting_for, self.patience))

    def relieve(self) -> None:
        """Bytes were taken: read on."""
        if self._reading_paused and self._transport is not None and not self._closed:
            self._reading_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once. Idempotent."""
        if not self._closed:
            self._closed = True
            self.pool.closed(self)
            self._give_room()
            if self._transport is not None:
                self._transport.abort()

    def _hold_back(self) -> None:
        if not self._reading_paused and not self._closed and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def drop(self, why: str) -> None:
        """Close at once, telling whoever waits."""
        self._lost(ConnectionAbortedError(why))

    def _end(self, response: Response) -> None:
        transport = self._transport
        self.patience = math.inf
        self.response = None
        response.feed_end()
        if (
            transport is None
            or not self.written
            or not self._parser.keep_alive
            or self._parser.rest
            or transport.is_closing()
            or transport.get_write_buffer_size()
        ):
            self.abort()
            return
        self.relieve()
        self.reused = True
        self.pool.put(self)

    def _lost(self, exc: Exception | None) -> None:
        if self._closed:
            return
        response = self.response
        if response is None:
            self.abort()
            return
        if exc is None and self._parser.eof():
            self._end(response)
            return
        origin = self.pool.origin
        why = f" ({exc})" if exc is not None else ""
        if self._got_bytes:
            self._fail(CutError(origin, f"connection lost before the response ended{why}"))
        else:
            self._fail(ResetError(origin, f"connection lost before any byte of the response{why}"))

    def _fail(self, error: UpstreamError) -> None:
        response, self.response = self.response, None
        if response is not None:
            response.fail(error)
        self.abort()

    def _give_room(self) -> None:
        waiter = self._room_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if not self.written and self.response is not None:
            self.response.wake()
