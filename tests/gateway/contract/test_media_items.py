"""Contract, "Media items": which parts of a request are media, whatever they say of themselves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.contract.kit import Gate, Scripted, media, parts
from tests.gateway.rig import image

DATA = "data:image/png;base64,aW1h"
REMOTE = "http://pictures.example/x.png"
ITEMS: dict[str, Any] = {
    "image_url": {"url": DATA},
    "input_image": DATA,
    "video_url": {"url": "data:video/mp4;base64,dmlk"},
    "audio_url": {"url": "data:audio/wav;base64,YXVk"},
    "input_audio": {"data": "YXVk", "format": "wav"},
}
EMBEDS: dict[str, Any] = {
    "image_embeds": {"image_grid_thw": [1, 8, 8]},
    "audio_embeds": {"audio_num_tokens": [25]},
    "video_embeds": {"video_grid_thw": [2, 8, 8]},
    "prompt_embeds": "AAAA",
}


@pytest.mark.parametrize("key", ITEMS)
async def test_a_part_is_media_by_the_key_that_it_carries_whatever_its_type_says(key: str) -> None:
    value = ITEMS[key]
    spellings: list[dict[str, Any]] = [
        {"type": key, key: value},
        {key: value},
        {"type": "text", "text": "a", key: value},
        {"type": "text", "text": "a", key: value, "uuid": "u"},
        {"type": "image_url", key: value},
        {"type": 7, key: value},
    ]
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        for part in spellings:
            e.seen.clear()
            assert (await gate.post(media(part))).status == 200
            assert len(e.seen) == 1, part
            (sent,) = parts(e.last)
            assert {k: v for k, v in sent.items() if k != "uuid"} == {k: v for k, v in part.items() if k != "uuid"}
            (got,) = parts(c.last)
            assert got["uuid"] == sent["uuid"] != "u"


async def test_a_media_key_is_one_however_it_is_spelled() -> None:
    raw = json.dumps(media({"type": "text", "image_url": {"url": DATA}})).replace('"image_url"', r'"im\u0061ge_url"')
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(raw.encode())).status == 200
        assert len(e.seen) == 1


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant", "tool", "anything"])
async def test_parts_of_messages_of_every_role_are_media(role: str) -> None:
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(media(image(), role=role))).status == 200
        assert len(e.seen) == 1
        assert "uuid" in parts(c.last)[0]


async def test_items_of_several_messages_are_taken_in_their_order() -> None:
    def turn(role: str, name: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": name}, image(name * 4)]}

    body = {"model": "sim", "messages": [turn("user", "A"), turn("assistant", "B"), turn("tool", "C")]}
    async with (
        Scripted() as e,
        Scripted() as c,
        Gate(encode=[e.url], combined=[c.url], limits={"encode_legs": 1}) as gate,
    ):
        assert (await gate.post(body)).status == 200
        assert [parts(seen)[0]["image_url"]["url"][-4:] for seen in e.seen] == ["AAAA", "BBBB", "CCCC"]
        assert [seen.header("x-request-id").rpartition("-")[2] for seen in e.seen] == ["enc0", "enc1", "enc2"]  # type: ignore[union-attr]


@pytest.mark.parametrize("opened", [(), ("embeds",)], ids=["closed", "opened"])
@pytest.mark.parametrize(
    "both",
    [("image_url", "input_image"), ("image_url", "audio_url"), ("image_url", "image_embeds"),
     ("input_audio", "prompt_embeds"), ("image_embeds", "audio_embeds"), ("video_url", "input_audio")],
)  # fmt: skip
async def test_two_media_keys_in_one_part_are_400_before_anything_is_called(
    both: tuple[str, str], opened: tuple[str, ...]
) -> None:
    values = ITEMS | EMBEDS
    part = {"type": both[0], **{key: values[key] for key in both}}
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], open=opened) as gate:
        answer = await gate.post(media(part))
        assert answer.status == 400
        assert answer.json["error"]["param"] == "messages[0].content[0]"
        assert "two media keys" in answer.json["error"]["message"]
        assert not e.seen
        assert not c.seen


async def test_one_media_key_twice_is_two_media_keys() -> None:
    raw = b'{"model":"sim","messages":[{"role":"user","content":[{"image_url":{"url":"http://a"},"image_url":null}]}]}'
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 400
        assert not c.seen


@pytest.mark.parametrize("key", EMBEDS)
@pytest.mark.parametrize(
    "form",
    [lambda k, v: {"type": k, k: v}, lambda k, v: {"type": "text", "text": "a", k: v, "uuid": "u"}],
    ids=["by type", "a text part with a uuid"],
)
async def test_embeds_parts_cause_no_encode_leg(key: str, form: Any) -> None:
    part = form(key, EMBEDS[key])
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url], open=["embeds"]) as gate:
        assert (await gate.post(media(part))).status == 200
        assert not e.seen
        assert {k: v for k, v in parts(c.last)[0].items() if k != "uuid"} == {
            k: v for k, v in part.items() if k != "uuid"
        }


@pytest.mark.parametrize("key", ["image_url", "input_image", "video_url", "audio_url"])
@pytest.mark.parametrize("plan", ["plain", "e_pd", "e_p_d"])
async def test_the_gateway_downloads_nothing_urls_go_to_the_engines_as_they_are(key: str, plan: str) -> None:
    asked = asyncio.Event()

    async def picture(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.close()

    server = await asyncio.start_server(picture, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a%20b.png?q=1"
    value = url if key == "input_image" else {"url": url}
    async with server, Scripted() as e, Scripted() as p, Scripted() as d:
        pools = {"plain": {"combined": [d.url]}, "e_pd": {"encode": [e.url], "combined": [d.url]}}
        pools["e_p_d"] = {"encode": [e.url], "prefill": [p.url], "decode": [d.url]}
        async with Gate(**pools[plan]) as gate:
            assert (await gate.post(media({"type": key, key: value}))).status == 200
            for engine in (e, p, d):
                for seen in engine.seen:
                    assert parts(seen) == [{"type": key, key: value}]
            assert not asked.is_set()


async def test_an_image_block_of_the_messages_api_is_media_where_the_engine_reads_it() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aW1h"}
    block = {"type": "image", "source": source}
    body = {
        "model": "sim",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]},
            {"role": "user", "content": [{"type": "image", "source": source | {"data": "b3RoZXI="}}]},
        ],
    }
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(body, "/v1/messages")).status == 200
        assert sorted(parts(seen)[0]["source"]["data"] for seen in e.seen) == ["aW1h", "b3RoZXI="]


async def test_media_of_the_responses_api_are_found_in_messages_and_in_tool_outputs() -> None:
    def part(data: str) -> dict[str, Any]:
        return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}

    body = {
        "model": "sim",
        "input": [
            {"role": "user", "content": [part("QUFB")]},
            {"type": "function_call_output", "call_id": "c", "output": [part("QkJC")]},
        ],
    }
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(body, "/v1/responses")).status == 200
        found = sorted(parts(seen, "input")[0]["image_url"][-4:] for seen in e.seen)
        assert found == ["QUFB", "QkJC"]
        assert {seen.path for seen in e.seen} == {"/v1/responses"}
