"""What a stage receives: registrations, chunks, their failures, and what their senders are told."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.transfer.adapter.memory import Exchange, MemoryConnector
from tests.transfer.adapter.stages import (
    WAITING_FOR_CHUNK,
    Queues,
    adapter,
    codes,
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
from triptych.transfer.errors import WireError

OTHER = Mark(7)


def stage(worker: str = "ar", **options: object) -> tuple[ChunkTransferAdapter, MemoryConnector]:
    """A receiving stage, and the end that sends to it."""
    exchange = Exchange()
    return adapter(MemoryConnector(exchange, 1), worker_type=worker, **options), MemoryConnector(exchange, 0)


def give(sender: MemoryConnector, number: int, chunk: object, external_id: str = "ext", terminal: bool = False) -> None:
    sender.put("0", "1", f"{external_id}_0_{number}", chunk, Mark(1, terminal))


def told(to: MemoryConnector) -> list[tuple[object, ...]]:
    return [call[1:] for call in to.done if call[0] == "unwatch"]


def test_a_stream_is_watched_once_and_at_the_replica_that_the_request_names() -> None:
    to, sender = stage()
    made = request(payload_sender_info={"host": "h", "zmq_port": 5})
    to.load_async(made)
    to.load_async(made)
    give(sender, 0, received(1))
    poll(to)
    to.load_async(made)
    connector = to.connector
    assert isinstance(connector, MemoryConnector)
    assert [call for call in connector.done if call[0] == "watch"] == [
        ("watch", "ext_0", {"source_host": "h", "source_port": 5})
    ]
    assert len(to._pending_load_reqs) == 1


@pytest.mark.parametrize(
    "info",
    [{}, {"host": "h"}, {"host": "", "zmq_port": 1}, {"host": "h", "zmq_port": True}, {"host": 1, "zmq_port": 1}],
)
def test_a_replica_of_a_wrong_form_fails_the_request(info: dict[str, object]) -> None:
    to, _ = stage()
    made = request(payload_sender_info=info)
    to.load_async(made)
    (reason,) = to.collect_failed_receive_request_ids().values()
    assert reason.startswith("stage 0 -> 1: payload_sender_info must have a host and a zmq_port")
    to.cleanup_receiver(made.request_id)
    end(to)


def test_two_requests_cannot_share_a_stream() -> None:
    to, sender = stage()
    first, second = request(), request()
    to.load_async(first)
    to.load_async(second)
    assert to.collect_failed_receive_request_ids() == {
        second.request_id: f"stage 0 -> 1: the stream 'ext' already feeds the request {first.request_id}"
    }
    to.cleanup_receiver(second.request_id)
    give(sender, 0, received(1))
    poll(to)
    assert to._finished_load_reqs == {first.request_id}


def test_a_connector_that_cannot_watch_fails_the_request() -> None:
    to, _ = stage()

    def watch(*_: object) -> None:
        raise OSError("no such host")

    to.connector.watch = watch  # type: ignore[attr-defined]
    made = request()
    to.load_async(made)
    assert to.collect_failed_receive_request_ids() == {made.request_id: "stage 0 -> 1: no such host"}


def test_a_chunk_that_was_there_before_it_was_wanted_is_taken() -> None:
    to, sender = stage()
    made = request()
    to.load_async(made)
    give(sender, 0, received(1))
    give(sender, 1, received(2))
    poll(to)
    assert to.get_req_chunk[made.request_id] == 1
    poll(to)
    assert to.get_req_chunk[made.request_id] == 1, "one chunk at a time"
    to.load_async(made)
    poll(to)
    assert to.get_req_chunk[made.request_id] == 2


def test_a_doorbell_between_two_polls_of_an_entry_is_not_lost() -> None:
    to, sender = stage()
    made = request()
    to.load_async(made)
    entry = to._next_entry()
    assert entry is not None
    assert not to._poll_single_request(entry)
    give(sender, 0, received(1))  # before the receive thread has put the entry aside
    to._poll_later(entry)
    poll(to)
    assert to._finished_load_reqs == {made.request_id}


def test_codec_chunks_with_nothing_in_them_are_skipped_at_once() -> None:
    to, sender = stage("generation")
    made = request()
    to.load_async(made)
    for number in range(3):
        give(sender, number, {"meta": {"step": number}})
    give(sender, 3, codes(7, 8))
    poll(to)
    assert to.get_req_chunk[made.request_id] == 4
    assert made.prompt_token_ids == [7, 8]
    assert made.additional_information["meta"] == {"step": 2}  # type: ignore[attr-defined]


# Failures.


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (WireError("8 bytes are missing"), "chunk 0 is not usable: 8 bytes are missing"),
        ("text", "chunk 0 is not usable: a chunk must be a map, not str"),
        ({"meta": 3}, "chunk 0 is not usable: the chunk's meta must be a map, not int"),
        (
            {"meta": {"finished": "no"}},
            "chunk 0 is not usable: the chunk's meta.finished must be true or false, not str",
        ),
        (
            {"meta": {"finished": torch.zeros(2)}},
            "chunk 0 is not usable: the chunk's meta.finished has 2 elements and must have one",
        ),
        ({"ids": [1]}, "chunk 0 is not usable: the chunk's ids must be a map, not list"),
        (
            {"meta": {"next_stage_prompt_len": 10**12}},
            "chunk 0 is not usable: next_stage_prompt_len=1000000000000 is more than the context holds: "
            "max_model_len=16777216",
        ),
    ],
)
def test_a_chunk_that_is_wrong_fails_its_request_at_once_and_stops_its_sender(chunk: object, reason: str) -> None:
    to, sender = stage()
    made = request()
    to.load_async(made)
    give(sender, 0, chunk)
    poll(to)
    assert to.collect_failed_receive_request_ids() == {made.request_id: f"stage 0 -> 1: {reason}"}
    assert not to._finished_load_reqs
    connector = to.connector
    assert isinstance(connector, MemoryConnector)
    assert told(connector) == [("ext_0", f"stage 0 -> 1: {reason}")]
    to.load_async(made)
    assert not to._pending_load_reqs, "it would fail for ever"
    to.cleanup_receiver(made.request_id)
    end(to)


@pytest.mark.parametrize(
    ("audio", "reason"),
    [
        ("abc", "codes.audio must be a tensor or a list of token ids, not str"),
        ([1, "b"], "codes.audio must be a tensor or a list of token ids"),
        (torch.zeros(3), "codes.audio must be token ids, not torch.float32"),
    ],
)
def test_codes_of_a_wrong_form_fail_their_request(audio: object, reason: str) -> None:
    to, sender = stage("generation")
    made = request(additional_information={"old": 1})
    to.load_async(made)
    give(sender, 0, {"codes": {"audio": audio}})
    poll(to)
    assert to.collect_failed_receive_request_ids() == {
        made.request_id: f"stage 0 -> 1: chunk 0 is not usable: {reason}"
    }
    assert made.additional_information == {"old": 1}  # type: ignore[attr-defined]


def test_a_sender_that_fails_fails_the_receiver_after_what_it_had_sent() -> None:
    to, sender = stage()
    made = request()
    to.load_async(made)
    give(sender, 0, received(1))
    sender.fail("0", "1", "ext_0", "stage 0's process has ended")
    poll(to)
    assert to._finished_load_reqs == {made.request_id}
    assert not to.collect_failed_receive_request_ids()
    to.load_async(made)
    poll(to)
    assert to.collect_failed_receive_request_ids() == {made.request_id: "stage 0 -> 1: stage 0's process has ended"}


def test_a_stream_that_ends_unfinished_is_a_failure() -> None:
    to, sender = stage()
    made = request()
    to.load_async(made)
    give(sender, 0, received(1))
    give(sender, 1, received(2), terminal=True)
    for _ in range(2):
        poll(to)
        to.load_async(made)
    poll(to)
    assert to.collect_failed_receive_request_ids() == {
        made.request_id: "stage 0 -> 1: the stream ended after 2 chunks without saying that it was finished"
    }


def test_a_condition_that_breaks_the_contract_fails_when_it_is_published() -> None:
    to, sender = stage(max_model_len=64)
    made = request(resumable=True)
    queues = Queues(to, [made])
    queues.tick()
    give(sender, 0, {"meta": {"next_stage_generation_tokens": -1}, "ids": {"tokens": [1]}})
    poll(to)
    queues.tick()
    (reason,) = to.collect_failed_receive_request_ids().values()
    assert "next_stage_generation_tokens must be a positive integer" in reason
    assert not to.requests_with_ready_chunks
    queues.finish(made, RequestStatus.FINISHED_ERROR)
    connector = to.connector
    assert isinstance(connector, MemoryConnector)
    assert "next_stage_generation_tokens" in str(told(connector)[0][1])
    end(to)


# The end.


def test_a_chunk_that_comes_after_the_request_has_gone_changes_nothing() -> None:
    to, sender = stage("generation")
    made = request()
    to.load_async(made)
    entry = to._next_entry()
    assert entry is not None
    give(sender, 0, codes(1))
    get = to.connector.get

    def slow(*place: object) -> object:
        got = get(*place)  # type: ignore[arg-type]
        to.finish_requests(made.request_id, RequestStatus.FINISHED_ABORTED, {made.request_id: made})
        return got

    to.connector.get = slow  # type: ignore[method-assign, assignment]
    assert to._poll_single_request(entry)
    assert made.prompt_token_ids == [1, 2, 3]
    assert made.additional_information is None  # type: ignore[attr-defined]
    end(to)


def test_a_failure_that_comes_after_the_request_has_gone_concerns_nobody() -> None:
    to, _ = stage()
    made = request()
    to.load_async(made)
    entry = to._next_entry()
    assert entry is not None

    def late(*_: object) -> None:
        to.cleanup_receiver(made.request_id)
        raise OSError("gone")

    to.connector.get = late  # type: ignore[method-assign, assignment]
    assert to._poll_single_request(entry)
    assert not to.collect_failed_receive_request_ids()
    end(to)


def test_a_consumer_that_ends_early_tells_its_sender_why() -> None:
    from_, to, _ = pair()
    made, sent = request(request_id="to"), request()
    to.load_async(made)
    send(from_, sent, tokens(1))
    drain(from_)
    poll(to)
    to.finish_requests("to", RequestStatus.FINISHED_ABORTED, {"to": made})
    drain(from_)
    assert from_.collect_stopped_request_ids() == {
        sent.request_id: "stage 0 -> 1: stage 1 ended the request: finished_aborted"
    }
    end(to)


def test_a_name_can_be_received_again_at_once() -> None:
    from_, to, _ = pair()
    for number in range(3):
        made, sent = request(), request()
        to.load_async(made)
        send(from_, sent, tokens(number))
        drain(from_)
        poll(to)
        assert to._pending_ar_prompt_updates[made.request_id].payload["ids"] == {"tokens": [number]}
        to.finish_requests(made.request_id, RequestStatus.FINISHED_ABORTED, {made.request_id: made})
        from_.finish_requests(sent.request_id, RequestStatus.FINISHED_ABORTED, {sent.request_id: sent})
        drain(from_)
    end(to)
    end(from_)


# Deadlines.


def test_the_alarm_is_the_nearest_deadline_and_rings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    to, _ = stage(extra={"chunk_timeout_s": 10})
    now = 100.0
    monkeypatch.setattr("triptych.transfer.adapter.receiving.time.monotonic", lambda: now)
    rung: list[float] = []
    to.wake = lambda: rung.append(now)
    first, second = request("a"), request("b")
    queues = Queues(to, [first])
    queues.tick()
    now = 104.0
    queues.add(second)
    queues.tick()
    assert to._load_wait() == pytest.approx(6.0, abs=0.01)
    to._sound_alarm()
    assert not rung
    assert not to.has_news()
    now = 110.5
    for _ in range(3):
        to._sound_alarm()
    assert rung == [110.5]
    assert to.has_news()
    assert to._load_wait() is None, "it sleeps until the scheduler has looked"
    assert to.collect_timed_out_request_ids() == {first.request_id}
    assert to._deadlines_moved
    to._sound_alarm()
    assert to._load_wait() == pytest.approx(3.5, abs=0.01)
    now = 115.0
    to._sound_alarm()
    queues.finish(second)
    assert to._deadlines_moved
    assert not to.has_news()
    assert not to.collect_timed_out_request_ids()


def test_the_sender_of_a_request_that_waited_too_long_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    to, _ = stage(extra={"chunk_timeout_s": 10})
    made = request()
    queues = Queues(to, [made])
    queues.tick()
    assert made.status == WAITING_FOR_CHUNK
    to._waiting_since[made.request_id] -= 11
    assert to.collect_timed_out_request_ids() == {made.request_id}
    queues.finish(made, RequestStatus.FINISHED_ERROR)
    connector = to.connector
    assert isinstance(connector, MemoryConnector)
    assert told(connector) == [("ext_0", "stage 0 -> 1: no chunk came for 10 s")]


def test_no_deadline_means_none() -> None:
    to, _ = stage(extra={"chunk_timeout_s": 0})
    made = request()
    Queues(to, [made]).tick()
    to._waiting_since[made.request_id] -= 1e6
    assert to.next_deadline() is None
    assert to._load_wait() is None
    assert not to.has_news()
    assert not to.collect_timed_out_request_ids()
