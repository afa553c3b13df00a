"""Bodies of legs (contract, "Encode stage" 2 and 6, "Editing bodies", "Prefill -> decode")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from triptych.gateway.endpoints import ENDPOINTS, Endpoint
from triptych.gateway.intake import Intake
from triptych.gateway.legs import LegBodies, metadata_part
from triptych.gateway.settings import ModelSettings

CHAT = ENDPOINTS["/v1/chat/completions"]
RESPONSES = ENDPOINTS["/v1/responses"]
MESSAGES = ENDPOINTS["/v1/messages"]
A, B = "data:image/png;base64,QUFB", "data:image/png;base64,QkJC"
REMOTE = "https://example.com/cat.png"


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts: dict[str, Any], **more: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}
    return json.dumps(body).encode()


def bodies(
    raw: bytes,
    endpoint: Endpoint = CHAT,
    *,
    encode: bool = True,
    keep_uuids: bool = False,
    tenant: bytes = b"",
    **settings: Any,
) -> LegBodies:
    model = ModelSettings.model_validate({"encode": ["http://e:1"], "combined": ["http://c:1"], **settings})
    asked = Intake.of({"uuid"}, 99, frozenset()).read(raw, endpoint)
    return LegBodies(endpoint, asked.body, asked.media, model, tenant, encode=encode, keep_uuids=keep_uuids)


def joined(segments: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(segments)


def parts_of(segments: Sequence[bytes | memoryview], field: str = "messages") -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(joined(segments))[field][0]["content"]
    return content


# -- encode


def test_one_encode_leg_per_distinct_item() -> None:
    assert bodies(chat(image(A), image(B), image(A), image(REMOTE), image(REMOTE))).count == 3


def test_the_same_bytes_as_image_and_as_video_are_two_items() -> None:
    assert bodies(chat(image(A), {"type": "video_url", "video_url": {"url": A}})).count == 2


def test_an_encode_body_holds_one_part_one_token_and_no_text() -> None:
    made = bodies(chat({"type": "text", "text": "hi"}, image(A, detail="low"), tools=[{"x": 1}], temperature=0.5))
    body = json.loads(joined(made.encode(0, None)))
    uuid = body["messages"][0]["content"][0].pop("uuid")
    assert len(uuid) == 64
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": [image(A, detail="low")]}],
        "max_tokens": 1,
        "stream": False,
    }


def test_what_changes_the_hash_or_handling_goes_to_encode_legs() -> None:
    more = {"mm_processor_kwargs": {"a": 1e-7}, "media_io_kwargs": {"b": [1]}, "session_id": "s", "priority": 3}
    body = json.loads(joined(bodies(chat(image(A), **more)).encode(0, None)))
    assert {k: body[k] for k in ("mm_processor_kwargs", "media_io_kwargs", "session_id")} == {
        k: more[k] for k in ("mm_processor_kwargs", "media_io_kwargs", "session_id")
    }
    assert "priority" not in body
    with_priority = bodies(chat(image(A), **more), encode_priority=True)
    assert json.loads(joined(with_priority.encode(0, None)))["priority"] == 3


def test_messages_has_none_of_the_extra_fields() -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUFB"}}
    raw = json.dumps(
        {
            "model": "m",
            "max_tokens": 9,
            "mm_processor_kwargs": {},
            "messages": [{"role": "user", "content": [block]}],
        }
    ).encode()
    body = json.loads(joined(bodies(raw, MESSAGES).encode(0, None)))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": [block]}],
        "max_tokens": 1,
        "stream": False,
    }


def test_responses_caps_by_its_own_field_and_stores_nothing() -> None:
    part = {"type": "input_image", "image_url": A}
    raw = json.dumps({"model": "m", "input": [{"role": "user", "content": [part]}]}).encode()
    body = json.loads(joined(bodies(raw, RESPONSES).encode(0, None)))
    assert (body["max_output_tokens"], body["stream"], body["store"]) == (1, False, False)
    assert body["input"][0]["content"][0]["image_url"] == A


def test_the_dialects_parameters_are_put_into_the_encode_body_as_they_are() -> None:
    body = joined(bodies(chat(image(A))).encode(0, b'{ "consumer_zmq":"tcp://c:1"}'))
    assert b'"ec_transfer_params":{ "consumer_zmq":"tcp://c:1"}' in body


def test_a_model_that_is_spelled_with_escapes_travels_as_it_was_spelled() -> None:
    raw = chat(image(A)).replace(b'"model": "m"', rb'"model": "\u006d"')
    assert joined(bodies(raw).encode(0, None)).startswith(rb'{"model":"\u006d",')


# -- uuids


def test_inline_media_get_the_gateways_uuid_the_same_on_encoder_and_consumer() -> None:
    made = bodies(chat(image(A, uuid="mine"), image(B)))
    encoder = [parts_of(made.encode(i, None))[0]["uuid"] for i in range(2)]
    consumer = [part["uuid"] for part in parts_of(made.final({}, consumer=True))]
    assert encoder == consumer
    assert len(set(encoder)) == 2
    assert "mine" not in encoder
    assert made.replaced == 1


def test_remote_media_get_no_uuid_since_the_engine_hashes_what_it_fetched() -> None:
    made = bodies(chat(image(REMOTE, uuid="mine")))
    assert "uuid" not in parts_of(made.encode(0, None))[0]
    assert "uuid" not in parts_of(made.final({}, consumer=True))[0]
    assert (made.removed, made.replaced) == (1, 0)


def test_the_digest_is_namespaced_by_tenant() -> None:
    one, other = bodies(chat(image(A)), tenant=b"1"), bodies(chat(image(A)), tenant=b"2")
    assert parts_of(one.encode(0, None))[0]["uuid"] != parts_of(other.encode(0, None))[0]["uuid"]
    again = bodies(chat(image(A)), tenant=b"1")
    assert parts_of(one.encode(0, None)) == parts_of(again.encode(0, None))


def test_uuids_are_removed_where_no_encode_leg_runs() -> None:
    made = bodies(chat(image(A, uuid="mine")), encode=False)
    assert parts_of(made.final({}, consumer=True)) == [image(A)]
    assert made.count == 0


def test_an_opened_uuid_passes_everywhere() -> None:
    made = bodies(chat(image(A, uuid="mine")), keep_uuids=True)
    assert parts_of(made.encode(0, None))[0]["uuid"] == "mine"
    assert parts_of(made.final({}, consumer=True))[0]["uuid"] == "mine"


# -- consumer, prefill, decode


def test_a_body_that_needs_no_edit_goes_through_as_the_very_same_object() -> None:
    raw = chat({"type": "text", "text": "hi"})
    made = bodies(raw, encode=False)
    (segment,) = made.final({}, consumer=True)
    assert segment is made.body.raw


def test_the_consumers_body_has_exactly_one_ec_transfer_params_the_gateways() -> None:
    raw = chat(image(A)).replace(
        b"{", rb'{"ec_transfer_params":{"x":1},"ec\u005ftransfer_params":2,"ec_transfer_params":3,', 1
    )
    made = bodies(raw)
    made.encoded(b'{"h":{"item_indices":[0]}}', [b'{"h":{"item_indices":[0]}}'])
    pairs = json.loads(joined(made.final({}, consumer=True)), object_pairs_hook=list)
    assert [value for key, value in pairs if key == "ec_transfer_params"] == [[("h", [("item_indices", [0])])]]


def test_none_where_the_encoders_returned_none() -> None:
    made = bodies(chat(image(A), ec_transfer_params={"x": 1}))
    made.encoded(None, [None])
    assert b"ec_transfer_params" not in joined(made.final({}, consumer=True))


def test_decode_gets_no_encoder_handles_unless_its_pool_takes_them() -> None:
    made = bodies(chat(image(A)))
    made.encoded(b'{"h":{}}', [b'{"h":{}}'])
    assert b"ec_transfer_params" in joined(made.prefill({}))
    assert b"ec_transfer_params" not in joined(made.final({}, consumer=False))
    assert b"ec_transfer_params" in joined(made.final({}, consumer=True))


@pytest.mark.parametrize(
    ("path", "field", "caps"),
    [
        ("/v1/chat/completions", "messages", {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", "prompt", {"max_tokens": 1}),
        ("/v1/responses", "input", {"max_output_tokens": 1, "store": False}),
        ("/v1/messages", "messages", {"max_tokens": 1}),
    ],
)
def test_a_prefill_body_asks_for_one_token_and_no_stream(path: str, field: str, caps: dict[str, Any]) -> None:
    asked = {"model": "m", field: "hi", "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 9}
    asked |= dict.fromkeys(caps, 77)
    made = bodies(json.dumps(asked).encode(), ENDPOINTS[path], encode=False)
    prefill = json.loads(joined(made.prefill({"kv_transfer_params": b'{"do_remote_decode":true}'})))
    assert prefill == {
        "model": "m",
        field: "hi",
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
        **caps,
    }
    assert json.loads(joined(made.final({}, consumer=False))) == asked


def test_decode_keeps_the_clients_limits_and_gets_what_prefill_handed_over_byte_for_byte() -> None:
    handed = b'{"remote_block_ids":[[1]], "weird" : 1.50e+01}'
    made = bodies(chat(max_tokens=50, stream=True), encode=False)
    body = joined(made.final({"kv_transfer_params": handed}, consumer=False))
    assert b'"kv_transfer_params":' + handed in body
    assert (json.loads(body)["max_tokens"], json.loads(body)["stream"]) == (50, True)


# -- metadata mode

GRID = b'{"%b":{"item_indices":[0],"metadata":{"image_grid_thw":[1,8,8]}}}'


def test_encoded_items_are_told_by_metadata_instead_of_bytes() -> None:
    made = bodies(chat(image(A), {"type": "text", "text": "and"}, image(A)), media_to_consumer="metadata")
    made.encoded(b"{}", [GRID % b"h1"])
    stand_in = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "h1"}
    assert parts_of(made.prefill({})) == [stand_in, {"type": "text", "text": "and"}, stand_in]
    assert made.rewritten == 2


def test_metadata_is_all_or_nothing_per_modality() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}}
    made = bodies(chat(image(A), image(B), audio), media_to_consumer="metadata")
    tokens = b'{"h3":{"metadata":{"audio_num_tokens":[25]}}}'
    made.encoded(b"{}", [GRID % b"h1", None, tokens])
    first, second, third = parts_of(made.final({}, consumer=True))
    assert "image_url" in first
    assert "image_url" in second
    assert third == {"type": "audio_embeds", "audio_embeds": {"audio_num_tokens": [25]}, "uuid": "h3"}


@pytest.mark.parametrize(
    "handed",
    [
        None,
        b"{}",
        b'{"h":{}}',
        b'{"h":{"metadata":{}}}',
        b'{"h":{"metadata":null}}',
        b'{"h":7}',
        b'{"h":{"metadata":{"g":1}},"i":{"metadata":{"g":1}}}',
    ],
)
def test_media_stay_raw_where_metadata_is_missing(handed: bytes | None) -> None:
    made = bodies(chat(image(A)), media_to_consumer="metadata")
    made.encoded(None, [handed])
    assert "image_url" in parts_of(made.final({}, consumer=True))[0]


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_media_stay_raw_where_the_consumer_would_derive_another_identifier(field: str) -> None:
    made = bodies(chat(image(A), **{field: {"x": 1}}), media_to_consumer="metadata")
    made.encoded(b"{}", [GRID % b"h1"])
    assert "image_url" in parts_of(made.final({}, consumer=True))[0]


def test_decode_can_get_the_media_though_prefill_got_metadata() -> None:
    made = bodies(chat(image(A)), media_to_consumer="metadata")
    made.encoded(b"{}", [GRID % b"h1"])
    assert "image_embeds" in parts_of(made.prefill({}))[0]
    assert "image_url" in parts_of(made.final({}, consumer=False, raw_media=True))[0]


@pytest.mark.parametrize(
    ("api", "modality", "handed", "part"),
    [
        (
            "chat",
            "image",
            b'{"h":{"metadata":{"image_grid_thw":[[1,8,8]]}}}',
            {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "h"},
        ),
        (
            "chat",
            "audio",
            b'{"h":{"metadata":{"audio_num_tokens":[25]}}}',
            {"type": "audio_embeds", "audio_embeds": {"audio_num_tokens": [25]}, "uuid": "h"},
        ),
        (
            "responses",
            "image",
            b'{"h":{"metadata":{"image_grid_thw":[1,8,8]}}}',
            {"type": "input_image", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "h"},
        ),
        ("responses", "audio", b'{"h":{"metadata":{"audio_num_tokens":[25]}}}', None),
    ],
)
def test_a_metadata_part_has_one_flat_vector_per_item(
    api: str, modality: str, handed: bytes, part: dict[str, Any] | None
) -> None:
    made = metadata_part(api, modality, handed)
    assert (None if made is None else json.loads(made)) == part
