"""What a stage sends, step by step, and what becomes of it where something fails or ends."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.transfer.adapter.memory import MemoryConnector
from tests.transfer.adapter.stages import adapter, drain, end, forward, pair, poll, request, send, tokens
from triptych.transfer.adapter.adapter import ChunkTransferAdapter
from triptych.transfer.adapter.loops import Told
from triptych.transfer.connectors.base import Connector, Mark
from triptych.transfer.payload import Codes, Meta, StagePayload

ABORTED = RequestStatus.FINISHED_ABORTED
STOPPED = RequestStatus.FINISHED_STOPPED


def puts(stage: ChunkTransferAdapter) -> list[tuple[str, Mark]]:
    connector = stage.connector
    assert isinstance(connector, MemoryConnector)
    return [(call[1], call[2]) for call in connector.done if call[0] == "put"]


def called(stage: ChunkTransferAdapter, name: str) -> list[tuple[object, ...]]:
    connector = stage.connector
    assert isinstance(connector, MemoryConnector)
    return [call[1:] for call in connector.done if call[0] == name]


def test_every_chunk_carries_its_generation_and_the_last_says_so() -> None:
    stage, _, _ = pair()
    made = request()
    send(stage, made, tokens(1))
    send(stage, made, tokens(2))
    made.status = STOPPED
    send(stage, made, tokens(3))
    assert not drain(stage)
    keys, marks = zip(*puts(stage), strict=True)
    assert keys == ("ext_0_0", "ext_0_1", "ext_0_2")
    assert [mark.terminal for mark in marks] == [False, False, True]
    assert len({mark.generation for mark in marks}) == 1
    assert 0 < marks[0].generation <= 2**63
    end(stage)


def test_an_id_that_is_used_again_gets_another_generation() -> None:
    stage, _, _ = pair()
    for _ in range(2):
        made = request(status=STOPPED)
        send(stage, made, tokens(1))
        drain(stage)
    (first, second) = puts(stage)
    assert first[0] == second[0] == "ext_0_0"
    assert first[1].generation != second[1].generation


def test_a_stage_that_was_started_again_does_not_repeat_its_generations() -> None:
    first, _, _ = pair()
    second, _, _ = pair()
    assert first._senders.make("ext").number != second._senders.make("ext").number


def test_a_request_without_an_external_id_takes_no_part() -> None:
    stage, _, _ = pair()
    send(stage, request(None), tokens(1))
    assert not stage._pending_save_reqs


@pytest.mark.parametrize("options", [{"extra": {"role": "receiver"}}, {"async_chunk": False}])
def test_a_stage_that_does_not_send_queues_nothing(options: dict[str, object]) -> None:
    stage, _, _ = pair(**options)
    send(stage, request(), tokens(1))
    assert not stage._pending_save_reqs


# What may be sent.


def test_tokens_that_were_sent_already_are_not_sent_again() -> None:
    stage, _, _ = pair()
    made = request(num_computed_tokens=10)
    stage.save_async(tokens(1), made)
    made.num_computed_tokens = 9
    stage.save_async(tokens(2), made)
    made.num_computed_tokens = 10
    stage.save_async(tokens(3), made)
    drain(stage)
    assert len(puts(stage)) == 2


def test_tokens_scheduled_ahead_of_their_output_do_not_count() -> None:
    stage, _, _ = pair()
    made = request(num_computed_tokens=10, num_output_placeholders=3)
    stage.save_async(tokens(1), made)
    assert stage.requests_num_chunks_sent["ext"] == 7
    made.num_computed_tokens = 1
    stage.save_async(tokens(2), made, confirmed_num_computed_tokens=12)
    assert stage.requests_num_chunks_sent["ext"] == 12


def test_a_request_that_was_preempted_can_still_end() -> None:
    stage, _, _ = pair()
    made = request(num_computed_tokens=10)
    stage.save_async(tokens(1), made)
    made.num_computed_tokens = 0
    made.status = STOPPED
    stage.save_async(tokens(2), made)
    drain(stage)
    assert [mark.terminal for _, mark in puts(stage)] == [False, True]


def test_a_boundary_moves_on_only_what_counts_its_segments() -> None:
    stage, _, _ = pair()
    counting = request("a", resumable=True, _omni_segment_generation=3)
    plain = request("b", resumable=True)
    for made in (counting, plain):
        stage.save_async(None, made, is_segment_finished=True)
    assert (stage._segment_generation["a"], stage._segment_generation["b"]) == (4, 0)
    stage.save_async(None, counting)
    stage.save_async(None, plain)
    drain(stage)
    assert [key for key, _ in puts(stage)] == ["a_0_0", "b_0_0"]  # the second chunk of b has nothing in it


def test_a_segment_is_claimed_by_who_must_end_its_stream() -> None:
    stage, _, _ = pair()
    made = request(resumable=True, _omni_segment_generation=3)
    assert not stage.has_sender("ext")
    stage.save_async(None, made, is_segment_finished=True)
    assert stage.has_sender("ext")
    stage.save_async(None, made, segment_generation=stage.claim_segment("ext"), force_request_finished=True)
    drain(stage)
    assert [mark.terminal for _, mark in puts(stage)] == [False, True]
    end(stage)


@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_to_send_is_sent_only_where_something_ends(boundary: bool, terminal: bool) -> None:
    stage, _, exchange = pair()
    made = request(status=STOPPED if terminal else RequestStatus.RUNNING)
    stage.save_async(None, made, is_segment_finished=boundary)
    drain(stage)
    if not boundary and not terminal:
        assert not puts(stage)
        return
    payload = exchange.streams["ext_0"].chunks[0]
    assert isinstance(payload, StagePayload)
    assert payload.meta is not None
    assert payload.meta.finished.item() is terminal
    assert payload.meta.is_segment_finished.item() is boundary


def test_a_processor_that_streams_a_codec_decides_when_it_is_finished() -> None:
    stage, _, exchange = pair()
    owned = StagePayload(meta=Meta(finished=True, codec_streaming=True))
    other = StagePayload(meta=Meta(finished=True))
    send(stage, request("a"), owned)
    send(stage, request("b"), other)
    drain(stage)
    assert owned.meta is not None
    assert other.meta is not None
    assert owned.meta.finished is True
    assert other.meta.finished.item() is False
    assert stage.has_sender("a"), "a codec that is finished does not end its request"
    assert set(exchange.streams) == {"a_0", "b_0"}


def test_a_processor_may_give_a_dict() -> None:
    stage, _, exchange = pair(processor=lambda **_: {"codes": {"audio": [1]}})
    send(stage, request(), None)
    drain(stage)
    sent = exchange.streams["ext_0"].chunks[0]
    assert isinstance(sent, StagePayload)
    assert sent.codes == Codes(audio=[1])


def test_only_a_processor_that_knows_of_new_tokens_is_given_them() -> None:
    seen: list[dict[str, object]] = []

    def older(transfer_manager: object, multimodal_output: object, request: object, is_finished: bool = False) -> None:
        seen.append({})

    def newer(*, new_token_ids: list[int] | None, **rest: object) -> None:
        seen.append({"new_token_ids": new_token_ids})

    for processor in (older, newer):
        stage, _, _ = pair(processor=processor)
        send(stage, request(), None, new_token_ids=[5])
        assert not drain(stage)
    assert seen == [{}, {"new_token_ids": [5]}]


# What fails.


def failing(**_: object) -> StagePayload:
    raise ZeroDivisionError("no frames")


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (failing, "ZeroDivisionError: no frames"),
        (lambda **_: 7, "TypeError: the stage input processor returned a int, not a StagePayload"),
        (lambda **_: {"nonsense": 1}, "ValueError: a stage payload has no field 'nonsense'"),
    ],
)
def test_a_processor_that_fails_fails_its_request_at_both_ends(processor: object, reason: str) -> None:
    stage, to, _ = pair(processor=processor)
    waits = request(request_id="waits")
    to.load_async(waits)
    made = request()
    send(stage, made, None)
    send(stage, made, None)
    assert len(drain(stage)) == 1, "a stream that lost a chunk must not go on"
    told = f"stage 0 -> 1: {reason}"
    failures = stage.collect_failed_send_request_ids()
    assert failures[made.request_id].startswith(told)
    assert stage.collect_failed_send_request_ids() == {}
    poll(to)
    assert to.collect_failed_receive_request_ids() == {"waits": failures[made.request_id]}
    stage.finish_requests(made.request_id, RequestStatus.FINISHED_ERROR, {made.request_id: made})
    drain(stage)
    end(stage)


def test_a_put_that_raises_fails_its_request_and_no_other() -> None:
    stage, _, exchange = pair()
    connector = stage.connector
    assert isinstance(connector, MemoryConnector)
    put = connector.put

    def sometimes(**place: object) -> object:
        if place["put_key"] == "bad_0_0":
            raise OSError("no space")
        return put(**place)  # type: ignore[arg-type]

    connector.put = sometimes  # type: ignore[method-assign, assignment]
    bad, good = request("bad"), request("good")
    for made in (bad, good, bad, good):
        send(stage, made, tokens(1))
    drain(stage)
    assert stage.collect_failed_send_request_ids() == {bad.request_id: "stage 0 -> 1: OSError: no space"}
    assert set(exchange.streams["good_0"].chunks) == {0, 1}
    assert "bad_0" not in exchange.streams


class Plain(Connector):
    """A connector without events. `answers`: what `put` returns or raises, the last for ever."""

    def __init__(self, *answers: object) -> None:
        self.stage_id = 0
        self.config = {}
        self.answers = list(answers)
        self.keys: list[str] = []

    def put(self, from_stage: str, to_stage: str, put_key: str, data: object) -> tuple[bool, int, None]:
        self.keys.append(put_key)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return bool(answer), 1, None

    def get(self, *_: object, **__: object) -> None:
        return None

    def close(self) -> None:
        pass


def test_a_put_that_gives_up_ends_the_stream() -> None:
    connector = Plain(True, False, True)
    stage = adapter(connector, processor=forward)
    made = request()
    for _ in range(3):
        send(stage, made, tokens(1))
    drain(stage)
    assert connector.keys == ["ext_0_0", "ext_0_1"], "a later chunk would pass for the lost one"
    assert stage.collect_failed_send_request_ids() == {
        made.request_id: "stage 0 -> 1: the connector did not take the chunk"
    }


@pytest.mark.parametrize("answer", [False, OSError("gone")])
def test_a_terminal_that_fails_leaves_nothing(answer: object) -> None:
    stage = adapter(Plain(answer), processor=forward)
    made = request(status=STOPPED)
    send(stage, made, tokens(1))
    drain(stage)
    assert list(stage.collect_failed_send_request_ids()) == [made.request_id]
    end(stage)


def test_the_first_reason_of_a_request_is_the_one_that_is_told() -> None:
    stage, _, _ = pair()
    stage._record_send_failure("r", "first")
    stage._record_send_failure("r", "second")
    stage._record_receive_failure("r", "one")
    stage._record_receive_failure("r", "two")
    assert stage.collect_failed_send_request_ids() == {"r": "first"}
    assert stage.collect_failed_receive_request_ids() == {"r": "one"}


def test_a_flag_of_several_elements_is_an_error_not_a_guess() -> None:
    stage, _, _ = pair()
    send(stage, request(), StagePayload(meta=Meta(finished=torch.zeros(2), codec_streaming=torch.zeros(2))))
    (error,) = drain(stage)
    assert "codec_streaming has 2 elements" in str(error)


# Credit.


def test_a_stream_without_credit_waits_and_the_others_go_on() -> None:
    stage, to, exchange = pair(credit=2)
    slow, quick = request("slow"), request("quick")
    for number in range(5):
        send(stage, slow, tokens(number))
    send(stage, quick, tokens(1))
    drain(stage)
    assert set(exchange.streams["slow_0"].chunks) == {0, 1}
    assert set(exchange.streams["quick_0"].chunks) == {0}
    assert stage.is_congested("slow")
    assert not stage.is_congested("quick")
    got = []
    while (chunk := to.connector.get("0", "1", f"slow_0_{len(got)}")) is not None:
        got.append(chunk[0]["ids"]["tokens"])
        drain(stage)
    assert got == [[0], [1], [2], [3], [4]]
    assert not stage.is_congested("slow")


def test_a_chunk_is_made_once_however_often_it_waits() -> None:
    made: list[int] = []

    def counting(new_token_ids: list[int], **_: object) -> StagePayload:
        made.extend(new_token_ids)
        return tokens(*new_token_ids)

    stage, to, _ = pair(credit=1, processor=counting)
    of = request()
    for number in range(4):
        send(stage, of, None, new_token_ids=[number])
    drain(stage)
    for _ in range(3):
        stage.ring_sender(Told("ext_0"))  # as if there were credit
        drain(stage)
    for number in range(4):
        got = to.connector.get("0", "1", f"ext_0_{number}")
        assert got is not None
        assert got[0]["ids"]["tokens"] == [number]
        drain(stage)
    assert made == [0, 1, 2, 3]


def test_a_consumer_that_never_reads_ends_its_stream_when_too_much_waits() -> None:
    stage, _, _ = pair(credit=1, extra={"max_backlog": 2})
    made = request()
    for number in range(5):
        send(stage, made, tokens(number))
    drain(stage)
    for _ in range(3):
        stage.ring_sender(Told("ext_0"))
        drain(stage)
    assert stage.collect_failed_send_request_ids() == {made.request_id: "stage 0 -> 1: its consumer is 3 chunks behind"}
    assert not stage.is_congested("ext")


def test_a_consumer_that_never_reads_ends_its_stream_when_it_has_waited_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, _, _ = pair(credit=1, extra={"send_timeout_s": 5})
    made, other = request(), request("other")
    now = 100.0
    monkeypatch.setattr("triptych.transfer.adapter.sending.time.monotonic", lambda: now)
    for number in range(2):
        send(stage, made, tokens(number))
    drain(stage)
    now = 103.0
    for number in range(2):
        send(stage, other, tokens(number))
    drain(stage)
    stage._give_up_overdue()
    assert not stage.collect_failed_send_request_ids()
    assert stage._save_wait() == pytest.approx(2.0, abs=0.01)
    now = 105.5
    stage._give_up_overdue()
    assert stage.collect_failed_send_request_ids() == {
        made.request_id: "stage 0 -> 1: its consumer has taken nothing for 5 s"
    }
    assert stage.is_congested("other")
    assert stage._save_wait() == pytest.approx(2.5, abs=0.01)


# The consumer leaves.


@pytest.mark.parametrize("blocked", [False, True])
def test_a_consumer_that_stops_ends_the_sender_s_stream(blocked: bool) -> None:
    stage, to, _ = pair(credit=1)
    waits = request(request_id="waits")
    to.load_async(waits)
    made = request()
    for number in range(3 if blocked else 1):
        send(stage, made, tokens(number))
    drain(stage)
    assert stage.is_congested("ext") is blocked
    to.cleanup_receiver("waits", "stage 1 has enough")
    drain(stage)
    assert stage.collect_stopped_request_ids() == {made.request_id: "stage 0 -> 1: stage 1 has enough"}
    assert stage.collect_stopped_request_ids() == {}
    assert not stage.is_congested("ext")
    send(stage, made, tokens(9))
    made.status = STOPPED
    send(stage, made, tokens(10))
    sent = len(puts(stage))
    drain(stage)
    assert len(puts(stage)) == sent
    end(stage)


def test_a_stop_that_a_put_meets_first_is_a_stop_too() -> None:
    stage, to, exchange = pair()
    made = request()
    send(stage, made, tokens(1))
    drain(stage)
    exchange.streams["ext_0"].stopped = "enough"
    send(stage, made, tokens(2))
    assert not drain(stage)
    assert stage.collect_stopped_request_ids() == {made.request_id: "stage 0 -> 1: enough"}
    assert not stage.collect_failed_send_request_ids()
    assert not to.collect_failed_receive_request_ids()


def test_a_stop_after_the_last_chunk_concerns_nobody() -> None:
    stage, _, _ = pair()
    made = request(status=STOPPED)
    send(stage, made, tokens(1))
    drain(stage)
    stage.ring_sender(Told("ext_0", "late"))
    drain(stage)
    assert not stage.collect_stopped_request_ids()


@pytest.mark.parametrize("sent", [False, True])
def test_a_stop_of_an_older_generation_does_not_end_the_newer(sent: bool) -> None:
    stage, _, _ = pair()
    first, second = request(), request()
    send(stage, first, tokens(1))
    drain(stage)
    old = puts(stage)[0][1].generation
    abort(stage, first)
    drain(stage)
    send(stage, second, tokens(2))
    if sent:
        drain(stage)
    stage.ring_sender(Told("ext_0", "enough", old if sent else None))
    drain(stage)
    assert not stage.collect_stopped_request_ids()
    stage.ring_sender(Told("ext_0", "enough", puts(stage)[-1][1].generation))
    drain(stage)
    assert list(stage.collect_stopped_request_ids()) == [second.request_id]


def test_another_request_cannot_join_a_stream_that_was_stopped() -> None:
    stage, _, _ = pair()
    made, newcomer = request(), request()
    send(stage, made, tokens(1))
    drain(stage)
    stage.ring_sender(Told("ext_0", "enough"))
    drain(stage)
    send(stage, newcomer, tokens(1))
    assert stage.collect_failed_send_request_ids() == {
        newcomer.request_id: "previous sender generation is still draining"
    }


# Aborts, at each point between the queue and the connector.


def abort(stage: ChunkTransferAdapter, made: object) -> None:
    stage.finish_requests(made.request_id, ABORTED, {made.request_id: made})  # type: ignore[attr-defined]


def test_an_abort_before_anything_was_sent_reaches_who_waits_already() -> None:
    stage, to, _ = pair()
    to.load_async(request(request_id="waits"))
    abort(stage, request())
    drain(stage)
    poll(to)
    assert to.collect_failed_receive_request_ids() == {"waits": "stage 0 -> 1: the request ended before its stream did"}


def test_an_abort_takes_back_what_was_not_read_and_nothing_else() -> None:
    stage, to, exchange = pair()
    neighbour = request("ext_0_1")
    made = request()
    send(stage, neighbour, tokens(7))
    for number in range(3):
        send(stage, made, tokens(number))
    drain(stage)
    assert to.connector.get("0", "1", "ext_0_0") is not None
    abort(stage, made)
    assert stage.connector._pending_keys == {"ext_0_1", "ext_0_2", "ext_0_1_0_0"}  # type: ignore[attr-defined]
    drain(stage)
    assert stage.connector._pending_keys == {"ext_0_1_0_0"}  # type: ignore[attr-defined]
    assert set(exchange.streams["ext_0_1_0"].chunks) == {0}
    assert called(stage, "fail") == [("ext_0", "stage 0 -> 1: the request ended before its stream did")]


@pytest.mark.parametrize("point", ["queued", "taken", "in the processor", "in put", "blocked", "after put"])
@pytest.mark.parametrize("terminal", [False, True])
def test_an_abort_at_any_point_leaves_no_chunk_and_no_state(point: str, terminal: bool) -> None:
    """An ordinary chunk is dropped or taken back. A terminal that was queued goes out, whatever the point."""
    aborts: list[object] = []

    def processor(multimodal_output: StagePayload, **_: object) -> StagePayload:
        if point == "in the processor" and aborts:
            abort(stage, aborts.pop())
        return multimodal_output

    stage, to, exchange = pair(credit=1, processor=processor)
    connector = stage.connector
    assert isinstance(connector, MemoryConnector)
    put = connector.put

    def watched(**place: object) -> object:
        if point == "in put" and aborts:
            abort(stage, aborts.pop())
        return put(**place)  # type: ignore[arg-type]

    connector.put = watched  # type: ignore[method-assign, assignment]
    made = request()
    if point == "blocked":
        send(stage, made, tokens(0))
        drain(stage)
    if terminal:
        made.status = STOPPED
    send(stage, made, tokens(1))
    if point == "queued":
        abort(stage, made)
        drain(stage)
    elif point == "taken":
        task = stage._pending_save_reqs.popleft()
        abort(stage, made)
        stage._send_single_request(task)
        drain(stage)
    elif point == "blocked":
        drain(stage)
        abort(stage, made)
        drain(stage)
        if terminal:
            to.connector.get("0", "1", "ext_0_0")
            drain(stage)
    elif point == "after put":
        drain(stage)
        abort(stage, made)
        drain(stage)
    else:
        aborts.append(made)
        drain(stage)
    if terminal:
        assert [mark.terminal for _, mark in puts(stage)][-1] is True
        assert exchange.streams["ext_0"].end is not None
    else:
        assert not connector._pending_keys
    assert not stage.collect_failed_send_request_ids()
    end(stage)


def test_a_name_can_be_used_again_as_soon_as_its_generation_is_over() -> None:
    stage, to, exchange = pair()
    first, second = request(), request()
    send(stage, first, tokens(1))
    drain(stage)
    abort(stage, first)
    send(stage, second, tokens(2))
    drain(stage)
    assert [key for key, _ in puts(stage)] == ["ext_0_0", "ext_0_0"]
    got = to.connector.get("0", "1", "ext_0_0")
    assert got is not None
    assert got[0]["ids"]["tokens"] == [2]
    assert not exchange.streams["ext_0"].over


def test_a_name_can_be_used_again_while_the_last_put_of_its_aborted_generation_is_under_way() -> None:
    stage, to, exchange = pair()
    first, second = request(), request()
    connector = stage.connector
    assert isinstance(connector, MemoryConnector)
    put = connector.put

    def interrupted(**place: object) -> object:
        if not exchange.streams:
            abort(stage, first)
            send(stage, second, tokens(2))
        return put(**place)  # type: ignore[arg-type]

    connector.put = interrupted  # type: ignore[method-assign, assignment]
    send(stage, first, tokens(1))
    assert not drain(stage)
    assert not stage.collect_failed_send_request_ids()
    got = to.connector.get("0", "1", "ext_0_0")
    assert got is not None
    assert got[0]["ids"]["tokens"] == [2]
    assert stage.put_req_chunk["ext"] == 1
    abort(stage, second)
    drain(stage)
    end(stage)


def test_a_newcomer_is_refused_while_a_terminal_is_still_to_be_sent() -> None:
    stage, _, _ = pair()
    first, second = request(status=STOPPED), request()
    send(stage, first, tokens(1))
    send(stage, second, tokens(2))
    assert stage.collect_failed_send_request_ids() == {
        second.request_id: "previous sender generation is still draining"
    }
    drain(stage)
    send(stage, second, tokens(2))
    drain(stage)
    assert len(puts(stage)) == 2
    assert not stage.collect_failed_send_request_ids()


def test_what_was_sent_stays_when_a_consumer_is_slow_but_the_sender_has_finished() -> None:
    stage, _, _ = pair()
    made = request(status=STOPPED)
    send(stage, made, tokens(1))
    drain(stage)
    abort(stage, made)
    abort(stage, request())
    drain(stage)
    assert stage.connector._pending_keys == {"ext_0_0"}  # type: ignore[attr-defined]


def test_a_release_takes_back_what_was_queued_before_it() -> None:
    stage, to, _ = pair()
    made = request()
    for number in range(3):
        send(stage, made, tokens(number))
    stage.release_shm_resources("ext")
    send(stage, made, tokens(3))
    stage.release_shm_resources("nobody")
    drain(stage)
    assert stage._reclaimed_shm_total == 3
    assert stage.connector._pending_keys == {"ext_0_3"}  # type: ignore[attr-defined]
    assert to.connector.get("0", "1", "ext_0_3") is not None


def test_the_request_of_a_queued_chunk_is_as_it_was() -> None:
    stage, _, _ = pair()
    made = request(additional_information={"parts": [{"deep": (1, [2])}]})
    send(stage, made, tokens(1))
    made.append_output_token_ids(9)
    made.additional_information["parts"][0]["deep"][1].append(3)  # type: ignore[attr-defined]
    seen = stage._pending_save_reqs[0]["request"]
    assert list(seen.all_token_ids) == [1, 2, 3]
    assert list(seen.output_token_ids) == []
    assert seen.additional_information == {"parts": [{"deep": (1, [2])}]}
    assert seen.additional_information["parts"][0]["deep"][1] is not made.additional_information["parts"][0]["deep"][1]  # type: ignore[attr-defined]
