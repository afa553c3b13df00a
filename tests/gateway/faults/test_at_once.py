"""KV dialects whose prefill and decode legs run at once: whichever fails first ends the other.

None is built in yet; the seam for them is there, and what it promises is held here with a dialect of the test's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.gateway.rig import POSTS, Rig, chat
from triptych.gateway.handover import KvContext, KvDialect
from triptych.gateway.handover.kv import KV_DIALECTS
from triptych.sim.faults import Fault


class Together:
    """Both legs are told of the same room and start together."""

    name = "together"
    owned: frozenset[str] = frozenset({"bootstrap_room"})
    answer_field: str | None = None
    at_once = True
    same_id = True

    def prefill_members(self, context: KvContext) -> Mapping[str, bytes]:
        return {"bootstrap_room": b"7"}

    def decode_members(self, context: KvContext, handed: bytes | None) -> Mapping[str, bytes]:
        return {"bootstrap_room": b"7"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    dialects: dict[str, KvDialect] = {d.name: d for d in (*KV_DIALECTS, Together())}
    monkeypatch.setattr("triptych.gateway.app.kv_dialects", lambda: dialects)


def rig_of(**more: Any) -> Rig:
    sims = {role: {"kv": "none"} for role in ("prefill", "decode")}
    return Rig("p_d", sims=sims, kv="together", **more)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_both_legs_carry_the_room_and_one_id(stream: bool) -> None:
    async with rig_of() as rig:
        answer = await rig.post(chat(stream=stream))
        assert answer.status == 200
        await rig.settled()
        seen = [rig.sim(role).seen.bodies[-1] for role in ("prefill", "decode")]
        assert [json.loads(s.body)["bootstrap_room"] for s in seen] == [7, 7]
        assert seen[0].header("x-request-id") == seen[1].header("x-request-id") == answer.headers["x-request-id"]
        assert rig.legs() == {("prefill", "success"): 1, ("decode", "success"): 1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_fails_ends_the_other(role: str) -> None:
    other = "decode" if role == "prefill" else "prefill"
    async with rig_of() as rig:
        rig.sim(role).faults.add(Fault(kind="reset", path=POSTS, count=None))
        rig.sim(other).faults.add(Fault(kind="hang", path=POSTS, count=None))
        answer = await rig.post(chat())
        assert answer.status == 502
        assert answer.json["error"]["message"].startswith(f"{role} engine {rig.sim(role).url}")
        await rig.settled()
        assert rig.legs() == {(role, "connect_error"): 1, (other, "cancelled"): 1}


async def test_an_engines_refusal_of_prefill_reaches_the_client() -> None:
    own = {"error": {"message": "own words", "type": "Odd", "param": None, "code": 422}}
    async with rig_of() as rig:
        rig.sim("prefill").faults.add(Fault(kind="status", status=422, body=own, path=POSTS))
        rig.sim("decode").faults.add(Fault(kind="hang", path=POSTS))
        answer = await rig.post(chat())
        assert (answer.status, answer.json) == (422, own)
        await rig.settled()


@pytest.mark.parametrize("kind", ["hang", "hang_body"])
async def test_prefill_that_fails_while_the_answer_streams_is_told_in_band(kind: str) -> None:
    """Decode has begun to answer; then its prefill turns out to have failed."""
    async with rig_of(deadlines={"prefill": 0.4}) as rig:
        rig.sim("decode").faults.add(Fault(kind="hang_body", events=2, path=POSTS))
        rig.sim("prefill").faults.add(Fault(kind=kind, path=POSTS))
        async with rig.client() as client:
            client.send(chat(stream=True))
            answer = await client.answer()
            assert answer.status == 200
            assert answer.complete
            assert b"[DONE]" not in answer.body
            error = json.loads(answer.events[-2].removeprefix(b"data: "))["error"]
            assert error["message"].startswith(f"prefill engine {rig.sim('prefill').url}")
            assert await client.ended()
        await rig.settled()
        assert rig.legs() == {("prefill", "timeout"): 1, ("decode", "cancelled"): 1}


async def test_prefill_that_fails_after_the_answer_is_only_counted() -> None:
    async with rig_of(deadlines={"prefill": 0.4}) as rig:
        rig.sim("prefill").faults.add(Fault(kind="hang", path=POSTS))
        answer = await rig.post(chat(stream=True))
        assert answer.status == 200
        assert answer.events[-2] == b"data: [DONE]"
        await rig.settled()
        assert rig.legs() == {("prefill", "timeout"): 1, ("decode", "success"): 1}
        assert rig.count("requests", status="200") == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_neither_leg_moves_to_another_engine(role: str) -> None:
    """Each has been told which engine the other is."""
    async with rig_of(engines={role: 2}) as rig:
        for sim in rig.pools[role]:
            sim.faults.add(Fault(kind="status", status=503, path=POSTS, count=None))
        if role == "prefill":
            rig.sim("decode").faults.add(Fault(kind="hang", path=POSTS))
        answer = await rig.post(chat())
        assert answer.status in (502, 503)
        await rig.settled()
        assert rig.seen(role) == 1


async def test_a_client_that_leaves_ends_both() -> None:
    async with rig_of() as rig:
        for role in ("prefill", "decode"):
            rig.sim(role).faults.add(Fault(kind="hang", path=POSTS))
        async with rig.client() as client:
            client.send(chat())
            for role in ("prefill", "decode"):
                await rig.sim(role).seen.until(lambda role=role: rig.sim(role).seen.faults["hang"] == 1)
            client.reset()
            await rig.settled()
        assert rig.legs() == {("prefill", "cancelled"): 1, ("decode", "cancelled"): 1}
