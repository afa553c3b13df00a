"""Media once: with `media_to_consumer: metadata` the consumer gets placeholder metadata instead of media bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.contract.kit import Gate, Scripted, media, parts
from tests.gateway.rig import BODIES, Rig, chat, image
from triptych.sim import Fault

A, B = image("QUFB"), image("QkJC")
AUDIO = {"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QUFB"}}
TEXT = {"type": "text", "text": "and"}
METADATA: dict[str, Any] = {"media_to_consumer": "metadata"}


async def plain_answer(body: Any, path: str = "/v1/chat/completions") -> Any:
    async with Rig("plain") as rig:
        answer = await rig.post(body, path)
        return answer.json.get("choices") or answer.json.get("output") or answer.json.get("content")


def keys_of(found: list[dict[str, Any]]) -> list[str]:
    return [str(part.get("type")) for part in found]


async def test_raw_is_the_default() -> None:
    async with Rig("e_pd") as rig:
        await rig.post(media(A))
        assert "image_url" in parts(rig.sim("combined").seen.bodies[-1])[0]
        assert rig.count("media_parts_rewritten") == 0


@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_encoded_items_reach_the_consumer_as_metadata_only_parts_and_the_answer_is_the_same(plan: Any) -> None:
    body = media(A, TEXT, AUDIO, VIDEO, B, A)
    wanted = await plain_answer(body)
    async with Rig(plan, **METADATA) as rig:
        assert (await rig.post(body)).json["choices"] == wanted
        for role in list(rig.pools)[1:]:
            seen = rig.sim(role).seen
            found = parts(seen.bodies[-1])
            assert keys_of(found) == [
                "image_embeds", "text", "audio_embeds", "video_embeds", "image_embeds", "image_embeds",
            ]  # fmt: skip
            assert found[0] == found[-1]
            assert set(found[0]) == {"type", "image_embeds", "uuid"}
            assert all(isinstance(v, int) for v in found[0]["image_embeds"]["image_grid_thw"]), "one flat vector"
            assert seen.media_bytes == 0
        assert rig.count("media_parts_rewritten") == 5


async def test_it_is_all_or_nothing_per_modality() -> None:
    body = media(A, B, AUDIO)
    wanted = await plain_answer(body)
    async with Rig("e_pd", **METADATA, limits={"encode_legs": 1}) as rig:
        rig.sim("encode").faults.add(Fault(kind="status", status=500, leg="-enc1"))
        assert (await rig.post(body)).json["choices"] == wanted
        found = parts(rig.sim("combined").seen.bodies[-1])
        assert keys_of(found) == ["image_url", "image_url", "audio_embeds"]
        assert all("uuid" in part for part in found[:2]), "raw ones keep the gateway's uuid, so that A is found"
        assert rig.sim("combined").seen.ec["taken"] == 2


async def test_media_stay_raw_where_the_encoder_returns_no_metadata() -> None:
    body = media(A, AUDIO)
    wanted = await plain_answer(body)
    async with Rig("e_pd", **METADATA, sims={"encode": {"metadata": False}}) as rig:
        assert (await rig.post(body)).json["choices"] == wanted
        assert keys_of(parts(rig.sim("combined").seen.bodies[-1])) == ["image_url", "input_audio"]


@pytest.mark.parametrize("kwargs", [{"mm_processor_kwargs": {"x": 1}}, {"media_io_kwargs": {"video": {"fps": 1}}}])
async def test_media_stay_raw_where_the_consumer_would_derive_another_identifier(kwargs: dict[str, Any]) -> None:
    trusting = {role: {"trust_mm_kwargs": True} for role in ("encode", "combined")}
    async with Rig("e_pd", **METADATA, sims=trusting) as rig:
        assert (await rig.post(media(A, **kwargs))).status == 200
        assert keys_of(parts(rig.sim("combined").seen.bodies[-1])) == ["image_url"]


async def test_remote_media_are_told_by_the_hash_that_the_encoder_made() -> None:
    body = media({"type": "image_url", "image_url": {"url": "http://h/x.png"}})
    wanted = await plain_answer(body)
    async with Rig("e_pd", **METADATA) as rig:
        assert (await rig.post(body)).json["choices"] == wanted
        assert keys_of(parts(rig.sim("combined").seen.bodies[-1])) == ["image_embeds"]


async def test_the_form_of_the_responses_api_is_an_input_image_with_a_uuid() -> None:
    path, make = BODIES["responses"]
    async with Rig("e_p_d", **METADATA) as rig:
        assert (await rig.post(make(images=2), path)).status == 200
        for role in ("prefill", "decode"):
            _, first, second = parts(rig.sim(role).seen.bodies[-1], "input")
            assert set(first) == {"type", "image_embeds", "uuid"}
            assert first["type"] == "input_image", "the protocol refuses the type image_embeds"
            assert first["uuid"] != second["uuid"]
            assert rig.sim(role).seen.media_bytes == 0


async def test_there_is_no_metadata_mode_for_the_messages_api() -> None:
    path, make = BODIES["messages"]
    async with Rig("e_p_d", **METADATA) as rig:
        assert (await rig.post(make(images=1), path)).status == 200
        found = parts(rig.sim("prefill").seen.bodies[-1])
        assert keys_of(found) == ["text", "image"]
        assert rig.count("media_parts_rewritten") == 0


async def test_decode_gets_raw_media_where_it_has_neither_kv_nor_encoder_output() -> None:
    """vLLM dies of a metadata-only part whose embeddings it can get nowhere."""
    said = b'{"ec_transfer_params":{"h":{"metadata":{"image_grid_thw":[1,8,8]}}}}'
    for handed, kind in ((b"{}", "image_url"), (b'{"kv_transfer_params":{"a":1}}', "image_embeds")):
        async with (
            Scripted(said) as e,
            Scripted(handed) as p,
            Scripted() as d,
            Gate(encode=[e.url], prefill=[p.url], decode=[d.url], **METADATA) as gate,
        ):
            await gate.post(media(A))
            assert keys_of(parts(p.last)) == ["image_embeds"]
            assert keys_of(parts(d.last)) == [kind]


async def test_no_engine_dies_of_it() -> None:
    async with Rig("e_p_d", **METADATA) as rig:
        for body in (chat(images=3), media(A, AUDIO, A), chat(images=1, stream=True), chat(images=2, n=2)):
            assert (await rig.post(body)).status == 200
        assert not any(sim.dead for sim in rig.all_sims)
