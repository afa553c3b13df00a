"""A request that is given up at any of its awaits leaves nothing: no place, no lease, no connection, no task.

Every await of the handler, and of the tasks that it makes, is a place where a request may be ended from outside. Each
scenario is run again and again and ended at its first, second, ... await, until it comes to its end untouched. `early`
ends it as it begins to wait, `late` in the turn of the event loop in which what it waited for has happened: there a
resource may have been handed over that nobody has in hand yet.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from tests.gateway.raw import Raw
from tests.gateway.rig import PLANS, ROLES, PlanName, Rig, chat, eventually
from triptych.http.request import Request

MOST = 400
# Tasks that a handler makes for itself; the simulators' own are in the same loop.
OWN_TASKS = ("EncodeStage.", "Run.", "_send_stream.", "look_for_model.")


class Awaits:
    """Counts the awaits of everything that is run through `watch`, and strikes at one of them."""

    def __init__(self, at: int, late: bool, strike: Callable[[], None]) -> None:
        self.at = at
        self.late = late
        self.strike = strike
        self.count = 0
        self.struck: float | None = None

    async def watch(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return await _Watched(coro, self)

    def awaits(self, future: Any) -> None:
        self.count += 1
        if self.count != self.at:
            return
        if self.late and isinstance(future, asyncio.Future):
            future.add_done_callback(lambda _: self._strike())
        else:
            asyncio.get_running_loop().call_soon(self._strike)

    def _strike(self) -> None:
        if self.struck is None:
            self.struck = time.monotonic()
            self.strike()
            self._turns(3)

    def _turns(self, left: int) -> None:
        """A cancellation reaches a task in the next turn of the loop, and its children in the one after."""
        self.struck = time.monotonic()
        if left:
            asyncio.get_running_loop().call_soon(self._turns, left - 1)


class _Watched:
    def __init__(self, coro: Coroutine[Any, Any, Any], awaits: Awaits) -> None:
        self._coro = coro
        self._awaits = awaits

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coro.__await__()
        error: BaseException | None = None
        while True:
            try:
                future = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            self._awaits.awaits(future)
            try:
                yield future
            except BaseException as thrown:
                error = thrown


class Ender:
    """Ends the requests of a rig at an await of theirs."""

    def __init__(self, rig: Rig, by: str, late: bool) -> None:
        self.rig = rig
        self.by = by
        self.late = late
        self.at = 1
        self.awaits: Awaits | None = None
        self._handle = rig.running.server.handler
        rig.running.server.handler = self.handler
        asyncio.get_running_loop().set_task_factory(self.make_task)  # type: ignore[arg-type]

    async def handler(self, request: Request) -> None:
        connection = request._connection
        task = asyncio.current_task()
        assert task is not None

        def strike() -> None:
            if self.by == "client":
                connection._left()
                connection.abort()
            else:
                task.cancel()

        self.awaits = Awaits(self.at, self.late, strike)
        await self.awaits.watch(self._handle(request))  # type: ignore[arg-type]

    def make_task(self, loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if self.awaits is not None and coro.__qualname__.startswith(OWN_TASKS):
            coro = self.awaits.watch(coro)
        return asyncio.Task(coro, loop=loop, **options)


async def end_at_every_await(rig: Rig, by: str, late: bool, send: Callable[[Raw], None]) -> int:
    """Run the scenario until it comes through; how often it was ended."""
    ender = Ender(rig, by, late)
    try:
        for at in range(1, MOST):
            ender.at = at
            ender.awaits = None
            async with rig.client() as client:
                send(client)
                answer: Any = None
                try:
                    answer = await client.answer()
                except ConnectionError:
                    pass
            await rig.settled()
            assert ender.awaits is not None
            struck = ender.awaits.struck
            if struck is None:
                assert answer is not None
                assert answer.complete
                return at - 1
            timeline = list(rig.gateway.requests)[-1]
            assert all(leg.started is None or leg.started <= struck for leg in timeline.legs), timeline.to_dict()
            assert all(leg.status for leg in timeline.legs), "a leg without an account"
            if timeline.status != 200:  # else it was struck when all was said
                assert timeline.status == 499
        raise AssertionError(f"not through after {MOST} awaits")
    finally:
        asyncio.get_running_loop().set_task_factory(None)


BY = pytest.mark.parametrize("by", ["client", "task"])
LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


def images(plan: PlanName) -> int:
    return 2 if plan.startswith("e") else 0


@BY
@LATE
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("plan", PLANS)
async def test_every_plan(plan: PlanName, stream: bool, late: bool, by: str) -> None:
    sims = {role: {"output_tokens": 4, "keep_bodies": 0} for role in ROLES[plan]}
    async with Rig(plan, sims=sims) as rig:
        ended = await end_at_every_await(rig, by, late, lambda c: c.send(chat(images=images(plan), stream=stream)))
        assert ended >= len(ROLES[plan])
        assert rig.count("requests", plan=plan, status="200") >= 1


@BY
@LATE
@pytest.mark.parametrize("plan", PLANS)
async def test_fresh_connections(plan: PlanName, late: bool, by: str) -> None:
    """Connecting has awaits of its own: no connection is reused here."""
    async with Rig(plan) as rig:
        rig.gateway.client.max_idle = 0
        await end_at_every_await(rig, by, late, lambda c: c.send(chat(images=images(plan))))


@BY
@LATE
@pytest.mark.parametrize(("plan", "role"), [(plan, role) for plan in PLANS for role in ROLES[plan]])
async def test_a_retry(plan: PlanName, role: str, late: bool, by: str) -> None:
    async with Rig(plan, engines={role: 2}, health={"failures": 10_000}) as rig:
        await rig.sim(role, 0).stop()
        busy = [lease for e in rig.gateway.fleet.find(rig.sim(role, 1).url) for lease in [e.lease()]]
        rig.ignore = {f"leases on {rig.sim(role, 1).url}"}
        await end_at_every_await(rig, by, late, lambda c: c.send(chat(images=images(plan))))
        for lease in busy:
            lease.release()


@BY
@LATE
async def test_waiting_for_an_encoders_place(late: bool, by: str) -> None:
    async with Rig("e_pd", limits={"encode_legs_per_engine": 1, "encode_legs": 2}) as rig:
        await end_at_every_await(rig, by, late, lambda c: c.send(chat(images=4)))


@BY
@LATE
async def test_waiting_for_admission(late: bool, by: str) -> None:
    async with Rig("plain", limits={"requests": 1}) as rig:
        admission = rig.gateway.admission
        loop = asyncio.get_running_loop()
        freeing: list[asyncio.Task[None]] = []

        def send(client: Raw) -> None:
            ticket = admission.try_admit(0)
            assert ticket is not None
            client.send(chat())
            # In the turn in which the place is given it may be taken away.
            freeing.append(loop.create_task(free_when_asked(ticket)))

        async def free_when_asked(ticket: Any) -> None:
            before = list(rig.gateway.requests)

            def queued_or_over() -> bool:
                return bool(
                    admission.queued or (not rig.running.server.running and list(rig.gateway.requests) != before)
                )

            await eventually(queued_or_over, "a request in the queue", 2.0)
            ticket.release()

        await end_at_every_await(rig, by, late, send)


@BY
@LATE
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_large_body(chunked: bool, late: bool, by: str) -> None:
    payload = "QUJD" * 200_000

    def send(client: Raw) -> None:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{payload}"}}
        body = chat(images=1)
        body["messages"][0]["content"].append(part)
        if chunked:
            raw = json.dumps(body).encode()
            client.head(None)
            for at in range(0, len(raw), 100_000):
                client.chunk(raw[at : at + 100_000])
            client.chunk(b"")
        else:
            client.send(body)

    async with Rig("e_pd", sims={"encode": {"keep_bodies": 0}, "combined": {"keep_bodies": 0}}) as rig:
        await end_at_every_await(rig, by, late, send)


@BY
@LATE
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_an_upload_that_is_streamed_through(chunked: bool, late: bool, by: str) -> None:
    body = (
        b'--f\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n'
        b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--f--\r\n' % bytes(300_000)
    )
    headers = {"content-type": "multipart/form-data; boundary=f"}

    def send(client: Raw) -> None:
        if chunked:
            client.head(None, "/v1/audio/transcriptions", headers=headers)
            for at in range(0, len(body), 100_000):
                client.chunk(body[at : at + 100_000])
            client.chunk(b"")
        else:
            client.send(body, "/v1/audio/transcriptions", headers=headers)

    async with Rig("plain", sims={"combined": {"keep_bodies": 0}}) as rig:
        await end_at_every_await(rig, by, late, send)


@BY
@LATE
async def test_pushes(late: bool, by: str) -> None:
    async with Rig("e_pd", ec="mooncake", sims={"combined": {"push_wait": 1.0}}) as rig:
        await end_at_every_await(rig, by, late, lambda c: c.send(chat(images=2)))
