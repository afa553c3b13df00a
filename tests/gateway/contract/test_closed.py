"""Contract, "What a client may not send": closed by default on every plan, opened by a named setting each."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.gateway.contract.kit import EC, KV, Gate, Scripted, copies, media, pairs, parts
from tests.gateway.rig import BODIES, PLANS, ROLES, Rig, chat, image
from triptych.gateway.settings import GatewaySettings
from triptych.sim import MemoryStore, Sim

A, B = image("QUFB"), image("QkJC")
REMOTE = {"type": "image_url", "image_url": {"url": "http://pictures.example/x.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}}


class Plan:
    """Scripted engines of one plan with a gateway, and every body that reached any of them."""

    def __init__(self, plan: str, **settings: Any) -> None:
        self.plan = plan
        self.engines = {role: Scripted() for role in ROLES[plan]}
        self._settings = settings
        self._stack = AsyncExitStack()
        self.gate: Gate

    async def __aenter__(self) -> Plan:
        for engine in self.engines.values():
            await self._stack.enter_async_context(engine)
        pools = {role: [engine.url] for role, engine in self.engines.items()}
        self.gate = await self._stack.enter_async_context(Gate(**pools, **self._settings))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def seen(self) -> list[Any]:
        return [request for engine in self.engines.values() for request in engine.seen]

    @property
    def final(self) -> Scripted:
        return list(self.engines.values())[-1]


# -- hand-over parameters

SPELLINGS = [
    '"{}"',
    r'"\u0065c_transfer_params"',
    r'"ec\u005ftransfer_params"',
    r'"ec_transfer\u005Fparams"',
    r'"\u0065\u0063\u005f\u0074\u0072\u0061\u006e\u0073\u0066\u0065\u0072\u005f\u0070\u0061\u0072\u0061\u006d\u0073"',
    r'"\u006bv_transfer_params"',
    r'"kv\u005ftransfer_params"',
    '"ec_transfer_params"',
    '"kv_transfer_params"',
]


@pytest.mark.parametrize("plan", PLANS)
async def test_handles_are_removed_whatever_the_plan_however_spelled_all_copies(plan: str) -> None:
    values = ['{"do_remote_prefill":true}', "null", "7", '"x"', "[1,{}]", "{}"]
    hostile = [f"{s} : {v}" for s in SPELLINGS[1:] for v in values]
    async with Plan(plan) as made:
        for api, (path, make) in BODIES.items():
            for images in (0, 1) if api != "completions" else (0,):
                clean = json.dumps(make(images=images))
                members = clean[1:-1]
                for raw in (
                    "{" + ",".join(hostile) + "," + members + "}",
                    "{" + members + " , " + ",".join(hostile) + "}",
                    "{" + hostile[0] + "," + members + "," + ",".join(hostile[1:]) + "\n}",
                ):
                    for engine in made.engines.values():
                        engine.seen.clear()
                    assert (await made.gate.post(raw.encode(), path)).status == 200
                    assert made.final.seen
                    for seen in made.seen:
                        assert copies(seen.body, EC) == [], (api, raw)
                        prefill = made.engines.get("prefill")
                        if prefill is None or seen not in prefill.seen:
                            assert copies(seen.body, KV) == [], (api, raw)
                        else:
                            ((told),) = copies(seen.body, KV)
                            assert told["do_remote_prefill"] is False, "the gateway's own"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens", "/v1/audio/speech"])
async def test_handles_are_removed_on_endpoints_that_generate_nothing_too(path: str) -> None:
    raw = rb'{"model":"sim","ec_transfer_params":{},"input":"a","kv\u005ftransfer_params":1,"messages":[]}'
    async with Plan("e_p_d") as made:
        assert (await made.gate.post(raw, path)).status == 200
        assert made.final.last.body == b'{"model":"sim","input":"a","messages":[]}'
        assert len(made.seen) == 1


@pytest.mark.parametrize("plan", PLANS)
async def test_handles_inside_vllm_xargs_are_removed_and_what_stands_beside_them_is_not(plan: str) -> None:
    inside = r'{"a": 1.50, "kv_transfer_params":"x", "ec\u005ftransfer_params" : 2, "ec_transfer_params":{}, "b":[1]}'
    async with Plan(plan) as made:
        for path, make in BODIES.values():
            body = json.dumps(make())
            for name in ('"vllm_xargs"', r'"vllm\u005fxargs"'):
                for engine in made.engines.values():
                    engine.seen.clear()
                assert (await made.gate.post(f"{body[:-1]},{name}:{inside}}}".encode(), path)).status == 200
                assert made.final.seen
                for seen in made.seen:
                    assert copies(seen.body, "vllm_xargs") == [{"a": 1.5, "b": [1]}]
                    assert b'"a": 1.50' in seen.body


async def test_only_the_two_handle_keys_are_removed_from_vllm_xargs_and_only_at_its_top() -> None:
    xargs = {"x": [1, "kv_transfer_params"], "kv_transfer_params2": 1, "deep": "ec_transfer_params"}
    async with Plan("plain") as made:
        raw = json.dumps(chat(vllm_xargs=xargs)).encode()
        assert (await made.gate.post(raw)).status == 200
        assert made.final.last.body == raw


@pytest.mark.parametrize("key", [EC, KV])
async def test_a_setting_opens_each_handle(key: str) -> None:
    given = {"mine": [1]}
    async with Plan("plain", open=[key]) as made:
        body = chat(vllm_xargs={key: 1, "other": 2})
        body |= {EC: given, KV: given}
        assert (await made.gate.post(body)).status == 200
        shut = KV if key == EC else EC
        assert copies(made.final.last.body, key) == [given]
        assert copies(made.final.last.body, shut) == []
        assert copies(made.final.last.body, "vllm_xargs") == [{key: 1, "other": 2}]


async def test_handles_deeper_in_a_body_are_text_like_any_other() -> None:
    raw = json.dumps(chat(metadata={EC: 1}, tools=[{KV: {}}])).encode()
    async with Plan("plain") as made:
        assert (await made.gate.post(raw)).status == 200
        assert made.final.last.body == raw


async def test_stripped_handles_are_counted() -> None:
    async with Plan("plain") as made:
        await made.gate.post(chat() | {EC: {}})
        await made.gate.post(chat(vllm_xargs={KV: 1}))
        await made.gate.post(chat())
        assert made.gate.count("handles_stripped") == 2


# -- rank


@pytest.mark.parametrize("plan", PLANS)
async def test_the_rank_header_is_removed_whatever_the_plan(plan: str) -> None:
    async with Plan(plan) as made:
        for name in ("X-data-parallel-rank", "x-data-parallel-rank", "X-DATA-PARALLEL-RANK"):
            assert (await made.gate.post(chat(images=1), headers={name: "3"})).status == 200
        assert all(seen.header("x-data-parallel-rank") is None for seen in made.seen)
        assert len(made.final.seen) == 3


@pytest.mark.parametrize("charset", ["", "; charset=us-ascii"])
@pytest.mark.parametrize("beside", [b"caf\xe9", "caf\u00e9".encode(), b"cafe"], ids=["latin-1", "utf-8", "ascii"])
async def test_handles_in_the_xargs_of_an_upload_are_refused_in_whatever_bytes(beside: bytes, charset: str) -> None:
    """The engine's server takes for Latin-1 what is not UTF-8."""
    xargs = b'{"kv_transfer_params": "x", "a": "%b"}' % beside
    form = b'--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n%b\r\n--x--\r\n' % xargs
    headers = {"content-type": f"multipart/form-data; boundary=x{charset}"}
    async with Plan("plain") as made:
        answer = await made.gate.post(form, "/v1/audio/transcriptions", headers=headers)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "vllm_xargs.kv_transfer_params"


async def test_the_rank_header_is_removed_from_uploads_too() -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x", "x-data-parallel-rank": "1"}
    async with Plan("plain") as made:
        assert (await made.gate.post(form, "/v1/audio/transcriptions", headers=headers)).status == 200
        assert made.final.last.header("x-data-parallel-rank") is None


async def test_a_setting_opens_the_rank_header() -> None:
    async with Plan("e_p_d", open=["data_parallel_rank"]) as made:
        assert (await made.gate.post(chat(images=1), headers={"x-data-parallel-rank": "3"})).status == 200
        assert [seen.header("x-data-parallel-rank") for seen in made.seen] == ["3", "3", "3"]


# -- uuid


@pytest.mark.parametrize("plan", ["plain", "p_d"])
async def test_media_uuids_are_removed_on_plans_without_an_encode_leg(plan: str) -> None:
    async with Plan(plan) as made:
        given = [part | {"uuid": "../evil"} for part in (A, REMOTE, AUDIO)]
        assert (await made.gate.post(media(*given))).status == 200
        assert made.seen
        for seen in made.seen:
            assert parts(seen) == [A, REMOTE, AUDIO]
        assert made.gate.count("media_uuids", action="removed") == 3


@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_inline_media_get_the_gateways_own_uuid_where_an_encode_leg_runs_and_remote_media_none(plan: str) -> None:
    async with Plan(plan, limits={"encode_legs": 1}) as made:
        given = [part | {"uuid": "../evil"} for part in (A, REMOTE, AUDIO)]
        assert (await made.gate.post(media(*given))).status == 200
        at_encoders = [parts(seen)[0] for seen in made.engines["encode"].seen]
        first, fetched, heard = at_encoders
        assert "uuid" not in fetched
        assert first["uuid"] != heard["uuid"]
        for part in (first, heard):
            assert len(part["uuid"]) == 64
            assert set(part["uuid"]) <= set("0123456789abcdef")
        for role in list(made.engines)[1:]:
            assert parts(made.engines[role].last) == at_encoders, role
        assert made.gate.count("media_uuids", action="replaced") == 2
        assert made.gate.count("media_uuids", action="removed") == 1


@pytest.mark.parametrize("plan", ["plain", "e_pd"])
async def test_every_copy_of_a_uuid_goes_however_it_is_spelled(plan: str) -> None:
    part = r'{"uuid":"a","type":"image_url","\u0075uid":"b","image_url":{"url":"http://h/x"},"uu\u0069d":null}'
    raw = f'{{"model":"sim","messages":[{{"role":"user","content":[{part}]}}]}}'.encode()
    async with Plan(plan) as made:
        assert (await made.gate.post(raw)).status == 200
        for seen in made.seen:
            assert parts(seen) == [{"type": "image_url", "image_url": {"url": "http://h/x"}}]
            assert b"u0075" not in seen.body
            assert b"u0069" not in seen.body


async def test_an_item_that_stays_without_encode_leg_since_no_encoder_is_healthy_loses_its_uuid() -> None:
    async with Plan("e_pd") as made:
        (encoder,) = made.gate.gateway.fleet.find(made.engines["encode"].url)
        encoder.hold()
        assert (await made.gate.post(media(A | {"uuid": "x"}))).status == 200
        assert parts(made.final.last) == [A]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "u"},
        {"type": "image_url", "image_url": {"url": ""}, "uuid": "u"},
        {"type": "image_url", "uuid": "u"},
        {"type": "input_audio", "input_audio": {"data": None}, "uuid": "u"},
        {"type": "video_url", "video_url": {}, "uuid": "u"},
        {"type": "text", "text": "hi", "image_url": None, "uuid": "u"},
        {"type": "image_pil", "image_pil": None, "uuid": "u"},
    ],
)
async def test_a_uuid_only_part_is_400(part: dict[str, Any], plan: str) -> None:
    async with Plan(plan) as made:
        answer = await made.gate.post(media({"type": "text", "text": "a"}, part))
        assert answer.status == 400
        assert answer.json["error"]["param"] == "messages[0].content[1]"
        assert "open: " in answer.json["error"]["message"]
        assert not made.seen


async def test_a_setting_opens_uuids() -> None:
    given = [A | {"uuid": "mine"}, {"type": "image_url", "image_url": None, "uuid": "known"}]
    async with Plan("e_p_d", open=["uuid"]) as made:
        assert (await made.gate.post(media(*given))).status == 200
        assert parts(made.engines["encode"].last) == [given[0]]
        assert parts(made.engines["prefill"].last) == given
        assert parts(made.final.last) == given


# -- embeddings


def tool(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "tool", "tool_call_id": "t", "content": [part]}]}


EMBEDS = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "h"}
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "image_embeds": ("/v1/chat/completions", media(EMBEDS)),
    "audio_embeds": ("/v1/chat/completions", media({"type": "audio_embeds", "audio_embeds": "AAAA"})),
    "video_embeds": ("/v1/chat/completions", media({"video_embeds": "AAAA"})),
    "an unheard-of kind": ("/v1/chat/completions", media({"type": "smell_embeds", "smell_embeds": "AAAA"})),
    "prompt_embeds by key": ("/v1/chat/completions", media({"prompt_embeds": "AAAA"})),
    "prompt_embeds by type": ("/v1/chat/completions", media({"type": "prompt_embeds", "data": "AAAA"})),
    "a text part": ("/v1/chat/completions", media({"type": "text", "text": "a", "image_embeds": "A", "uuid": "u"})),
    "a system message": ("/v1/chat/completions", media(EMBEDS, role="system")),
    "a tool message": ("/v1/chat/completions", tool(EMBEDS)),
    "a nested list": ("/v1/chat/completions", media({"type": "tool_result", "content": [EMBEDS]})),
    "a nested list of lists": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [[[EMBEDS]]]}]}),
    "top level of chat": ("/v1/chat/completions", chat(prompt_embeds="AAAA")),
    "top level of completions": ("/v1/completions", {"model": "sim", "prompt_embeds": "AAAA"}),
    "top level, a list": ("/v1/completions", {"model": "sim", "prompt": "a", "prompt_embeds": ["AAAA"]}),
    "responses input": ("/v1/responses", {"model": "sim", "input": [{"role": "user", "content": [EMBEDS]}]}),
    "responses tool output": (
        "/v1/responses",
        {"model": "sim", "input": [{"type": "function_call_output", "call_id": "c", "output": [EMBEDS]}]},
    ),
    "responses, earlier input": (
        "/v1/responses",
        {"model": "sim", "input": "a", "previous_input_messages": [{"role": "user", "content": [EMBEDS]}]},
    ),
    "messages content": (
        "/v1/messages",
        {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": [EMBEDS]}]},
    ),
    "messages system": ("/v1/messages", {"model": "sim", "max_tokens": 1, "messages": [], "system": [EMBEDS]}),
    "messages tool result": (
        "/v1/messages",
        {
            "model": "sim",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [EMBEDS]}]}],
        },
    ),
    "embeddings messages": ("/v1/embeddings", {"model": "sim", "messages": [{"role": "user", "content": [EMBEDS]}]}),
    "embeddings input": ("/v1/embeddings", {"model": "sim", "input": [{"role": "user", "content": [EMBEDS]}]}),
    "embeddings input, a batch": (
        "/v1/embeddings",
        {"model": "sim", "input": [[{"role": "user", "content": [EMBEDS]}]]},
    ),
}


@pytest.mark.parametrize("place", PLACES)
async def test_embeddings_are_400_that_names_the_setting_wherever_they_are_legal(place: str) -> None:
    path, body = PLACES[place]
    async with Plan("e_pd") as made:
        answer = await made.gate.post(body, path)
        assert answer.status == 400, answer
        error = answer.json["error"]
        assert "open: embeds" in error["message"]
        assert not made.seen
        assert made.gate.count("requests_refused", reason="closed") == 1


@pytest.mark.parametrize("place", [p for p in PLACES if "unheard" not in p])
async def test_a_setting_opens_embeddings(place: str) -> None:
    path, body = PLACES[place]
    async with Plan("e_pd", open=["embeds", "uuid"]) as made:
        raw = json.dumps(body).encode()
        assert (await made.gate.post(raw, path)).status == 200
        assert made.final.last.body == raw
        assert not made.engines["encode"].seen


async def test_embeddings_that_are_open_lose_their_uuid_like_any_media() -> None:
    async with Plan("plain", open=["embeds"]) as made:
        assert (await made.gate.post(media(EMBEDS | {"uuid": "../evil"}))).status == 200
        assert parts(made.final.last) == [{k: v for k, v in EMBEDS.items() if k != "uuid"}]


async def test_embeddings_inside_a_part_that_becomes_metadata_are_no_stumbling_block() -> None:
    said = b'{"ec_transfer_params":{"h":{"metadata":{"image_grid_thw":[1,8,8]}}}}'
    async with Plan("e_pd", open=["embeds"], media_to_consumer="metadata") as made:
        made.engines["encode"].says = said
        answer = await made.gate.post(media(A | {"content": [EMBEDS]}, EMBEDS))
        assert answer.status == 200
        assert [part.get("uuid") for part in parts(made.final.last)] == ["h", None]


def test_each_closed_thing_has_a_named_setting_and_nothing_is_open_by_default() -> None:
    assert GatewaySettings.model_validate({"combined": ["http://c:1"]}).open == frozenset()
    every = ["ec_transfer_params", "kv_transfer_params", "uuid", "embeds", "data_parallel_rank", "answer_handles"]
    assert GatewaySettings.model_validate({"combined": ["http://c:1"], "open": every}).open == set(every)


# -- what is forwarded


@pytest.mark.parametrize("plan", PLANS)
async def test_processor_kwargs_are_forwarded(plan: str) -> None:
    kwargs: dict[str, Any] = {"mm_processor_kwargs": {"min_pixels": 1}, "media_io_kwargs": {"video": {"fps": 1}}}
    async with Plan(plan) as made:
        assert (await made.gate.post(chat(images=1, **kwargs))).status == 200
        assert len(made.seen) == len(ROLES[plan])
        for seen in made.seen:
            assert {k: v for k, v in pairs(seen.body) if k in kwargs} == kwargs


async def test_an_engine_refuses_processor_kwargs_by_itself() -> None:
    async with Rig("plain") as rig:
        answer = await rig.post(chat(images=1, mm_processor_kwargs={"min_pixels": 1}))
        assert answer.status == 400
        assert "--trust-request-mm-kwargs" in answer.json["error"]["message"]


# -- handles in answers


async def test_handles_in_answers_to_the_client_are_nulled() -> None:
    both = Sim(ec="example", ec_role="both", ec_dir=MemoryStore())
    async with both:
        async with Gate(combined=[both.url], open=["answer_handles"]) as gate:
            assert (await gate.post(chat(images=1))).json[EC], "the engine tells handles"
        async with Gate(combined=[both.url]) as gate:
            answer = (await gate.post(chat(images=1))).json
            assert answer[EC] is None
            assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_both_handles_are_nulled_in_answers_of_every_api_and_no_other_byte_changes(path: str) -> None:
    said = b'{ "id":"a","kv_transfer_params": {"x":[1]} ,"ec_transfer_params":"s", "big": 1e400 }\n'
    async with Scripted(said) as c, Gate(combined=[c.url]) as gate:
        answer = await gate.post({"model": "sim", "messages": [], "max_tokens": 1, "prompt": "a", "input": "a"}, path)
        assert answer.body == b'{ "id":"a","kv_transfer_params": null ,"ec_transfer_params":null, "big": 1e400 }\n'
        assert int(answer.headers["content-length"]) == len(answer.body)


async def test_a_decode_engines_answer_after_a_hop_has_its_handles_nulled_too() -> None:
    said = b'{"kv_transfer_params":{"remote_port":1}}'
    async with Scripted(said) as p, Scripted(said) as d, Gate(prefill=[p.url], decode=[d.url]) as gate:
        assert (await gate.post(chat())).json == {KV: None}
        assert copies(d.last.body, KV) == [{"remote_port": 1}]


@pytest.mark.parametrize("opened", [(), ("answer_handles",)], ids=["closed", "opened"])
async def test_handles_in_streams_are_nulled_too_a_stream_of_responses_ends_with_the_whole_answer(
    opened: tuple[str, ...],
) -> None:
    path, make = BODIES["responses"]
    async with Sim(ec="example", ec_role="both", ec_dir=MemoryStore()) as both:
        async with Gate(combined=[both.url], open=opened) as gate:
            answer = await gate.post(make(images=1, stream=True), path)
        assert answer.status == 200
        assert answer.events[-2].startswith(b"event: response.completed\ndata: ")
        told = json.loads(answer.events[-2].partition(b"data: ")[2])["response"]
        assert told["output"][0]["content"][0]["text"]
        assert bool(told[EC]) == bool(opened)
        assert EC in told


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b'{"kv_transfer_params":{"a":1},"x": 1.0}', b'{"kv_transfer_params":null,"x": 1.0}'),
        (b'{"response":{"ec_transfer_params":{}, "kv_transfer_params":[1]}}',
         b'{"response":{"ec_transfer_params":null, "kv_transfer_params":null}}'),
        (b'{"message":{"kv_transfer_params":1}}', b'{"message":{"kv_transfer_params":null}}'),
        (b'{"delta":"\\"kv_transfer_params\\":1"}', b'{"delta":"\\"kv_transfer_params\\":1"}'),
        (b'{"choices":[{"kv_transfer_params":1}]}', b'{"choices":[{"kv_transfer_params":1}]}'),
        (b"no json: kv_transfer_params", b"no json: kv_transfer_params"),
    ],
)  # fmt: skip
async def test_only_handles_of_an_answer_are_nulled_in_a_stream(sent: bytes, got: bytes) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        c.headers = [(b"content-type", b"text/event-stream")]
        c.says = b"data: %b\n\ndata: %b\r\n\r\ndata: [DONE]\n\n" % (sent, sent)
        answer = await gate.post(chat(stream=True))
        assert answer.body == b"data: %b\n\ndata: %b\r\n\r\ndata: [DONE]\n\n" % (got, got)


async def test_an_answer_with_a_lone_surrogate_is_an_answer_like_any_other() -> None:
    said = rb'{"choices":[{"text":"\ud83d"}]%b}'
    for end, told in ((b',"kv_transfer_params":{"a":1}', b',"kv_transfer_params":null'), (b"", b"")):
        async with Scripted(said % end) as c, Gate(combined=[c.url]) as gate:
            answer = await gate.post(chat())
            assert answer.status == 200
            assert answer.body == said % told
