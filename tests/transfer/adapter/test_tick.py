"""The scheduler's side: what is parked, what comes back, in which order, and what a tick costs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.transfer.adapter.memory import Exchange, MemoryConnector
from tests.transfer.adapter.stages import (
    WAITING_FOR_CHUNK,
    Queues,
    adapter,
    drain,
    end,
    pair,
    poll,
    received,
    request,
    send,
    tokens,
)
from triptych.transfer.adapter.adapter import ChunkTransferAdapter
from triptych.transfer.connectors.base import Mark

ABORTED = RequestStatus.FINISHED_ABORTED


class Upstream:
    """The stage before: gives streams their next chunk."""

    def __init__(self, exchange: Exchange) -> None:
        self.connector = MemoryConnector(exchange, 0)
        self.given: dict[str, int] = {}

    def give(self, to: Request, *values: int, finished: bool = False, segment_finished: bool = False) -> None:
        name = to.external_req_id  # type: ignore[attr-defined]
        number = self.given.get(name, 0)
        self.given[name] = number + 1
        chunk = received(*values, finished=finished, segment_finished=segment_finished)
        self.connector.put("0", "1", f"{name}_0_{number}", chunk, Mark(1, finished))


def stage(**options: object) -> tuple[ChunkTransferAdapter, Upstream]:
    exchange = Exchange(credit=100)
    return adapter(MemoryConnector(exchange, 1), **options), Upstream(exchange)


def make(count: int) -> list[Request]:
    return [request(f"e{n}", f"r{n}") for n in range(count)]


def ids(requests: object) -> list[str]:
    return [r.request_id for r in requests]  # type: ignore[attr-defined]


def test_a_request_is_parked_until_its_chunk_is_there_and_grows_by_it() -> None:
    to, upstream = stage()
    (made,) = make(1)
    queues = Queues(to, [made])
    queues.tick()
    assert (made.status, len(queues.waiting), to.num_parked()) == (WAITING_FOR_CHUNK, 0, 1)
    assert to.is_parked("r0")
    assert not to.has_news()
    upstream.give(made, 10, 11)
    poll(to)
    assert to.has_news()
    assert made.additional_information is None  # type: ignore[attr-defined]
    queues.tick()
    assert not to.has_news()
    assert ids(queues.waiting) == ["r0"]
    assert made.status == RequestStatus.WAITING
    assert made.prompt_token_ids == [1, 2, 3, 10, 11]
    assert ids(queues.run()) == ["r0"]
    queues.tick()
    assert (made.status, queues.running, to.num_parked()) == (WAITING_FOR_CHUNK, [], 1)
    upstream.give(made, 12, finished=True)
    poll(to)
    queues.tick()
    assert ids(queues.running) == ["r0"]
    assert made.status == RequestStatus.RUNNING
    queues.run()
    for _ in range(3):  # it decodes on, with nothing to wait for
        queues.tick()
        assert ids(queues.run()) == ["r0"]
    queues.finish(made)
    end(to)


def test_a_segment_that_has_ended_lets_its_request_go_on_until_the_next_is_begun() -> None:
    to, upstream = stage()
    (made,) = make(1)
    queues = Queues(to, [made])
    queues.tick()
    upstream.give(made, 1, segment_finished=True)
    poll(to)
    queues.tick()
    queues.run()
    queues.tick()
    assert ids(queues.running) == ["r0"]
    to.segment_finished_requests.discard("r0")
    queues.tick()
    assert to.is_parked("r0")


def test_a_request_of_no_stream_passes() -> None:
    to, _ = stage(active_stream_window=1)
    plain = request(None)
    queues = Queues(to, [plain])
    queues.tick()
    assert list(queues.waiting) == [plain]
    assert plain.status == RequestStatus.WAITING
    assert not to._active_streams


@pytest.mark.parametrize(
    "status", [RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.WAITING_FOR_REMOTE_KVS, ABORTED]
)
def test_a_request_that_waits_for_something_else_is_left_to_it(status: RequestStatus) -> None:
    to, _ = stage()
    (made,) = make(1)
    made.status = status
    queues = Queues(to, [made])
    queues.tick()
    assert list(queues.waiting) == [made]
    assert made.status == status


def test_a_preempted_request_comes_back_as_one() -> None:
    to, upstream = stage()
    (made,) = make(1)
    made.status = RequestStatus.PREEMPTED
    queues = Queues(to, [made])
    queues.tick()
    upstream.give(made, 1)
    poll(to)
    queues.tick()
    assert made.status == RequestStatus.PREEMPTED


def test_an_abort_of_a_parked_request_gives_it_its_status_back_first() -> None:
    to, _ = stage()
    (made,) = make(1)
    made.status = RequestStatus.RUNNING
    queues = Queues(to)
    queues.running, queues.requests = [made], {"r0": made}
    queues.tick()
    assert to.finish_requests("r0", ABORTED, queues.requests) == ["r0"]
    assert made.status == RequestStatus.RUNNING
    end(to)


def test_none_finishes_all() -> None:
    to, _ = stage()
    queues = Queues(to, make(3))
    queues.tick()
    assert to.finish_requests(None, ABORTED, queues.requests) == ["r0", "r1", "r2"]
    end(to)


def test_a_request_that_the_scheduler_dropped_does_not_come_back() -> None:
    to, upstream = stage()
    (made,) = make(1)
    queues = Queues(to, [made])
    queues.tick()
    upstream.give(made, 1)
    poll(to)
    queues.requests.clear()
    queues.tick()
    assert not queues.waiting
    end(to)


def test_more_running_requests_than_there_is_room_for_are_preempted() -> None:
    to, upstream = stage(max_num_seqs=1)
    made = make(2)
    queues = Queues(to)
    for one in made:
        one.status = RequestStatus.RUNNING
        queues.requests[one.request_id] = one
    queues.running = list(made)
    queues.tick()
    for one in made:
        upstream.give(one, 1)
    poll(to)
    queues.tick()
    assert len(queues.running) == 1
    (out,) = queues.waiting
    assert out.status == RequestStatus.PREEMPTED


# The window.


def test_places_in_the_window_go_to_those_that_waited_longest() -> None:
    to, _ = stage(active_stream_window=2)
    made = make(5)
    queues = Queues(to, made[:4])
    queues.tick()
    assert list(to._active_streams) == ["r0", "r1"]
    assert [one.status == WAITING_FOR_CHUNK for one in made[:4]] == [True, True, False, False]
    assert ids(to.waiting_for_chunk_waiting_requests) == ["r0", "r1", "r2", "r3"]
    queues.finish(made[0])
    assert to.has_news()
    queues.add(made[4])
    queues.tick()
    assert list(to._active_streams) == ["r1", "r2"]
    queues.finish(made[1])
    queues.finish(made[2])
    queues.tick()
    assert list(to._active_streams) == ["r3", "r4"]
    assert not to.has_news()


def test_a_running_request_outside_the_window_is_held_and_comes_back() -> None:
    to, upstream = stage(active_stream_window=1)
    made = make(2)
    queues = Queues(to)
    for one in made:
        one.status = RequestStatus.RUNNING
        queues.requests[one.request_id] = one
    queues.running = list(made)
    queues.tick()
    assert ids(to._held_non_active) == ["r1"]
    assert made[1].status == RequestStatus.RUNNING
    queues.finish(made[0])
    queues.tick()
    assert made[1].status == WAITING_FOR_CHUNK
    upstream.give(made[1], 1)
    poll(to)
    queues.tick()
    assert ids(queues.running) == ["r1"]


def test_a_place_that_the_save_thread_frees_wakes_the_scheduler() -> None:
    to, _ = stage(active_stream_window=1)
    made = make(2)
    queues = Queues(to, made)
    queues.tick()
    rung: list[int] = []
    to.wake = lambda: rung.append(1)
    to.cleanup("r0", "e0")
    assert rung == [1]
    assert to.has_news()


# A consumer that is behind.


def test_a_request_whose_consumer_is_far_behind_makes_no_more_until_it_has_caught_up() -> None:
    from_, to, _ = pair(credit=2, extra={"hold_backlog": 4})
    slow, quick = request("slow"), request("quick")
    queues = Queues(from_)
    rung: list[int] = []
    from_.wake = lambda: rung.append(1)
    for one in (slow, quick):
        one.status = RequestStatus.RUNNING
        queues.requests[one.request_id] = one
    queues.running = [slow, quick]
    for number in range(5):
        send(from_, slow, tokens(number))
    drain(from_)
    queues.tick()
    assert queues.running == [slow, quick]
    send(from_, slow, tokens(5))
    drain(from_)
    queues.tick()
    assert queues.running == [quick]
    assert from_.is_parked(slow.request_id)
    assert not from_.has_news()
    for number in range(2):
        assert to.connector.get("0", "1", f"slow_0_{number}") is not None
        drain(from_)
        assert bool(rung) is (number == 1), "it goes on when half of it is gone"
    assert from_.has_news()
    queues.tick()
    assert queues.running == [quick, slow]
    assert not from_.has_news()


@pytest.mark.parametrize("ending", ["abort", "stop"])
def test_a_held_request_can_end(ending: str) -> None:
    from_, to, _ = pair(credit=1, extra={"hold_backlog": 1})
    made = request()
    queues = Queues(from_)
    made.status = RequestStatus.RUNNING
    queues.requests, queues.running = {made.request_id: made}, [made]
    to.load_async(request(request_id="waits"))
    for number in range(3):
        send(from_, made, tokens(number))
    drain(from_)
    queues.tick()
    assert from_.is_parked(made.request_id)
    if ending == "stop":
        to.cleanup_receiver("waits", "enough")
        drain(from_)
        assert from_.has_news()
        queues.tick()
        assert queues.running == [made]
        assert list(from_.collect_stopped_request_ids()) == [made.request_id]
    queues.finish(made)
    drain(from_)
    end(from_)


# What a tick costs.


def calls(of: ChunkTransferAdapter, queues: Queues) -> int:
    """How many functions, Python's own included, one tick calls."""
    count = 0

    def counting(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        of.tick(queues.waiting, queues.running, queues.requests)
        of.has_news()
    finally:
        sys.setprofile(None)
    return count


def test_a_tick_costs_what_has_changed_however_many_are_parked() -> None:
    cost = {}
    for parked in (10, 1000):
        to, upstream = stage(max_num_seqs=4096)
        made = make(parked)
        queues = Queues(to, made)
        queues.tick()
        poll(to)
        idle = calls(to, queues)
        upstream.give(made[parked // 2], 1)
        poll(to)
        one = calls(to, queues)
        assert ids(queues.waiting) == [f"r{parked // 2}"]
        assert to.num_parked() == parked - 1
        cost[parked] = idle, one
    assert cost[10] == cost[1000]
    assert cost[1000][0] < 60


def test_a_thousand_deadlines_cost_what_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    to, _ = stage(max_num_seqs=4096)
    queues = Queues(to, make(1000))
    queues.tick()
    looked = 0
    get = type(to._waiting_since).__getitem__

    def counting(self: object, key: str) -> float:
        nonlocal looked
        looked += 1
        return get(self, key)  # type: ignore[arg-type]

    monkeypatch.setattr(type(to._waiting_since), "__getitem__", counting)
    assert not to.collect_timed_out_request_ids(600)
    assert looked <= 1


# The other way to tick: everything back after each step.


def test_processing_and_restoring_keeps_every_request_and_its_order() -> None:
    to, _ = stage(active_stream_window=2)
    made = make(4)
    queues = Queues(to, made)
    for _ in range(3):
        to.process_pending_chunks(queues.waiting, queues.running, scheduler_requests=queues.requests)
        assert to.num_parked() == 4
        to.restore_queues(queues.waiting, queues.running, queues.requests)
        assert ids(queues.waiting) == ["r0", "r1", "r2", "r3"]
        assert to.num_parked() == 0
    del queues.requests["r1"]
    to.process_pending_chunks(queues.waiting, queues.running, scheduler_requests=queues.requests)
    del queues.requests["r2"]
    to.restore_queues(queues.waiting, queues.running, queues.requests)
    assert "r2" not in ids(queues.waiting)


def test_a_chunk_goes_with_the_step_that_schedules_it_and_with_no_other() -> None:
    to, _ = stage()
    known, plain = request(additional_information={"a": 1}), request()
    to.requests_with_ready_chunks = {known.request_id, "other"}  # type: ignore[assignment]
    cached = SimpleNamespace(req_ids=[known.request_id, plain.request_id, "gone"])
    output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
    to.postprocess_scheduler_output(output, {r.request_id: r for r in (known, plain)})
    assert cached.additional_information == {known.request_id: {"a": 1}, plain.request_id: None, "gone": None}
    assert known.additional_information is None  # type: ignore[attr-defined]
    assert to.requests_with_ready_chunks == {"other"}
