"""Clients that people use, unchanged: the official openai one, curl; and the ways in which clients send bodies."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.rig import PLANS, POSTS, PlanName, Rig, chat, eventually, image
from triptych.sim import Sim
from triptych.sim.faults import Fault

IMAGES = {"plain": 0, "p_d": 0, "e_pd": 2, "e_p_d": 2}
CURL = shutil.which("curl")
needs_curl = pytest.mark.skipif(CURL is None, reason="there is no curl here")


@asynccontextmanager
async def official(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def question(plan: PlanName) -> list[Any]:
    return chat(images=IMAGES[plan])["messages"]  # type: ignore[no-any-return]


# --- openai


@pytest.mark.parametrize("plan", PLANS)
async def test_openai_gets_the_answer_that_a_lone_engine_gives(plan: PlanName) -> None:
    async with Sim() as alone, Rig(plan) as rig:
        answers, streams = [], []
        for url in (alone.url, rig.running.url):
            async with official(url) as client:
                whole = await client.chat.completions.create(model="sim", messages=question(plan))
                answers.append(whole.choices[0].message.content)
                pieces = [
                    chunk.choices[0].delta.content or ""
                    async for chunk in await client.chat.completions.create(
                        model="sim", messages=question(plan), stream=True
                    )
                    if chunk.choices
                ]
                streams.append("".join(pieces))
        assert answers[0] == answers[1] == streams[0] == streams[1]
        await rig.settled()


async def test_openai_lists_models() -> None:
    async with Rig("p_d") as rig, official(rig.running.url) as client:
        assert [model.id async for model in client.models.list()] == ["sim"]
        assert (await client.models.retrieve("sim")).id == "sim"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_openai_responses_and_embeddings() -> None:
    async with Rig("plain") as rig, official(rig.running.url) as client:
        answer = await client.responses.create(model="sim", input="hello")
        assert answer.output_text
        kinds = [event.type async for event in await client.responses.create(model="sim", input="hello", stream=True)]
        assert kinds[-1] == "response.completed"
        vectors = await client.embeddings.create(model="sim", input=["a", "b"])
        assert len(vectors.data) == 2


async def test_openai_transcriptions(tmp_path: Path) -> None:
    sound = tmp_path / "sound.wav"
    sound.write_bytes(random.Random(1).randbytes(3_000_000))
    async with Sim() as alone, Rig("plain") as rig:
        texts = []
        for url in (alone.url, rig.running.url):
            async with official(url) as client:
                with sound.open("rb") as file:
                    answer = await client.audio.transcriptions.create(model="sim", file=file)
                texts.append(answer.text)
        assert texts[0] == texts[1]
        await rig.settled()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_openai_raises_for_an_engines_error(
    status: int, error: type[openai.APIStatusError], stream: bool
) -> None:
    own = {"error": {"message": "own words", "type": "Odd", "param": "it", "code": status}}
    async with Rig("p_d") as rig, official(rig.running.url) as client:
        rig.sim("decode").faults.add(Fault(kind="status", status=status, body=own, path=POSTS))
        with pytest.raises(error) as raised:
            await client.chat.completions.create(model="sim", messages=question("p_d"), stream=stream)
        assert raised.value.status_code == status
        assert raised.value.body == own["error"]
        assert raised.value.request_id


@pytest.mark.parametrize("leg", ["encode", "prefill", "decode"])
async def test_openai_raises_for_the_gateways_error(leg: str) -> None:
    async with Rig("e_p_d", encode_failure="strict") as rig, official(rig.running.url) as client:
        rig.sim(leg).faults.add(Fault(kind="reset", path=POSTS, count=None))
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model="sim", messages=question("e_p_d"))
        assert raised.value.status_code == 502
        assert rig.sim(leg).url in str(raised.value)


@pytest.mark.parametrize("plan", PLANS)
async def test_openai_raises_where_a_stream_breaks(plan: PlanName) -> None:
    async with Rig(plan) as rig, official(rig.running.url) as client:
        rig.sim("final").faults.add(Fault(kind="cut", events=4, partial=True, path=POSTS))
        stream = await client.chat.completions.create(model="sim", messages=question(plan), stream=True)
        got = []

        async def read() -> None:
            async for chunk in stream:
                got.append(chunk)

        with pytest.raises(openai.APIError) as raised:
            await read()
        assert len(got) == 4
        assert rig.sim("final").url in str(raised.value)
        await rig.settled()


@pytest.mark.parametrize("plan", PLANS)
async def test_openai_closing_a_stream_closes_the_engines(plan: PlanName) -> None:
    async with Rig(plan) as rig, official(rig.running.url) as client:
        sim = rig.sim("final")
        sim.faults.add(Fault(kind="hang_body", events=3, path=POSTS))
        stream = await client.chat.completions.create(model="sim", messages=question(plan), stream=True)
        async for _ in stream:
            break
        await stream.close()
        await rig.settled()
        assert [cancel.moment for cancel in sim.seen.cancels] == ["streaming"]


@pytest.mark.parametrize("plan", PLANS)
async def test_openai_cancelling_a_call_closes_the_engines(plan: PlanName) -> None:
    async with Rig(plan) as rig, official(rig.running.url) as client:
        sim = rig.sim("final")
        sim.faults.add(Fault(kind="hang", path=POSTS))
        call = asyncio.create_task(client.chat.completions.create(model="sim", messages=question(plan)))
        await sim.seen.until(lambda: sim.seen.faults["hang"] == 1)
        call.cancel()
        await asyncio.wait([call])
        await rig.settled()
        assert [cancel.moment for cancel in sim.seen.cancels] == ["working"]


async def test_openai_gives_up_by_its_own_timeout() -> None:
    async with Rig("e_p_d") as rig, official(rig.running.url) as client:
        sim = rig.sim("prefill")
        sim.faults.add(Fault(kind="hang", path=POSTS))
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(model="sim", messages=question("e_p_d"))
        await rig.settled()
        assert len(sim.seen.cancels) == 1
        assert rig.seen("decode") == 0


# --- curl


async def curl(*args: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
    assert CURL is not None
    process = await asyncio.create_subprocess_exec(
        CURL, "-sS", "--max-time", "20", *args,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate(data)
    assert process.returncode is not None
    return process.returncode, out, errors


JSON = ("-H", "content-type: application/json")


@needs_curl
@pytest.mark.parametrize("plan", PLANS)
async def test_curl_streams(plan: PlanName) -> None:
    async with Rig(plan) as rig:
        body = json.dumps(chat(images=IMAGES[plan], stream=True))
        status, out, errors = await curl("-N", *JSON, "-d", body, f"{rig.running.url}/v1/chat/completions")
        assert status == 0, errors
        assert out.endswith(b"data: [DONE]\n\n")


@needs_curl
async def test_curl_sees_a_broken_stream_to_its_end() -> None:
    async with Rig("plain") as rig:
        rig.sim("final").faults.add(Fault(kind="cut", events=3, path=POSTS))
        body = json.dumps(chat(stream=True))
        status, out, errors = await curl("-N", *JSON, "-d", body, f"{rig.running.url}/v1/chat/completions")
        assert status == 0, errors
        assert json.loads(out.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == 502


@needs_curl
async def test_curl_waits_for_100_continue_with_a_big_body() -> None:
    async with Rig("e_pd") as rig:
        payload = base64.b64encode(random.Random(2).randbytes(2_000_000)).decode()
        body = chat()
        body["messages"][0]["content"].append(image(payload))
        status, out, errors = await curl(
            "-v", *JSON, "-H", "expect: 100-continue", "--expect100-timeout", "15",
            "--data-binary", "@-", f"{rig.running.url}/v1/chat/completions", data=json.dumps(body).encode(),
        )  # fmt: skip
        assert status == 0, errors
        assert b"100 Continue" in errors
        assert json.loads(out)["choices"]
        assert rig.legs()[("encode", "success")] == 1


@needs_curl
async def test_curl_is_told_of_a_body_too_large_before_it_sends_it() -> None:
    async with Rig("plain", limits={"body_bytes": 1_000_000}) as rig:
        status, out, errors = await curl(
            "-v", *JSON, "-H", "expect: 100-continue", "--expect100-timeout", "15",
            "--data-binary", "@-", f"{rig.running.url}/v1/chat/completions", data=bytes(2_000_000),
        )  # fmt: skip
        assert status == 0, errors
        assert b"100 Continue" not in errors
        assert json.loads(out)["error"]["code"] == 413


@needs_curl
@pytest.mark.parametrize("size", [100_000, 5_000_000])
async def test_curl_uploads_in_chunks(size: int) -> None:
    async with Rig("e_pd") as rig:
        body = chat()
        body["messages"][0]["content"].append(image(base64.b64encode(random.Random(3).randbytes(size)).decode()))
        status, out, errors = await curl(
            *JSON, "-H", "transfer-encoding: chunked", "--data-binary", "@-",
            f"{rig.running.url}/v1/chat/completions", data=json.dumps(body).encode(),
        )  # fmt: skip
        assert status == 0, errors
        assert json.loads(out)["choices"]
        await rig.settled()


@needs_curl
async def test_curl_uploads_a_form(tmp_path: Path) -> None:
    sound = tmp_path / "sound.wav"
    sound.write_bytes(random.Random(4).randbytes(4_000_000))
    async with Sim() as alone, Rig("plain") as rig:
        texts = []
        for url in (alone.url, rig.running.url):
            status, out, errors = await curl(
                "-F", "model=sim", "-F", f"file=@{sound}", f"{url}/v1/audio/transcriptions"
            )
            assert status == 0, errors
            texts.append(json.loads(out)["text"])
        assert texts[0] == texts[1]


@needs_curl
async def test_curl_keeps_its_connection_over_errors() -> None:
    async with Rig("plain") as rig:
        url = f"{rig.running.url}/v1/chat/completions"
        rig.sim("final").faults.add(Fault(kind="status", status=400, path=POSTS))
        one = ("-w", "%{http_code} %{num_connects}\\n", "-o", "/dev/null", *JSON, "-d", json.dumps(chat()), url)
        status, out, errors = await curl(*one, "--next", "-sS", *one, "--next", "-sS", *one)
        assert status == 0, errors
        assert out.split() == [b"400", b"1", b"200", b"0", b"200", b"0"]


# --- bodies of unknown length


@pytest.mark.parametrize("endpoint", ["json", "form"])
async def test_a_chunked_body_over_the_limit_is_refused_as_it_arrives(endpoint: str) -> None:
    path, headers = "/v1/chat/completions", {}
    if endpoint == "form":
        path, headers = "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=f"}
    async with Rig("plain", limits={"body_bytes": 300_000}) as rig:
        async with rig.client() as client:
            client.head(None, path, headers=headers)
            if endpoint == "form":
                client.chunk(b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n')
                client.chunk(b'--f\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n')
            for _ in range(4):
                client.chunk(bytes(100_000))
            answer = await client.answer()  # without the end of the body
            assert answer.status == 413
            assert await client.ended()
        await rig.settled()
        assert rig.count("requests", status="413") == 1


async def test_chunked_bodies_share_the_budget_of_bytes_as_they_arrive() -> None:
    async with Rig("plain", limits={"bytes": 300_000, "body_bytes": 250_000}) as rig:
        async with rig.client() as first, rig.client() as second:
            for client in (first, second):
                client.head(None)
            first.chunk(bytes(200_000))
            await eventually(lambda: rig.gateway.admission.nbytes == 200_000, "the first body's bytes", 2.0)
            second.chunk(bytes(200_000))
            answer = await second.answer()
            assert answer.status == 429
            assert answer.headers["retry-after"]
            assert rig.gateway.admission.nbytes == 200_000
        await rig.settled()


async def test_an_engine_may_answer_before_it_has_the_whole_upload() -> None:
    """It refuses a form by its head; the client hears of it at once."""
    async with Rig("plain") as rig:
        # The simulator reads bodies first, so this engine is a plain socket.
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = b'{"error":"no"}'
            head = b"HTTP/1.1 415 No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        (engine,) = rig.gateway.fleet.engines()
        engine.origin = engine.origin._replace(port=server.sockets[0].getsockname()[1])
        async with rig.client() as client:
            client.head(
                10_000_000, "/v1/audio/transcriptions", headers={"content-type": "multipart/form-data; boundary=f"}
            )
            client.writer.write(b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--f\r\n')
            answer = await client.answer()
            assert answer.status == 415
            assert answer.body == b'{"error":"no"}'
        await rig.settled()
        server.close()
        await server.wait_closed()
