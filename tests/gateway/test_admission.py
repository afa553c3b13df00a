"""Admission: limits hold whatever the order of events, turns are kept, and nothing is left of those who leave."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.gateway.admission import Admission, Overloaded, Ticket, TooLarge, TooSlow
from triptych.gateway.settings import Limits


def gate(requests: int = 2, nbytes: int = 100, queue: int = 3, deadline: float = 60.0) -> Admission:
    limits = Limits(requests=requests, bytes=nbytes, queue=queue)
    return Admission(limits, deadline)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def state(admission: Admission) -> tuple[int, int, int]:
    return admission.requests, admission.nbytes, admission.queued


async def test_room_is_given_without_waiting() -> None:
    admission = gate()
    coroutine = admission.admit(10)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)  # ends at the first step: nothing was awaited
    ticket: Ticket = done.value.value
    assert state(admission) == (1, 10, 0)
    ticket.release()
    assert state(admission) == (0, 0, 0)


async def test_release_counts_once_however_often() -> None:
    admission = gate()
    with await admission.admit(10) as ticket:
        await admission.admit(5)
        ticket.release()
        ticket.release()
        assert state(admission) == (1, 5, 0)
    assert state(admission) == (1, 5, 0)


@pytest.mark.parametrize(("requests", "nbytes"), [(1, 1000), (10, 10)])
async def test_beyond_either_limit_requests_wait(requests: int, nbytes: int) -> None:
    admission = gate(requests, nbytes)
    ticket = await admission.admit(10)
    waiting = asyncio.create_task(admission.admit(10))
    await settle()
    assert not waiting.done()
    assert state(admission) == (1, 10, 1)
    ticket.release()
    (await waiting).release()
    assert state(admission) == (0, 0, 0)


async def test_full_queue_refuses_at_once() -> None:
    admission = gate(requests=1, queue=2)
    await admission.admit(1)
    waiting = [asyncio.create_task(admission.admit(1)) for _ in range(2)]
    await settle()
    with pytest.raises(Overloaded) as refused:
        await admission.admit(1)
    assert (refused.value.reason, refused.value.retry_after) == ("queue_full", 1)
    assert state(admission) == (1, 1, 2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_without_a_queue_nobody_waits() -> None:
    admission = gate(requests=1, queue=0)
    with await admission.admit(1), pytest.raises(Overloaded, match="queue is full"):
        await admission.admit(1)
    await admission.admit(1)


async def test_queue_deadline_refuses_and_leaves_nothing() -> None:
    admission = gate(requests=1, deadline=0.01)
    ticket = await admission.admit(1)
    with pytest.raises(Overloaded) as refused:
        await admission.admit(1)
    assert refused.value.reason == "queue_timeout"
    assert "0.01 s" in refused.value.message
    assert state(admission) == (1, 1, 0)
    ticket.release()
    assert state(admission) == (0, 0, 0)


async def test_body_beyond_the_whole_budget_is_refused_not_queued() -> None:
    admission = gate(nbytes=100)
    await admission.admit(100)
    for nbytes in (101, 10**12):
        with pytest.raises(TooLarge) as refused:
            await admission.admit(nbytes)
        assert str(nbytes) in refused.value.message
        assert "limits.bytes" in refused.value.message
    assert state(admission) == (1, 100, 0)


async def test_large_request_at_the_head_is_not_starved_by_small_ones() -> None:
    admission = gate(requests=10, nbytes=100, queue=10)
    small = await admission.admit(10)
    large = asyncio.create_task(admission.admit(100))
    await settle()
    later = [asyncio.create_task(admission.admit(1)) for _ in range(5)]
    await settle()
    assert not any(t.done() for t in later), "there is room for them, but it is not their turn"
    small.release()
    ticket = await large
    await settle()
    assert not any(t.done() for t in later)
    ticket.release()
    await asyncio.gather(*later)
    assert state(admission) == (5, 5, 0)


async def test_large_one_that_leaves_the_head_lets_those_behind_in() -> None:
    admission = gate(requests=10, nbytes=100, queue=10)
    await admission.admit(10)
    large = asyncio.create_task(admission.admit(100))
    await settle()
    later = asyncio.create_task(admission.admit(1))
    await settle()
    large.cancel()
    await later
    assert state(admission) == (2, 11, 0)


async def test_large_one_whose_deadline_passes_lets_those_behind_in() -> None:
    admission = gate(requests=10, nbytes=100, queue=10, deadline=0.02)
    await admission.admit(10)
    large = asyncio.create_task(admission.admit(100))
    await settle()
    admission.queue_deadline = 60.0
    later = asyncio.create_task(admission.admit(1))
    with pytest.raises(Overloaded):
        await large
    await later
    assert state(admission) == (2, 11, 0)


@pytest.mark.parametrize("when", ["before it runs", "while it waits", "after it was let in", "after its deadline"])
async def test_cancelled_admission_leaves_nothing_behind(when: str) -> None:
    admission = gate(requests=1)
    ticket = await admission.admit(1)
    task = asyncio.create_task(admission.admit(7))
    if when != "before it runs":
        await settle()
        assert admission.queued == 1
    if when == "after it was let in":
        ticket.release()
        assert state(admission) == (1, 7, 0)
    if when == "after its deadline":
        for waiter in list(admission._queue):
            admission._expire(waiter)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ticket.release()
    assert state(admission) == (0, 0, 0)


async def test_cancelled_one_passes_its_turn_on() -> None:
    admission = gate(requests=1)
    ticket = await admission.admit(1)
    first, second = (asyncio.create_task(admission.admit(1)) for _ in range(2))
    await settle()
    ticket.release()
    first.cancel()
    await second
    assert first.cancelled()
    assert state(admission) == (1, 1, 0)


async def test_cancelled_and_released_in_one_turn_admits_the_next() -> None:
    admission = gate(requests=1)
    ticket = await admission.admit(1)
    first, second = (asyncio.create_task(admission.admit(1)) for _ in range(2))
    await settle()
    first.cancel()
    ticket.release()
    await second
    assert state(admission) == (1, 1, 0)


async def test_upload_of_unknown_length_grows_within_the_budget() -> None:
    admission = gate(nbytes=100)
    ticket = await admission.admit(0)
    ticket.grow(60)
    other = await admission.admit(30)
    with pytest.raises(Overloaded) as refused:
        ticket.grow(11)
    assert refused.value.reason == "bytes"
    ticket.grow(10)
    assert state(admission) == (2, 100, 0)
    with pytest.raises(TooLarge):
        ticket.grow(31)
    other.release()
    ticket.release()
    assert state(admission) == (0, 0, 0)


async def test_bytes_no_longer_held_let_others_in() -> None:
    admission = gate(nbytes=100)
    ticket = await admission.admit(80)
    waiting = asyncio.create_task(admission.admit(50))
    await settle()
    ticket.shrink(29)
    await settle()
    assert not waiting.done()
    ticket.shrink(1)
    await waiting
    ticket.shrink(10**9)
    assert (ticket.nbytes, admission.nbytes) == (0, 50)
    ticket.release()
    ticket.shrink(1)
    assert state(admission) == (1, 50, 0)


async def test_ticket_that_was_released_does_not_grow() -> None:
    admission = gate()
    ticket = await admission.admit(1)
    ticket.release()
    ticket.grow(5)
    assert state(admission) == (0, 0, 0)


async def test_no_timer_is_left_of_those_let_in(event_loop_timers: list[asyncio.TimerHandle]) -> None:
    admission = gate(requests=1)
    ticket = await admission.admit(1)
    task = asyncio.create_task(admission.admit(1))
    await settle()
    assert len(event_loop_timers) == 1
    ticket.release()
    await task
    assert event_loop_timers[0].cancelled()


@pytest.fixture
async def event_loop_timers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    real = loop.call_later

    def call_later(*args: object, **more: object) -> asyncio.TimerHandle:
        timers.append(real(*args, **more))  # type: ignore[arg-type]
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", call_later)
    return timers


def test_repr_tells_what_is_in_flight() -> None:
    admission = gate()
    admission.try_admit(10)
    assert repr(admission) == "<Admission: 1 of 2 requests, 10 of 100 bytes, 0 of 3 queued>"


class AdmissionMachine(RuleBasedStateMachine):
    """Against a model: a list of those inside and a strict queue of those outside."""

    REQUESTS, BYTES, QUEUE = 3, 100, 4

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.admission = gate(self.REQUESTS, self.BYTES, self.QUEUE)
        self.inside: dict[asyncio.Task[Ticket], int] = {}
        self.outside: deque[tuple[asyncio.Task[Ticket], int]] = deque()

    def fits(self, nbytes: int) -> bool:
        return len(self.inside) < self.REQUESTS and sum(self.inside.values()) + nbytes <= self.BYTES

    def move_up(self) -> None:
        while self.outside and self.fits(self.outside[0][1]):
            task, nbytes = self.outside.popleft()
            self.inside[task] = nbytes

    def turn(self) -> None:
        self.loop.run_until_complete(settle())
        assert all(t.done() for t in self.inside)
        assert not any(t.done() for t, _ in self.outside)
        for task, nbytes in self.inside.items():
            assert task.result().nbytes == nbytes

    @rule(nbytes=st.integers(0, 130))
    def arrive(self, nbytes: int) -> None:
        task = self.loop.create_task(self.admission.admit(nbytes))
        self.loop.run_until_complete(settle())
        if not self.outside and self.fits(nbytes):
            self.inside[task] = nbytes
        elif nbytes > self.BYTES:
            assert isinstance(task.exception(), TooLarge)
        elif len(self.outside) == self.QUEUE:
            assert isinstance(task.exception(), Overloaded)
        else:
            self.outside.append((task, nbytes))
        self.turn()

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), turn=st.booleans())
    def leave(self, data: st.DataObject, turn: bool) -> None:
        self.turn()
        task = data.draw(st.sampled_from(list(self.inside)))
        del self.inside[task]
        task.result().release()
        self.move_up()
        if turn:
            self.turn()

    @precondition(lambda self: self.outside)
    @rule(data=st.data(), releases=st.booleans())
    def give_up(self, data: st.DataObject, releases: bool) -> None:
        """Somebody leaves the queue, perhaps in the very turn in which a place comes free."""
        self.turn()
        index = data.draw(st.integers(0, len(self.outside) - 1))
        gone = self.outside[index]
        gone[0].cancel()
        if releases and self.inside:
            task = next(iter(self.inside))
            del self.inside[task]
            task.result().release()
        self.outside.remove(gone)
        self.move_up()
        self.turn()

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), nbytes=st.integers(0, 60))
    def grow(self, data: st.DataObject, nbytes: int) -> None:
        self.turn()
        task = data.draw(st.sampled_from(list(self.inside)))
        if sum(self.inside.values()) + nbytes <= self.BYTES:
            task.result().grow(nbytes)
            self.inside[task] += nbytes
        else:
            with pytest.raises((Overloaded, TooLarge)):
                task.result().grow(nbytes)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        self.turn()
        task = data.draw(st.sampled_from(list(self.inside)))
        nbytes = data.draw(st.integers(0, self.inside[task]))
        task.result().shrink(nbytes)
        self.inside[task] -= nbytes
        self.move_up()
        self.turn()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert state(self.admission) == (len(self.inside), sum(self.inside.values()), len(self.outside))
        assert self.admission.requests <= self.REQUESTS
        assert self.admission.nbytes <= self.BYTES

    def teardown(self) -> None:
        self.turn()
        while self.inside:
            task = next(iter(self.inside))
            del self.inside[task]
            task.result().release()
            self.move_up()
            self.turn()
        assert state(self.admission) == (0, 0, 0)
        self.loop.close()


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class Uploading:
    """A body on its way, as `Admission.upload` sees it."""

    def __init__(self) -> None:
        self.came: int | None = 0
        self.ended: TooSlow | None = None
        self.over = asyncio.Event()

    def received(self) -> int | None:
        return self.came

    def give_up(self, error: TooSlow) -> None:
        self.ended = error
        self.over.set()


def slow_gate(**limits: int) -> Admission:
    """A gate at which an upload has had its time at once."""
    return Admission(Limits(bytes=100, upload_rate=1000, **limits), 5.0, upload_time=0.0)


async def test_a_slow_upload_is_ended_when_another_request_has_to_wait() -> None:
    gate, upload = slow_gate(), Uploading()
    held = await gate.admit(100)
    with gate.upload(upload.received, upload.give_up):
        waiting = asyncio.create_task(gate.admit(50))
        await asyncio.sleep(0)
        assert isinstance(upload.ended, TooSlow)
        assert upload.ended.status == 408
        held.release()
        (await waiting).release()


async def test_an_upload_that_becomes_slow_while_others_wait_is_ended_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.admission._PATROL", 0.0)
    gate, upload = slow_gate(), Uploading()
    upload.came = 1 << 30
    held = await gate.admit(100)
    with gate.upload(upload.received, upload.give_up):
        waiting = asyncio.create_task(gate.admit(50))
        await asyncio.sleep(0)
        assert upload.ended is None
        upload.came = 0
        async with asyncio.timeout(5):
            await upload.over.wait()
        held.release()
        (await waiting).release()


async def test_a_slow_upload_goes_on_while_nobody_waits() -> None:
    gate, upload = slow_gate(), Uploading()
    with gate.upload(upload.received, upload.give_up):
        (await gate.admit(50)).release()
    assert upload.ended is None


@pytest.mark.parametrize(("came", "upload_time"), [(1 << 30, 0.0), (None, 0.0), (0, 60.0)])
async def test_an_upload_is_left_alone_that_is_fast_or_waits_for_an_engine_or_is_young(
    came: int | None, upload_time: float
) -> None:
    gate, upload = Admission(Limits(bytes=100, queue=0), 5.0, upload_time=upload_time), Uploading()
    upload.came = came
    with await gate.admit(100), gate.upload(upload.received, upload.give_up), pytest.raises(Overloaded):
        await gate.admit(50)
    assert upload.ended is None


async def test_no_upload_is_looked_at_after_its_end() -> None:
    gate, upload = slow_gate(queue=0), Uploading()
    with await gate.admit(100):
        with gate.upload(upload.received, upload.give_up):
            pass
        with pytest.raises(Overloaded):
            await gate.admit(50)
    assert upload.ended is None
