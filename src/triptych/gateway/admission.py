"""Admission: how many requests, and how many bytes of their bodies, are in flight at once.

Beyond either limit requests wait in one bounded queue, first come first served: a large one at its head holds the
small ones behind it back, so none starves. All state changes in `_admit_next`, `_leave` and the fast path of
`try_admit`; nothing here does I/O.

A body of unknown length is admitted with 0 bytes and grows as it arrives. Growing never waits: two half-read
uploads that waited for each other's bytes would hold both until their deadlines. It may take bytes that the queue's
head waits for, as the upload already holds its place and ends sooner for getting them.

A place is taken before the body's bytes are there, so a few clients that drip theirs could hold all of it for ever.
While others wait, uploads that have had their time and come too slowly are ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, NamedTuple, Self

from triptych.gateway.settings import Limits
from triptych.http.errors import ServerSideError

_PATROL = 0.5  # seconds between two looks at slow uploads while others wait
_RETRY_AFTER = 1  # seconds: the queue moves within the time of one request, of which the gateway knows nothing


class Overloaded(Exception):
    """No room: 429. `reason` for metrics, `retry_after` in seconds, the message is for the client."""

    def __init__(self, reason: Literal["queue_full", "queue_timeout", "bytes"], message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = _RETRY_AFTER


class TooLarge(Exception):
    """The body alone exceeds the whole budget of bytes, so waiting cannot help: 413. The message is for the client."""

    def __init__(self, nbytes: int, budget: int) -> None:
        self.message = (
            f"The request body of {nbytes} bytes is larger than all that the gateway holds at once "
            f"({budget} bytes, setting `limits.bytes`)."
        )
        super().__init__(self.message)


class TooSlow(ServerSideError):
    """The body came slower than `rate` bytes a second while others waited for its place: 408."""

    status = 408

    def __init__(self, rate: int) -> None:
        super().__init__(f"the request body came at less than {rate} bytes a second while others waited for its place")


class Upload(NamedTuple):
    """A body on its way. `received`: bytes so far, None while it is not the client who is waited for."""

    since: float
    received: Callable[[], int | None]
    give_up: Callable[[TooSlow], None]


class Ticket:
    """A request's place. `release` may be called again; also a context manager."""

    __slots__ = ("_admission", "_held", "nbytes")

    def __init__(self, admission: Admission, nbytes: int) -> None:
        self._admission = admission
        self._held = True
        self.nbytes = nbytes

    def grow(self, nbytes: int) -> None:
        """More bytes of the body have come. Raises TooLarge, Overloaded; the ticket stays as it was."""
        self._admission._grow(self, nbytes)

    def shrink(self, nbytes: int) -> None:
        """That many bytes of the body are no longer held (an engine took them): others may have them."""
        if self._held:
            self._admission._shrink(self, min(nbytes, self.nbytes))

    def release(self) -> None:
        if self._held:
            self._held = False
            self._admission._leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Ticket for {self.nbytes} bytes{'' if self._held else ', released'}>"


class _Waiter:
    __slots__ = ("future", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()


class Admission:
    """The gate that every request passes. `requests`, `nbytes` and `queued` say what is in flight and waiting."""

    def __init__(self, limits: Limits, queue_deadline: float, upload_time: float = 30.0) -> None:
        """limits: `requests`, `bytes`, `queue` and `upload_rate` of it; queue_deadline: seconds that a request waits at
        most; upload_time: seconds that a body may take at any rate."""
        self.max_requests = limits.requests
        self.max_bytes = limits.bytes
        self.max_queue = limits.queue
        self.queue_deadline = queue_deadline
        self.upload_rate = limits.upload_rate
        self.upload_time = upload_time
        self.requests = 0
        self.nbytes = 0
        self._queue: dict[_Waiter, None] = {}  # an ordered set: leaving from the middle is O(1)
        self._uploads: set[Upload] = set()
        self._patrol: asyncio.TimerHandle | None = None

    @property
    def queued(self) -> int:
        return len(self._queue)

    def try_admit(self, nbytes: int) -> Ticket | None:
        """A ticket if there is room and nobody waits. Raises TooLarge."""
        if not self._queue and self.requests < self.max_requests and self.nbytes + nbytes <= self.max_bytes:
            self.requests += 1
            self.nbytes += nbytes
            return Ticket(self, nbytes)
        if nbytes > self.max_bytes:
            raise TooLarge(nbytes, self.max_bytes)
        return None

    async def admit(self, nbytes: int) -> Ticket:
        """A ticket for a request with a body of `nbytes`; waits its turn, at most the queue deadline.

        Raises Overloaded (queue full, or the deadline passed) and TooLarge. A cancelled wait leaves nothing behind.
        """
        ticket = self.try_admit(nbytes)
        if ticket is not None:
            return ticket
        self._end_slow()
        if len(self._queue) >= self.max_queue:
            raise Overloaded("queue_full", "The gateway is at its limit and its queue is full. Try again later.")
        waiter = _Waiter(nbytes)
        self._queue[waiter] = None
        timer = asyncio.get_running_loop().call_later(self.queue_deadline, self._expire, waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in self._queue:
                self._drop(waiter)
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release()  # admitted in the same turn of the loop that cancelled it
            raise
        finally:
            timer.cancel()

    @contextmanager
    def upload(self, received: Callable[[], int | None], give_up: Callable[[TooSlow], None]) -> Iterator[None]:
        """While the block runs a body is on its way, which `give_up` ends if it is slow while others wait."""
        upload = Upload(time.monotonic(), received, give_up)
        self._uploads.add(upload)
        try:
            yield
        finally:
            self._uploads.discard(upload)

    def _end_slow(self) -> None:
        """End uploads that have had their time and are slow; look again as long as anybody waits."""
        now = time.monotonic()
        for upload in list(self._uploads):
            age = now - upload.since
            received = upload.received()
            if age > self.upload_time and received is not None and received < age * self.upload_rate:
                self._uploads.discard(upload)
                upload.give_up(TooSlow(self.upload_rate))
        if self._patrol is None and self._uploads:
            self._patrol = asyncio.get_running_loop().call_later(_PATROL, self._look_again)

    def _look_again(self) -> None:
        self._patrol = None
        if self._queue:
            self._end_slow()

    def _expire(self, waiter: _Waiter) -> None:
        if waiter in self._queue:
            message = f"The gateway is at its limit; waited {self.queue_deadline:g} s for room. Try again later."
            if not waiter.future.done():
                waiter.future.set_exception(Overloaded("queue_timeout", message))
            self._drop(waiter)

    def _drop(self, waiter: _Waiter) -> None:
        """Out of the queue without a ticket: if it was a large one at the head, those behind may fit."""
        del self._queue[waiter]
        self._admit_next()

    def _admit_next(self) -> None:
        while self._queue and self.requests < self.max_requests:
            waiter = next(iter(self._queue))
            if self.nbytes + waiter.nbytes > self.max_bytes:
                return
            del self._queue[waiter]
            if not waiter.future.done():
                self.requests += 1
                self.nbytes += waiter.nbytes
                waiter.future.set_result(Ticket(self, waiter.nbytes))

    def _grow(self, ticket: Ticket, nbytes: int) -> None:
        if self.nbytes + nbytes > self.max_bytes:
            if ticket.nbytes + nbytes > self.max_bytes:
                raise TooLarge(ticket.nbytes + nbytes, self.max_bytes)
            self._end_slow()
            raise Overloaded("bytes", "The gateway holds as many bytes of requests as it may. Try again later.")
        if ticket._held:
            ticket.nbytes += nbytes
            self.nbytes += nbytes

    def _shrink(self, ticket: Ticket, nbytes: int) -> None:
        ticket.nbytes -= nbytes
        self.nbytes -= nbytes
        if self._queue:
            self._admit_next()

    def _leave(self, ticket: Ticket) -> None:
        self.requests -= 1
        self.nbytes -= ticket.nbytes
        if self._queue:
            self._admit_next()

    def __repr__(self) -> str:
        return (
            f"<Admission: {self.requests} of {self.max_requests} requests, {self.nbytes} of {self.max_bytes} bytes, "
            f"{self.queued} of {self.max_queue} queued>"
        )
