"""Contract, "Editing bodies": splices at known offsets, and what is refused before anything is called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.contract.kit import EC, KV, Gate, Scripted, copies, media
from tests.gateway.rig import BODIES, Rig, chat, image
from triptych.body.request import OWNED
from triptych.gateway.endpoints import ENDPOINTS

PATHS = [path for path, endpoint in ENDPOINTS.items() if endpoint.body == "json"]


@pytest.mark.parametrize("spelled", ["plainly", "with escapes"])
@pytest.mark.parametrize(("path", "beside"), [("/v1/chat/completions", "x"), ("/v1/embeddings", "temperature")])
@pytest.mark.parametrize(
    "key",
    ["model", "messages", "input", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
     "max_output_tokens", "min_tokens", "mm_processor_kwargs", "media_io_kwargs", "session_id", "priority",
     "vllm_xargs"],
)  # fmt: skip
async def test_a_field_that_the_gateway_reads_or_sets_may_not_occur_twice(
    key: str, path: str, beside: str, spelled: str
) -> None:
    value = {"messages": "[]", "input": '"a"', "prompt": '"a"'}.get(key, "null")
    again = "".join(f"\\u{ord(c):04x}" for c in key) if spelled == "with escapes" else key
    raw = f'{{"{key}": {value}, "{beside}": 1, "{again}": {value}}}'.encode()
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        answer = await gate.post(raw, path)
        assert answer.status == 400
        assert answer.json["error"]["message"] == f'duplicate top-level key "{key}" in request body'
        assert answer.json["error"]["param"] == key
        assert not e.seen
        assert not c.seen


def test_the_fields_that_may_not_occur_twice_are_those_of_the_contract() -> None:
    assert len(OWNED) == 16, "the list above"


async def test_other_duplicates_and_nested_ones_pass() -> None:
    raw = (
        b'{"temperature":1,"temperature":0.5,"a":{"model":1,"model":2},"messages":[{"n":1,"n":2}],'
        b'"vllm_xargs":{"x":1,"x":2},"max_tokens":3,"":1,"":2}'
    )
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 200
        assert c.last.body == raw


async def test_handles_given_twice_are_stripped_not_refused() -> None:
    raw = b'{"kv_transfer_params":1,"x":1,"kv_transfer_params":1,"ec_transfer_params":1,"ec_transfer_params":1}'
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(raw)).status == 200
        assert c.last.body == b'{"x":1}'


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw",
    [b"", b" ", b"[]", b"null", b"7", b'"{}"', b"{", b"{}{}", b"{} x", b'{"a":1,}', b"{'a':1}", b'{"a":01}',
     b'{"a":NaN}', b'{"a":Infinity}', b'{"a":"\x01"}', b'{"a":"\xff"}', b"\xef\xbb\xbf{}", b'{"a" 1}', b'{"a":"\\x"}'],
)  # fmt: skip
async def test_what_is_not_one_json_object_is_400(raw: bytes, path: str) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        answer = await gate.post(raw, path)
        assert answer.status == 400, answer
        assert not c.seen
        assert gate.count("requests_refused", reason="bad_body") == 1


async def test_content_length_is_computed_from_the_result() -> None:
    body = media(image(), {"type": "text", "text": "é"}) | {EC: {"x": 1}, KV: None}
    said = b'{"ec_transfer_params":{"h":{}},"kv_transfer_params":{"a":1}}'
    async with (
        Scripted(said) as e,
        Scripted(said) as p,
        Scripted(said) as d,
        Gate(encode=[e.url], prefill=[p.url], decode=[d.url]) as gate,
    ):
        answer = await gate.post(body)
        assert answer.status == 200
        assert int(answer.headers["content-length"]) == len(answer.body)
        lengths = [len(seen.body) for engine in (e, p, d) for seen in engine.seen]
        assert len(set(lengths)) == 3
        told = [seen.header("content-length") for engine in (e, p, d) for seen in engine.seen]
        assert told == [str(n) for n in lengths]
        assert all(seen.header("transfer-encoding") is None for engine in (e, p, d) for seen in engine.seen)


async def test_a_chunked_upload_reaches_the_engine_with_its_length() -> None:
    raw = json.dumps(chat()).encode()
    async with Scripted() as c, Gate(combined=[c.url]) as gate, gate.client() as client:
        client.head(None)
        for at in range(0, len(raw), 7):
            client.chunk(raw[at : at + 7])
        client.chunk(b"")
        assert (await client.answer()).status == 200
        assert c.last.body == raw
        assert c.last.header("content-length") == str(len(raw))
        assert c.last.header("transfer-encoding") is None


# -- deep or wide bodies are an answer, not an accident


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}",
    ],
    ids=["lists", "objects", "contents"],
)
async def test_a_body_that_is_nested_beyond_reason_is_400_or_passes_as_it_is(raw: bytes) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        answer = await gate.post(raw)
        assert answer.status == 400 or c.last.body == raw


async def test_a_body_whose_rewrite_fails_is_refused_rather_than_sent_on_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("splices overlap")

    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        monkeypatch.setattr("triptych.body.request.apply", broken)
        answer = await gate.post(chat() | {KV: {"do_remote_prefill": True}})
        assert answer.status == 500
        assert answer.json["error"]["message"] == "internal error of the gateway"
        assert not c.seen
        await gate.settled()
        assert [line["event"] for line in gate.errors] == ["unexpected error"]
        gate.lines.clear()


# -- uploads


def form(*fields: tuple[str, bytes], boundary: str = "b0undary") -> tuple[bytes, dict[str, str]]:
    """A multipart body and its content type; a field named "file" comes with a file name."""
    out = b""
    for name, value in fields:
        named = f'form-data; name="{name}"' + ('; filename="a.wav"' if name == "file" else "")
        out += f"--{boundary}\r\nContent-Disposition: {named}\r\n\r\n".encode() + value + b"\r\n"
    body = out + f"--{boundary}--\r\n".encode()
    return body, {"content-type": f"multipart/form-data; boundary={boundary}"}


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
@pytest.mark.parametrize("order", [("model", "file"), ("file", "model")])
async def test_an_upload_is_streamed_through_byte_for_byte_its_model_read_from_the_form(
    path: str, order: tuple[str, str]
) -> None:
    fields = {"model": b"b", "file": bytes(range(256)) * 3000}
    body, headers = form(*((name, fields[name]) for name in order))
    async with Scripted(names=("a",)) as a, Scripted(names=("b",)) as b:
        models = [{"name": "a", "combined": [a.url]}, {"name": "b", "combined": [b.url]}]
        async with Gate(models=models) as gate:
            assert (await gate.post(body, path, headers=headers)).status == 200
            assert b.last.body == body
            assert b.last.path == path
            assert b.last.header("content-length") == str(len(body))
            assert b.last.header("content-type") == headers["content-type"]
            assert not a.seen


async def test_an_upload_goes_on_before_its_end_has_come() -> None:
    """Streamed: the engine has its head while the client is still sending."""
    body, headers = form(("model", b"sim"), ("file", b"x" * 100))
    async with Rig("plain") as rig, rig.client() as client:
        client.head(len(body), "/v1/audio/transcriptions", headers=headers)
        client.writer.write(body[:-10])
        await rig.sim("combined").seen.until(lambda: rig.sim("combined").seen.in_flight == 1)
        client.writer.write(body[-10:])
        assert (await client.answer()).status == 200


async def test_a_chunked_upload_of_a_form_is_streamed_too() -> None:
    body, headers = form(("model", b"sim"), ("file", b"x" * 1000))
    async with Scripted() as c, Gate(combined=[c.url]) as gate, gate.client() as client:
        client.head(None, "/v1/audio/transcriptions", headers=headers)
        for at in range(0, len(body), 99):
            client.chunk(body[at : at + 99])
        client.chunk(b"")
        assert (await client.answer()).status == 200
        assert c.last.body == body


async def test_a_forms_unknown_model_is_404_and_a_missing_one_400_where_there_are_several() -> None:
    async with Scripted(names=("a",)) as a, Scripted(names=("b",)) as b:
        models = [{"name": "a", "combined": [a.url]}, {"name": "b", "combined": [b.url]}]
        async with Gate(models=models) as gate:
            body, headers = form(("model", b"c"), ("file", b"x"))
            assert (await gate.post(body, "/v1/audio/transcriptions", headers=headers)).status == 404
            body, headers = form(("file", b"x"))
            assert (await gate.post(body, "/v1/audio/transcriptions", headers=headers)).status == 400
            assert not a.seen
            assert not b.seen


async def test_an_upload_takes_a_plain_plan_whatever_pools_there_are() -> None:
    body, headers = form(("model", b"sim"), ("file", b"x"))
    async with Rig("e_p_d") as rig:
        assert (await rig.post(body, "/v1/audio/transcriptions", headers=headers)).status == 200
        assert (rig.seen("encode"), rig.seen("prefill"), rig.seen("decode")) == (0, 0, 1)
        assert rig.count("requests", plan="plain", status="200") == 1


HOSTILE: dict[str, tuple[str, bytes]] = {
    "kv in xargs": ("vllm_xargs", b'{"kv_transfer_params": "x"}'),
    "ec in xargs": ("vllm_xargs", b'{"a":1,"ec_transfer_params":[1]}'),
    "escaped": ("vllm_xargs", rb'{"kv\u005ftransfer_params":1}'),
    "kv": (KV, b"{}"),
    "ec": (EC, b"{}"),
}


@pytest.mark.parametrize("several", [False, True], ids=["one model", "several models"])
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("place", ["before the model", "after the model", "after the file"])
async def test_handles_in_a_form_are_refused_since_a_form_is_not_edited(
    hostile: str, place: str, several: bool
) -> None:
    """vLLM reads `vllm_xargs` of a transcription form as JSON, into the slot that hand-over parameters are in."""
    fields = [("model", b"a"), ("file", b"x" * 70_000)]
    fields.insert(["before the model", "after the model", "after the file"].index(place), HOSTILE[hostile])
    body, headers = form(*fields)
    async with Scripted(names=("a",)) as a, Scripted(names=("b",)) as b:
        models: list[dict[str, Any]] = [{"name": "a", "combined": [a.url]}, {"name": "b", "combined": [b.url]}]
        async with Gate(models=models[: 1 + several]) as gate:
            answer = await gate.post(body, "/v1/audio/transcriptions", headers=headers)
            assert answer.status == 400, answer
            assert "open: " in answer.json["error"]["message"]
            assert not a.seen, "the engine never got all of it"
            assert gate.legs().get(("combined", "http_error")) is None, "it is no fault of the engine's"
            await gate.settled()


async def test_handles_in_a_form_are_refused_however_late_they_come() -> None:
    """The engine has most of the form by then, and will not get the rest: it never starts."""
    body, headers = form(("model", b"sim"), ("file", b"x" * 1000), HOSTILE["kv in xargs"])
    async with Rig("plain") as rig, rig.client() as client:
        sim = rig.sim("combined")
        client.head(len(body), "/v1/audio/transcriptions", headers=headers)
        client.writer.write(body[:-200])
        await sim.seen.until(lambda: sim.seen.in_flight == 1)
        client.writer.write(body[-200:])
        assert (await client.answer()).status == 400
        await sim.seen.until(lambda: sim.seen.in_flight == 0)
        assert [cancel.moment for cancel in sim.seen.cancels] == ["upload"]
        assert rig.legs() == {("combined", "cancelled"): 1}


async def test_a_setting_opens_handles_in_forms_and_other_xargs_need_none() -> None:
    body, headers = form(("vllm_xargs", b'{"kv_transfer_params": "x"}'), ("model", b"sim"))
    harmless, _ = form(("model", b"sim"), ("vllm_xargs", b'{"x": "kv_transfer_params"}'), ("vllm_xargs", b"no json"))
    async with Scripted() as c, Gate(combined=[c.url], open=[KV]) as gate:
        assert (await gate.post(body, "/v1/audio/transcriptions", headers=headers)).status == 200
        assert (await gate.post(harmless, "/v1/audio/transcriptions", headers=headers)).status == 200
        assert [seen.body for seen in c.seen] == [body, harmless]


async def test_a_forms_model_may_not_be_given_twice() -> None:
    body, headers = form(("model", b"a"), ("file", b"x"), ("model", b"b"))
    async with Scripted(names=("a",)) as a, Gate(combined=[a.url]) as gate:
        answer = await gate.post(body, "/v1/audio/transcriptions", headers=headers)
        assert answer.status == 400
        assert answer.json["error"]["message"] == 'duplicate field "model" in the form'
        assert not a.seen


async def test_a_form_of_more_parts_than_an_engine_takes_is_refused() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        for parts, status in ((999, 200), (1001, 400)):
            body, headers = form(("model", b"sim"), *((f"x{n}", b"") for n in range(parts)))
            answer = await gate.post(body, "/v1/audio/transcriptions", headers=headers)
            assert answer.status == status
        assert answer.json["error"]["message"] == "more than 1000 parts in the form"
        assert len(c.seen) <= 2


async def test_a_part_of_a_form_has_headers_of_a_bounded_length() -> None:
    body, headers = form(("x" * 20_000, b"1"))
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(body, "/v1/audio/transcriptions", headers=headers)).status == 400
        assert not c.seen


async def test_an_error_of_an_engine_that_is_no_json_is_passed_on_though_it_speaks_of_handles() -> None:
    said = b"kv_transfer_params: not supported"
    async with Scripted(said) as c, Gate(combined=[c.url]) as gate:
        c.status = 422
        answer = await gate.post(chat())
        assert (answer.status, answer.body) == (422, said)


async def test_a_form_in_another_character_set_is_refused_since_its_names_could_not_be_told() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="vllm+AF8-xargs"\r\n\r\n{"kv_transfer_params":1}\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; charset=utf-7; boundary=b"}
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(body, "/v1/audio/transcriptions", headers=headers)).status == 400
        assert not c.seen


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "multipart/form-data", "multipart/mixed; boundary=b", "text/plain"]
)
async def test_an_upload_that_is_no_form_is_400(kind: str) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        answer = await gate.post(b"model=sim", "/v1/audio/transcriptions", headers={"content-type": kind})
        assert answer.status == 400
        assert not c.seen


@pytest.mark.parametrize("api", BODIES)
async def test_every_api_answers_through_the_gateway_as_a_plain_engine_does(api: str) -> None:
    path, make = BODIES[api]
    body = make(images=0 if api == "completions" else 2)
    told: dict[str, Any] = {}
    for plan in ("plain", "e_p_d"):
        async with Rig(plan) as rig:
            answer = await rig.post(body, path)
            assert answer.status == 200, answer
            told[plan] = {k: v for k, v in answer.json.items() if k in ("choices", "output", "content")}
            if api == "responses":
                told[plan] = [part["text"] for item in told[plan]["output"] for part in item["content"]]
    assert told["plain"] == told["e_p_d"]
    assert told["plain"]


async def test_a_handle_is_not_put_where_the_client_had_a_null_model() -> None:
    said = b'{"ec_transfer_params":{"h":{}}}'
    async with Scripted(said) as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post(media(image(), model=None))).status == 200
        assert copies(e.last.body, "model") == [None]
        assert copies(c.last.body, EC) == [{"h": {}}]
