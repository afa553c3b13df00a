"""Contract, "What a client may not send": whose media is whose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.contract.kit import Gate, Scripted, media, parts
from tests.gateway.rig import Rig, image, messages

A = image("QUFB")


async def uuids(*asks: dict[str, str], **settings: Any) -> list[str]:
    """The uuid that the same image gets in requests with these headers."""
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], **settings) as gate:
        for headers in asks:
            assert (await gate.post(media(A), headers=headers)).status == 200
        assert [parts(seen)[0]["uuid"] for seen in e.seen] == [parts(seen)[0]["uuid"] for seen in c.seen]
        return [parts(seen)[0]["uuid"] for seen in e.seen]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("settings", [{}, {"api_keys": ["one", "two"]}], ids=["keys passed on", "keys checked"])
async def test_the_same_image_under_two_keys_has_two_uuids_and_under_one_key_one(settings: dict[str, Any]) -> None:
    one, again, two = await uuids(bearer("one"), bearer("one"), bearer("two"), **settings)
    assert one == again != two


async def test_without_a_key_there_is_one_shared_namespace() -> None:
    one, two, basic = await uuids({}, {"x-tenant": "a"}, {"authorization": "Basic x"})
    assert one == two == basic


async def test_a_tenant_header_counts_only_where_it_is_configured() -> None:
    first, second = await uuids({"x-tenant": "a"}, {"x-tenant": "b"})
    assert first == second
    first, second, again, none = await uuids(
        {"x-tenant": "a"}, {"x-tenant": "b"}, {"X-Tenant": "a"}, {}, tenant_header="X-Tenant"
    )
    assert first == again
    assert len({first, second, none}) == 3


async def test_a_tenant_header_names_tenants_within_a_key_so_that_no_key_reaches_anothers() -> None:
    told = await uuids(
        {"x-tenant": "a", **bearer("one")},
        {"x-tenant": "a", **bearer("two")},
        {"x-tenant": "a"},
        bearer("one"),
        tenant_header="x-tenant",
    )
    assert len(set(told)) == 4


async def test_a_client_cannot_name_the_uuid_of_anothers_image() -> None:
    """The attack: learn a uuid, send another image under it, and the next one who sends the first sees the second."""
    async with Rig("e_pd") as rig:
        victim = media(A, {"type": "text", "text": "what is it?"})
        await rig.post(victim, headers=bearer("victim"))
        stolen = parts(rig.sim("encode").seen.bodies[-1])[0]["uuid"]
        wanted = (await rig.post(victim, headers=bearer("victim"))).json["choices"]
        attack = media(image("QkJC") | {"uuid": stolen})
        assert (await rig.post(attack, headers=bearer("attacker"))).status == 200
        assert parts(rig.sim("encode").seen.bodies[-1])[0]["uuid"] != stolen
        assert (await rig.post(victim, headers=bearer("victim"))).json["choices"] == wanted


async def test_paths_never_reach_a_store_of_encoder_outputs() -> None:
    async with Rig("e_pd") as rig:
        for uuid in ("../evil", "/abs/evil", "..%2fevil"):
            assert (await rig.post(media(A | {"uuid": uuid}))).status == 200
        assert rig.sim("encode").seen.ec["escapes"] == 0
        assert rig.sim("combined").seen.ec["escapes"] == 0


async def test_on_messages_the_key_of_x_api_key_is_the_tenant() -> None:
    """The API has no uuids, so the engine hashes contents by itself; distinct legs are all that there is to see."""
    async with Rig("e_pd") as rig:
        for key in ("one", "two"):
            answer = await rig.post(messages(images=1), "/v1/messages", headers={"x-api-key": key})
            assert answer.status == 200
        for seen in rig.sim("encode").seen.bodies:
            assert b"uuid" not in seen.body
        assert sum(rig.sim("combined").seen.taken.values()) == 2
