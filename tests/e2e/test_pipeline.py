"""A speaking model of three real vLLM stages: what its users hear is what its stages made, and only theirs."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import shutil
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
from openai import APIError

from tests.e2e.pipeline_rig import Pipeline, all_or_first_error, hear, left, pipeline
from tests.e2e.rig import client
from triptych.families.tiny_omni.sound import SAMPLE_RATE, TAIL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WORDS = ["the", "sea", "is", "calm", "tonight", "and", "nobody", "is", "listening", "to", "what", "it", "says"]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pipeline(tmp_path_factory.mktemp("omni")) as up:
        yield up


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))


async def nothing_left(found: Pipeline) -> None:
    async def idle() -> bool:
        return not any((await asyncio.to_thread(left, found)).values())

    async with asyncio.timeout(30):
        while not await idle():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)


async def test_the_first_sound_comes_before_the_thinkers_last_token(speaking: Pipeline) -> None:
    async with speaking.client() as openai:
        await hear(openai, "warm up", 8)
        heard = await hear(openai, "tell me a long story", 200)
    assert heard.sound_at[0] < heard.words_at[-1]
    legs = {leg["name"]: leg for leg in speaking.timeline(heard.request_id)["legs"]}
    assert legs["sound"]["first"] < legs["thinker"]["ended"]
    assert {"thinker", "talker", "codec", "sound"} <= legs.keys()
    assert legs["sound"]["bytes_in"] == len(heard.pcm)


async def test_streamed_sound_is_one_pass_over_the_codes_of_the_run(speaking: Pipeline) -> None:
    rng = random.Random(1)

    async def one(openai: Any) -> None:
        most = rng.randint(1, 60)
        heard = await hear(openai, text(rng), most)
        assert heard.pcm == speaking.whole(heard.request_id)
        assert len(speaking.codes(heard.request_id)) == most + TAIL - 1
        assert len(heard.transcript.split()) == most
        assert heard.finish == "length"

    async with speaking.client() as openai:
        for _ in range(4):
            await one(openai)
        await all_or_first_error(*(one(openai) for _ in range(16)))
    await nothing_left(speaking)


async def test_requests_that_leave_change_nobody_elses_sound(speaking: Pipeline) -> None:
    rng = random.Random(2)
    gate = asyncio.Semaphore(16)

    async def one(number: int, openai: Any) -> None:
        leaves = rng.random() < 1 / 3
        async with gate:
            heard = await hear(openai, f"{number} {text(rng)}", 40, until_sound=rng.randint(1, 2) if leaves else None)
        if not leaves:
            assert heard.pcm == speaking.whole(heard.request_id)

    async with speaking.client() as openai:
        await all_or_first_error(*(one(number, openai) for number in range(48)))
    await nothing_left(speaking)


async def test_a_whole_answer_has_its_sound_and_transcript(speaking: Pipeline, tmp_path: Path) -> None:
    async with speaking.client() as openai:
        raw = await openai.chat.completions.with_raw_response.create(
            model="omni",
            messages=[{"role": "user", "content": "hello"}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
            max_tokens=30,
        )
    message = raw.parse().choices[0].message
    assert message.content is None
    assert message.audio.transcript
    assert raw.parse().usage.completion_tokens == 30
    data = base64.b64decode(message.audio.data)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE, 1, 2)
        pcm = file.readframes(file.getnframes())
    assert pcm == speaking.whole(raw.headers["x-request-id"])
    assert "codec;dur=" in raw.headers["server-timing"]
    if shutil.which("soxi"):
        path = tmp_path / "answer.wav"
        path.write_bytes(data)
        told = await asyncio.to_thread(subprocess.run, ["soxi", "-s", str(path)], capture_output=True, text=True)
        assert told.stdout.strip() == str(len(pcm) // 2)


@pytest.mark.parametrize("form", ["wav", "pcm", "flac", "mp3", "opus"])
async def test_speech_is_as_long_as_its_codes(speaking: Pipeline, form: Any) -> None:
    async with (
        speaking.client() as openai,
        openai.audio.speech.with_streaming_response.create(
            model="omni", voice="alloy", input="say this, please", response_format=form
        ) as answer,
    ):
        data = await answer.read()
        request_id = answer.headers["x-request-id"]
    want = speaking.whole(request_id)
    if form == "pcm":
        assert data == want
        return
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.audio
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        rate = stream.rate
    samples = sum(frame.shape[-1] for frame in frames)
    seconds = len(want) / 2 / SAMPLE_RATE
    assert abs(samples / rate - seconds) < 0.12
    if form in ("wav", "flac"):
        assert b"".join(frame.tobytes() for frame in frames) == want


async def test_a_client_that_leaves_frees_every_stage(speaking: Pipeline) -> None:
    async with speaking.client() as openai:
        heard = await hear(openai, "a very long story", 400, until_sound=1)
    assert heard.sound_at
    await nothing_left(speaking)


async def test_the_codec_serves_nobody_who_is_in_no_pipeline(speaking: Pipeline) -> None:
    async with client(speaking.engines.url("codec-0")) as openai:
        with pytest.raises(APIError):
            await openai.completions.create(model="omni", prompt=[0], max_tokens=5, timeout=20)
    await nothing_left(speaking)


async def test_text_alone_needs_only_the_thinker(speaking: Pipeline) -> None:
    async with speaking.client() as openai:
        raw = await openai.chat.completions.with_raw_response.create(
            model="omni", messages=[{"role": "user", "content": "hello"}], max_tokens=5
        )
    assert raw.parse().choices[0].message.content
    assert [leg["role"] for leg in speaking.timeline(raw.headers["x-request-id"])["legs"]] == ["combined"]
