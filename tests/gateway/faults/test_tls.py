"""The same over TLS, on both sides: what fails, who leaves, and nothing left."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.gateway.rig import PLANS, POSTS, ROLES, PlanName, Rig, chat
from triptych.sim import Sim
from triptych.sim.faults import Fault

LEGS = [(plan, role) for plan in PLANS for role in ROLES[plan]]
IMAGES = {"plain": 0, "p_d": 0, "e_pd": 2, "e_p_d": 2}


class Keys:
    """An authority, and what gateway, engines and clients have of it."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        own = self.authority.issue_cert("127.0.0.1")
        self.ca = folder / "ca.pem"
        self.certificate = folder / "certificate.pem"
        self.key = folder / "key.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.certificate.write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
        own.private_key_pem.write_to_path(self.key)
        self.client = ssl.create_default_context(cafile=self.ca)

    def engine(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        return context

    def rig(self, plan: PlanName, **more: Any) -> Rig:
        return Rig(
            plan,
            sims={role: {"tls": self.engine()} for role in ROLES[plan]},
            tls={"certificate": self.certificate, "key": self.key},
            engine_tls={"ca": self.ca},
            **more,
        )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("plan", PLANS)
async def test_every_plan_runs_over_tls(keys: Keys, plan: PlanName, stream: bool) -> None:
    async with keys.rig(plan, encode_failure="strict") as rig:
        async with rig.client(tls=keys.client) as client:
            client.send(chat(images=IMAGES[plan], stream=stream))
            answer = await client.answer()
        assert answer.status == 200, answer
        assert answer.complete
        await rig.settled()


@pytest.mark.parametrize(("plan", "role"), LEGS)
@pytest.mark.parametrize("wrong", ["untrusted", "no-tls"])
async def test_an_engine_that_cannot_be_trusted_is_unreachable(
    keys: Keys, plan: PlanName, role: str, wrong: str
) -> None:
    context = None
    if wrong == "untrusted":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with Sim(tls=context) as other, keys.rig(plan, encode_failure="strict") as rig:
        (engine,) = rig.gateway.fleet.find(rig.sim(role).url)
        engine.origin = engine.origin._replace(port=other.port)
        async with rig.client(tls=keys.client) as client:
            client.send(chat(images=IMAGES[plan]))
            answer = await client.answer()
        assert answer.status == 502, answer
        await rig.settled()
        assert rig.legs()[(role, "connect_error")] >= 1
        assert sum(other.seen.requests.values()) == 0


@pytest.mark.parametrize("kind", ["reset", "cut", "hang"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_faults_over_tls(keys: Keys, plan: PlanName, role: str, kind: str) -> None:
    deadlines = {"encode": 0.3, "prefill": 0.3, "first_byte": 0.3} if kind == "hang" else {}
    async with keys.rig(plan, encode_failure="strict", deadlines=deadlines) as rig:
        rig.sim(role).faults.add(Fault(kind=kind, path=POSTS, count=None))
        async with rig.client(tls=keys.client) as client:
            client.send(chat(images=IMAGES[plan]))
            answer = await client.answer()
        assert answer.status == (504 if kind == "hang" else 502)
        await rig.settled()


@pytest.mark.parametrize("plan", PLANS)
async def test_a_broken_stream_over_tls(keys: Keys, plan: PlanName) -> None:
    async with keys.rig(plan) as rig:
        rig.sim("final").faults.add(Fault(kind="cut", events=3, partial=True, path=POSTS))
        async with rig.client(tls=keys.client) as client:
            client.send(chat(images=IMAGES[plan], stream=True))
            answer = await client.answer()
            assert len(answer.events) == 5
            assert json.loads(answer.events[3].removeprefix(b"data: "))["error"]["code"] == 502
            assert await client.ended()
        await rig.settled()


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize(("plan", "role"), LEGS)
async def test_a_client_that_leaves_over_tls(keys: Keys, plan: PlanName, role: str, way: str) -> None:
    async with keys.rig(plan) as rig:
        sim = rig.sim(role)
        sim.faults.add(Fault(kind="hang", path=POSTS, count=None))
        legs = IMAGES[plan] if role == "encode" else 1
        async with rig.client(tls=keys.client) as client:
            client.send(chat(images=IMAGES[plan]))
            await sim.seen.until(lambda: sim.seen.faults["hang"] == legs)
            if way == "reset":
                client.reset()
            else:
                await client.close()
            await rig.settled()
        assert [cancel.moment for cancel in sim.seen.cancels] == ["working"] * legs
        assert rig.count("requests", plan=plan, status="499") == 1


async def test_a_client_that_speaks_no_tls_is_turned_away(keys: Keys) -> None:
    async with keys.rig("plain") as rig:
        async with rig.client() as client:
            client.send(chat())
            await client.ended()
        await rig.settled()
        assert rig.seen("combined") == 0
