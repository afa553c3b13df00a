"""The response to one request, as the caller reads it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from triptych.http.collect import Collector
from triptych.http.errors import ResponseTooLarge, UpstreamError
from triptych.http.head import Header, ResponseHead, find

if TYPE_CHECKING:
    from triptych.http.upstream import UpstreamConnection

READ_AHEAD = 262_144
"""Bytes of a response that wait to be taken before the upstream is held back."""


class Response(Collector):
    """One exchange. Whoever got it from `Client.request` has the head; read the rest with `read` or `chunks`, and
    `close` it whatever happens.

    Bytes that came are kept here, so the connection goes back to its pool once the response has ended on the wire.
    """

    __slots__ = (
        "_connection",
        "_held",
        "_limit",
        "_sink_error",
        "_waiter",
        "ended",
        "error",
        "headers",
        "length",
        "origin",
        "reason",
        "reused",
        "sink",
        "status",
    )

    def __init__(self, connection: UpstreamConnection) -> None:
        Collector.__init__(self)
        self.status = 0
        self.reason = b""
        self.headers: list[Header] = []
        self.length: int | None = None
        self.origin = connection.pool.origin
        self.reused = connection.reused
        self.ended = False
        self.error: UpstreamError | None = None
        self._connection: UpstreamConnection | None = connection
        self._limit = -1
        self.sink: Callable[[bytes], bool] | None = None
        self._sink_error: Exception | None = None
        self._held = False
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "complete" if self.ended else "broken" if self.error else "open" if self._connection else "closed"
        return f"<Response {self.status or 'pending'} from {self.origin}: {state}>"

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header called `name` (lower case), or None."""
        return find(self.headers, name)

    async def read(self, limit: int, *, timeout: float | None = None) -> bytes:
        """The whole body, at most `limit` bytes.

        Raises ResponseTooLarge as soon as it is known, CutError, GarbageError, and UpstreamTimeout when nothing comes
        for `timeout` seconds.
        """
        if (self.length or 0) > limit or self.collected > limit:
            self.close()
            raise ResponseTooLarge(self.origin, limit)
        self._limit = limit
        while not self.ended:
            if self.error is not None:
                raise self.error
            await self._wait("the rest of the response", timeout)
        return self._take()

    def chunks(self, *, timeout: float | None = None) -> ResponseChunks:
        """Async iterator over the body as it comes; what arrived together comes as one `bytes`.

        The upstream is held back while nobody takes. Raises CutError, GarbageError after all that came before, and
        UpstreamTimeout when nothing comes for `timeout` seconds.
        """
        return ResponseChunks(self, timeout)

    async def pump(
        self,
        sink: Callable[[bytes], bool],
        drained: Callable[[], Awaitable[None]],
        *,
        timeout: float | None = None,
    ) -> None:
        """Like `chunks`, cheaper for a relay: `sink(data)` is called as bytes come, without a switch of tasks.

        When `sink` returns False the upstream is held back until `drained()` returns, then `sink` is called again with
        what came meanwhile. Returns at the end of the body. Raises what `chunks` raises, and what `sink` raises.
        """
        try:
            while True:
                while self.collected:
                    if not sink(self._take()):
                        await drained()
                if self.error is not None:
                    raise self.error
                if self.ended:
                    return
                self.sink = sink
                try:
                    await self._wait("the next bytes of the response", timeout)
                finally:
                    self.sink = None
                if self._sink_error is not None:
                    raise self._sink_error
                if self._held:
                    self._held = False
                    await drained()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what has not come. Idempotent; a response that has ended has nothing to close."""
        connection = self._connection
        if connection is not None:
            self._connection = None
            connection.abort()

    async def _wait(self, what: str, timeout: float | None) -> None:
        """Wait until there is something new: the head, bytes (with a limit set: all of them), the end, an error, or,
        while the request is being written, room for more of it."""
        connection = self._connection
        if connection is None:
            raise RuntimeError("the response was closed")
        waiter = self._waiter = connection.loop.create_future()
        connection.relieve()
        if timeout is not None:
            connection.wait_for(what, timeout)
        try:
            await waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None
            if self._connection is not None:
                connection.patience = math.inf

    # --- from the connection -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have whoever waits look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed_head(self, head: ResponseHead) -> None:
        """The head is there."""
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self.length = head.length if head.length >= 0 else None
        self.wake()

    def feed(self, data: bytes) -> bool:
        """More of the body; False when so much waits to be taken that the upstream should be held back."""
        if self.sink is not None:
            self.pour(data)
            return True
        size = self._add(data)
        if self._limit < 0:
            self.wake()
            return size <= READ_AHEAD
        if size > self._limit:
            connection = self._connection
            self.fail(ResponseTooLarge(self.origin, self._limit))
            if connection is not None:
                connection.abort()
        return True

    def pour(self, data: bytes) -> None:
        """More of the body, into the sink that there is."""
        sink = self.sink
        assert sink is not None
        try:
            if sink(data):
                return
            self._held = True
        except Exception as error:
            self._sink_error = error
        self.sink = None
        self.wake()

    def feed_end(self) -> None:
        """The body is whole."""
        self.ended = True
        self._connection = None
        self.wake()

    def fail(self, error: UpstreamError) -> None:
        """There will be no more."""
        if not self.ended and self.error is None:
            self.error = error
            self._connection = None
            self.wake()


class ResponseChunks:
    """Async iterator over a response body; see `Response.chunks`."""

    __slots__ = ("_response", "_timeout")

    def __init__(self, response: Response, timeout: float | None) -> None:
        self._response = response
        self._timeout = timeout

    def __aiter__(self) -> ResponseChunks:
        return self

    async def __anext__(self) -> bytes:
        response = self._response
        while not response.collected:
            if response.error is not None:
                raise response.error
            if response.ended:
                raise StopAsyncIteration
            await response._wait("the next bytes of the response", self._timeout)
        return response._take()
