"""Each deadline: it passes, it says whom it waited for, and nothing is left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.faults.silence import deaf_port, silent_port
from tests.gateway.rig import PLANS, POSTS, ROLES, PlanName, Rig, chat, eventually
from triptych.sim.faults import Fault

LEGS = [(plan, role) for plan in PLANS for role in ROLES[plan]]
IMAGES = {"plain": 0, "p_d": 0, "e_pd": 1, "e_p_d": 1}


def word(role: str) -> str:
    """What messages call the leg."""
    return "enc0" if role == "encode" else role


# --- connect


@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_connect(plan: PlanName, role: str) -> None:
    with silent_port() as port:
        async with Rig(plan, deadlines={"connect": 0.2}, encode_failure="strict", elsewhere={role: port}) as rig:
            answer = await rig.post(chat(images=IMAGES[plan]))
            assert answer.status == 502
            message = answer.json["error"]["message"]
            assert message.startswith(f"{word(role)} engine http://127.0.0.1:{port}"), message
            assert "no connection within 0.2 s" in message
            await rig.settled()
            assert rig.legs()[(role, "connect_error")] == 1


# --- legs


@pytest.mark.parametrize("kind", ["hang", "hang_body", "trickle"])
@pytest.mark.parametrize(
    ("plan", "role", "deadline"),
    [
        ("e_pd", "encode", "encode"),
        ("e_p_d", "encode", "encode"),
        ("p_d", "prefill", "prefill"),
        ("e_p_d", "prefill", "prefill"),
    ],
)
async def test_a_leg_that_is_read_whole_has_one_deadline_for_all_of_it(
    plan: PlanName, role: str, deadline: str, kind: str
) -> None:
    async with Rig(plan, deadlines={deadline: 0.3}, encode_failure="strict") as rig:
        rig.sim(role).faults.add(Fault(kind=kind, path=POSTS, chunk=1, seconds=0.05 if kind == "trickle" else None))
        answer = await rig.post(chat(images=IMAGES[plan]))
        assert answer.status == 504, answer
        message = answer.json["error"]["message"]
        assert message.startswith(f"{word(role)} engine {rig.sim(role).url}"), message
        assert "0.3 s" in message
        await rig.settled()
        assert rig.legs()[(role, "timeout")] == 1


async def test_encode_waits_no_longer_for_a_place_than_for_an_answer() -> None:
    limits = {"encode_legs_per_engine": 1}
    async with Rig("e_pd", deadlines={"encode": 0.3}, limits=limits, encode_failure="strict") as rig:
        rig.sim("encode").faults.add(Fault(kind="hang", path=POSTS, count=None))
        async with rig.client() as first, rig.client() as second:
            first.send(chat("one", images=1))
            await rig.sim("encode").seen.until(lambda: rig.seen("encode") == 1)
            second.send(chat("two", images=1))
            answers = [await first.answer(), await second.answer()]
        assert [answer.status for answer in answers] == [504, 504]
        await rig.settled()
        assert rig.legs()[("encode", "timeout")] == 2


@pytest.mark.parametrize("plan", PLANS)
async def test_first_byte(plan: PlanName) -> None:
    async with Rig(plan, deadlines={"first_byte": 0.3}) as rig:
        rig.sim("final").faults.add(Fault(kind="hang", path=POSTS))
        answer = await rig.post(chat(images=IMAGES[plan], stream=True))
        assert answer.status == 504
        message = answer.json["error"]["message"]
        assert message.startswith(f"{rig.final} engine {rig.sim('final').url}"), message
        assert "waited 0.3 s for the head of the response" in message
        await rig.settled()


@pytest.mark.parametrize("plan", ["plain", "p_d"])
async def test_first_byte_of_an_engine_that_does_not_even_take_the_request(plan: PlanName) -> None:
    sims = {"prefill": {"max_model_len": 1 << 30}}
    with deaf_port() as port:
        async with Rig(plan, deadlines={"first_byte": 0.3}, sims=sims, elsewhere={ROLES[plan][-1]: port}) as rig:
            answer = await rig.post(chat("x" * 12_000_000))
            assert answer.status == 504, answer
            message = answer.json["error"]["message"]
            assert message.startswith(f"{rig.final} engine http://127.0.0.1:{port}"), message
            assert "waited 0.3 s for the upstream to take the request" in message
            await rig.settled()


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_first_byte_of_an_engine_that_does_not_take_an_upload(chunked: bool) -> None:
    body = (
        b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n'
        b'--f\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--f--\r\n' % bytes(12_000_000)
    )
    headers = {"content-type": "multipart/form-data; boundary=f"}
    with deaf_port() as port:
        async with Rig("plain", deadlines={"first_byte": 0.3}, elsewhere={"combined": port}) as rig:
            async with rig.client() as client:
                client.head(None if chunked else len(body), "/v1/audio/transcriptions", headers=headers)
                client.chunk(body) if chunked else client.writer.write(body)
                answer = await client.answer()
            assert answer.status == 504, answer
            assert "to take the request" in answer.json["error"]["message"]
            await rig.settled()


async def test_a_slow_upload_is_not_the_engines_fault() -> None:
    """The engine's deadline does not run while the client is the one that is waited for."""
    async with Rig("plain", deadlines={"first_byte": 0.3}) as rig:
        parts = [
            b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n',
            b'--f\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n',
            *(b"audio" for _ in range(10)),
            b"\r\n--f--\r\n",
        ]
        headers = {"content-type": "multipart/form-data; boundary=f"}
        async with rig.client() as client:
            client.head(None, "/v1/audio/transcriptions", headers=headers)
            for part in parts:
                client.chunk(part)
                await asyncio.sleep(0.1)  # the client's own slowness is what is tested
            client.chunk(b"")
            answer = await client.answer()
        assert answer.status == 200, answer
        await rig.settled()


@pytest.mark.parametrize("plan", PLANS)
async def test_stream_idle_in_a_whole_answer(plan: PlanName) -> None:
    async with Rig(plan, deadlines={"stream_idle": 0.3}) as rig:
        rig.sim("final").faults.add(Fault(kind="hang_body", path=POSTS))
        answer = await rig.post(chat(images=IMAGES[plan]))
        assert answer.status == 504
        assert f"{rig.final} engine {rig.sim('final').url}" in answer.json["error"]["message"]
        await rig.settled()


@pytest.mark.parametrize("plan", PLANS)
async def test_stream_idle_in_a_stream(plan: PlanName) -> None:
    async with Rig(plan, deadlines={"stream_idle": 0.3}) as rig:
        rig.sim("final").faults.add(Fault(kind="hang_body", events=2, path=POSTS))
        answer = await rig.post(chat(images=IMAGES[plan], stream=True))
        error = json.loads(answer.events[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == 504
        assert "waited 0.3 s" in error["message"]
        assert f"{rig.final} engine {rig.sim('final').url}" in error["message"]
        await rig.settled()


async def test_a_stream_that_goes_on_has_no_deadline() -> None:
    async with Rig("plain", deadlines={"stream_idle": 0.4, "first_byte": 0.4}) as rig:
        rig.sim("final").faults.add(Fault(kind="trickle", chunk=2000, seconds=0.1, path=POSTS))
        answer = await rig.post(chat(stream=True))
        assert answer.complete
        assert answer.events[-2] == b"data: [DONE]"


# --- total


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_total_names_the_leg_that_was_running(plan: PlanName, role: str, stream: bool) -> None:
    async with Rig(plan, deadlines={"total": 0.3}) as rig:
        rig.sim(role).faults.add(Fault(kind="hang", path=POSTS))
        answer = await rig.post(chat(images=IMAGES[plan], stream=stream))
        assert answer.status == 504
        message = answer.json["error"]["message"]
        assert message.endswith(f"it waited for {word(role)} engine {rig.sim(role).url}"), message
        assert "0.3 s" in message
        await rig.settled()
        assert rig.count("requests", plan=plan, status="504") == 1
        assert rig.legs()[(role, "cancelled")] == 1


@pytest.mark.parametrize("plan", PLANS)
async def test_total_in_the_middle_of_a_stream_is_told_in_band(plan: PlanName) -> None:
    async with Rig(plan, deadlines={"total": 0.4}) as rig:
        rig.sim("final").faults.add(Fault(kind="hang_body", events=2, path=POSTS))
        async with rig.client() as client:
            client.send(chat(images=IMAGES[plan], stream=True))
            answer = await client.answer()
            assert answer.status == 200
            assert answer.complete
            assert b"[DONE]" not in answer.body
            error = json.loads(answer.events[-2].removeprefix(b"data: "))["error"]
            assert error["code"] == 504
            assert f"{rig.final} engine {rig.sim('final').url}" in error["message"]
            assert await client.ended()
        await rig.settled()
        assert rig.count("requests", plan=plan, status="200") == 1
        assert [line["error"] for line in rig.log if line["event"] == "request"] == ["total"]


async def test_total_while_the_body_is_sent() -> None:
    async with Rig("plain", deadlines={"total": 0.3}) as rig:
        async with rig.client() as client:
            client.head(1000)
            answer = await client.answer()
        assert answer.status == 504
        assert answer.json["error"]["message"].endswith("it waited for the client to send its body")
        await rig.settled()


async def test_total_while_waiting_for_admission() -> None:
    async with Rig("plain", deadlines={"total": 0.3}, limits={"requests": 1}) as rig:
        with await rig.gateway.admission.admit(0):
            answer = await rig.post(chat())
        assert answer.status == 504
        assert "it waited for its turn" in answer.json["error"]["message"]
        await rig.settled()
        assert rig.seen("combined") == 0


# --- the client's side


async def test_queue() -> None:
    async with Rig("plain", deadlines={"queue": 0.2}, limits={"requests": 1}) as rig:
        rig.sim("final").faults.add(Fault(kind="hang", path=POSTS))
        async with rig.client() as first:
            first.send(chat())
            await rig.sim("final").seen.until(lambda: rig.seen("combined") == 1)
            answer = await rig.post(chat())
            assert answer.status == 429
            assert answer.headers["retry-after"] == "1"
            assert "waited 0.2 s" in answer.json["error"]["message"]
        await rig.settled()
        assert rig.count("requests_refused", reason="queue_timeout") == 1


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_body(chunked: bool) -> None:
    async with Rig("plain", deadlines={"body": 0.2}) as rig:
        async with rig.client() as client:
            client.head(None if chunked else 1000)
            client.chunk(b'{"model"') if chunked else client.writer.write(b'{"model"')
            answer = await client.answer()
            assert answer.status == 408
            assert "waited 0.2 s for the client to send the rest" in answer.json["error"]["message"]
            assert await client.ended()
        await rig.settled()
        assert rig.count("requests", status="408") == 1


async def test_body_of_an_upload_that_is_streamed_through() -> None:
    async with Rig("plain", deadlines={"body": 0.2}) as rig:
        async with rig.client() as client:
            headers = {"content-type": "multipart/form-data; boundary=f"}
            client.head(10_000, "/v1/audio/transcriptions", headers=headers)
            client.writer.write(b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--f\r\n')
            answer = await client.answer()
            assert answer.status == 408, answer
        await rig.settled()
        assert [cancel.moment for cancel in rig.sim("final").seen.cancels] == ["upload"]


@pytest.mark.parametrize("form", [False, True], ids=["json", "form"])
async def test_uploads_that_drip_cannot_hold_the_byte_budget_against_others(form: bool) -> None:
    """Each byte renews the deadline of silence; what ends them is that somebody waits for their place."""
    limits = {"bytes": 100_000, "requests": 1}
    async with Rig("plain", deadlines={"body": 0.3, "queue": 10}, limits=limits) as rig, rig.client() as dripping:
        headers = {"content-type": "multipart/form-data; boundary=f"} if form else {}
        field = b'--f\r\ncontent-disposition: form-data; name="%b"\r\n\r\n'
        start = field % b"model" + b"sim\r\n" + field % b"prompt" if form else b'{"model"'
        dripping.head(90_000, "/v1/audio/transcriptions" if form else "/v1/chat/completions", headers=headers)
        dripping.writer.write(start)

        async def drip() -> None:
            while True:
                dripping.writer.write(b"-")
                await asyncio.sleep(0.05)  # the client's own slowness is what is tested

        drips = asyncio.create_task(drip())
        await eventually(lambda: rig.gateway.admission.requests == 1, "the upload has its place", 5.0)
        assert (await rig.post(chat())).status == 200
        answer = await dripping.answer()
        drips.cancel()
        assert answer.status == 408
        assert "while others waited for its place" in answer.json["error"]["message"]
        await dripping.close()
        await rig.settled()


async def test_header() -> None:
    async with Rig("plain", deadlines={"header": 0.2}) as rig:
        async with rig.client() as client:
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            answer = await client.answer()
            assert answer.status == 408
            assert "waited 0.2 s for the request head" in answer.json["error"]["message"]
            assert await client.ended()
        await rig.settled()


async def test_keep_alive() -> None:
    async with Rig("plain", deadlines={"keep_alive": 0.2}) as rig:
        async with rig.client() as client:
            client.send(chat())
            assert (await client.answer()).status == 200
            assert await client.ended()
        await rig.settled()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("plan", PLANS)
async def test_write(plan: PlanName, stream: bool) -> None:
    sims: dict[str, Any] = {ROLES[plan][-1]: {"output_tokens": 200_000, "max_model_len": 400_000}} if stream else {}
    async with Rig(plan, deadlines={"write": 0.3}, sims=sims) as rig:
        sim = rig.sim("final")
        if not stream:
            sim.faults.add(Fault(kind="oversize", size=16_000_000, path=POSTS))
        async with rig.client(receive_buffer=4096) as client:
            more = {"max_tokens": 200_000} if stream else {}
            client.send(chat(images=IMAGES[plan], stream=stream, **more))
            await eventually(lambda: rig.count("requests", plan=plan, status="499") == 1, "the request given up", 10.0)
            await rig.settled()
        assert len(sim.seen.cancels) == int(stream)


async def test_drain() -> None:
    async with Rig("plain", deadlines={"drain": 0.3}) as rig:
        rig.sim("final").faults.add(Fault(kind="hang", path=POSTS))
        async with rig.client() as client:
            client.send(chat())
            await rig.sim("final").seen.until(lambda: rig.seen("combined") == 1)
            assert not await rig.running.drain()
            assert rig.running.server.running == 1
            await rig.running.server.close()
            assert await client.ended()
        await rig.settled()
