"""Sound formats: whatever way the samples come, what is decoded again is the sound."""

from __future__ import annotations

import asyncio
import builtins
import gc
import importlib
import io
import threading
import wave
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.gateway.sound.formats import FORMATS, FormatUnavailable, content_type, encoder, whole

RATE = 24_000
LOSSY = ("mp3", "opus", "aac")
TONE = (np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE) * 8000).astype("<i2").tobytes()


def decoded(form: str, data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """Samples from -1 to 1, and their rate."""
    if form == "pcm":
        return np.frombuffer(data, "<i2") / 32768, RATE
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(stream)]
        rate = stream.rate
    found = np.concatenate(frames) if frames else np.zeros(0, np.int16)
    return (found / 32768 if found.dtype == np.int16 else found), rate


def in_pieces(form: str, pcm: bytes, sizes: list[int], rate: int = RATE) -> bytes:
    made = encoder(form, rate)
    out, at = [], 0
    for size in sizes:
        out.append(made.feed(pcm[at : at + 2 * size]))
        at += 2 * size
    out += [made.feed(pcm[at:]), made.finish()]
    made.close()
    return b"".join(out)


@pytest.mark.parametrize("form", ["pcm", "wav", "flac"])
@given(sizes=st.lists(st.integers(0, 5000), max_size=8))
@settings(max_examples=20, deadline=None)
def test_lossless_formats_give_the_samples_back_however_they_came(form: str, sizes: list[int]) -> None:
    samples, rate = decoded(form, in_pieces(form, TONE, sizes))
    assert rate == RATE
    assert (samples * 32768).astype("<i2").tobytes() == TONE


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("rate", [8_000, 22_050, 24_000, 44_100, 48_000, 96_000])
def test_lossy_formats_give_as_long_a_sound_of_the_same_tone(form: str, rate: int) -> None:
    pcm = (np.sin(2 * np.pi * 440 * np.arange(rate) / rate) * 8000).astype("<i2").tobytes()
    samples, found = decoded(form, in_pieces(form, pcm, [rate // 50] * 49, rate))
    assert abs(len(samples) / found - 1) < 0.2
    middle = samples[len(samples) // 4 : len(samples) * 3 // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(int(spectrum.argmax()) * found / len(middle) - 440) < 10


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "wav"])
def test_a_stream_begins_before_a_tenth_of_a_second_has_gone_in(form: str) -> None:
    made = encoder(form, RATE)
    out, fed = b"", 0
    while not out:
        out = made.feed(TONE[fed : fed + 480])
        fed += 480
    made.close()
    assert fed / 2 / RATE <= 0.1


def test_a_wav_file_says_how_long_it_is() -> None:
    with wave.open(io.BytesIO(whole("wav", RATE, TONE))) as file:
        assert (file.getnframes(), file.getframerate(), file.getsampwidth(), file.getnchannels()) == (RATE, RATE, 2, 1)
    with wave.open(io.BytesIO(whole("wav", RATE, b""))) as file:
        assert file.getnframes() == 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_almost_nothing_is_a_sound_too(form: str, count: int) -> None:
    whole(form, RATE, TONE[: 2 * count])


@pytest.mark.parametrize("form", FORMATS)
def test_half_a_sample_is_refused_and_closing_in_the_middle_is_allowed(form: str) -> None:
    made = encoder(form, RATE)
    made.feed(TONE[:100])
    with pytest.raises(ValueError, match="no whole number of samples"):
        made.feed(b"abc")
    made.close()
    made.close()


def test_what_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="there are wav, pcm, mp3"):
        encoder("midi", RATE)
    with pytest.raises(ValueError, match="from 8000 to 192000"):
        encoder("pcm", 5)
    assert content_type("pcm", 16_000) == b"audio/pcm;rate=16000;channels=1"


def test_without_pyav_wav_and_pcm_work_and_the_others_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str, *rest: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", gone)
    assert whole("pcm", RATE, TONE) == TONE
    assert whole("wav", RATE, TONE)
    with pytest.raises(FormatUnavailable, match=r"triptych\[speech\]"):
        encoder("mp3", RATE)


async def test_an_encoder_may_be_fed_by_another_thread_each_time() -> None:
    made = encoder("flac", RATE)
    out = [await asyncio.to_thread(made.feed, TONE[at : at + 960]) for at in range(0, len(TONE), 960)]
    out.append(await asyncio.to_thread(made.finish))
    made.close()
    assert (decoded("flac", b"".join(out))[0] * 32768).astype("<i2").tobytes() == TONE


@pytest.mark.parametrize("form", LOSSY)
def test_closing_waits_for_the_thread_that_still_feeds(form: str) -> None:
    for _ in range(30):
        made = encoder(form, RATE)
        thread = threading.Thread(target=lambda made=made: [made.feed(TONE[:9600]) for _ in range(20)])
        thread.start()
        made.close()
        thread.join()
        assert made.feed(TONE[:100]) == made.finish() == b""


def test_a_thousand_encoders_leave_nothing() -> None:
    def some(count: int) -> int:
        for number in range(count):
            made = encoder(("mp3", "opus", "flac")[number % 3], RATE)
            made.feed(TONE[:9600])
            made.close()
        gc.collect()
        with builtins.open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    some(150)
    before = some(150)
    assert some(700) - before < 5000  # pages: 20 MB
