"""A stage that sends what it makes, under vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from tests.scheduling.rig import PATIENCE_S, Downstream, Stage, Upstream, answers
from tests.transfer.adapter.memory import Exchange
from tests.transfer.adapter.stages import received
from triptych.scheduling.ar import ARScheduler, AsyncARScheduler

ABORTED = RequestStatus.FINISHED_ABORTED
PROMPT = [1, 2, 3, 4, 5]
FORWARD = "triptych.processors.tokens:forward"

Make = Callable[..., Stage]


@pytest.fixture
def downstream(exchange: Exchange) -> Downstream:
    return Downstream(exchange)


def sender(make: Make, kind: type = ARScheduler, **options: object) -> Stage:
    return make(kind, **{"id": 0, "role": "sender", "processor": FORWARD, **options})


@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_of_a_stream_is_a_chunk_and_the_last_one_says_so(
    make: Make, downstream: Downstream, depth: int
) -> None:
    stage = sender(make, AsyncARScheduler if depth > 1 else ARScheduler, depth=depth)
    downstream.watch("s_0")
    stage.add("r", PROMPT, "s", max_tokens=4)
    stage.add("plain", PROMPT, max_tokens=4)
    stage.rest()
    chunks = downstream.all("s_0")
    assert [chunk["ids"]["tokens"] for chunk in chunks] == [[token] for token in answers(PROMPT, 4)]
    assert [bool(chunk["meta"]["finished"]) for chunk in chunks] == [False, False, False, True]
    assert stage.said["r"] == stage.said["plain"] == answers(PROMPT, 4)
    stage.clean()
    stage.sent_all()


def test_a_consumer_that_is_far_behind_stops_its_own_stream_and_no_other(
    make: Make, exchange: Exchange, downstream: Downstream
) -> None:
    exchange.credit = 2
    stage = sender(make, connector={"name": "memory", "extra": {"hold_backlog": 3}})
    downstream.watch("slow_0")
    stage.add("slow", PROMPT, "slow", max_tokens=600)  # long after the save thread has seen it
    while not stage.adapter.is_parked("slow"):
        assert stage.step()
    written = len(stage.said["slow"])
    stage.add("quick", PROMPT, "quick", max_tokens=2)
    stage.add("plain", PROMPT, max_tokens=20)
    stage.rest()
    assert stage.said["plain"] == answers(PROMPT, 20)
    assert stage.said["quick"] == answers(PROMPT, 2)
    assert len(stage.said["slow"]) == written
    tokens = [chunk["ids"]["tokens"][0] for chunk in downstream.all("slow_0", meanwhile=stage)]
    assert tokens == stage.said["slow"] == answers(PROMPT, 600)
    assert [chunk["ids"]["tokens"][0] for chunk in downstream.all("quick_0")] == answers(PROMPT, 2)
    stage.clean()


def test_a_consumer_that_wants_no_more_ends_the_request_with_its_reason(make: Make, downstream: Downstream) -> None:
    stage = sender(make)
    downstream.watch("s_0")
    stage.add("r", PROMPT, "s", max_tokens=500)
    stage.step()
    downstream.first("s_0")
    downstream.connector.unwatch("s_0", "stage 0 -> 1: it did not decode")
    while "r" not in stage.ends:
        assert stage.step()
    assert stage.ends["r"].finish_reason == FinishReason.ERROR
    assert stage.ends["r"].stop_reason == "stage 0 -> 1: it did not decode"
    stage.clean()


def test_a_processor_that_raises_ends_the_request_and_tells_its_receiver(make: Make, downstream: Downstream) -> None:
    stage = sender(make, processor=f"{__name__}:broken")
    downstream.watch("s_0")
    stage.add("r", PROMPT, "s", max_tokens=500)
    while "r" not in stage.ends:
        assert stage.step()
    assert "stage 0 -> 1: RuntimeError: no codes today" in str(stage.ends["r"].stop_reason)
    assert "RuntimeError: no codes today" in downstream.broken("s_0")
    stage.clean()


def broken(**_: object) -> None:
    raise RuntimeError("no codes today")


@pytest.mark.parametrize("when", ["new", "running"])
def test_an_abort_reaches_the_next_stage(make: Make, downstream: Downstream, when: str) -> None:
    stage = sender(make)
    downstream.watch("s_0")
    stage.add("r", PROMPT, "s", max_tokens=500)
    if when == "running":
        stage.step()
        downstream.first("s_0")
    stage.scheduler.finish_requests("r", ABORTED)
    assert "the request ended before its stream did" in downstream.broken("s_0")
    stage.clean()
    stage.sent_all()


def test_a_stage_between_two_others_sends_on_what_it_made_of_each_chunk(
    make: Make, upstream: Upstream, downstream: Downstream
) -> None:
    stage = make(ARScheduler, id=1, role="both", processor=FORWARD)
    downstream.watch("s_1")
    stage.add("r", PROMPT, "s", max_tokens=3)
    stage.rest()
    upstream.give("s", received(10))
    stage.woken()
    upstream.give("s", received(11, finished=True))
    stage.until(lambda: "r" in stage.ends)
    sent = [token for chunk in downstream.all("s_1") for token in chunk["ids"]["tokens"]]
    assert sent == stage.said["r"]
    assert sent[-3:] == answers([*PROMPT, 10, 11], 3)
    stage.clean()
    stage.sent_all()


# Sessions: a resumable request waits for more input when its segment has stopped.


def update(request_id: str, *, last: bool) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[7, 8],
        sampling_params=SamplingParams(max_tokens=2, ignore_eos=True),
        pooling_params=None,
        resumable=not last,
    )


def test_the_end_of_a_segment_is_told_and_so_is_that_of_the_session(make: Make, downstream: Downstream) -> None:
    stage = sender(make)
    downstream.watch("s_0")
    stage.add("r", PROMPT, "s", max_tokens=2, resumable=True)
    stage.rest()
    assert stage.scheduler.num_waiting_for_streaming_input == 1
    stage.scheduler.add_request(update("r", last=False))
    stage.rest()
    chunks = [downstream.first("s_0") for _ in range(4)]
    stage.scheduler.add_request(update("r", last=True))
    stage.rest()
    chunks += downstream.all("s_0")
    assert [bool(chunk["meta"]["is_segment_finished"]) for chunk in chunks] == [False, True, False, True, False]
    assert [bool(chunk["meta"]["finished"]) for chunk in chunks] == [False] * 4 + [True]
    stage.clean()
    stage.sent_all()


def test_a_session_of_no_stream_ends_as_vllm_ends_it(make: Make) -> None:
    stage = sender(make)
    stage.add("r", PROMPT, max_tokens=2, resumable=True)
    stage.rest()
    assert stage.scheduler.num_waiting_for_streaming_input == 1
    stage.scheduler.add_request(update("r", last=True))
    stage.clean()


def test_a_session_can_be_aborted_between_two_segments(make: Make, downstream: Downstream) -> None:
    stage = sender(make)
    downstream.watch("s_0")
    stage.add("r", PROMPT, "s", max_tokens=2, resumable=True)
    stage.rest()
    stage.scheduler.finish_requests("r", ABORTED)
    assert "the request ended before its stream did" in downstream.broken("s_0")
    stage.clean()


def test_a_segment_of_a_receiving_session_waits_for_chunks_of_its_own(make: Make, upstream: Upstream) -> None:
    stage = make(ARScheduler, id=1, role="receiver")
    stage.add("r", PROMPT, "s", max_tokens=1, resumable=True)
    stage.rest()
    upstream.give("s", received(10, segment_finished=True))
    stage.woken()
    assert len(stage.said["r"]) == 1
    assert not stage.adapter.is_parked("r")
    stage.scheduler.add_request(update("r", last=False))
    stage.rest()
    assert stage.adapter.is_parked("r")
    assert stage.scheduler.num_waiting_for_streaming_input == 0
    upstream.give("s", received(11, finished=True))
    stage.until(lambda: len(stage.said["r"]) == 3)
    stage.clean()


def test_threads_and_connector_end_with_the_scheduler(make: Make) -> None:
    stage = sender(make)
    threads = list(stage.adapter._threads)
    assert threads
    stage.scheduler.shutdown()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert stage.adapter.connector.closed
