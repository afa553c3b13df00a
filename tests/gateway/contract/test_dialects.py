"""Contract, the hand-over dialects. `eccpu` and `mooncake` cannot run on a CPU: the simulator stands for their engines,
which refuses what a real one would have to refuse."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.gateway.contract.kit import EC, KV, Gate, Scripted, copies, media
from tests.gateway.rig import Rig, chat, image
from triptych.gateway.app import ConfigurationError
from triptych.gateway.settings import GatewaySettings
from triptych.sim import Fault, MemoryStore, Sim

TWO = chat(images=2)
LONG = "what is to be seen in this picture, and in how many places of it? " * 4


async def plain_answer(body: dict[str, Any]) -> Any:
    async with Rig("plain") as rig:
        return (await rig.post(body)).json["choices"]


# -- eccpu


@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_eccpu_entries_carry_the_address_of_the_encoder_and_the_consumer_reads_there(plan: Any) -> None:
    wanted = await plain_answer(TWO)
    async with Rig(plan, ec="eccpu", engines={"encode": 2}) as rig:
        assert (await rig.post(TWO)).json["choices"] == wanted
        consumer = rig.sim("combined" if plan == "e_pd" else "prefill")
        ((told),) = copies(consumer.seen.bodies[-1].body, EC)
        assert len(told) == 2
        for entry in told.values():
            assert set(entry) == {"item_indices", "metadata", "peer_host", "peer_port", "size_bytes", "shape"}
        assert {entry["peer_port"] for entry in told.values()} <= {s for e in rig.pools["encode"] for s in e.side_ports}
        assert consumer.seen.ec["taken"] == 2
        assert not consumer.seen.encodes
        assert sum(e.seen.ec["served"] for e in rig.pools["encode"]) == 2


async def test_eccpu_entries_travel_byte_for_byte() -> None:
    entry = b'"h" : {"item_indices":[0],"peer_host":"e","peer_port":5.0e3, "size_bytes":1024,"shape":[8 ,32]}'
    said = b'{"ec_transfer_params":{' + entry + b"}}"
    async with Scripted(said) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], ec="eccpu") as gate:
        await gate.post(media(image()))
        assert b'"ec_transfer_params":{' + entry + b"}" in c.last.body


async def test_eccpu_an_encoder_that_is_gone_costs_an_encoding_and_not_the_request() -> None:
    body = chat(images=1)
    wanted = await plain_answer(body)
    async with Rig("e_p_d", ec="eccpu") as rig:
        prefill = rig.sim("prefill")
        prefill.faults.add(Fault(kind="slow_first_byte", seconds=0.3, path="/v1/*"))
        task = asyncio.create_task(rig.post(body))
        await prefill.seen.until(lambda: prefill.seen.in_flight == 1)
        await rig.sim("encode").kill()
        assert (await task).json["choices"] == wanted
        assert sum(prefill.seen.encodes.values()) == 1


# -- mooncake


def mooncake(consumers: list[Sim]) -> list[dict[str, Any]]:
    return [{"url": c.url, "ec_zmq": list(c.zmq_addresses)} for c in consumers]


async def test_mooncake_the_consumer_is_chosen_before_the_encode_call_and_both_are_told_of_it() -> None:
    async with Rig("e_pd", ec="mooncake", engines={"combined": 3}) as rig:
        for turn in range(6):
            assert (await rig.post(chat(text=str(turn), images=2))).status == 200
        encodes = list(rig.sim("encode").seen.bodies)
        assert len(encodes) == 12
        for consumer in rig.pools["combined"]:
            for seen in consumer.seen.bodies:
                asked = seen.header("x-request-id").removesuffix("-decode")  # type: ignore[union-attr]
                ((told),) = copies(seen.body, EC)
                items = told["ec_items"]
                legs = [e for e in encodes if str(e.header("x-request-id")).startswith(asked + "-")]
                sent = [copies(leg.body, EC)[0] for leg in legs]
                assert [set(s) for s in sent] == [{"consumer_zmq", "ec_items"}] * 2
                assert {s["consumer_zmq"] for s in sent} == {consumer.zmq}, "the encoder is told of this consumer"
                assert {s["ec_items"][0]["transfer_id"] for s in sent} == {i["transfer_id"] for i in items}
                assert all(set(item) == {"mm_hash", "transfer_id"} for item in items)
                assert {i["mm_hash"] for i in items} == set(told) - {"ec_items"}
        assert sum(c.seen.ec["received"] for c in rig.pools["combined"]) == 12
        assert sum(c.seen.ec["taken"] for c in rig.pools["combined"]) == 12
        assert not any(c.seen.encodes for c in rig.pools["combined"])


async def test_mooncake_repeated_items_are_matched_wherever_they_stand() -> None:
    body = media(image("QUFB"), image("QkJC"), image("QUFB"))
    wanted = await plain_answer(body)
    async with Rig("e_pd", ec="mooncake", sims={"combined": {"encoder_cache_items": 9}}) as rig:
        assert (await rig.post(body)).json["choices"] == wanted
        assert rig.seen("encode") == 2


async def test_mooncake_transfer_ids_are_new_for_each_request_whatever_its_id() -> None:
    async with Rig("e_pd", ec="mooncake") as rig:
        for _ in range(2):
            assert (await rig.post(chat(images=1), headers={"x-request-id": "same"})).status == 200
        ids = {copies(b.body, EC)[0]["ec_items"][0]["transfer_id"] for b in rig.sim("encode").seen.bodies}
        assert len(ids) == 2


async def test_mooncake_an_item_whose_encode_leg_failed_is_left_out_of_ec_items() -> None:
    wanted = await plain_answer(chat(images=3))
    async with Rig("e_pd", ec="mooncake") as rig:
        rig.sim("encode").faults.add(Fault(kind="status", status=500, leg="-enc1"))
        assert (await rig.post(chat(images=3))).json["choices"] == wanted
        consumer = rig.sim("combined")
        ((told),) = copies(consumer.seen.bodies[-1].body, EC)
        assert len(told["ec_items"]) == 2
        assert consumer.seen.ec["timeout"] == 0
        assert sum(consumer.seen.encodes.values()) == 1


async def test_mooncake_with_every_leg_failed_the_consumer_is_told_nothing() -> None:
    async with Rig("e_pd", ec="mooncake") as rig:
        rig.sim("encode").faults.add(Fault(kind="reset", count=None, path="/v1/*"))
        assert (await rig.post(TWO)).status == 200
        assert copies(rig.sim("combined").seen.bodies[-1].body, EC) == []


async def test_mooncake_the_rank_is_pinned_by_header_where_there_are_several() -> None:
    async with Rig("e_pd", ec="mooncake", sims={"combined": {"dp_size": 3}}) as rig:
        consumer = rig.sim("combined")
        for turn in range(12):
            answer = await rig.post(chat(text=str(turn), images=1), headers={"x-data-parallel-rank": "7"})
            assert answer.status == 200
        told = [copies(b.body, EC)[0]["consumer_zmq"] for b in rig.sim("encode").seen.bodies]
        ranks = [b.header("x-data-parallel-rank") for b in consumer.seen.bodies]
        assert [consumer.zmq_addresses[int(str(rank))] for rank in ranks] == told
        assert len(set(ranks)) > 1, "requests are spread over the ranks"
        assert all(b.header("x-data-parallel-rank") is None for b in rig.sim("encode").seen.bodies)
        assert consumer.seen.ec["taken"] == 12


async def test_mooncake_the_rank_is_the_plans_even_where_a_setting_lets_clients_choose() -> None:
    async with Rig("e_pd", ec="mooncake", sims={"combined": {"dp_size": 2}}, open=["data_parallel_rank"]) as rig:
        for turn in range(4):
            answer = await rig.post(chat(text=str(turn), images=1), headers={"x-data-parallel-rank": "9"})
            assert answer.status == 200
        for seen in rig.sim("combined").seen.bodies:
            ranks = [value for name, value in seen.headers if name == "x-data-parallel-rank"]
            assert len(ranks) == 1
            assert ranks[0] in ("0", "1")


async def test_mooncake_no_rank_is_pinned_where_there_is_one() -> None:
    async with Rig("e_pd", ec="mooncake") as rig:
        assert (await rig.post(chat(images=1))).status == 200
        assert rig.sim("combined").seen.bodies[-1].header("x-data-parallel-rank") is None


async def test_mooncake_the_consumers_leg_moves_to_no_other_engine() -> None:
    async with Rig("e_pd", ec="mooncake", engines={"combined": 2}) as rig:
        for consumer in rig.pools["combined"]:
            consumer.faults.add(Fault(kind="status", status=503, path="/v1/*", count=None))
        answer = await rig.post(chat(images=1))
        assert answer.status == 503
        assert sum(rig.pools["combined"][i].seen.requests["/v1/chat/completions"] for i in range(2)) == 1
        assert rig.count("leg_retries", leg="combined") == 0


def test_mooncake_is_for_e_pd_only_and_needs_the_consumers_addresses() -> None:
    with pytest.raises(ValidationError, match=r"mooncake works with E\+PD only"):
        GatewaySettings.model_validate(
            {"ec": "mooncake", "encode": ["http://e:1"], "prefill": ["http://p:1"], "decode": ["http://d:1"]}
        )
    with pytest.raises(ValidationError, match="needs, for http://c:1, the address tcp://"):
        GatewaySettings.model_validate({"ec": "mooncake", "encode": ["http://e:1"], "combined": ["http://c:1"]})


async def test_mooncake_on_decode_engines_without_a_prefill_pool_is_e_pd() -> None:
    encoder, consumer = Sim(role="encode", ec="mooncake"), Sim(ec="mooncake")
    async with encoder, consumer, Gate(encode=[encoder.url], decode=mooncake([consumer]), ec="mooncake") as gate:
        assert (await gate.post(TWO)).status == 200
        assert consumer.seen.ec["taken"] == 2
        gate.others_have_sockets()  # the engines' own channel


# -- example: EC by hash, KV by shared storage


async def test_ec_example_is_keyed_by_hash_so_that_what_is_injected_does_no_harm() -> None:
    wanted = await plain_answer(TWO)
    for injected in (b"{}", b'{"ec_transfer_params":{"some":{"item_indices":[9]}}}'):
        async with Rig("e_pd") as rig:
            rig.sim("encode").faults.add(
                Fault(kind="garbage_json", body=injected.decode(), count=None, after_work=True, path="/v1/*")
            )
            assert (await rig.post(TWO)).json["choices"] == wanted
            assert rig.sim("combined").seen.ec["taken"] == 2, "found by its hash all the same"


@pytest.mark.parametrize("takes_ec", [False, True])
async def test_kv_example_carries_nothing(takes_ec: bool) -> None:
    body = media({"type": "text", "text": LONG}, image())
    wanted = await plain_answer(body)
    ec, kv = MemoryStore(), MemoryStore()
    e = Sim(role="encode", ec="example", ec_dir=ec)
    p = Sim(role="prefill", ec="example", ec_dir=ec, kv="example", kv_dir=kv, keep_bodies=9)
    also: dict[str, Any] = {"ec": "example", "ec_role": "consumer", "ec_dir": ec} if takes_ec else {}
    d = Sim(role="decode", kv="example", kv_dir=kv, keep_bodies=9, **also)
    async with e, p, d:
        pools = {"encode": [e.url], "prefill": [p.url], "decode": [d.url]}
        async with Gate(**pools, kv="example", decode_ec_consumer=takes_ec) as gate:
            assert (await gate.post(body)).json["choices"] == wanted
        for engine in (p, d):
            assert copies(engine.seen.bodies[-1].body, KV) == []
        assert copies(p.seen.bodies[-1].body, "max_tokens") == [1]
        assert d.seen.kv["hit"] == 1
        assert len(copies(d.seen.bodies[-1].body, EC)) == takes_ec


# -- third parties

LABELLED = """
class Labelled:
    name = "labelled"
    pins_consumer = False

    def rank(self, consumer, rng):
        return 0

    def encode_params(self, context, item):
        return b'{"label":"%b","item":%d}' % (context.request_id.encode(), item)

    def consumer_params(self, context, handles):
        return b'{"count":%d}' % sum(handed is not None for handed in handles)

    def consumer_rank(self, context):
        return None


labelled = Labelled()
"""
DOCUMENT = Path(__file__).parents[3] / "docs" / "epd.md"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a third party as pip would leave it: nothing in Triptych knows of it.

    Its KV dialect is the worked example of the documentation.
    """
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "my_package.py").write_text(example + LABELLED)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[triptych.kv_dialects]\nbootstrap = my_package:dialect\n"
        "[triptych.ec_dialects]\nlabelled = my_package:labelled\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)


class AtOnce:
    """Two engines, each of which answers only when the other has been called too."""

    def __init__(self) -> None:
        self._both = asyncio.Barrier(2)
        self.prefill = Scripted(lambda _: self._answer(b"{}"))
        self.decode = Scripted(lambda _: self._answer(b'{"from":"decode"}'))

    async def _answer(self, said: bytes) -> bytes:
        async with asyncio.timeout(5):
            await self._both.wait()
        return said


@pytest.mark.usefixtures("plugin")
async def test_a_kv_dialect_with_a_room_on_both_bodies_and_both_legs_at_once_needs_no_change_to_the_registry() -> None:
    pair = AtOnce()
    async with pair.prefill as p, pair.decode as d:
        prefill = [{"url": p.url, "handover": {"bootstrap_port": 9001}}]
        async with Gate(prefill=prefill, decode=[d.url], kv="bootstrap") as gate:
            body = chat(stream=False, max_tokens=9) | {"bootstrap_room": 1}
            answer = await gate.post(body, headers={"x-request-id": "r"})
            assert answer.json == {"from": "decode"}
            told = [
                {k: v for k, v in json.loads(seen.body).items() if k.startswith("bootstrap")}
                for seen in (p.last, d.last)
            ]
            assert told[0] == told[1]
            assert told[0].keys() == {"bootstrap_host", "bootstrap_port", "bootstrap_room"}
            assert (told[0]["bootstrap_host"], told[0]["bootstrap_port"]) == ("127.0.0.1", 9001)
            assert copies(p.last.body, "max_tokens") == [1]
            assert copies(d.last.body, "max_tokens") == [9]
            assert copies(p.last.body, KV) == copies(d.last.body, KV) == []
            assert (p.last.header("x-request-id"), d.last.header("x-request-id")) == ("r", "r")
            await gate.post(body, headers={"x-request-id": "r"})
            rooms = {copies(seen.body, "bootstrap_room")[0] for seen in d.seen}
            assert len(rooms) == 2, "no two requests meet in a room, though a client gives them one id"
            await gate.settled(5.0)


@pytest.mark.usefixtures("plugin")
async def test_fields_that_the_dialect_in_force_owns_may_not_occur_twice() -> None:
    raw = b'{"model":"sim","messages":[],"bootstrap_host":"a","bootstrap_host":"b"}'
    async with Scripted() as p, Scripted() as d:
        async with Gate(prefill=[p.url], decode=[d.url], kv="bootstrap") as gate:
            answer = await gate.post(raw)
            assert answer.status == 400
            assert answer.json["error"]["message"] == 'duplicate top-level key "bootstrap_host" in request body'
        async with Gate(combined=[d.url]) as gate:
            assert (await gate.post(raw)).status == 200
            assert d.last.body == raw


@pytest.mark.usefixtures("plugin")
async def test_when_one_of_two_legs_at_once_fails_the_other_is_closed_and_the_client_told() -> None:
    async with Rig("p_d", kv="bootstrap", sims={"decode": {"kv": "none"}}) as rig:
        rig.sim("decode").faults.add(Fault(kind="hang", path="/v1/*"))
        rig.sim("prefill").faults.add(Fault(kind="status", status=500, path="/v1/*"))
        answer = await rig.post(chat())
        assert answer.status == 502
        assert "prefill engine" in answer.json["error"]["message"]
        await rig.settled(5.0)
        assert rig.count("leg_retries") == 0


@pytest.mark.usefixtures("plugin")
async def test_an_ec_dialect_of_a_third_party_is_told_of_and_tells() -> None:
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], ec="labelled") as gate:
        e.says = b'{"ec_transfer_params":{"h":{}}}'
        assert (await gate.post(TWO, headers={"x-request-id": "r"})).status == 200
        assert [copies(seen.body, EC) for seen in e.seen] == [[{"label": "r", "item": i}] for i in (0, 1)]
        assert copies(c.last.body, EC) == [{"count": 2}]


@pytest.mark.parametrize("kind", ["ec", "kv"])
async def test_a_dialect_that_is_not_there_is_an_error_that_names_those_that_are(kind: str) -> None:
    known = {"ec": "eccpu, example, mooncake", "kv": "example, nixl"}[kind]
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigurationError, match=f"{kind}: there is no dialect 'other'; there are {known}"):
            await stack.enter_async_context(Gate(combined=["http://127.0.0.1:9"], **{kind: "other"}))
