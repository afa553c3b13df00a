"""The encode stage: one leg per distinct media item, in parallel, bounded, each failing by itself.

Rules: contract, "Encode stage". With the soft policy a failed leg is counted and the request goes on, since the
consumer still has the media; with the strict one the first failure ends the stage and the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.body.answer import AnswerError, top_level_object
from triptych.gateway.engines import Lease, Pool
from triptych.gateway.errors import EngineRefused, first_of
from triptych.gateway.logs import Log
from triptych.gateway.metrics import Metrics
from triptych.gateway.settings import ENCODE_ANSWER_BYTES
from triptych.gateway.upstream import Leg, LegError, LegStatus, call_leg
from triptych.http.client import Client


@dataclass(frozen=True, slots=True)
class EncodeStage:
    """What the stage needs beside its legs. deadline: seconds for one leg; parallel: legs at once."""

    client: Client
    pool: Pool
    metrics: Metrics
    log: Log
    deadline: float
    parallel: int
    strict: bool
    gateway_key: bool
    request_id: str

    async def run(self, count: int, make_leg: Callable[[int, Lease], Leg]) -> list[bytes | None]:
        """Run `count` legs; per item the object that its encoder handed over, None for nothing.

        Raises LegError or EngineRefused under the strict policy only. Cancelling it closes every leg.
        """
        if count == 1:
            return [await self._leg(0, make_leg)]
        slots = asyncio.Semaphore(self.parallel)

        async def bounded(item: int) -> bytes | None:
            async with slots:
                return await self._leg(item, make_leg)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(bounded(item)) for item in range(count)]
        except BaseExceptionGroup as failures:  # not `except*`: before 3.11.4 what is raised in one comes as a group
            raise first_of(failures) from None
        return [task.result() for task in tasks]

    async def _leg(self, item: int, make_leg: Callable[[int, Lease], Leg]) -> bytes | None:
        """One leg, from taking an encoder's place to its account."""
        status: LegStatus = "cancelled"
        started = time.monotonic()
        leg: Leg | None = None
        try:
            leg = make_leg(item, await self._take(item))
            handles = await self._handles(leg, time.monotonic() - started)
            status = "success"
            return handles
        except (LegError, EngineRefused) as error:
            status = error.status if isinstance(error, LegError) else "http_error"
            self.log.warning(
                "encode leg failed",
                request=self.request_id,
                leg=f"enc{item}",
                engine=leg.engine.url if leg is not None else None,
                status=status,
                why=str(error),
            )
            if self.strict:
                raise
            return None
        finally:
            if leg is None:
                self.metrics.leg("encode", status, time.monotonic() - started)
            else:
                leg.status = status
                leg.end(self.metrics)

    async def _take(self, item: int) -> Lease:
        """A place on an encoder, at once or when one is free."""
        try:
            async with asyncio.timeout(self.deadline):
                lease = await self.pool.take()
        except TimeoutError:
            message = f"no encode engine had a free place for {self.deadline:g} s"
            raise LegError(f"enc{item}", "timeout", message, http_status=504) from None
        if lease is None:
            raise LegError(f"enc{item}", "connect_error", "no healthy encode engine", http_status=503)
        return lease

    async def _handles(self, leg: Leg, spent: float) -> bytes | None:
        answer = await call_leg(self.client, leg, self.deadline, ENCODE_ANSWER_BYTES, self.metrics, spent=spent)
        if answer.status != 200:
            if 400 <= answer.status < 500 and not (answer.status in (401, 403) and self.gateway_key):
                raise EngineRefused(leg.name, answer.status, answer.headers, answer.body)
            raise LegError(leg.name, "http_error", f"{leg} answered {answer.status}")
        try:
            return top_level_object(answer.body, "ec_transfer_params")
        except AnswerError as error:
            raise LegError(leg.name, "invalid_response", f"{leg}: {error}") from error
