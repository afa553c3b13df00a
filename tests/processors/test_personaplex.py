"""PersonaPlex's frames: every one once, complete, in the codec's order, as early as the options say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.processors.adapter import Adapter, Connector, Request
from triptych.processors.personaplex import talker_to_codec
from triptych.transfer.payload import StagePayload

WIDTH = 16  # the talker also gives the codebooks of the user's voice


def rows(count: int) -> torch.Tensor:
    """`[count, 16]`, each code another: step and codebook can be read from it."""
    return torch.arange(count).reshape(-1, 1) * 100 + torch.arange(WIDTH)


def step(adapter: Adapter, row: torch.Tensor, request: Request | None = None, *, flush: bool = False) -> StagePayload:
    request = request or Request()
    request.additional_information = {"codes": {"audio": row.reshape(1, -1)}}
    return talker_to_codec(adapter, None, request, is_finished=flush)


def frames(payload: StagePayload) -> list[list[int]]:
    """The payload's frames: eight codes each."""
    if payload.codes is None:
        return []
    audio = payload.codes.audio
    assert audio.dtype is torch.long
    assert audio.ndim == 1
    assert audio.numel() > 0
    return [list(frame) for frame in zip(*audio.reshape(8, -1).tolist(), strict=True)]


def whole(first: int, last: int) -> list[list[int]]:
    """Frames `first` to `last - 1` of `rows`: codebook 0 of the step, the others of the next."""
    return [[t * 100] + [(t + 1) * 100 + book for book in range(1, 8)] for t in range(first, last)]


def says_nothing_ends(payload: StagePayload) -> bool:
    assert payload.codes is None
    assert payload.meta is not None
    flags = (payload.meta.finished, payload.meta.is_segment_finished)
    assert all(flag.dtype is torch.bool and flag.shape == () for flag in flags)
    return not any(flag.item() for flag in flags)


def test_a_frame_takes_the_row_after_it_and_is_laid_out_codebook_by_codebook() -> None:
    adapter = Adapter(initial_codec_chunk_frames=2, codec_chunk_frames=2)
    source = rows(3)
    assert says_nothing_ends(step(adapter, source[0]))
    assert says_nothing_ends(step(adapter, source[1]))
    payload = step(adapter, source[2])
    assert payload.codes is not None
    assert payload.codes.audio.tolist() == [
        0,
        100,
        101,
        201,
        102,
        202,
        103,
        203,
        104,
        204,
        105,
        205,
        106,
        206,
        107,
        207,
    ]


@given(st.integers(0, 30), st.integers(1, 6), st.integers(1, 6), st.lists(st.booleans(), min_size=30, max_size=30))
def test_every_complete_frame_is_sent_once_in_chunks_of_the_configured_sizes(
    count: int, initial: int, steady: int, flushes: list[bool]
) -> None:
    adapter = Adapter(initial_codec_chunk_frames=initial, codec_chunk_frames=steady)
    source = rows(count)
    sent: list[list[int]] = []
    sizes: list[int] = []
    for number in range(count):
        got = frames(step(adapter, source[number], flush=flushes[number]))
        sent += got
        sizes += [len(got)] if got else []
    last = frames(talker_to_codec(adapter, None, Request(resumable=False), is_finished=True))
    assert sent + last == whole(0, max(0, count - 1))
    assert sizes == [initial, *[steady] * (len(sizes) - 1)][: len(sizes)]
    assert len(last) < (steady if sizes else initial)
    assert adapter.request_payload == {}


def test_a_segment_s_end_is_none_while_rows_are_kept() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=5)
    assert says_nothing_ends(step(adapter, rows(1)[0], flush=True))


def test_the_end_of_a_request_sends_what_there_is_and_leaves_the_flags_to_the_adapter() -> None:
    adapter = Adapter(codec_chunk_frames=25)
    for row in rows(4):
        assert frames(step(adapter, row)) == []
    payload = step(adapter, rows(5)[4], Request(resumable=False), flush=True)
    assert frames(payload) == whole(0, 4)
    assert payload.meta is None
    assert adapter.request_payload == {}


@pytest.mark.parametrize("count", [0, 1])
def test_a_request_that_ends_with_no_frame_sends_an_empty_payload(count: int) -> None:
    adapter = Adapter()
    for row in rows(count):
        step(adapter, row)
    assert talker_to_codec(adapter, None, Request(resumable=False), is_finished=True) == StagePayload()
    assert adapter.request_payload == {}


def test_after_an_abort_the_same_id_begins_without_the_rows_of_before() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=1)
    step(adapter, rows(1)[0])
    adapter.cleanup_sender("ext")
    assert says_nothing_ends(step(adapter, rows(2)[1]))
    assert frames(step(adapter, rows(3)[2])) == whole(1, 2)


def test_streams_do_not_share_rows() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=1)
    source = rows(4)
    for number in range(4):
        for name in ("a", "b"):
            got = frames(step(adapter, source[number] + (1000 if name == "b" else 0), Request(name)))
            shift = 1000 if name == "b" else 0
            assert got == [[code + shift for code in frame] for frame in whole(number - 1, number) if number]


def test_the_last_row_of_a_step_counts() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=1)
    request = Request(information={"codes": {"audio": rows(3)}})
    talker_to_codec(adapter, None, request)
    request.additional_information = {"codes": {"audio": rows(4)}}
    assert frames(talker_to_codec(adapter, None, request)) == whole(2, 3)


def test_the_output_is_read_where_the_request_has_no_codes() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=1)
    source = rows(3)
    without: list[Any] = [None, {"codes": {}}]
    for information in without:
        talker_to_codec(adapter, {"codes": {"audio": source[:1]}}, Request(information=information))
    request = Request(information={"codes": {"audio": source[1:2]}})
    assert frames(talker_to_codec(adapter, {"codes": {"audio": source[2:]}}, request))[0][1:] == whole(0, 1)[0][1:]


def test_rows_are_copied_from_memory_that_the_model_writes_to_again() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=1)
    memory = rows(1).clone()
    step(adapter, memory)
    memory += 100
    assert frames(step(adapter, memory)) == whole(0, 1)


def test_rows_of_a_model_that_is_warming_up_are_no_sound() -> None:
    adapter = Adapter(initial_codec_chunk_frames=1, codec_chunk_frames=1)
    assert says_nothing_ends(step(adapter, rows(1)[0] - 1))
    assert says_nothing_ends(step(adapter, rows(1)[0]))
    users = rows(2)[1].clone()
    users[8:] = -1
    assert frames(step(adapter, users)) == whole(0, 1)


def test_without_options_chunks_are_of_25_frames() -> None:
    configs: list[dict[str, Any]] = [{}, {"extra": {}}, {"extra": {"initial_codec_chunk_frames": 0}}]
    configs.append({"codec_chunk_frames": 25})  # options right at the top
    for config in configs:
        adapter = Adapter()
        adapter.connector = Connector(config)
        source = rows(26)
        for row in source[:25]:
            assert frames(step(adapter, row)) == []
        assert frames(step(adapter, source[25])) == whole(0, 25)


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        ([1] * 8, "not a list"),
        (torch.zeros(8, dtype=torch.long), "not torch.int64 [8]"),
        (torch.zeros(1, 7, dtype=torch.long), "not torch.int64 [1, 7]"),
        (torch.zeros(1, 1, 8, dtype=torch.long), "not torch.int64 [1, 1, 8]"),
        (torch.zeros(1, 8), "not torch.float32 [1, 8]"),
        (torch.zeros(1, 8, dtype=torch.bool), "not torch.bool [1, 8]"),
    ],
)
@pytest.mark.parametrize("place", ["request", "output"])
def test_codes_of_a_wrong_shape_are_named_and_change_nothing(audio: Any, said: str, place: str) -> None:
    adapter = Adapter()
    source = {"codes": {"audio": audio}}
    request = Request(information=source if place == "request" else None)
    with pytest.raises(ValueError, match=re.escape(f"[rows, at least 8], {said}")):
        talker_to_codec(adapter, source if place == "output" else None, request)
    assert adapter.request_payload == {}


@pytest.mark.parametrize("name", ["codec_chunk_frames", "initial_codec_chunk_frames"])
@pytest.mark.parametrize("value", [-1, 1.5, "5", True])
def test_an_option_that_is_no_size_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"option {name} must be a positive integer, not {value!r}")):
        talker_to_codec(Adapter(**{name: value}), None, Request())
