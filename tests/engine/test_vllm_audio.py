"""The EC connector between real engines, with audio."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Handover
from tests.engine.engines import bare_part, metadata_parts, sound

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]


def reference(sounds: Handover, seed: int) -> str:
    """The consumer's answer to the clip encoded by itself: under another name, so it cannot know it as the same."""
    before = sounds.consume.metric("triptych_ec_items_total", result="fallback", reason="missing")
    answer = sounds.consume.chat([sound(seed) | {"uuid": f"reference {seed}"}])
    assert sounds.consume.metric("triptych_ec_items_total", result="fallback", reason="missing") == before + 1
    return answer.text


@pytest.mark.parametrize(("media", "seed"), [("raw", 1), ("metadata", 2)])
def test_a_consumer_takes_the_encoders_output_and_answers_as_if_by_itself(
    sounds: Handover, media: str, seed: int
) -> None:
    clip, before = sound(seed), sounds.consume.metric("triptych_ec_items_total", result="hit")
    announced = sounds.encode.encode([clip]).ec
    (entry,) = announced.values()
    assert entry["item_indices"] == [0]
    assert list(entry["metadata"]) == ["audio_num_tokens"]
    parts = [clip] if media == "raw" else metadata_parts(announced, "audio")
    answer = sounds.consume.chat(parts, ec_transfer_params=announced)
    assert answer.status == 200
    assert sounds.consume.metric("triptych_ec_items_total", result="hit") == before + 1
    assert answer.text == reference(sounds, seed)
    assert answer.text != reference(sounds, seed + 100)


def test_a_clip_of_another_sampling_rate_is_resampled(sounds: Handover) -> None:
    clip = sound(5, rate=44100)
    announced = sounds.encode.encode([clip]).ec
    assert sounds.consume.chat(metadata_parts(announced, "audio")).text == sounds.consume.chat([clip]).text


def test_a_clip_that_never_was_fails_that_request_alone(sounds: Handover) -> None:
    assert sounds.consume.chat([bare_part("nothing", "audio", {"audio_num_tokens": [6]})]).status == 500
    assert sounds.consume.chat([sound(3)]).status == 200


def test_a_length_that_does_not_fit_the_rows_fails_that_request_alone(sounds: Handover) -> None:
    announced = sounds.encode.encode([sound(4)]).ec
    (identifier,) = announced
    assert sounds.consume.chat([bare_part(identifier, "audio", {"audio_num_tokens": [3]})]).status == 500
    assert sounds.consume.chat(metadata_parts(announced, "audio")).status == 200
