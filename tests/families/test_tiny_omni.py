"""The tiny speaking model: sound in chunks is sound in one pass, and a processor's state is its stream's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.families.tiny_omni.processors import codec_to_sound, mark_of, talker_to_codec, thinker_to_talker
from triptych.families.tiny_omni.sound import CODEBOOKS, CODES, HOP, sound

FRAMES = st.lists(st.lists(st.integers(0, CODES - 1), min_size=CODEBOOKS, max_size=CODEBOOKS), min_size=1, max_size=80)


def manager(**options: Any) -> Any:
    return SimpleNamespace(connector=SimpleNamespace(config={"extra": options}), request_payload={})


def request(name: str = "s") -> Any:
    return SimpleNamespace(external_req_id=name, resumable=False)


def spoken(frames: torch.Tensor, to: Any, name: str = "s") -> list[torch.Tensor]:
    """The sound of the chunks that these frames become, one frame for each step."""
    chunks = [talker_to_codec(to, {"codes": {"audio": frames[n : n + 1]}}, request(name)) for n in range(len(frames))]
    chunks.append(talker_to_codec(to, None, request(name), is_finished=True))
    return [
        sound(chunk.codes.audio, chunk.meta.left_context_size or 0)
        for chunk in chunks
        if chunk is not None and chunk.codes is not None and chunk.meta is not None
    ]


@given(frames=FRAMES, initial=st.integers(1, 9), steady=st.integers(1, 30))
def test_sound_in_chunks_of_any_size_is_the_sound_of_one_pass(
    frames: list[list[int]], initial: int, steady: int
) -> None:
    codes = torch.tensor(frames)
    parts = spoken(codes, manager(initial_codec_chunk_frames=initial, codec_chunk_frames=steady))
    assert torch.equal(torch.cat(parts), sound(codes))
    sizes = [len(part) // HOP for part in parts]
    assert sizes[0] == min(initial, len(frames))
    assert all(size == steady for size in sizes[1:-1])


@given(frames=FRAMES)
def test_a_frame_sounds_otherwise_after_another_frame(frames: list[list[int]]) -> None:
    codes = torch.tensor(frames)
    assert sound(codes).shape == (len(frames) * HOP,)
    assert torch.equal(sound(codes, len(frames) - 1), sound(codes)[-HOP:])


@pytest.mark.parametrize(
    ("codes", "left"),
    [
        (torch.zeros(2, 7, dtype=torch.int64), 0),
        (torch.zeros(2, 8), 0),
        (torch.zeros(8, dtype=torch.int64), 0),
        (torch.full((1, 8), CODES), 0),
        (torch.full((1, 8), -1), 0),
        (torch.zeros(2, 8, dtype=torch.int64), 3),
        (torch.zeros(2, 8, dtype=torch.int64), -1),
    ],
)
def test_codes_that_are_none_are_refused(codes: torch.Tensor, left: int) -> None:
    with pytest.raises(ValueError):
        sound(codes, left)


def test_two_streams_of_one_stage_do_not_mix() -> None:
    to = manager(initial_codec_chunk_frames=3, codec_chunk_frames=3)
    one, two = torch.full((1, 8), 1), torch.full((1, 8), 2)
    for _ in range(2):
        assert talker_to_codec(to, {"codes": {"audio": one}}, request("one")) is None
        assert talker_to_codec(to, {"codes": {"audio": two}}, request("two")) is None
    chunk = talker_to_codec(to, {"codes": {"audio": one}}, request("one"))
    assert chunk is not None
    assert chunk.codes is not None
    assert torch.equal(chunk.codes.audio, one.expand(3, 8))


def test_the_thinkers_chunk_has_a_hidden_state_for_each_token_and_the_streams_mark() -> None:
    chunk = thinker_to_talker(manager(), {"hidden": torch.ones(1, 4)}, request("abc"), new_token_ids=[5])
    assert chunk is not None
    assert chunk.ids is not None
    assert chunk.ids.tokens == [5]
    assert chunk.extra == {"mark": mark_of("abc")}
    assert thinker_to_talker(manager(), None, request(), is_finished=True, new_token_ids=[]) is None


def test_a_thinker_that_gives_no_hidden_states_is_told_what_its_stage_lacks() -> None:
    with pytest.raises(ValueError, match="`take: hidden`"):
        thinker_to_talker(manager(), None, request(), new_token_ids=[5])


def test_the_codecs_chunk_has_samples_and_their_rate() -> None:
    samples = torch.zeros(4, dtype=torch.int16)
    chunk = codec_to_sound(manager(), {"sound": samples, "sample_rate": 24000}, request())
    assert chunk is not None
    assert chunk.extra == {"sound": samples, "sample_rate": 24000}
    assert codec_to_sound(manager(), None, request(), is_finished=True) is None


def test_codes_are_recorded_where_the_stage_is_told_to(tmp_path: Path) -> None:
    codes = torch.arange(16).reshape(2, 8)
    spoken(codes, manager(record=str(tmp_path)), "odd/../id")
    (file,) = tmp_path.iterdir()
    assert np.fromfile(file, np.int16).reshape(-1, 8).tolist() == codes.tolist()
