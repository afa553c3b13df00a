"""One leg: a call to an engine of a pool, with its deadline, its one retry, and its accounts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.gateway.engines import Engine, Lease, Pool
from triptych.gateway.errors import ApiError
from triptych.gateway.metrics import Metrics
from triptych.gateway.settings import Role
from triptych.gateway.timeline import LegTiming
from triptych.http import (
    Buffer,
    Client,
    ConnectError,
    GarbageError,
    Header,
    UpstreamError,
    Response,
    ResponseTooLarge,
)

LegStatus = Literal[
    "success", "timeout", "connect_error", "http_error", "oversize", "invalid_response", "cancelled"
]


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
        return ApiError(self.http_status, str(self), reason=f"{self.leg}_{self.status}")


@dataclass(slots=True)
class Leg:
    """A call that is to be made or is being made, and its place on an engine, which may change once, by retry.

    name: as ids and messages spell it (`enc0`, `prefill`, `decode`). headers: with the leg's id, without length.
    body: segments, sent one after the other; or an iterator, which can be sent once only.
    pinned: no other engine will do. repeatable: may be run again though it may have run before.
    """

    name: str
    role: Role
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


async def open_leg(client: Client, leg: Leg, deadline: float, metrics: Metrics) -> Response:
    """Call the leg's engine and wait for its response head, at most `deadline` seconds.

    A connect failure, or a 502/503, goes once to another engine of the pool (contract, "Retry"); a leg that may have
    run only if it is repeatable. The caller closes the response. Raises LegError.
    """
    try:
        async with asyncio.timeout(deadline):
            return await _open(client, leg, metrics)
    except TimeoutError:
        raise LegError(
            leg.name, "timeout", f"{leg} did not answer within {deadline:g} s", http_status=504
        ) from None


async def _open(client: Client, leg: Leg, metrics: Metrics) -> Response:
    retried = leg.pinned
    while True:
        leg.timing.start()
        engine = leg.engine
        try:
            response = await client.request(
                engine.origin, b"POST", leg.target, leg.headers, leg.body, content_length=leg.content_length
            )
        except ConnectError as error:
            engine.failed(str(error))
            other = None if retried else leg.pool.choose(avoid=(engine,))
            if other is None:
                raise LegError(leg.name, "connect_error", f"{leg}: {error}") from error
        except UpstreamError as error:
            other = leg.pool.choose(avoid=(engine,)) if leg.repeatable and not retried else None
            if other is None:
                garbage = isinstance(error, GarbageError)
                raise LegError(leg.name, "invalid_response" if garbage else "connect_error", f"{leg}: {error}") from error
        else:
            leg.timing.first_byte()
            engine.connected()
            if response.status not in (502, 503) or retried or not isinstance(leg.body, Sequence):
                return response
            other = leg.pool.choose(avoid=(engine,))
            if other is None:
                return response
            response.close()
        retried = True
        metrics.retry(leg.role)
        leg.move(other)


@dataclass(frozen=True, slots=True)
class Answer:
    """A leg's whole answer."""

    status: int
    headers: list[Header]
    body: bytes


async def call_leg(client: Client, leg: Leg, deadline: float, limit: int, metrics: Metrics) -> Answer:
    """Call the leg's engine and read its whole answer, all within `deadline` seconds and `limit` bytes.

    Raises LegError: `oversize` for one byte more, `invalid_response` for one that was cut, `timeout`, `connect_error`.
    """
    try:
        async with asyncio.timeout(deadline):
            response = await _open(client, leg, metrics)
            try:
                return Answer(response.status, response.headers, await read_answer(leg, response, limit))
            finally:
                response.close()
    except TimeoutError:
        message = f"{leg} did not finish its answer within {deadline:g} s"
        raise LegError(leg.name, "timeout", message, http_status=504) from None


async def read_answer(leg: Leg, response: Response, limit: int) -> bytes:
    """The body of a response, at most `limit` bytes. Raises LegError `oversize` or `invalid_response`."""
    try:
        return await response.read(limit)
    except ResponseTooLarge as error:
        raise LegError(leg.name, "oversize", f"{leg} answered with more than {limit} bytes") from error
    except UpstreamError as error:
        raise LegError(leg.name, "invalid_response", f"{leg}: {error}") from error
