"""A client that leaves, at each boundary of each plan: started legs are closed within a second, none is begun after.

It leaves by closing, by a reset, or by half-closing (which a client of an API has no other reason to do).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.faults.silence import silent_port
from tests.gateway.raw import Raw
from tests.gateway.rig import PLANS, POSTS, ROLES, PlanName, Rig, chat, eventually
from triptych.sim.faults import Fault

WAYS = ("close", "reset", "half_close")
LEGS = [(plan, role) for plan in PLANS for role in ROLES[plan]]


def by_way(test: Callable[..., Any]) -> Callable[..., Any]:
    return pytest.mark.parametrize("way", WAYS)(test)


async def leave(client: Raw, way: str) -> None:
    if way == "close":
        await client.close()
    elif way == "reset":
        client.reset()
    else:
        client.half_close()


@asynccontextmanager
async def leaver(rig: Rig, **options: Any) -> AsyncIterator[Raw]:
    """A client whose connection the gateway has ended, or forgotten, when the block ends."""
    async with rig.client(**options) as client:
        yield client
        await rig.settled(1.0)


def images(plan: PlanName) -> int:
    return 3 if plan.startswith("e") else 0


def started_after(rig: Rig, role: str) -> dict[str, int]:
    """Calls seen by engines whose turn comes after that role's."""
    roles = ROLES[rig.plan]
    return {later: count for later in roles[roles.index(role) + 1 :] if (count := rig.seen(later))}


# --- before any leg


@by_way
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_while_it_sends_its_body(way: str, chunked: bool) -> None:
    async with Rig("e_p_d") as rig:
        async with leaver(rig) as client:
            body = json.dumps(chat(images=1)).encode()
            client.head(None if chunked else len(body))
            client.chunk(body[:100]) if chunked else client.writer.write(body[:100])
            await eventually(lambda: rig.running.server.running == 1, "a handler", 2.0)
            await leave(client, way)
        assert rig.count("requests", status="499") == 1
        assert {role: rig.seen(role) for role in rig.pools} == {"encode": 0, "prefill": 0, "decode": 0}


@by_way
async def test_while_it_waits_for_admission(way: str) -> None:
    async with Rig("p_d", limits={"requests": 1}) as rig:
        rig.sim("prefill").faults.add(Fault(kind="hang", path=POSTS))
        async with leaver(rig) as first:
            first.send(chat())
            await rig.sim("prefill").seen.until(lambda: rig.seen("prefill") == 1)
            async with rig.client() as second:
                second.send(chat())
                await eventually(lambda: rig.gateway.admission.queued == 1, "a request in the queue", 2.0)
                await leave(second, way)
                await eventually(lambda: rig.gateway.admission.queued == 0, "an empty queue", 1.0)
            assert rig.count("requests", status="499") == 1
            assert rig.gateway.admission.requests == 1
            await leave(first, way)
        assert rig.seen("prefill") == 1
        assert rig.seen("decode") == 0


@by_way
async def test_while_a_large_body_waits_for_admission(way: str) -> None:
    """Reading is held back then, so that the transport alone would not see the client leave."""
    async with Rig("p_d", limits={"requests": 1}) as rig:
        rig.sim("prefill").faults.add(Fault(kind="hang", path=POSTS))
        async with leaver(rig) as first:
            first.send(chat())
            await rig.sim("prefill").seen.until(lambda: rig.seen("prefill") == 1)
            async with rig.client() as second:
                # More than the gateway holds for one that waits. A close comes behind what was sent, so that is no
                # more than the kernel holds; a reset comes at once.
                second.send(chat("x" * (8_000_000 if way == "reset" else 600_000)))
                await eventually(lambda: rig.gateway.admission.queued == 1, "a request in the queue", 2.0)
                if way != "reset":
                    unsent = second.writer.transport.get_write_buffer_size
                    await eventually(lambda: not unsent(), "a body that is all sent", 5.0)
                left = asyncio.create_task(leave(second, way))
                await eventually(lambda: rig.count("requests", status="499") == 1, "the end of the request", 1.0)
                await left
            assert rig.gateway.admission.queued == 0
            first.reset()
        assert rig.seen("prefill") == 1


# --- while a leg runs


@by_way
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_while_a_leg_has_not_answered(plan: PlanName, role: str, stream: bool, way: str) -> None:
    async with Rig(plan) as rig:
        sim = rig.sim(role)
        sim.faults.add(Fault(kind="hang", path=POSTS, count=None))
        legs = images(plan) if role == "encode" else 1
        async with leaver(rig) as client:
            client.send(chat(images=images(plan), stream=stream))
            await sim.seen.until(lambda: sim.seen.faults["hang"] == legs)
            await leave(client, way)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["working"] * legs
        assert rig.seen(role) == legs
        assert started_after(rig, role) == {}
        assert rig.legs()[(role, "cancelled")] == legs
        assert rig.count("requests", plan=plan, status="499") == 1


@by_way
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_while_half_of_an_answer_is_there(plan: PlanName, role: str, way: str) -> None:
    async with Rig(plan) as rig:
        sim = rig.sim(role)
        sim.faults.add(Fault(kind="hang_body", path=POSTS, count=None))
        legs = images(plan) if role == "encode" else 1
        async with leaver(rig) as client:
            client.send(chat(images=images(plan)))
            await sim.seen.until(lambda: sim.seen.faults["hang_body"] == legs)
            await leave(client, way)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["streaming"] * legs
        assert started_after(rig, role) == {}
        assert rig.count("requests", plan=plan, status="499") == 1


@by_way
@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_while_items_wait_for_an_encoder(plan: PlanName, way: str) -> None:
    async with Rig(plan, limits={"encode_legs_per_engine": 1}) as rig:
        sim = rig.sim("encode")
        sim.faults.add(Fault(kind="hang", path=POSTS, count=None))
        pool = rig.gateway.fleet.deployments[0].encode
        async with leaver(rig) as client:
            client.send(chat(images=3))
            await sim.seen.until(lambda: sim.seen.faults["hang"] == 1)
            assert pool.waiting == 2
            await leave(client, way)
        assert rig.seen("encode") == 1
        assert started_after(rig, "encode") == {}
        assert rig.legs()[("encode", "cancelled")] == 3


@by_way
async def test_while_items_wait_for_their_turn(way: str) -> None:
    """More items than one request may have legs at once."""
    async with Rig("e_pd", limits={"encode_legs": 2}) as rig:
        sim = rig.sim("encode")
        sim.faults.add(Fault(kind="hang", path=POSTS, count=None))
        async with leaver(rig) as client:
            client.send(chat(images=5))
            await sim.seen.until(lambda: sim.seen.faults["hang"] == 2)
            await leave(client, way)
        assert rig.seen("encode") == 2
        assert rig.seen("combined") == 0


@by_way
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_while_a_leg_connects(plan: PlanName, role: str, way: str) -> None:
    with silent_port() as port:
        async with Rig(plan, deadlines={"connect": 30}, elsewhere={role: port}) as rig:
            async with leaver(rig) as client:
                client.send(chat(images=images(plan)))
                pools = rig.gateway.client.pools
                await eventually(lambda: sum(p.connecting for p in pools()) >= 1, "a connection on its way", 2.0)
                await leave(client, way)
            assert rig.count("requests", plan=plan, status="499") == 1
            assert started_after(rig, role) == {}


# --- while the answer streams


@by_way
@pytest.mark.parametrize("plan", PLANS)
async def test_in_the_middle_of_a_stream(plan: PlanName, way: str) -> None:
    async with Rig(plan) as rig:
        sim = rig.sim("final")
        sim.faults.add(Fault(kind="hang_body", events=3, path=POSTS))
        async with leaver(rig) as client:
            client.send(chat(images=images(plan), stream=True))
            assert (await client.answer_head())[0] == 200
            got = b""
            while got.count(b"\n\n") < 3:
                got += await client.answer_chunk()
            await leave(client, way)
        assert [(c.moment, c.events) for c in sim.seen.cancels] == [("streaming", 3)]
        assert rig.legs()[(rig.final, "cancelled")] == 1
        assert rig.count("requests", plan=plan, status="499") == 1


@by_way
@pytest.mark.parametrize("plan", PLANS)
async def test_while_it_takes_nothing_of_a_stream(plan: PlanName, way: str) -> None:
    """The gateway is blocked writing, and holds the engine back."""
    async with Rig(plan, sims={ROLES[plan][-1]: {"output_tokens": 200_000, "max_model_len": 400_000}}) as rig:
        sim = rig.sim("final")
        async with leaver(rig, receive_buffer=4096) as client:
            client.send(chat(images=images(plan), stream=True, max_tokens=200_000))
            await eventually(lambda: blocked(rig), "a blocked write", 10.0)
            await leave(client, way)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["streaming"]
        assert rig.count("requests", plan=plan, status="499") == 1


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("plan", PLANS)
async def test_while_it_takes_nothing_of_a_whole_answer(plan: PlanName, way: str) -> None:
    async with Rig(plan) as rig:
        rig.sim("final").faults.add(Fault(kind="oversize", size=16_000_000, path=POSTS))
        async with leaver(rig, receive_buffer=4096) as client:
            client.send(chat(images=images(plan)))
            await eventually(lambda: blocked(rig), "a blocked write", 5.0)
            # The engines have done their part: a slow client holds none of their places.
            assert sum(engine.in_flight for engine in rig.gateway.fleet.engines()) == 0
            await leave(client, way)
        assert rig.count("requests", plan=plan, status="499") == 1


async def test_half_closing_after_the_answer_was_given_leaves_it_to_be_read() -> None:
    """No leg runs any more, so nothing is to be closed."""
    async with Rig("plain") as rig:
        rig.sim("final").faults.add(Fault(kind="oversize", size=16_000_000, path=POSTS))
        async with leaver(rig, receive_buffer=4096) as client:
            client.send(chat())
            await eventually(lambda: blocked(rig), "a blocked write", 5.0)
            client.half_close()
            answer = await client.answer()
            assert answer.complete
            assert len(answer.body) == 16_000_000
        assert rig.count("requests", status="200") == 1


def blocked(rig: Rig) -> bool:
    return any(connection.write_paused for connection in rig.running.server.connections)


# --- other requests of the same client


@by_way
async def test_a_pipelined_request_is_not_begun(way: str) -> None:
    async with Rig("p_d") as rig:
        sim = rig.sim("prefill")
        sim.faults.add(Fault(kind="hang", path=POSTS))
        async with leaver(rig) as client:
            client.send(chat("first"))
            client.send(chat("second"))
            await sim.seen.until(lambda: sim.seen.faults["hang"] == 1)
            await leave(client, way)
        assert rig.seen("prefill") == 1


async def test_one_client_that_leaves_takes_no_other_along() -> None:
    async with Rig("e_p_d", sims={"decode": {"costs": {"token": 0.02}}}) as rig:
        body = chat(images=2, stream=True)
        async with rig.client() as stays, rig.client() as leaves:
            stays.send(body)
            leaves.send(body)
            await leaves.answer_head()
            leaves.reset()
            answer = await stays.answer()
            assert answer.complete
            assert answer.events[-2] == b"data: [DONE]"
        await rig.settled()
        assert len(rig.sim("decode").seen.cancels) == 1


# --- multipart


def form(audio: bytes) -> tuple[bytes, dict[str, str]]:
    parts = (
        b'--frontier\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n'
        b'--frontier\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"content-type: audio/wav\r\n\r\n%b\r\n--frontier--\r\n" % audio
    )
    return parts, {"content-type": "multipart/form-data; boundary=frontier"}


@by_way
async def test_in_the_middle_of_an_upload_that_is_streamed_through(way: str) -> None:
    async with Rig("plain") as rig:
        sim = rig.sim("combined")
        body, headers = form(b"a" * 1_000_000)
        async with leaver(rig) as client:
            client.head(len(body), "/v1/audio/transcriptions", headers=headers)
            client.writer.write(body[:500_000])
            await sim.seen.until(lambda: sim.seen.in_flight == 1)
            await leave(client, way)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["upload"]
        assert rig.count("requests", status="499") == 1


@by_way
async def test_while_an_upload_waits_for_its_answer(way: str) -> None:
    async with Rig("plain") as rig:
        sim = rig.sim("combined")
        sim.faults.add(Fault(kind="hang", path=POSTS))
        body, headers = form(b"a" * 1_000)
        async with leaver(rig) as client:
            client.send(body, "/v1/audio/transcriptions", headers=headers)
            await sim.seen.until(lambda: sim.seen.faults["hang"] == 1)
            await leave(client, way)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["working"]


# --- mooncake: both ends of a push


@by_way
async def test_while_encoders_push(way: str) -> None:
    async with Rig("e_pd", ec="mooncake") as rig:
        sim = rig.sim("encode")
        sim.faults.add(Fault(kind="hang", path=POSTS, count=None, after_work=True))
        async with leaver(rig) as client:
            client.send(chat(images=2))
            await sim.seen.until(lambda: sim.seen.faults["hang"] == 2)
            await leave(client, way)
        assert rig.seen("combined") == 0


# --- what is written after the client has left


async def test_nothing_is_told_of_a_client_that_left() -> None:
    """A reset between request and answer is an everyday event: one access line, no warning."""
    async with Rig("plain", sims={"combined": {"costs": {"request": 0.05}}}) as rig:
        for _ in range(5):
            async with rig.client() as client:
                client.send(chat())
                await eventually(lambda: rig.running.server.running == 1, "a handler", 2.0)
                client.reset()
                await rig.settled()
        await asyncio.sleep(0)
        assert [line["level"] for line in rig.log if line["level"] not in ("info", "debug")] == []
        assert [line["status"] for line in rig.log if line["event"] == "request"] == [499] * 5
