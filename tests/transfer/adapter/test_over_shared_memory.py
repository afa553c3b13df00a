"""Two adapters over the real connector, with all of their threads."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from vllm.v1.request import RequestStatus

from tests.transfer.adapter.stages import Bell, Queues, adapter, end, forward, request, send, tokens
from triptych.transfer.adapter.adapter import ChunkTransferAdapter
from triptych.transfer.connectors.shm import SharedMemoryConnector

Ends = tuple[ChunkTransferAdapter, ChunkTransferAdapter, Bell]


@pytest.fixture
def ends() -> Iterator[Ends]:
    deployment = f"adapter-{uuid.uuid4().hex}"
    to = adapter(SharedMemoryConnector({"stage_id": 1, "deployment": deployment}), max_num_seqs=64)
    from_ = adapter(SharedMemoryConnector({"stage_id": 0, "deployment": deployment}), processor=forward)
    to.wake = bell = Bell()
    for stage in (to, from_):
        stage.start()
    yield from_, to, bell
    for stage in (from_, to):
        stage.close()


def test_streams_of_any_name_arrive_complete_and_leave_nothing(ends: Ends) -> None:
    from_, to, bell = ends
    names = [f"e/{n}_{n} ü" + "x" * 50 * n for n in range(16)]
    sent = [request(name) for name in names]
    made = [request(name) for name in names]
    queues = Queues(to, made)
    queues.tick()
    for number in range(12):
        for n, one in enumerate(sent):
            if number == 11:
                one.status = RequestStatus.FINISHED_STOPPED
            send(from_, one, tokens(1000 * n + number))
    while not all(one.request_id in to.upstream_exhausted_requests for one in made) or to.has_news():
        bell.wait_until(to.has_news)
        queues.tick()
        queues.run()
        queues.tick()
    for n, one in enumerate(made):
        assert one.prompt_token_ids == [1, 2, 3, *range(1000 * n, 1000 * n + 12)]
        queues.finish(one)
    end(to)
    from_.close()  # its last put may be under way still
    end(from_)
    assert not to.connector.statistics().watching  # type: ignore[attr-defined]


def test_a_name_is_free_again_as_soon_as_it_was_aborted(ends: Ends) -> None:
    from_, to, bell = ends
    for number in range(60):
        sent, made = request("again"), request("again")
        queues = Queues(to, [made])
        queues.tick()
        send(from_, sent, tokens(number))
        bell.wait_until(to.has_news)
        queues.tick()
        assert not to.collect_failed_receive_request_ids()
        assert made.prompt_token_ids == [1, 2, 3, number]
        from_.finish_requests(sent.request_id, RequestStatus.FINISHED_ABORTED, {sent.request_id: sent})
        queues.finish(made)
    assert not from_.collect_failed_send_request_ids()
    end(to)
    from_.close()  # its last put may be under way still
    end(from_)


def test_an_abort_before_the_first_chunk_reaches_who_waits(ends: Ends) -> None:
    from_, to, bell = ends
    made, sent = request("early"), request("early")
    Queues(to, [made]).tick()
    from_.finish_requests(sent.request_id, RequestStatus.FINISHED_ABORTED, {sent.request_id: sent})
    bell.wait_until(lambda: bool(to._receive_failures))
    (reason,) = to.collect_failed_receive_request_ids().values()
    assert reason.endswith("stage 0 -> 1: the request ended before its stream did")
