"""What a client of a pipeline gets: text and sound as they come, or whole, in each format."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from typing import Any

import av
import httpx
import pytest

from tests.gateway.pipeline.rig import (
    RATE,
    WHOLE,
    Rig,
    Stage,
    begin,
    chunk,
    done,
    samples,
    says,
    sse,
    waits,
    word,
)
from triptych.http.request import Request


async def heard(stream: Any) -> tuple[str, bytes, list[str]]:
    """Transcript, sound, and the order in which pieces came."""
    text, sound, order = "", b"", []
    async for event in stream:
        for choice in event.choices:
            audio = choice.delta.audio
            if audio is not None and audio.transcript:
                text += audio.transcript
                order.append("text")
            if audio is not None and audio.data:
                sound += base64.b64decode(audio.data)
                order.append("sound")
            if choice.finish_reason:
                order.append(choice.finish_reason)
    return text, sound, order


async def test_a_streamed_chat_has_its_transcript_and_its_sound_and_then_the_end() -> None:
    async with Rig() as rig:
        async with rig.chat() as stream:
            text, sound, order = await heard(stream)
        assert (text, sound, order[-1]) == ("0 1 2 3 ", WHOLE, "length")
        await rig.nothing_left()


async def test_sound_goes_out_while_the_text_is_still_being_written() -> None:
    heard_first = asyncio.Event()

    async def thinks(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        await begin(request)
        await request.send(sse(word("one")))
        await heard_first.wait()
        await request.send(sse(word("two")))
        await request.send(sse(word(None, "stop")))
        await done(request)

    async with Rig(thinks) as rig, rig.chat() as stream:
        order = []
        async for event in stream:
            audio = event.choices[0].delta.audio if event.choices else None
            if audio is not None and audio.data:
                order.append("sound")
                heard_first.set()
            elif audio is not None and audio.transcript:
                order.append(audio.transcript)
        assert order.index("sound") < order.index("two")


async def test_usage_comes_last_where_it_is_asked_for_and_only_there() -> None:
    async with Rig() as rig:
        async with rig.chat(stream_options={"include_usage": True}) as stream:
            events = [event async for event in stream]
        assert events[-1].usage.completion_tokens == 4
        assert events[-1].choices == []
        async with rig.chat() as stream:
            assert all(event.usage is None for event in [event async for event in stream])


@pytest.mark.parametrize("form", ["wav", "pcm16", "flac"])
async def test_a_whole_chat_has_the_sound_in_its_message(form: Any) -> None:
    async with Rig() as rig, rig.openai() as openai:
        answer = await openai.chat.completions.create(
            model="omni",
            messages=[{"role": "user", "content": "hello"}],
            modalities=["text", "audio"],
            audio={"voice": "v", "format": form},
            max_tokens=4,
        )
        message = answer.choices[0].message
        assert message.content is None
        assert message.audio is not None
        assert message.audio.transcript == "0 1 2 3 "
        assert decoded(form, base64.b64decode(message.audio.data)) == WHOLE
        assert answer.kv_transfer_params is None  # type: ignore[attr-defined]
        await rig.nothing_left()


def decoded(form: str, data: bytes) -> bytes:
    if form in ("pcm", "pcm16"):
        return data
    if form == "wav":
        with wave.open(io.BytesIO(data)) as file:
            assert (file.getframerate(), file.getnchannels()) == (RATE, 1)
            return file.readframes(file.getnframes())
    with av.open(io.BytesIO(data)) as container:
        return b"".join(frame.to_ndarray().tobytes() for frame in container.decode(audio=0))


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("wav", "audio/wav"),
        ("pcm", "audio/pcm;rate=24000;channels=1"),
        ("flac", "audio/flac"),
        ("mp3", "audio/mpeg"),
        ("opus", "audio/ogg"),
        ("aac", "audio/aac"),
    ],
)
async def test_speech_says_what_it_is_and_is_that(form: Any, kind: str) -> None:
    async with Rig() as rig, rig.openai() as openai:
        answer = await openai.audio.speech.create(model="omni", voice="v", input="say this", response_format=form)
        assert answer.response.headers["content-type"] == kind
        if form in ("wav", "pcm", "flac"):
            assert decoded(form, answer.content) == WHOLE
        else:
            with av.open(io.BytesIO(answer.content)) as container:
                assert sum(1 for _ in container.decode(audio=0)) > 0
        assert ("content-length" in answer.response.headers) == (form == "wav")
        assert rig.thinker.asked[0]["messages"] == [{"role": "user", "content": "say this"}]
        assert rig.thinker.asked[0]["max_tokens"] == 5
        await rig.nothing_left()


async def test_speech_in_events_has_the_same_sound() -> None:
    async with Rig() as rig, httpx.AsyncClient() as client:
        body = {"model": "omni", "voice": "v", "input": "x", "response_format": "pcm", "stream_format": "sse"}
        answer = await client.post(rig.running.url + "/v1/audio/speech", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == WHOLE
        assert events[-1]["type"] == "speech.audio.done"
        assert events[-1]["usage"] is None or events[-1]["usage"]["completion_tokens"] == 5


async def test_each_stage_is_asked_under_one_stream_with_the_replica_before_it() -> None:
    async with Rig() as rig:
        async with rig.chat(extra_headers={"x-request-id": "mine"}, extra_body={"vllm_xargs": {"own": 1}}) as stream:
            await heard(stream)
        (first,), (talker,), (codec,) = (stage.asked for stage in rig.stages)
        stream_id = first["vllm_xargs"]["triptych_stream"]
        assert stream_id.startswith("mine-")
        assert len(stream_id) > 20
        assert first["vllm_xargs"] == {"own": 1, "triptych_stream": stream_id, "triptych_voice": "v"}
        assert "modalities" not in first
        assert "audio" not in first
        assert first["stream"] is True
        assert talker["vllm_xargs"] == {
            "triptych_stream": stream_id,
            "triptych_source": "127.0.0.1:1",
            "triptych_voice": "v",
        }
        assert talker["max_tokens"] == 511  # what the engine's context leaves
        assert codec["vllm_xargs"]["triptych_source"] == "127.0.0.1:2"


async def test_a_chat_without_sound_goes_to_the_first_stage_alone() -> None:
    async with Rig() as rig, rig.openai() as openai:
        answer = await openai.chat.completions.create(
            model="omni", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        assert answer.choices[0].message.content == "0 1 2 3 "
        assert [len(stage.asked) for stage in rig.stages] == [1, 0, 0]
        assert "vllm_xargs" not in rig.thinker.asked[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_what_stages_trust_cannot_be_sent_by_a_client(path: str) -> None:
    async with Rig() as rig, httpx.AsyncClient() as client:
        xargs = {"triptych_stream": "yours", "triptych_source": "evil:1", "triptych_voice": "x", "own": 1}
        body = {"model": "omni", "max_tokens": 1, "messages": [], "input": "", "prompt": "", "vllm_xargs": xargs}
        await client.post(rig.running.url + path, json=body)
        assert rig.thinker.asked[0]["vllm_xargs"] == {"own": 1}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"modalities": ["text", "audio"]}, "audio"),
        ("chat/completions", {"modalities": ["audio"], "audio": {"format": "midi"}}, "audio.format"),
        ("chat/completions", {"modalities": ["audio"], "audio": {"format": "wav"}, "stream": True}, "audio.format"),
        ("chat/completions", {"modalities": ["audio"], "audio": {"format": "wav"}, "n": 2}, "n"),
        ("chat/completions", {"modalities": ["audio"], "audio": {"format": "wav", "voice": 3}}, "audio.voice"),
        (
            "chat/completions",
            {"modalities": ["audio"], "audio": {"format": "wav"}, "use_beam_search": True},
            "use_beam_search",
        ),
        ("chat/completions", {"modalities": ["audio"], "audio": {"format": "wav"}, "vllm_xargs": 3}, "vllm_xargs"),
        ("audio/speech", {"input": ""}, "input"),
        ("audio/speech", {"input": 5}, "input"),
        ("audio/speech", {"input": "x" * 70_000}, "input"),
        ("audio/speech", {"input": "x", "response_format": "midi"}, "response_format"),
        ("audio/speech", {"input": "x", "speed": 2}, "speed"),
        ("audio/speech", {"input": "x", "voice": "v" * 65}, "voice"),
        ("audio/speech", {"input": "x", "stream_format": "tape"}, "stream_format"),
        ("audio/speech", {"input": "x", "stream_format": "sse", "response_format": "wav"}, "response_format"),
    ],
)
async def test_what_is_wrong_is_refused_with_its_field(path: str, body: dict[str, Any], field: str) -> None:
    async with Rig() as rig, httpx.AsyncClient() as client:
        given = {"model": "omni", "messages": [{"role": "user", "content": "x"}], **body}
        answer = await client.post(f"{rig.running.url}/v1/{path}", json=given)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert not any(stage.asked for stage in rig.stages)


async def test_the_timeline_and_the_header_have_every_stage_and_the_sound() -> None:
    async with Rig() as rig, rig.openai() as openai:
        raw = await openai.chat.completions.with_raw_response.create(
            model="omni",
            messages=[{"role": "user", "content": "x"}],
            modalities=["text", "audio"],
            audio={"voice": "v", "format": "wav"},
            max_tokens=2,
        )
        for name in ("thinker", "talker", "codec", "sound", "total"):
            assert f"{name};dur=" in raw.headers["server-timing"]
        await rig.nothing_left()
        timeline = rig.gateway.requests.get(raw.headers["x-request-id"]).to_dict()
        legs = {leg["name"]: leg for leg in timeline["legs"]}
        assert set(legs) == {"thinker", "talker", "codec", "sound"}
        assert {leg["status"] for leg in legs.values()} == {"success"}
        assert legs["sound"]["bytes_in"] == len(WHOLE)
        assert legs["sound"]["started"] <= legs["sound"]["first"] <= legs["sound"]["ended"]
        assert timeline["plan"] == "plain+sound"


async def test_over_tcp_it_is_the_same() -> None:
    async with Rig(connector="tcp") as rig:
        async with rig.chat() as stream:
            text, sound, _ = await heard(stream)
        assert (text, sound) == ("0 1 2 3 ", WHOLE)
        await rig.nothing_left()


async def test_a_thinker_may_itself_be_prefill_and_decode() -> None:
    async with Rig(split=True) as rig:
        async with rig.chat() as stream:
            text, sound, _ = await heard(stream)
        assert (text, sound) == ("0 1 2 3 ", WHOLE)
        (prefill,) = rig.stages[3].asked
        assert prefill["max_tokens"] == 1
        assert rig.thinker.asked[0]["kv_transfer_params"] is not None
        assert rig.talker.asked[0]["vllm_xargs"]["triptych_source"] == "127.0.0.1:1"
        await rig.nothing_left()
        (timeline,) = rig.gateway.requests
        assert timeline.plan == "p_d+sound"


async def test_a_hundred_at_once_each_hear_their_own() -> None:
    async def own(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        stream = body["vllm_xargs"]["triptych_stream"]
        seed = int(stream.partition("-")[0].removeprefix("n"))
        await begin(request)
        for number in range(3):
            await stage.rig.put(stream, number, chunk(samples(seed * 10 + number, 240)))
        await stage.rig.put(stream, 3, chunk(None, last=True), last=True)
        stage.rig.sent(stream).set()
        await done(request)

    async with Rig(says, waits, own) as rig:

        async def one(number: int) -> None:
            async with rig.chat(extra_headers={"x-request-id": f"n{number}"}) as stream:
                _, sound, _ = await heard(stream)
            assert sound == b"".join(samples(number * 10 + n, 240) for n in range(3))

        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(one(number))
        await rig.nothing_left()


async def test_a_client_that_does_not_read_holds_its_own_sound_back() -> None:
    sent: list[int] = []

    async def floods(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        stream = body["vllm_xargs"]["triptych_stream"]
        await begin(request)
        for number in range(200):
            await stage.rig.put(stream, number, chunk(samples(number, 50_000)))
            sent.append(number)
        await stage.rig.put(stream, 200, chunk(None, last=True), last=True)
        stage.rig.sent(stream).set()
        await done(request)

    async with Rig(says, waits, floods) as rig, rig.chat() as stream:
        quiet, before = 0, -1
        while quiet < 20:
            await asyncio.sleep(0.02)
            quiet, before = (quiet + 1, before) if len(sent) == before else (0, len(sent))
        assert 0 < len(sent) < 150
        _, sound, _ = await heard(stream)
        assert len(sound) == 200 * 100_000
