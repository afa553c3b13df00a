"""What is tried again, where, how often; and what never is (contract, "Retry")."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.rig import PLANS, POSTS, ROLES, PlanName, Rig, chat
from triptych.gateway.engines import Engine
from triptych.sim.faults import Fault

LEGS = [(plan, role) for plan in PLANS for role in ROLES[plan]]
LATER_LEGS = [(plan, role) for plan, role in LEGS if role != "encode"]
IMAGES = {"plain": 0, "p_d": 0, "e_pd": 1, "e_p_d": 1}
OWN = {"error": {"message": "own words", "type": "Odd", "param": None, "code": 409}}


def engine(rig: Rig, role: str, index: int) -> Engine:
    found = rig.gateway.fleet.find(rig.sim(role, index).url)
    return found[0]


class First:
    """While entered, the pool's engines are chosen in their order: each is more loaded than those before it."""

    def __init__(self, rig: Rig, role: str) -> None:
        self._rig = rig
        self._role = role

    def __enter__(self) -> None:
        count = len(self._rig.pools[self._role])
        self._leases = [
            engine(self._rig, self._role, index).lease() for index in range(count) for _ in range(10 * index)
        ]

    def __exit__(self, *_: object) -> None:
        for lease in self._leases:
            lease.release()


def seen(rig: Rig, role: str) -> list[int]:
    return [
        sum(count for path, count in sim.seen.requests.items() if path.startswith("/v1/") and path != "/v1/models")
        for sim in rig.pools[role]
    ]


def body(plan: PlanName, stream: bool = False) -> dict[str, Any]:
    return chat(images=IMAGES[plan], stream=stream)


# --- to another engine of the pool


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_connect_failure_goes_to_another_engine(plan: PlanName, role: str, stream: bool) -> None:
    async with Rig(plan, engines={role: 2}, encode_failure="strict") as rig:
        await rig.sim(role, 0).stop()
        with First(rig, role):
            answer = await rig.post(body(plan, stream))
        assert answer.status == 200, answer
        await rig.settled()
        assert seen(rig, role) == [0, 1]
        assert rig.count("leg_retries", leg=role) == 1
        assert rig.legs()[(role, "success")] == 1
        assert (role, "connect_error") not in rig.legs()


@pytest.mark.parametrize("status", [502, 503])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_502_or_503_goes_to_another_engine(plan: PlanName, role: str, status: int) -> None:
    async with Rig(plan, engines={role: 2}, encode_failure="strict") as rig:
        rig.sim(role, 0).faults.add(Fault(kind="status", status=status, path=POSTS, count=None))
        with First(rig, role):
            answer = await rig.post(body(plan))
        assert answer.status == 200, answer
        await rig.settled()
        assert seen(rig, role) == [1, 1]
        assert rig.count("leg_retries", leg=role) == 1


@pytest.mark.parametrize("fault", ["refused", "503"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_once_and_no_more(plan: PlanName, role: str, fault: str) -> None:
    async with Rig(plan, engines={role: 3}, encode_failure="strict") as rig:
        for index in (0, 1):
            if fault == "refused":
                await rig.sim(role, index).stop()
            else:
                rig.sim(role, index).faults.add(Fault(kind="status", status=503, path=POSTS, count=None))
        with First(rig, role):
            answer = await rig.post(body(plan))
        assert answer.status == (503 if fault == "503" and role == rig.final else 502)
        await rig.settled()
        assert seen(rig, role) == ([0, 0, 0] if fault == "refused" else [1, 1, 0])


@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_not_to_an_engine_at_its_limit(plan: PlanName, role: str) -> None:
    async with Rig(plan, engines={role: 2}, encode_failure="strict") as rig:
        await rig.sim(role, 0).stop()
        other = engine(rig, role, 1)
        other.limit = 1
        with other.lease():
            answer = await rig.post(body(plan))
        assert answer.status == 502
        await rig.settled()
        assert seen(rig, role) == [0, 0]


@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_500_is_not_tried_again(plan: PlanName, role: str) -> None:
    async with Rig(plan, engines={role: 2}, encode_failure="strict") as rig:
        rig.sim(role, 0).faults.add(Fault(kind="status", status=500, path=POSTS, count=None))
        with First(rig, role):
            answer = await rig.post(body(plan))
        assert answer.status == (500 if role == rig.final else 502)
        await rig.settled()
        assert seen(rig, role) == [1, 0]


# --- what may have run


@pytest.mark.parametrize("kind", ["reset", "close", "garbage", "hang", "cut"])
@pytest.mark.parametrize(("plan", "role"), LATER_LEGS)
async def test_a_leg_that_may_have_run_is_not_repeated(plan: PlanName, role: str, kind: str) -> None:
    deadlines = {"prefill": 0.3, "first_byte": 0.3} if kind == "hang" else {}
    async with Rig(plan, engines={role: 2}, deadlines=deadlines) as rig:
        rig.sim(role, 0).faults.add(Fault(kind=kind, path=POSTS, count=None))
        with First(rig, role):
            answer = await rig.post(body(plan))
        assert answer.status in (502, 504)
        await rig.settled()
        assert seen(rig, role) == [1, 0]
        assert rig.count("leg_retries") == 0


@pytest.mark.parametrize("kind", ["reset", "close", "garbage"])
@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_an_encode_leg_may_be_repeated(plan: PlanName, kind: str) -> None:
    async with Rig(plan, engines={"encode": 2}, encode_failure="strict") as rig:
        rig.sim("encode", 0).faults.add(Fault(kind=kind, path=POSTS, count=None))
        with First(rig, "encode"):
            answer = await rig.post(body(plan))
        assert answer.status == 200, answer
        await rig.settled()
        assert seen(rig, "encode") == [1, 1]
        assert rig.legs()[("encode", "success")] == 1


# --- a connection that was used before


@pytest.mark.parametrize("kind", ["reset", "close"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_reset_on_a_reused_connection_is_sent_again_once_on_a_fresh_one(
    plan: PlanName, role: str, kind: str
) -> None:
    async with Rig(plan, encode_failure="strict") as rig:
        assert (await rig.post(body(plan))).status == 200  # opens the connections
        rig.sim(role).faults.add(Fault(kind=kind, path=POSTS, count=1))
        answer = await rig.post(body(plan))
        assert answer.status == 200, answer
        await rig.settled()
        assert seen(rig, role) == [3]
        assert rig.count("leg_retries") == 0  # the same engine

        rig.sim(role).faults.add(Fault(kind=kind, path=POSTS, count=2))
        answer = await rig.post(body(plan))
        assert answer.status == 502
        await rig.settled()
        assert seen(rig, role) == [5]


@pytest.mark.parametrize("kind", ["reset_body", "cut", "garbage"])
@pytest.mark.parametrize(("plan", "role"), LATER_LEGS)
async def test_what_breaks_on_a_reused_connection_after_a_byte_is_not_sent_again(
    plan: PlanName, role: str, kind: str
) -> None:
    async with Rig(plan) as rig:
        assert (await rig.post(body(plan))).status == 200
        rig.sim(role).faults.add(Fault(kind=kind, path=POSTS, count=1))
        answer = await rig.post(body(plan))
        assert answer.status == 502
        await rig.settled()
        assert seen(rig, role) == [2]


@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_connection_that_the_engine_closed_meanwhile_costs_nothing(plan: PlanName, role: str) -> None:
    async with Rig(plan, encode_failure="strict") as rig:
        assert (await rig.post(body(plan))).status == 200
        rig.sim(role).close_idle()
        assert (await rig.post(body(plan))).status == 200
        await rig.settled()
        assert seen(rig, role) == [2]


async def test_an_upload_that_is_streamed_through_is_never_sent_twice() -> None:
    form = b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--f\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\naudio\r\n--f--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=f"}
    async with Rig("plain", engines={"combined": 2}) as rig:
        for kind in ("reset", "status"):
            rig.sim("combined", 0).faults.add(Fault(kind=kind, status=503, path=POSTS, count=1))
            with First(rig, "combined"):
                answer = await rig.post(form, "/v1/audio/transcriptions", headers=headers)
            assert answer.status == (502 if kind == "reset" else 503)
            await rig.settled()
        assert seen(rig, "combined") == [2, 0]


async def test_an_upload_that_could_not_connect_goes_to_another_engine() -> None:
    form = b'--f\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--f\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\naudio\r\n--f--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=f"}
    async with Rig("plain", engines={"combined": 2}) as rig:
        await rig.sim("combined", 0).stop()
        with First(rig, "combined"):
            answer = await rig.post(form, "/v1/audio/transcriptions", headers=headers)
        assert answer.status == 200, answer
        await rig.settled()


# --- an engine's own words


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 429])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_4xx_reaches_the_client_as_the_engine_wrote_it_and_once(plan: PlanName, role: str, status: int) -> None:
    async with Rig(plan, engines={role: 2}, encode_failure="strict") as rig:
        fault = Fault(kind="status", status=status, body=OWN, headers={"x-engine": "says so"}, path=POSTS, count=None)
        for sim in rig.pools[role]:
            sim.faults.add(fault)
        async with rig.client() as client:
            client.send(body(plan))
            answer = await client.answer()
            assert answer.status == status
            assert answer.json == OWN
            assert answer.headers["x-engine"] == "says so"
            for sim in rig.pools[role]:
                sim.faults.clear()
            client.send(body(plan))  # the connection is good for another request
            assert (await client.answer()).status == 200
        await rig.settled()
        assert sum(seen(rig, role)) == 2
        assert rig.count("leg_retries") == 0


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_refusal_of_the_gateways_own_key_is_a_502(plan: PlanName, role: str, status: int) -> None:
    async with Rig(plan, encode_failure="strict", engine_api_key="the-gateways-own") as rig:
        rig.sim(role).faults.add(Fault(kind="status", status=status, body=OWN, path=POSTS, count=None))
        answer = await rig.post(body(plan, stream=True))
        assert answer.status == 502
        message = answer.json["error"]["message"]
        assert rig.sim(role).url in message
        assert "own words" not in message
        assert "the-gateways-own" not in str(answer) + str(rig.log)
        await rig.settled()
        assert rig.legs()[(role, "http_error")] == 1


@pytest.mark.parametrize("plan", PLANS)
async def test_the_gateways_own_key_is_shown_to_every_leg_and_the_clients_to_none(plan: PlanName) -> None:
    sims = {role: {"api_key": "right"} for role in ROLES[plan]}
    async with Rig(plan, sims=sims, encode_failure="strict", engine_api_key="right") as rig:
        answer = await rig.post(body(plan), headers={"authorization": "Bearer a-clients"})
        assert answer.status == 200, answer
        await rig.settled()
        for sim in rig.all_sims:
            assert [seen.header("authorization") for seen in sim.seen.bodies] == ["Bearer right"]


# --- mooncake: the encoder was told which consumer it is


async def test_mooncake_pins_the_consumer() -> None:
    async with Rig("e_pd", ec="mooncake", engines={"combined": 2}) as rig:
        await rig.sim("combined", 0).stop()
        with First(rig, "combined"):
            answer = await rig.post(body("e_pd"))
        assert answer.status == 502
        assert rig.sim("combined", 0).url in answer.json["error"]["message"]
        await rig.settled()
        assert seen(rig, "combined") == [0, 0]


async def test_mooncake_pins_no_consumer_that_no_encoder_was_told_of() -> None:
    async with Rig("e_pd", ec="mooncake", engines={"combined": 2}) as rig:
        await rig.sim("combined", 0).stop()
        with First(rig, "combined"):
            answer = await rig.post(chat())
        assert answer.status == 200
        await rig.settled()


async def test_mooncake_an_item_whose_leg_failed_is_not_announced() -> None:
    async with Rig("e_pd", ec="mooncake") as rig:
        rig.sim("encode").faults.add(Fault(kind="status", status=500, path=POSTS, leg="-enc1"))
        answer = await rig.post(chat(images=3))
        await rig.settled()
        told = json.loads(rig.sim("combined").seen.bodies[-1].body)["ec_transfer_params"]
        assert len(told["ec_items"]) == 2
        assert answer.status in (200, 500)  # vLLM 0.32 waits for the item all the same


# --- what ejects


@pytest.mark.parametrize("plan", PLANS)
async def test_an_engine_that_refuses_connections_leaves_the_pool(plan: PlanName) -> None:
    async with Rig(plan, health={"failures": 3}) as rig:
        await rig.sim("final").stop()
        statuses = [(await rig.post(body(plan))).status for _ in range(4)]
        assert statuses == [502, 502, 502, 503]
        answer = await rig.post(body(plan))
        assert int(answer.headers["retry-after"]) > 0
        await rig.settled()
