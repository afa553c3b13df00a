"""A stage whose prompts grow by chunks, under vLLM's real scheduler, with a worker that checks what it is told."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.scheduling.rig import PATIENCE_S, Stage, Upstream, answer, answers
from tests.transfer.adapter.stages import received
from triptych.scheduling.ar import ARScheduler, AsyncARScheduler
from triptych.scheduling.output import StageRequestData

ABORTED = RequestStatus.FINISHED_ABORTED
PROMPT = [1, 2, 3, 4, 5]

Make = Callable[..., Stage]


def receiver(make: Make, kind: type = ARScheduler, **options: object) -> Stage:
    return make(kind, **{"id": 1, "role": "receiver", **options})


def test_a_parked_request_is_no_work_and_is_counted_as_waiting(make: Make) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    assert stage.step()
    assert stage.adapter.is_parked("r")
    assert not stage.step(), "the engine core sleeps"
    assert stage.scheduler.get_num_unfinished_requests() == 0
    assert stage.scheduler.get_request_counts() == (0, 1)
    assert stage.counts.num_waiting_reqs == 1
    stage.scheduler.finish_requests("r", ABORTED)
    stage.clean()


def test_a_prompt_grows_chunk_by_chunk_and_the_answer_is_that_to_all_of_it(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s", max_tokens=6)
    stage.rest()
    whole = list(PROMPT)
    chunks = [[10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 20], [21]]
    for number, tokens in enumerate(chunks, 1):
        upstream.give("s", received(*tokens))
        stage.woken()
        whole += tokens
        assert stage.said["r"] == [*stage.said["r"][:-1], answer(whole)], "one token after each chunk"
        assert len(stage.said["r"]) == number
        assert stage.adapter.is_parked("r")
    upstream.give("s", received(finished=True))
    stage.woken()
    assert stage.said["r"][len(chunks) - 1 :] == answers(whole, 6)
    assert stage.ends["r"].finish_reason == FinishReason.LENGTH
    stage.clean()


def test_what_was_computed_is_not_computed_again(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    stage.rest()
    for tokens in ([10, 11, 12], [13, 14]):
        upstream.give("s", received(*tokens))
        stage.woken()
    assert [new.num_computed_tokens for new in stage.worker.seen] == [0, 8]
    assert [new.prompt_token_ids for new in stage.worker.seen] == [[*PROMPT, 10, 11, 12], [*PROMPT, 10, 11, 12, 13, 14]]


def test_a_chunk_reaches_the_model_with_the_step_that_computes_it(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    stage.add("plain", PROMPT)
    stage.rest()
    chunk = received(10) | {"thinker": {"note": [7]}}
    upstream.give("s", chunk)
    stage.woken()
    plain, mine = stage.worker.seen
    assert not isinstance(plain, StageRequestData)
    assert isinstance(mine, StageRequestData)
    assert mine.additional_information is not None
    assert mine.additional_information["thinker"] == {"note": [7]}


def test_a_chunk_that_is_there_before_its_request_is_not_missed(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    upstream.give("s", received(10))
    upstream.give("s", received(11, finished=True))
    stage.add("r", PROMPT, "s", max_tokens=2)
    stage.until(lambda: "r" in stage.ends)
    assert stage.said["r"][-2:] == answers([*PROMPT, 10, 11], 2)
    stage.clean()


def test_requests_of_no_stream_are_scheduled_as_by_vllm_itself(make: Make) -> None:
    stage = receiver(make)
    stage.add("parked", PROMPT, "s")
    stage.add("plain", [7, 8], max_tokens=3)
    stage.rest()
    assert stage.said == {"plain": answers([7, 8], 3)}
    stage.scheduler.finish_requests(None, ABORTED)
    stage.clean()


# Ends.


def test_a_sender_that_fails_ends_the_request_with_its_reason_in_the_next_step(
    make: Make, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    stage.rest()
    upstream.give("s", received(10))
    stage.woken()
    upstream.connector.fail("0", "1", "s_0", "the processor raised KeyError")
    stage.woken()
    assert stage.ends["r"].finish_reason == FinishReason.ERROR
    assert "stage 0 -> 1: the processor raised KeyError" in str(stage.ends["r"].stop_reason)
    assert "request r failed: stage 0 -> 1: the processor raised KeyError" in caplog.text
    stage.clean()


def test_a_chunk_that_is_no_chunk_ends_the_request_and_its_sender_is_told(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    stage.rest()
    upstream.give("s", {"ids": {"tokens": [1, -1]}, "meta": {"finished": False}})
    stage.woken()
    assert "must be a list of token ids" in str(stage.ends["r"].stop_reason)
    stream, reason = upstream.told.get(timeout=PATIENCE_S)
    assert stream == "s_0"
    assert "must be a list of token ids" in reason
    stage.clean()


def test_a_prompt_that_grows_out_of_the_context_ends_the_request(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    stage.rest()
    upstream.give("s", received(*[9] * 3000))
    stage.woken()
    assert "max_model_len=2048" in str(stage.ends["r"].stop_reason)
    stage.clean()


def test_the_nearest_deadline_wakes_a_sleeping_stage(make: Make, upstream: Upstream) -> None:
    stage = receiver(make, chunk_timeout=0.2)
    stage.add("r", PROMPT, "s")
    stage.rest()
    assert not stage.step()
    stage.until(lambda: "r" in stage.ends)
    assert stage.ends["r"].finish_reason == FinishReason.ERROR
    assert "stage 1 waited more than 0.2 s for stage 0" in str(stage.ends["r"].stop_reason)
    stage.clean()


@pytest.mark.parametrize("when", ["new", "parked", "begun"])
def test_an_abort_gives_everything_back_and_tells_the_sender(make: Make, upstream: Upstream, when: str) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s")
    if when != "new":
        stage.rest()
    if when == "begun":
        upstream.give("s", received(10))
        stage.woken()
        assert stage.adapter.is_parked("r")
        upstream.give("s", received(11))
        stage.core.input_queue.get(timeout=PATIENCE_S)
    assert [r.request_id for r in stage.scheduler.finish_requests("r", ABORTED)] == ["r"]
    assert stage.scheduler.finish_requests("r", ABORTED) == []
    stage.clean()
    if when == "begun":
        assert upstream.told.get(timeout=PATIENCE_S)[0] == "s_0"
    stage.add("again", PROMPT, "s")
    stage.rest()
    assert stage.adapter.is_parked("again")


def test_a_name_belongs_to_one_request_at_a_time(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("first", PROMPT, "s", max_tokens=1)
    stage.add("second", PROMPT, "s")
    stage.rest()
    assert stage.ends["second"].finish_reason == FinishReason.ERROR
    assert "'s' is running already" in str(stage.ends["second"].stop_reason)
    upstream.give("s", received(10, finished=True))
    stage.woken()
    assert stage.said["first"] == [answer([*PROMPT, 10])]
    stage.clean()


def test_a_stream_that_is_named_wrongly_ends_its_request_alone(make: Make) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "x" * 5000)
    stage.add("plain", PROMPT, max_tokens=1)
    stage.rest()
    assert "triptych_stream must be" in str(stage.ends["r"].stop_reason)
    assert stage.ends["plain"].finish_reason == FinishReason.LENGTH
    stage.clean()


# The queues.


def test_a_reset_of_the_cache_preempts_what_is_parked_and_nothing_is_lost(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s", max_tokens=3)
    stage.add("fresh", PROMPT, "t")
    stage.rest()
    upstream.give("s", received(10, 11))
    stage.woken()
    assert not stage.scheduler.reset_prefix_cache(), "the parked request holds blocks"
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True)
    stage.rest()
    assert stage.adapter.num_parked() == 2
    upstream.give("s", received(12))
    stage.woken()
    upstream.give("s", received(finished=True))
    stage.woken()
    assert stage.said["r"][-3:] == answers([*PROMPT, 10, 11, 12], 3)
    stage.scheduler.finish_requests("fresh", ABORTED)
    stage.clean()


def test_a_reset_of_the_cache_does_not_lose_a_chunk_that_has_come(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s", max_tokens=3)
    stage.rest()
    upstream.give("s", received(10))
    stage.woken()
    upstream.give("s", received(11, finished=True))
    stage.core.input_queue.get(timeout=PATIENCE_S)
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True)
    stage.rest()
    assert stage.said["r"][-3:] == answers([*PROMPT, 10, 11], 3)
    stage.clean()


def test_a_paused_stage_plans_nothing_and_goes_on_afterwards(make: Make, upstream: Upstream) -> None:
    stage = receiver(make)
    stage.add("r", PROMPT, "s", max_tokens=1)
    stage.rest()
    stage.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    upstream.give("s", received(10, finished=True))
    stage.woken()
    assert "r" not in stage.said
    assert stage.scheduler.get_num_unfinished_requests() == 0
    stage.scheduler.set_pause_state(PauseState.UNPAUSED)
    stage.rest()
    assert stage.said["r"] == [answer([*PROMPT, 10])]
    stage.clean()


def test_a_stream_that_has_begun_keeps_its_slot_where_the_runner_has_slots(make: Make, upstream: Upstream) -> None:
    stage = receiver(make, seqs=2, slots=True)
    for name in "ab":
        stage.add(name, PROMPT, name)
    stage.rest()
    for name in "ab":
        upstream.give(name, received(10))
    stage.until(lambda: len(stage.said) == 2)
    stage.add("plain", PROMPT, max_tokens=1)
    stage.step()
    assert "plain" not in stage.said
    assert stage.scheduler.max_num_active_reqs == 2
    stage.scheduler.finish_requests("a", ABORTED)
    stage.rest()
    assert "plain" in stage.said
    stage.scheduler.finish_requests("b", ABORTED)
    stage.clean()


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_in_between_each_stream_answers_to_all_that_it_was_sent(
    make: Make, upstream: Upstream, window: int, depth: int, seed: int
) -> None:
    dice = random.Random(f"{window} {depth} {seed}")
    stage = receiver(make, AsyncARScheduler if depth > 1 else ARScheduler, depth=depth, window=window, seqs=3)
    wholes: dict[str, list[int]] = {}
    todo: dict[str, list[list[int]]] = {}
    for number in range(8):
        name = f"s{number}"
        wholes[name] = [number + 1] * dice.randint(1, 9)
        todo[name] = [[dice.randint(10, 900) for _ in range(dice.randint(1, 9))] for _ in range(dice.randint(1, 6))]
        todo[name] += dice.choice([[], [[]]])
        stage.add(name, wholes[name], name, max_tokens=5)
    while todo:
        name = dice.choice(list(todo))
        tokens = todo[name].pop(0)
        wholes[name] += tokens
        upstream.give(name, received(*tokens, finished=not todo[name]))
        if not todo[name]:
            del todo[name]
        for _ in range(dice.randint(0, 3)):
            stage.step()
        if dice.random() < 0.1:
            stage.scheduler.reset_prefix_cache(reset_running_requests=True)
    stage.until(lambda: len(stage.ends) == len(wholes))
    for name, whole in wholes.items():
        assert stage.ends[name].finish_reason == FinishReason.LENGTH, name
        assert stage.said[name][-5:] == answers(whole, 5), name
    stage.clean()
    with pytest.raises(queue.Empty):
        upstream.told.get_nowait()


def test_requests_that_all_hold_blocks_and_all_want_more_give_way(make: Make, upstream: Upstream) -> None:
    """With none running vLLM preempts nobody: each would wait for the others' blocks for ever."""
    stage = receiver(make)
    spare = stage.scheduler.kv_cache_manager.block_pool.get_new_blocks(stage.free_blocks - 6)
    for name in ("a", "b", "c"):
        stage.add(name, PROMPT, name, max_tokens=2)  # two blocks each
    stage.rest()
    for name in ("a", "b", "c"):
        upstream.give(name, received(10))
    stage.until(lambda: all(len(stage.said.get(name, [])) >= 1 for name in ("a", "b", "c")))
    for token in range(11, 16):
        for name in ("a", "b", "c"):
            upstream.give(name, received(token, finished=token == 15))
    stage.until(lambda: stage.ends.keys() == {"a", "b", "c"})
    for name in ("a", "b", "c"):
        assert stage.said[name][-2:] == answers([*PROMPT, *range(10, 16)], 2)
    stage.scheduler.kv_cache_manager.block_pool.free_blocks(spare)
    stage.clean()
