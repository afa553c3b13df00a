"""One leg: a call to an engine of a pool, with its deadline, its one retry, and its accounts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.gateway.engines import Engine, Lease, Pool
from triptych.gateway.errors import ApiError
from triptych.gateway.metrics import Metrics
from triptych.gateway.timeline import LegTiming
from triptych.http.client import Client, Response
from triptych.http.errors import ConnectError, ResetError, ResponseTooLarge, UpstreamError, UpstreamTimeout
from triptych.http.head import Header
from triptych.http.request import Buffer

_RETRY_AFTER = 2  # seconds: a probe or two

LegStatus = Literal["success", "timeout", "connect_error", "http_error", "oversize", "invalid_response", "cancelled"]


class LegError(Exception):
    """A leg that failed: which, how (`status`, the contract's words), and in a sentence why.

    http_status: what the client is told if this fails its request.
    """

    def __init__(self, leg: str, status: LegStatus, message: str, http_status: int = 502) -> None:
        super().__init__(message)
        self.leg = leg
        self.status = status
        self.http_status = http_status

    def api_error(self) -> ApiError:
        """The same failure as the client is told of it."""
        wait = _RETRY_AFTER if self.http_status == 503 else None
        return ApiError(self.http_status, str(self), retry_after=wait, reason=f"{self.leg}_{self.status}")


@dataclass(slots=True)
class Leg:
    """A call that is to be made or is being made, and its place on an engine, which may change once, by retry.

    name: as ids and messages spell it (`enc0`, `prefill`, `decode`). headers: with the leg's id, without length.
    body: segments, sent one after the other; or an iterator, which can be sent once only.
    pinned: no other engine will do. repeatable: may be run again though it may have run before.
    """

    name: str
    role: str
    pool: Pool
    lease: Lease
    target: bytes
    headers: Sequence[Header]
    body: Sequence[Buffer] | AsyncIterator[bytes]
    timing: LegTiming
    content_length: int | None = None
    pinned: bool = False
    repeatable: bool = False
    status: LegStatus = "cancelled"

    @property
    def engine(self) -> Engine:
        return self.lease.engine

    def end(self, metrics: Metrics) -> None:
        """Give the engine's place back and close the account under `status`; called on every path, again if need be."""
        self.lease.release()
        if self.timing.ended is None:
            self.timing.end(self.status)
            metrics.leg(self.role, self.status, self.timing.seconds)

    def move(self, engine: Engine) -> None:
        """Go on with another engine."""
        self.lease.release()
        self.lease = engine.lease()
        self.timing.engine = engine.url

    def __str__(self) -> str:
        return f"{self.name} engine {self.engine.url}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A leg's whole answer."""

    status: int
    headers: list[Header]
    body: bytes


async def open_leg(client: Client, leg: Leg, deadline: float, metrics: Metrics) -> Response:
    """Call the leg's engine and wait for its response head, at most `deadline` seconds once the call is on its way.

    A connect failure, or a 502/503, goes once to another engine of the pool (contract, "Retry"); a leg that may have
    run only if it is repeatable. The caller closes the response. Raises LegError.
    """
    retried = leg.pinned
    while True:
        leg.timing.start()
        engine = leg.engine
        try:
            response = await client.request(
                engine.origin,
                b"POST",
                leg.target,
                leg.headers,
                leg.body,
                content_length=leg.content_length,
                timeout=deadline,
            )
        except UpstreamError as error:
            nothing_sent = isinstance(error, ConnectError)
            if nothing_sent:
                engine.failed(str(error))
            again = nothing_sent or (leg.repeatable and not isinstance(error, UpstreamTimeout))
            other = leg.pool.choose(avoid=(engine,)) if again and not retried else None
            if other is None:
                raise failed(leg, error) from error
        else:
            leg.timing.first_byte()
            engine.connected()
            # What a stream of the client's brought is gone; only bodies that are all here can be sent again.
            if response.status not in (502, 503) or retried or not isinstance(leg.body, Sequence):
                return response
            other = leg.pool.choose(avoid=(engine,))
            if other is None:
                return response
            response.close()
        retried = True
        metrics.retry(leg.role)
        leg.move(other)


async def call_leg(
    client: Client, leg: Leg, deadline: float, limit: int, metrics: Metrics, *, spent: float = 0.0
) -> Answer:
    """Call the leg's engine and read its whole answer, all within `deadline` seconds and `limit` bytes.

    spent: seconds of the deadline that are over already.

    Raises LegError: `oversize` for one byte more, `invalid_response` for one that was cut, `timeout`, `connect_error`.
    """
    try:
        async with asyncio.timeout(deadline - spent):
            response = await open_leg(client, leg, deadline, metrics)
            try:
                return Answer(response.status, response.headers, await read_answer(leg, response, limit, deadline))
            finally:
                response.close()
    except TimeoutError:
        message = f"{leg} did not finish its answer within {deadline:.3g} s"
        raise LegError(leg.name, "timeout", message, http_status=504) from None


async def read_answer(leg: Leg, response: Response, limit: int, idle: float) -> bytes:
    """The body of a response, at most `limit` bytes, with no silence longer than `idle` seconds. Raises LegError.

    The engine has done its part then: its place is free, however slowly a client takes what it said.
    """
    try:
        body = await response.read(limit, timeout=idle)
    except UpstreamError as error:
        raise failed(leg, error) from error
    leg.lease.release()
    leg.timing.bytes_in = len(body)
    return body


def failed(leg: Leg, error: UpstreamError) -> LegError:
    """What an error of the call means for the leg."""
    match error:
        case UpstreamTimeout():
            return LegError(leg.name, "timeout", f"{leg.name} engine {error}", http_status=504)
        case ConnectError() | ResetError():
            status: LegStatus = "connect_error"
        case ResponseTooLarge():
            status = "oversize"
        case _:
            status = "invalid_response"
    return LegError(leg.name, status, f"{leg.name} engine {error}")
