"""Contract, "Prefill → decode"."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.contract.kit import KV, Gate, Scripted, copies, media, pairs
from tests.gateway.rig import BODIES, Rig, chat, completions, image
from triptych.sim import Fault

TEMPLATE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CAPS: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": 1, "max_completion_tokens": 1},
    "completions": {"max_tokens": 1},
    "responses": {"max_output_tokens": 1, "store": False},
    "messages": {"max_tokens": 1},
}
EVERY_CAP = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Hop:
    """A prefill and a decode engine that say what they are told to, with a gateway."""

    def __init__(self, said: Any = b'{"kv_transfer_params":{"a":1}}', **settings: Any) -> None:
        self.prefill, self.decode = Scripted(said), Scripted()
        self._settings = settings
        self.gate: Gate

    async def __aenter__(self) -> Hop:
        await self.prefill.__aenter__()
        await self.decode.__aenter__()
        self.gate = Gate(prefill=[self.prefill.url], decode=[self.decode.url], **self._settings)
        await self.gate.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.gate.__aexit__(*error)
        await self.decode.__aexit__()
        await self.prefill.__aexit__()


@pytest.mark.parametrize("api", BODIES)
async def test_the_prefill_body_carries_the_template_one_token_and_no_stream(api: str) -> None:
    path, make = BODIES[api]
    asked: dict[str, Any] = make(stream=True) | {
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "temperature": 0.5,
        **dict.fromkeys(CAPS[api], 77),
    }
    async with Hop() as hop:
        assert (await hop.gate.post(asked, path)).status == 200
        sent = dict(pairs(hop.prefill.last.body))
        kept = {k: v for k, v in asked.items() if k not in ("stream_options", "min_tokens")}
        assert sent == kept | {"stream": False, KV: TEMPLATE} | CAPS[api]
        assert len(pairs(hop.prefill.last.body)) == len(sent), "nothing twice"
        assert list(copies(hop.prefill.last.body, KV)[0]) == list(TEMPLATE)
        assert hop.prefill.last.path == path


@pytest.mark.parametrize("api", BODIES)
async def test_the_caps_are_those_of_the_api_and_no_others(api: str) -> None:
    path, make = BODIES[api]
    body = {k: v for k, v in make().items() if k not in EVERY_CAP}
    async with Hop() as hop:
        assert (await hop.gate.post(body, path)).status == 200
        sent = dict(pairs(hop.prefill.last.body))
        assert {k: sent[k] for k in (*EVERY_CAP, "store") if k in sent} == CAPS[api]


@pytest.mark.parametrize("stream", [True, False, None])
@pytest.mark.parametrize("api", BODIES)
async def test_the_decode_body_keeps_the_clients_own_limits_and_stream_flag(api: str, stream: bool | None) -> None:
    path, make = BODIES[api]
    asked: dict[str, Any] = make() | {"min_tokens": 3, **dict.fromkeys(CAPS[api], 50)}
    asked.pop("stream")
    if stream is not None:
        asked |= {"stream": stream, "stream_options": {"include_usage": True}}
    if api == "responses":
        asked["store"] = True
    async with Hop() as hop:
        assert (await hop.gate.post(asked, path)).status == 200
        assert dict(pairs(hop.decode.last.body)) == asked | {KV: {"a": 1}}


async def test_what_prefill_hands_over_goes_into_the_decode_body_byte_for_byte() -> None:
    handed = rb'{ "remote_block_ids":[[1, 2]],"n":1.50e+01,"big":123456789012345678901,"n":2,"s":"\ud83d\/" }'
    async with Hop(b'{"id":1, "kv_transfer_params" : ' + handed + b',"z":[]}') as hop:
        assert (await hop.gate.post(chat() | {KV: {"mine": 1}})).status == 200
        assert b'"kv_transfer_params":' + handed in hop.decode.last.body
        assert len(copies(hop.decode.last.body, KV)) == 1


@pytest.mark.parametrize("said", [b"{}", b'{"kv_transfer_params":null}', b'{"choices":[{"kv_transfer_params":{}}]}'])
async def test_absent_or_null_parameters_let_decode_run_without(said: bytes) -> None:
    async with Hop(said) as hop:
        raw = json.dumps(chat()).encode()
        assert (await hop.gate.post(raw)).status == 200
        assert hop.decode.last.body == raw


@pytest.mark.parametrize("value", [b"[]", b'"x"', b"7", b"true", b"false", b"0", b'[{"a":1}]'])
async def test_parameters_of_any_other_type_are_502(value: bytes) -> None:
    async with Hop(b'{"kv_transfer_params":' + value + b"}") as hop:
        answer = await hop.gate.post(chat())
        assert answer.status == 502
        assert f"prefill engine {hop.prefill.url}" in answer.json["error"]["message"]
        assert not hop.decode.seen
        assert hop.gate.legs()["prefill", "invalid_response"] == 1


@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 502)])
async def test_the_prefill_answer_is_read_up_to_a_cap(extra: int, status: int) -> None:
    cap = 4096
    async with Hop(b'{"kv_transfer_params":{"a":1}}'.ljust(cap + extra), limits={"prefill_answer_bytes": cap}) as hop:
        assert (await hop.gate.post(chat())).status == status
        assert len(hop.decode.seen) == (status == 200)


async def test_decode_is_not_called_before_prefill_has_answered() -> None:
    async with Rig("p_d") as rig:
        rig.sim("prefill").faults.add(Fault(kind="hang_body", seconds=0.2, path="/v1/*"))
        task = asyncio.create_task(rig.post(chat()))
        await rig.sim("prefill").seen.until(lambda: rig.sim("prefill").seen.faults["hang_body"] == 1)
        assert rig.seen("decode") == 0
        assert (await task).status == 200
        assert rig.seen("decode") == 1


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_decode_reads_prefills_kv_and_computes_nothing_of_the_prompt(api: str, stream: bool) -> None:
    path, make = BODIES[api]
    body = make("a longer question", images=0 if api == "completions" else 1, stream=stream)
    async with Rig("p_d") as rig:
        assert (await rig.post(body, path)).status == 200
        prefill, decode = rig.sim("prefill").seen, rig.sim("decode").seen
        assert (prefill.kv["issued"], prefill.kv["read"], decode.kv["used"]) == (1, 1, 1)
        assert (decode.local_tokens, decode.kv_tokens) == (0, prefill.prompt_tokens)
        assert rig.sim("prefill").pinned == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("plan", ["p_d", "e_p_d"])
async def test_the_answer_is_a_plain_engines(plan: Any, stream: bool) -> None:
    def words(answer: Any) -> Any:
        if not stream:
            return [choice["message"]["content"] for choice in answer.json["choices"]]
        events = [json.loads(e.removeprefix(b"data: ")) for e in answer.events if e.startswith(b"data: {")]
        return "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])

    body = media({"type": "text", "text": "what is it?"}, image(), stream=stream, max_tokens=20)
    told = []
    for made in ("plain", plan):
        async with Rig(made) as rig:
            told.append(words(await rig.post(body)))
    assert told[0] == told[1]
    assert told[0]


async def test_min_tokens_beside_one_token_would_have_been_refused() -> None:
    """Why `min_tokens` and `stream_options` leave the prefill body: the engine says 400 to either."""
    body = completions(min_tokens=5, max_tokens=9, stream=True, stream_options={"include_usage": True})
    async with Rig("p_d") as rig:
        assert (await rig.post(body, "/v1/completions")).status == 200
        direct = dict(pairs(rig.sim("decode").seen.bodies[-1].body))
        assert (direct["min_tokens"], direct["max_tokens"]) == (5, 9)
    async with Rig("plain") as rig:
        assert (await rig.post(body | {"max_tokens": 1}, "/v1/completions")).status == 400
        assert (await rig.post(body | {"stream": False}, "/v1/completions")).status == 400
