"""Whatever breaks: the others end, nothing is left, and the client is told which stage it was."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError

from tests.gateway.pipeline.rig import Rig, Stage, begin, chunk, done, samples, says, speaks, sse, waits, word
from tests.gateway.rig import eventually
from triptych.http.request import Request

SPEECH = {"model": "omni", "voice": "v", "input": "x", "response_format": "pcm"}


async def refuses(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    await request.respond(400, [(b"content-type", b"application/json")], b'{"error":{"message":"no such thing"}}')


async def breaks(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    request.abort()


async def breaks_later(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    await begin(request)
    await request.send(sse(word("one")))
    request.abort()


async def tells_an_error(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    await begin(request)
    await request.send(sse({"error": {"message": "the engine is dead", "code": 500}}))
    await done(request)


async def ends_early(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    await begin(request)
    await request.finish()


async def says_rubbish(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    await begin(request)
    await request.send(b"data: {nothing\n\n")
    await done(request)


async def hangs(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    await begin(request)
    await asyncio.Event().wait()


async def listen(rig: Rig) -> None:
    """Ask, and take the answer to its end."""
    async with rig.chat() as stream:
        async for _ in stream:
            pass


FAULTS = [refuses, breaks, breaks_later, tells_an_error, ends_early, says_rubbish]


@pytest.mark.parametrize("place", [0, 1, 2], ids=["thinker", "talker", "codec"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_stage_that_fails_is_named_and_nothing_is_left(place: int, fault: Any) -> None:
    acts: list[Any] = [says, waits, speaks]
    if place:
        acts[0] = hangs  # so that the answer is still going on
    if place != 2:
        acts[2] = hangs
    acts[place] = fault
    async with Rig(*acts) as rig:
        with pytest.raises(APIError) as caught:
            await listen(rig)
        if fault is refuses and place == 0:
            assert isinstance(caught.value, APIStatusError)
            assert caught.value.status_code == 400  # the client's own request: in the engine's words
            assert "no such thing" in str(caught.value)
        else:
            assert rig.stages[place].name in str(caught.value)
        await rig.nothing_left()
        for stage in rig.stages:
            if stage.act is hangs:
                assert stage.left == len(stage.asked)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["thinker", "talker", "codec"])
async def test_before_the_answer_has_begun_it_is_a_status(place: int) -> None:
    acts: list[Any] = [hangs, hangs, hangs]
    acts[place] = breaks
    async with Rig(*acts) as rig, httpx.AsyncClient() as client:
        answer = await client.post(rig.running.url + "/v1/audio/speech", json=SPEECH)
        assert answer.status_code == 502
        assert rig.stages[place].name in answer.json()["error"]["message"]
        await rig.nothing_left()


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (chunk(b"\0\0\0\0", dtype="float32"), "not int16 samples"),
        (chunk(b"\0\0", rate=7), "sample rate is 7"),
        (chunk(b"\0\0", rate="24000"), "sample rate is '24000'"),
        (chunk(b"\0\0", rate=True), "sample rate is True"),
        ({"extra": 5}, "`extra` is no map"),
        ({"meta": {"finished": "yes"}}, "`finished` is 'yes'"),
        ("words", "is no map"),
    ],
)
async def test_sound_that_is_none_ends_the_request(bad: Any, told: str) -> None:
    async def odd(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        await begin(request)
        await stage.rig.put(body["vllm_xargs"]["triptych_stream"], 0, bad)
        await asyncio.Event().wait()

    async with Rig(hangs, hangs, odd) as rig:
        with pytest.raises(APIError, match="codec") as caught:
            await listen(rig)
        assert told in str(caught.value)
        await rig.nothing_left()


async def test_a_rate_that_changes_ends_the_request() -> None:
    async def odd(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        await begin(request)
        for number, rate in enumerate((24_000, 16_000)):
            await stage.rig.put(body["vllm_xargs"]["triptych_stream"], number, chunk(samples(1, 10), rate=rate))
        await asyncio.Event().wait()

    async with Rig(hangs, hangs, odd) as rig:
        with pytest.raises(APIError, match="changed from 24000 to 16000"):
            await listen(rig)
        await rig.nothing_left()


async def test_sound_that_breaks_is_told_with_its_reason() -> None:
    async def breaks_off(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        stream = body["vllm_xargs"]["triptych_stream"]
        await begin(request)
        await stage.rig.put(stream, 0, chunk(samples(0, 10)))
        stage.rig.connector.fail("2", "3", f"{stream}_2", "out of breath")
        await asyncio.Event().wait()

    async with Rig(hangs, hangs, breaks_off) as rig:
        with pytest.raises(APIError, match="out of breath"):
            await listen(rig)
        await rig.nothing_left()


async def test_sound_that_goes_out_as_it_is_is_cut_when_it_breaks() -> None:
    async def breaks_off(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        stream = body["vllm_xargs"]["triptych_stream"]
        await begin(request)
        await stage.rig.put(stream, 0, chunk(samples(0, 10)))
        stage.rig.connector.fail("2", "3", f"{stream}_2", "out of breath")
        await asyncio.Event().wait()

    async with Rig(hangs, hangs, breaks_off) as rig, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(rig.running.url + "/v1/audio/speech", json=SPEECH)
        await rig.nothing_left()


async def test_silence_of_all_stages_has_a_deadline_that_names_the_last() -> None:
    async with Rig(hangs, hangs, hangs, deadlines={"stream_idle": 0.3}) as rig:
        with pytest.raises(APIError) as caught:
            await listen(rig)
        assert "0.3 s" in str(caught.value)
        await rig.nothing_left()


async def test_a_stage_may_be_silent_for_as_long_as_the_text_goes_on() -> None:
    async def slowly(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        await begin(request)
        for _ in range(8):
            await request.send(sse(word("x")))
            await asyncio.sleep(0.1)  # what is tested is a deadline of 0.3 s
        await request.send(sse(word(None, "stop")))
        await done(request)

    async def late(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        await begin(request)
        await asyncio.sleep(0.7)
        await speaks(stage, _Begun(request), body)

    async with Rig(slowly, waits, late, deadlines={"stream_idle": 0.3}) as rig:
        async with rig.chat() as stream:
            assert [event async for event in stream]
        await rig.nothing_left()


class _Begun:
    """A request whose answer has begun."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.send = request.send
        self.finish = request.finish

    async def start(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("after", range(4))
async def test_a_client_that_leaves_ends_every_leg(after: int) -> None:
    async def sings(stage: Stage, request: Request, body: dict[str, Any]) -> None:
        await begin(request)
        for number in range(3):
            await stage.rig.put(body["vllm_xargs"]["triptych_stream"], number, chunk(samples(number, 10)))
        await asyncio.Event().wait()

    async with Rig(hangs, hangs, sings) as rig:
        reader, writer = await asyncio.open_connection(*rig.running.api[0])
        body = json.dumps(
            {
                "model": "omni",
                "messages": [{"role": "user", "content": "x"}],
                "modalities": ["audio"],
                "audio": {"format": "pcm16"},
                "stream": True,
            }
        ).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        for _ in range(after):
            await reader.readuntil(b"data: ")
        if not after:
            await eventually(lambda: all(stage.asked for stage in rig.stages), "the legs", 5.0)
        writer.close()
        await rig.nothing_left()
        await eventually(lambda: [stage.left for stage in rig.stages] == [1, 1, 1], "the legs' end", 5.0)


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_wherever_it_is_cancelled_nothing_is_left(turns: int) -> None:
    async with Rig() as rig:
        task = asyncio.create_task(listen(rig))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.nothing_left()


async def test_without_a_healthy_stage_there_is_no_answer_and_no_place_is_kept() -> None:
    async with Rig() as rig:
        (engine,) = rig.gateway.fleet.deployments[0].stages[1].engines
        engine.hold()
        with pytest.raises(APIStatusError) as caught:
            async with rig.chat():
                pass
        assert caught.value.status_code == 503
        assert "codec" in str(caught.value)
        assert not any(stage.asked for stage in rig.stages)
        await rig.nothing_left()
