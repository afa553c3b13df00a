"""A stage that computes each chunk as a prompt of its own, under vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.scheduling.rig import Stage, Upstream, answer
from tests.transfer.adapter.stages import codes
from triptych.scheduling.ar import ARScheduler
from triptych.scheduling.generation import GenerationScheduler
from triptych.scheduling.output import StageRequestData

PROMPT = [1, 2, 3, 4, 5]

Make = Callable[..., Stage]


def generation(make: Make, **options: object) -> Stage:
    return make(GenerationScheduler, **{"id": 1, "role": "receiver", "worker": "generation", **options})


def prompts(stage: Stage) -> list[list[int]]:
    """What the worker was told to compute, in order."""
    return [new.prompt_token_ids for new in stage.worker.seen]


def test_each_chunk_is_computed_whole_and_the_last_one_ends_the_request(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    stage.add("r", PROMPT, "s", max_tokens=500)
    stage.rest()
    for tokens in ([10, 11, 12], [13, 14, 15], [16]):  # two of one length
        upstream.give("s", codes(*tokens))
        stage.woken()
        assert prompts(stage)[-1] == tokens
        assert stage.said["r"][-1] == answer(tokens)
    upstream.give("s", codes(17, 18, finished=True))
    stage.woken()
    assert prompts(stage) == [[10, 11, 12], [13, 14, 15], [16], [17, 18]]
    assert stage.ends["r"].finish_reason == FinishReason.STOP
    stage.clean()


def test_a_chunk_like_one_before_is_computed_again(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    for request_id in "ab":
        stage.add(request_id, PROMPT, request_id)
        stage.rest()
        for finished in (False, True):
            upstream.give(request_id, codes(*range(10, 30), finished=finished))
            stage.woken()
    assert [new.num_computed_tokens for new in stage.worker.seen] == [0] * 4
    stage.clean()


def test_an_end_without_codes_ends_the_request_without_a_step_of_its_own(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    stage.add("r", PROMPT, "s")
    stage.add("at once", PROMPT, "t")
    stage.rest()
    upstream.give("s", codes(10))
    stage.woken()
    for stream in "st":
        upstream.give(stream, codes(finished=True))
    stage.until(lambda: len(stage.ends) == 2)
    assert {end.finish_reason for end in stage.ends.values()} == {FinishReason.STOP}
    assert prompts(stage) == [[10]]
    stage.clean()


def test_the_end_of_a_segment_without_codes_is_computed_of_a_placeholder(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    stage.add("r", PROMPT, "s", max_tokens=500)
    stage.rest()
    upstream.give("s", codes(is_segment_finished=True))
    stage.woken()
    assert prompts(stage) == [[0]]
    assert stage.adapter.is_parked("r"), "the next segment's chunks follow"
    upstream.give("s", codes(10, finished=True))
    stage.woken()
    assert prompts(stage) == [[0], [10]]
    stage.clean()


def test_a_session_waits_for_input_when_its_segment_is_computed(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    stage.add("r", PROMPT, "s", max_tokens=500, resumable=True)
    stage.rest()
    upstream.give("s", codes(10, 11, is_segment_finished=True))
    stage.woken()
    assert stage.ends["r"].finish_reason == FinishReason.STOP
    assert stage.scheduler.num_waiting_for_streaming_input == 1
    stage.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    stage.clean()


def test_what_the_chunks_say_beside_the_codes_reaches_the_model(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    stage.add("r", PROMPT, "s")
    stage.rest()
    upstream.give("s", codes(10, replace_runtime_additional_information=True) | {"speaker": {"id": 3}})
    stage.woken()
    (new,) = stage.worker.seen
    assert isinstance(new, StageRequestData)
    assert new.additional_information is not None
    assert new.additional_information["speaker"] == {"id": 3}
    assert new.model_intermediate_buffer == new.additional_information
    stage.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    stage.clean()


def test_a_request_of_no_stream_is_refused_since_nothing_would_ever_come_for_it(make: Make) -> None:
    stage = generation(make)
    stage.add("plain", PROMPT, max_tokens=3)
    stage.rest()
    assert stage.ends["plain"].finish_reason == FinishReason.ERROR
    assert "vllm_xargs.triptych_stream is missing" in str(stage.ends["plain"].stop_reason)
    stage.clean()


def test_codes_that_are_none_end_the_request_with_the_reason(make: Make, upstream: Upstream) -> None:
    stage = generation(make)
    stage.add("r", PROMPT, "s")
    stage.rest()
    upstream.give("s", {"codes": {"audio": "la la"}, "meta": {"finished": False}})
    stage.woken()
    assert stage.ends["r"].finish_reason == FinishReason.ERROR
    assert "codes.audio must be a tensor or a list" in str(stage.ends["r"].stop_reason)
    stage.clean()


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (GenerationScheduler, {"worker": "ar"}, "GenerationScheduler is for `worker` 'generation', not 'ar'"),
        (ARScheduler, {"worker": "generation"}, "ARScheduler is for `worker` 'ar', not 'generation'"),
        (GenerationScheduler, {"worker": "generation", "depth": 2}, "--no-async-scheduling"),
        (ARScheduler, {"id": 0}, "its role is `sender`"),
    ],
)
def test_a_scheduler_that_does_not_fit_its_stage_refuses_to_start(
    make: Make, kind: type, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make(kind, **{"id": 1, "role": "receiver", **options})
