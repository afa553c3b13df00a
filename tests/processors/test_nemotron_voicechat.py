"""Nemotron VoiceChat's rows: each once to a codec that keeps its state, none of the prompt's, none lost."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.processors.adapter import Adapter, Request
from triptych.processors.nemotron_voicechat import talker_to_codec
from triptych.transfer.payload import StagePayload

STREAMING = {"codec_streaming": True, "nvc_logical_prompt_len": 1}


def rows(count: int) -> torch.Tensor:
    return torch.arange(count).reshape(-1, 1) * 100 + torch.arange(31)


def output(count: int, **meta: Any) -> dict[str, Any]:
    return {"codes": {"audio": rows(count)}, "meta": {**STREAMING, **meta}}


def sent(payload: StagePayload | None) -> list[int]:
    """Which rows of `rows` a payload has."""
    if payload is None or payload.codes is None:
        return []
    audio = payload.codes.audio
    assert audio.dtype is torch.long
    assert audio.device.type == "cpu"
    assert torch.equal(audio, rows(10_000)[audio[:, 0] // 100])
    return [int(first) // 100 for first in audio[:, 0]]


def ends(payload: StagePayload | None) -> tuple[bool, bool]:
    assert payload is not None
    assert payload.meta is not None
    flags = (payload.meta.finished, payload.meta.is_segment_finished)
    assert all(flag.dtype is torch.bool and flag.shape == () for flag in flags)
    assert payload.meta.codec_streaming is True
    return bool(flags[0]), bool(flags[1])


def test_a_chunk_of_one_row_is_the_row_itself() -> None:
    payload = talker_to_codec(Adapter(codec_chunk_frames=1), output(1), Request())
    assert payload is not None
    assert payload.codes is not None
    assert payload.codes.audio.shape == (1, 31)
    assert sent(payload) == [0]
    assert ends(payload) == (False, False)


@given(
    st.integers(1, 5), st.lists(st.integers(0, 4), max_size=12), st.integers(1, 6), st.lists(st.booleans(), min_size=12)
)
def test_every_row_behind_the_prompt_is_sent_once_and_none_before_there_are_enough(
    prompt: int, grows: list[int], wanted: int, flushes: list[bool]
) -> None:
    adapter = Adapter(codec_chunk_frames=wanted)
    total = prompt - 1
    got: list[int] = []
    for grow, flush in zip(grows, flushes, strict=False):
        total += grow
        payload = talker_to_codec(adapter, output(total, nvc_logical_prompt_len=prompt), Request(), flush)
        chunk = sent(payload)
        assert not chunk or len(chunk) >= wanted
        assert total - (prompt - 1) - len(got) - len(chunk) < wanted
        assert ends(payload) == (False, False)
        got += chunk
    last = talker_to_codec(adapter, None, Request(resumable=False, information={"meta": STREAMING}), is_finished=True)
    assert got + sent(last) == list(range(prompt - 1, total))
    assert ends(last) == (True, False)
    assert adapter.request_payload == {}


def test_too_few_rows_make_an_empty_payload_that_ends_nothing_even_at_a_segment_s_end() -> None:
    payload = talker_to_codec(Adapter(codec_chunk_frames=2), output(1), Request(), is_finished=True)
    assert payload is not None
    assert payload.codes is None
    assert ends(payload) == (False, False)


def test_a_step_without_codes_makes_an_empty_payload_too() -> None:
    adapter = Adapter(codec_chunk_frames=1)
    empties: list[Any] = [None, {}, {"codes": {}}, {"codes": {"audio": torch.empty(0, dtype=torch.long)}}]
    for empty in empties:
        payload = talker_to_codec(adapter, empty, Request(information={"codec_streaming": True}))
        assert payload is not None
        assert payload.codes is None
        assert ends(payload) == (False, False)


def test_rows_that_wait_are_sent_with_the_end_of_the_request_whatever_that_step_has() -> None:
    adapter = Adapter(codec_chunk_frames=13)
    talker_to_codec(adapter, output(5), Request())
    payload = talker_to_codec(adapter, None, Request(resumable=False), is_finished=True)
    assert sent(payload) == [0, 1, 2, 3, 4]
    assert ends(payload) == (True, False)


def test_after_an_abort_the_same_id_starts_over() -> None:
    adapter = Adapter(codec_chunk_frames=1)
    assert sent(talker_to_codec(adapter, output(3), Request())) == [0, 1, 2]
    adapter.cleanup_sender("ext")
    assert sent(talker_to_codec(adapter, output(2), Request())) == [0, 1]


def test_streams_do_not_share_rows() -> None:
    adapter = Adapter(codec_chunk_frames=1)
    assert sent(talker_to_codec(adapter, output(3), Request("a"))) == [0, 1, 2]
    assert sent(talker_to_codec(adapter, output(2), Request("b"))) == [0, 1]
    assert sent(talker_to_codec(adapter, output(4), Request("a"))) == [3]


def test_rows_are_copied_from_memory_that_the_model_writes_to_again() -> None:
    adapter = Adapter(codec_chunk_frames=2)
    first = output(1)
    talker_to_codec(adapter, first, Request())
    first["codes"]["audio"].fill_(-7)
    payload = talker_to_codec(adapter, output(2), Request())
    assert sent(payload) == [0, 1]


@pytest.mark.parametrize(
    ("step", "request_has", "first"),
    [
        ({"nvc_logical_prompt_len": 3}, {"nvc_logical_prompt_len": 2}, 2),
        ({"meta": {"nvc_logical_prompt_len": 3}}, {"nvc_logical_prompt_len": 2}, 2),
        ({"nvc_logical_prompt_len": torch.tensor([3])}, {}, 2),
        ({}, {"nvc_logical_prompt_len": 2}, 1),
        ({}, {"meta": {"nvc_logical_prompt_len": 2}}, 1),
    ],
)
def test_the_prompt_s_length_is_the_step_s_or_else_the_request_s(
    step: dict[str, Any], request_has: dict[str, Any], first: int
) -> None:
    request = Request(information={"codec_streaming": True, **request_has})
    payload = talker_to_codec(Adapter(codec_chunk_frames=1), {"codes": {"audio": rows(4)}, **step}, request)
    assert sent(payload) == list(range(first, 4))


def test_the_prompt_s_length_is_remembered() -> None:
    adapter = Adapter(codec_chunk_frames=1)
    assert sent(talker_to_codec(adapter, output(4, nvc_logical_prompt_len=3), Request())) == [2, 3]
    assert sent(talker_to_codec(adapter, {"codes": {"audio": rows(5)}}, Request())) == [4]


def test_a_prompt_s_length_that_nobody_says_is_an_error() -> None:
    adapter = Adapter()
    with pytest.raises(ValueError, match="nvc_logical_prompt_len is neither in the model's output nor in the request"):
        talker_to_codec(adapter, {"codes": {"audio": rows(4)}}, Request(information={"codec_streaming": True}))
    assert adapter.request_payload == {}


def test_what_the_model_writes_down_goes_before_what_the_request_came_with() -> None:
    request = Request(information={"codec_streaming": True, "nvc_logical_prompt_len": 1})
    request.model_intermediate_buffer = {"codec_streaming": True, "nvc_logical_prompt_len": 4}
    assert sent(talker_to_codec(Adapter(codec_chunk_frames=1), {"codes": {"audio": rows(4)}}, request)) == [3]


def test_rows_that_get_fewer_are_an_error_and_change_nothing() -> None:
    adapter = Adapter(codec_chunk_frames=1)
    talker_to_codec(adapter, output(5), Request())
    with pytest.raises(ValueError, match=r"codes\.audio has 4 rows of sound after 5 before"):
        talker_to_codec(adapter, output(4), Request())
    assert sent(talker_to_codec(adapter, output(6), Request())) == [5]


def test_a_codec_without_state_gets_all_the_sound_so_far_and_what_of_it_it_has_had() -> None:
    adapter = Adapter(codec_chunk_frames=2)
    got = []
    for count in range(2, 8):
        step = {"codes": {"audio": rows(count)}, "nvc_logical_prompt_len": 2}
        payload = talker_to_codec(adapter, step, Request())
        if payload is not None:
            assert payload.meta is not None
            assert payload.meta.finished is None  # the adapter's to say
            got.append((sent(payload), payload.meta.left_context_size))
    last = talker_to_codec(adapter, step, Request(resumable=False), is_finished=True)
    assert got == [([1, 2], 0), ([1, 2, 3, 4], 2), ([1, 2, 3, 4, 5, 6], 4)]
    assert last is None
    assert adapter.request_payload == {}


def test_a_codec_without_state_gets_the_rest_with_the_end_of_the_request() -> None:
    adapter = Adapter(codec_chunk_frames=2)
    for count in (2, 3):
        talker_to_codec(adapter, {"codes": {"audio": rows(count)}, "nvc_logical_prompt_len": 1}, Request())
    last = talker_to_codec(adapter, None, Request(resumable=False), is_finished=True)
    assert last is not None
    assert last.meta is not None
    assert (sent(last), last.meta.left_context_size) == ([0, 1, 2], 2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"codes": {"audio": torch.zeros(1, 30, dtype=torch.long)}}, "[rows, 31], not torch.int64 [1, 30]"),
        ({"codes": {"audio": torch.zeros(1, 32, dtype=torch.long)}}, "[rows, 31], not torch.int64 [1, 32]"),
        ({"codes": {"audio": torch.zeros(31, dtype=torch.long)}}, "[rows, 31], not torch.int64 [31]"),
        ({"codes": {"audio": torch.zeros(1, 31)}}, "[rows, 31], not torch.float32 [1, 31]"),
        ({"codes": {"audio": [[0] * 31]}}, "[rows, 31], not a list"),
        (output(1, nvc_logical_prompt_len=0), "nvc_logical_prompt_len must be a positive integer, not 0"),
        (output(1, nvc_logical_prompt_len=True), "nvc_logical_prompt_len must be a positive integer, not True"),
        (output(1, nvc_logical_prompt_len=2.0), "nvc_logical_prompt_len must be a positive integer, not 2.0"),
        (output(1, nvc_logical_prompt_len=torch.tensor([1, 2])), "nvc_logical_prompt_len must be a positive integer"),
        (output(1, codec_streaming="yes"), "codec_streaming must be true or false, not 'yes'"),
    ],
)
def test_a_field_that_cannot_be_is_named_and_changes_nothing(broken: dict[str, Any], said: str) -> None:
    adapter = Adapter()
    with pytest.raises(ValueError, match=re.escape(said)):
        talker_to_codec(adapter, broken, Request())
    assert adapter.request_payload == {}


def test_codec_streaming_may_be_a_tensor_and_once_said_holds() -> None:
    adapter = Adapter(codec_chunk_frames=1)
    talker_to_codec(adapter, output(1, codec_streaming=torch.tensor(True)), Request())
    assert ends(talker_to_codec(adapter, None, Request())) == (False, False)


def test_without_an_option_chunks_are_of_13_rows() -> None:
    adapter = Adapter()
    assert sent(talker_to_codec(adapter, output(12), Request())) == []
    assert sent(talker_to_codec(adapter, output(13), Request())) == list(range(13))
