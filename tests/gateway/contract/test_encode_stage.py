"""Contract, "Encode stage", point by point."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.gateway.contract.kit import EC, KV, Gate, Scripted, copies, media, pairs, parts
from tests.gateway.rig import Rig, chat, image
from triptych.gateway.metrics import ENCODE_STATUSES, Metrics
from triptych.sim import Fault, SeenRequest

A, B, C = image("QUFB"), image("QkJC"), image("Q0ND")
MIB = 1 << 20


def name_of(seen: SeenRequest) -> str:
    """The item that an encode leg is about: the letters of its data."""
    return str(parts(seen)[0]["image_url"]["url"][-4:])


# -- 1: distinct, parallel, bounded, each under its own deadline


@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_1_there_is_one_leg_for_each_distinct_item(plan: Any) -> None:
    async with Rig(plan) as rig:
        assert (await rig.post(media(A, B, A, {"type": "text", "text": "and"}, A, B))).status == 200
        assert rig.seen("encode") == 2
        assert rig.legs()["encode", "success"] == 2
        consumer = rig.sim("combined" if plan == "e_pd" else "prefill")
        assert sum(consumer.seen.taken.values()) == 5, "every place of an item takes the one encoding"
        assert not consumer.seen.encodes


async def test_1_the_same_data_as_image_and_as_video_are_two_items() -> None:
    url = {"url": "data:video/mp4;base64,QUFB"}
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        await gate.post(media({"image_url": url}, {"video_url": url}))
        assert len(e.seen) == 2
        assert len({part["uuid"] for part in parts(c.last)}) == 2


async def test_1_legs_run_in_parallel_at_most_so_many_of_one_request() -> None:
    async with Rig("e_pd", limits={"encode_legs": 3}) as rig:
        encoder = rig.sim("encode")
        encoder.faults.add(Fault(kind="slow_first_byte", seconds=0.1, count=None, path="/v1/*"))
        assert (await rig.post(chat(images=7))).status == 200
        assert encoder.seen.max_in_flight == 3
        assert rig.seen("encode") == 7


async def test_1_legs_are_bounded_on_each_encoder_over_all_requests() -> None:
    async with Rig("e_pd", engines={"encode": 2}, limits={"encode_legs_per_engine": 2}) as rig:
        for encoder in rig.pools["encode"]:
            encoder.faults.add(Fault(kind="slow_first_byte", seconds=0.1, count=None, path="/v1/*"))
        answers = await asyncio.gather(*(rig.post(chat(text=str(i), images=4)) for i in range(3)))
        assert [answer.status for answer in answers] == [200] * 3
        assert [encoder.seen.max_in_flight for encoder in rig.pools["encode"]] == [2, 2]
        assert rig.seen("encode") == 12


async def test_1_each_leg_has_its_own_deadline() -> None:
    async with Rig("e_pd", deadlines={"encode": 0.5}, limits={"encode_legs": 1}) as rig:
        rig.sim("encode").faults.add(Fault(kind="hang", leg="-enc0"), Fault(kind="hang", leg="-enc1"))
        began = time.monotonic()
        assert (await rig.post(chat(images=3))).status == 200
        assert time.monotonic() - began >= 1.0, "one after the other, half a second each"
        assert rig.legs()["encode", "timeout"] == 2
        assert rig.legs()["encode", "success"] == 1


async def test_1_waiting_for_a_place_on_an_encoder_counts() -> None:
    async with Rig("e_pd", deadlines={"encode": 1.0}, limits={"encode_legs_per_engine": 1}) as rig:
        rig.sim("encode").faults.add(Fault(kind="slow_first_byte", seconds=0.7, count=None, path="/v1/*"))
        answers = await asyncio.gather(*(rig.post(chat(text=text, images=1)) for text in "ab"))
        assert [answer.status for answer in answers] == [200, 200]
        assert rig.legs()["encode", "success"] == 1
        assert rig.legs()["encode", "timeout"] == 1


# -- 2: the body

EXACT: dict[str, tuple[str, dict[str, Any], str, list[tuple[str, Any]]]] = {
    "chat": ("/v1/chat/completions", A, "messages", [("max_tokens", 1), ("stream", False)]),
    "responses": (
        "/v1/responses",
        {"type": "input_image", "image_url": "http://h/x", "detail": "auto"},
        "input",
        [("max_output_tokens", 1), ("stream", False), ("store", False)],
    ),
    "messages": (
        "/v1/messages",
        {"type": "image", "source": {"type": "url", "url": "http://h/x"}},
        "messages",
        [("max_tokens", 1), ("stream", False)],
    ),
}


@pytest.mark.parametrize("api", EXACT)
async def test_2_the_encode_body_is_one_user_message_with_the_one_part_and_nothing_else(api: str) -> None:
    path, part, field, rest = EXACT[api]
    asked = {
        "temperature": 0.5,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream_options": {"include_usage": True},
        "priority": 3,
        "max_tokens": 500,
        "model": "sim",
        field: [
            {"role": "system", "content": "be brief"},
            {"role": "user", "name": "x", "content": [{"type": "text", "text": "see"}, part]},
        ],
        "stream": True,
        "n": 1,
        "logprobs": True,
    }
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(asked, path)).status == 200
        (sent,) = parts(e.last, field)
        assert {k: v for k, v in sent.items() if k != "uuid"} == part
        assert pairs(e.last.body) == [
            ("model", "sim"), (field, [{"role": "user", "content": [sent]}]), *rest,
        ]  # fmt: skip
        assert e.last.path == path


async def test_2_the_part_is_as_the_client_sent_it_but_for_its_uuid() -> None:
    url = r'"data:image\/png;base64,QU\u0046B"'
    part = f'{{ "x" :1.50e+01,"detail" : "l\\u006fw",\n"image_url":{{"url": {url} , "big":123456789012345678901}}}}'
    raw = f'{{"messages":[{{"role":"user","content":[{part}]}}],"model": "s\\u0069m"}}'.encode()
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 200
        uuid = parts(e.last)[0]["uuid"]
        sent = f'{part[:-1]},"uuid":"{uuid}"}}'
        assert (
            e.last.body
            == (
                rf'{{"model":"s\u0069m","messages":[{{"role":"user","content":[{sent}]}}],"max_tokens":1,"stream":false}}'
            ).encode()
        )
        assert sent.encode() in c.last.body


@pytest.mark.parametrize("api", EXACT)
async def test_2_what_changes_the_medias_hash_or_handling_goes_along_where_the_api_has_it(api: str) -> None:
    path, part, field, _ = EXACT[api]
    extra: dict[str, Any] = {
        "mm_processor_kwargs": {"min_pixels": 1},
        "media_io_kwargs": {"video": {"fps": 2}},
        "session_id": "s",
    }
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        await gate.post({"model": "sim", field: [{"role": "user", "content": [part]}], **extra}, path)
        sent = {k: v for k, v in pairs(e.last.body) if k in extra}
        assert sent == ({} if api == "messages" else extra)


@pytest.mark.parametrize(("setting", "sent"), [({}, []), ({"encode_priority": True}, [-7])], ids=["default", "set"])
async def test_2_priority_goes_along_only_if_configured(setting: dict[str, Any], sent: list[int]) -> None:
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], **setting) as gate:
        await gate.post(media(A, priority=-7))
        assert copies(e.last.body, "priority") == sent
        assert copies(c.last.body, "priority") == [-7]


@pytest.mark.parametrize(("setting", "sent"), [({}, None), ({"encode_priority": True}, "5")], ids=["default", "set"])
async def test_2_nor_does_priority_go_along_as_the_header_that_engines_take_it_from(
    setting: dict[str, Any], sent: str | None
) -> None:
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], **setting) as gate:
        await gate.post(media(A), headers={"X-Vllm-Priority": "5"})
        assert e.last.header("x-vllm-priority") == sent
        assert c.last.header("x-vllm-priority") == "5"


async def test_2_an_engine_without_priority_scheduling_would_have_refused_it() -> None:
    async with Rig("e_pd", encode_priority=True) as rig:
        await rig.post(chat(images=1, priority=1))
        assert rig.legs()["encode", "http_error"] == 1


# -- 3: answers and their union


async def test_3_the_union_is_in_item_order_the_first_of_a_hash_wins_and_values_travel_byte_for_byte() -> None:
    later = asyncio.Event()
    of_a = b'{ "h1" : {"x":1.50e+01,"x":2, "s":"\\ud800"} , "both":{"from":"A"}}'
    of_b = b'{"both":{"from":"B"},"h2":{"big":123456789012345678901},"bo\\u0074h":[3]}'

    async def says(seen: SeenRequest) -> bytes:
        if name_of(seen) == "QUFB":
            await later.wait()  # the first item's answer comes last
            return b'{"ec_transfer_params":' + of_a + b"}"
        later.set()
        return b'{"id":"x","ec_transfer_params": ' + of_b + b' ,"choices":[]}'

    async with Scripted(says) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(media(A, B))).status == 200
        merged = (
            b'"ec_transfer_params":{"h1" : {"x":1.50e+01,"x":2, "s":"\\ud800"},"both":{"from":"A"},'
            b'"h2":{"big":123456789012345678901}}'
        )
        assert merged in c.last.body
        assert gate.legs() == {("encode", "success"): 2, ("combined", "success"): 1}


@pytest.mark.parametrize("said", [b"{}", b'{"ec_transfer_params":null}', b'{"ec_transfer_params": {} }'])
async def test_3_absent_null_or_empty_means_none_and_is_a_success(said: bytes) -> None:
    async with Scripted(said) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(media(A) | {EC: {"mine": 1}})).status == 200
        assert copies(c.last.body, EC) == []
        assert gate.legs()["encode", "success"] == 1


@pytest.mark.parametrize("value", [b"[]", b'"x"', b"7", b"true", b"false", b'[{"h":{}}]', b"0"])
async def test_3_any_other_type_is_an_invalid_response(value: bytes) -> None:
    async with (
        Scripted(b'{"ec_transfer_params":' + value + b"}") as e,
        Scripted() as c,
        Gate(encode=[e.url], combined=[c.url]) as gate,
    ):
        assert (await gate.post(media(A))).status == 200
        assert copies(c.last.body, EC) == []
        assert gate.legs() == {("encode", "invalid_response"): 1, ("combined", "success"): 1}


# -- 4: one MiB


@pytest.mark.parametrize(("extra", "status"), [(0, "success"), (1, "oversize")])
async def test_4_an_answer_of_one_mib_is_read_and_one_byte_more_fails_that_leg(extra: int, status: str) -> None:
    def says(seen: SeenRequest) -> bytes:
        said = b'{"ec_transfer_params":{"%b":{}}}' % name_of(seen).encode()
        return said.ljust(MIB + extra) if name_of(seen) == "QUFB" else said

    async with Scripted(says) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(media(A, B))).status == 200
        ((told),) = copies(c.last.body, EC)
        assert list(told) == (["QUFB", "QkJC"] if status == "success" else ["QkJC"])
        assert gate.legs()["encode", status] == (2 if status == "success" else 1)


# -- 5: soft and strict


async def test_5_soft_is_the_default_a_failed_leg_is_logged_and_counted_the_others_still_merge() -> None:
    async with Rig("e_pd") as rig:
        rig.sim("encode").faults.add(Fault(kind="status", status=500, leg="-enc1"))
        plain = await rig.post(chat(images=3))
        assert plain.status == 200
        assert rig.legs()["encode", "http_error"] == 1
        assert rig.legs()["encode", "success"] == 2
        ((told),) = copies(rig.sim("combined").seen.bodies[-1].body, EC)
        assert len(told) == 2
        (line,) = [line for line in rig.log if line["event"] == "encode leg failed"]
        assert (line["leg"], line["status"], line["engine"]) == ("enc1", "http_error", rig.sim("encode").url)
        assert sum(rig.sim("combined").seen.encodes.values()) == 1, "the consumer encodes what is missing"


async def test_5_with_every_encode_leg_failed_the_answer_is_a_plain_engines() -> None:
    body = chat(images=2)
    async with Rig("plain") as plain:
        wanted = (await plain.post(body)).json["choices"]
    async with Rig("e_p_d") as rig:
        rig.sim("encode").faults.add(Fault(kind="reset", count=None, path="/v1/*"))
        assert (await rig.post(body)).json["choices"] == wanted


@pytest.mark.parametrize(
    ("status", "body"),
    [(201, b"{}"), (202, b"{}"), (203, b"{}"), (206, b"{}"), (299, b"{}"), (301, b"{}"), (404, b"{}"), (500, b"{}"),
     (200, b"[]"), (200, b"null"), (200, b'"{}"'), (200, b"{} {}"), (200, b""), (200, b'{"a":1')],
)  # fmt: skip
async def test_5_only_exactly_200_with_a_json_object_is_success(status: int, body: bytes) -> None:
    async with Scripted(body) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        e.status = status
        assert (await gate.post(media(A))).status == 200
        word = "http_error" if status != 200 else "invalid_response"
        assert gate.legs() == {("encode", word): 1, ("combined", "success"): 1}


@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_5_the_strict_policy_fails_the_request_instead(plan: Any) -> None:
    async with Rig(plan, encode_failure="strict") as rig:
        rig.sim("encode").faults.add(Fault(kind="garbage_json", leg="-enc1", path="/v1/*"))
        answer = await rig.post(chat(images=2))
        assert answer.status == 502
        assert f"enc1 engine {rig.sim('encode').url}" in answer.json["error"]["message"]
        assert all(rig.seen(role) == 0 for role in rig.pools if role != "encode")


def test_5_every_status_of_an_encode_leg_is_counted_from_zero_on() -> None:
    _, text = Metrics().render()
    words = ("success", "timeout", "connect_error", "http_error", "oversize", "invalid_response", "cancelled")
    assert set(ENCODE_STATUSES) == set(words)
    for word in words:
        assert f'triptych_legs_total{{leg="encode",status="{word}"}} 0.0'.encode() in text


# -- 6: injection


@pytest.mark.parametrize("order", ["{client},{rest}", "{rest},{client}", "{client},{rest},{client}"])
async def test_6_the_consumers_body_has_exactly_one_ec_transfer_params_the_gateways(order: str) -> None:
    said = b'{"ec_transfer_params":{"h":{"item_indices":[0]}}}'
    client = r'"ec_transfer_params":{"evil":1},"ec\u005ftransfer_params":2'
    raw = "{" + order.format(client=client, rest=json.dumps(media(A))[1:-1]) + "}"
    async with Scripted(said) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(raw.encode())).status == 200
        assert copies(c.last.body, EC) == [{"h": {"item_indices": [0]}}]
        assert b"evil" not in c.last.body


async def test_6_it_is_the_gateways_even_where_a_setting_lets_clients_send_their_own() -> None:
    said = b'{"ec_transfer_params":{"h":{}}}'
    async with (
        Scripted(said) as e,
        Scripted() as c,
        Gate(encode=[e.url], combined=[c.url], open=["ec_transfer_params"]) as gate,
    ):
        twice = json.dumps(media(A))[:-1] + ',"ec_transfer_params":{"mine":1},"ec_transfer_params":{"too":1}}'
        assert (await gate.post(media(A) | {EC: {"mine": 1}})).status == 200
        assert copies(c.last.body, EC) == [{"h": {}}]
        assert (await gate.post(twice.encode())).status == 200
        assert copies(c.last.body, EC) == [{"h": {}}]


@pytest.mark.parametrize("raw", [b'{"ec_transfer_params":{"x":1}}', b'{"ec_transfer_params":1,"kv_transfer_params":2}'])
async def test_6_a_body_with_nothing_else_in_it_becomes_an_empty_object(raw: bytes) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 200
        assert c.last.body == b"{}"
        assert c.last.header("content-length") == "2"


# -- 7: one pass, and the very same bytes


async def test_7_fifty_thousand_copies_cost_milliseconds_not_minutes() -> None:
    rest = json.dumps(media({"type": "text", "text": "hi"}))[1:-1]
    copy = r'"ec\u005ftransfer_params":{"a":[1]},"kv_transfer_params":2,'
    raw = ("{" + copy * 25_000 + rest + "}").encode()
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        began = time.process_time()
        assert (await gate.post(raw)).status == 200
        assert time.process_time() - began < 1.0, "a pass for each copy takes minutes"
        assert c.last.body == ("{" + rest + "}").encode()


BODIES = [
    b'{"model":"sim","messages":[]}',
    b' \n{ "model" : "sim" ,"messages":[ ],"x":1.50E+2, "x":[1,1] }\r\n',
    b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http:\\/\\/h"}}]}]}',
    b'{"vllm_xargs":{"a":1,"a":2}}',
    '{"é":"\\ud83d","vllm_xargs":null}'.encode(),
]


@pytest.mark.parametrize("raw", BODIES)
async def test_7_a_body_that_needs_no_edit_goes_through_as_the_very_same_bytes(raw: bytes) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 200
        assert c.last.body == raw


async def test_7_so_does_one_whose_encoders_returned_none() -> None:
    raw = json.dumps(media({"type": "image_url", "image_url": {"url": "http://h/x"}})).encode()
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 200
        assert len(e.seen) == 1
        assert c.last.body == raw


# -- 8: who gets the handles


@pytest.mark.parametrize(("setting", "at_decode"), [({}, 0), ({"decode_ec_consumer": True}, 1)], ids=["default", "set"])
async def test_8_the_consumer_alone_gets_handles_unless_decode_is_a_consumer_too(
    setting: dict[str, Any], at_decode: int
) -> None:
    said = b'{"ec_transfer_params":{"h":{}}}'
    async with (
        Scripted(said) as e,
        Scripted(b'{"kv_transfer_params":{"a":1}}') as p,
        Scripted() as d,
        Gate(encode=[e.url], prefill=[p.url], decode=[d.url], **setting) as gate,
    ):
        assert (await gate.post(media(A))).status == 200
        assert copies(p.last.body, EC) == [{"h": {}}]
        assert copies(d.last.body, EC) == [{"h": {}}] * at_decode
        assert copies(d.last.body, KV) == [{"a": 1}]
        assert copies(e.last.body, EC) == []


async def test_8_a_decode_engine_that_stands_in_for_prefill_gets_none_unless_its_pool_says_so() -> None:
    said = b'{"ec_transfer_params":{"h":{}}}'
    for setting, told in ((False, []), (True, [{"h": {}}])):
        async with (
            Scripted(said) as e,
            Scripted() as p,
            Scripted() as d,
            Gate(encode=[e.url], prefill=[p.url], decode=[d.url], decode_ec_consumer=setting) as gate,
        ):
            assert (await gate.post(media(A, n=2))).status == 200
            assert not p.seen
            assert copies(d.last.body, EC) == told
            assert len(e.seen) == len(told)
