"""Image requests over real vLLM: E+PD with the EC connector, and E+P+D with KV over NIXL.

Every test asserts on what the engines counted, since a silent fallback gives the same answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, InternalServerError

from tests.e2e.media import ask, picture
from tests.e2e.rig import (
    Engines,
    Messages,
    alive,
    client,
    computed,
    gateway,
    items_taken,
    kv_taken,
    started,
    streamed_tokens,
    tokens,
    until,
)
from triptych.gateway.handover.kv import KvContext, Nixl
from triptych.models.tiny import write_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

COMMON: dict[str, Any] = {"model": {"tiny": "image", "name": "tiny"}, "engine": "vllm"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engines, ...]]:
    """The split engines, and an engine without any connector, which has the last word on what is right."""
    roles = {"encode": 1, "prefill": 1, "decode": 1, "combined": 1}
    split = COMMON | {"ec": "triptych", "kv": "nixl", "engines": roles}
    with started(tmp_path_factory.mktemp("image"), split, COMMON | {"engines": {"combined": 1}}) as up:
        yield up


@pytest.fixture(scope="module")
def engines(both: tuple[Engines, ...]) -> Engines:
    return both[0]


@pytest.fixture(scope="module")
def plain(both: tuple[Engines, ...]) -> str:
    return both[1].url("combined-0")


def e_pd(engines: Engines, **more: Any) -> dict[str, Any]:
    return {"encode": [engines.url("encode-0")], "combined": [engines.url("combined-0")], **more}


def e_p_d(engines: Engines, **more: Any) -> dict[str, Any]:
    roles = ("encode", "prefill", "decode")
    return {role: [engines.url(f"{role}-0")] for role in roles} | more


MODES = pytest.mark.parametrize("mode", ["raw", "metadata"])


@MODES
async def test_e_pd_the_consumer_takes_the_encoders_output(engines: Engines, plain: str, mode: str) -> None:
    consumer = engines.url("combined-0")
    seed = 11 if mode == "raw" else 12
    messages = ask(picture(seed), picture(seed + 50), picture(seed))
    before = items_taken(consumer)
    async with gateway(**e_pd(engines, media_to_consumer=mode)) as up:
        assert await tokens(up.url, messages) == await tokens(plain, messages)
        record = next(iter(up.gateway.requests))
    assert record.plan == "e_pd"
    assert [leg.role for leg in record.legs].count("encode") == 2
    assert items_taken(consumer) - before >= 2


@MODES
async def test_e_p_d_decode_takes_the_kv_that_prefill_made_of_the_encoders_output(
    engines: Engines, plain: str, mode: str
) -> None:
    prefill, decode = engines.url("prefill-0"), engines.url("decode-0")
    messages = ask(picture(21 if mode == "raw" else 22))
    items, kv, own = items_taken(prefill), kv_taken(decode), computed(decode)
    async with gateway(**e_p_d(engines, media_to_consumer=mode)) as up:
        assert await tokens(up.url, messages) == await tokens(plain, messages)
        assert next(iter(up.gateway.requests)).plan == "e_p_d"
    assert items_taken(prefill) - items == 1
    assert kv_taken(decode) - kv > 32
    assert computed(decode) - own <= 1


@MODES
async def test_a_stream_says_the_same(engines: Engines, plain: str, mode: str) -> None:
    messages = ask(picture(31), picture(32))
    async with gateway(**e_p_d(engines, media_to_consumer=mode)) as up:
        assert await streamed_tokens(up.url, messages) == await tokens(plain, messages)


async def test_text_takes_prefill_and_decode_only(engines: Engines, plain: str) -> None:
    messages = ask(text="A question about nothing to be seen, long enough for a block of tokens or two.")
    before = kv_taken(engines.url("decode-0"))
    async with gateway(**e_p_d(engines)) as up:
        assert await tokens(up.url, messages) == await tokens(plain, messages)
        assert next(iter(up.gateway.requests)).plan == "p_d"
    assert kv_taken(engines.url("decode-0")) > before


async def test_many_requests_at_once_get_their_own_answers(engines: Engines, plain: str) -> None:
    asked: list[Messages] = [ask(picture(100 + i), text=f"Number {i}: " + "what is it? " * 3) for i in range(6)]
    expected = [await tokens(plain, messages) for messages in asked]
    assert len({tuple(answer) for answer in expected}) == len(expected)
    async with gateway(**e_p_d(engines, media_to_consumer="metadata")) as up:
        assert await asyncio.gather(*(tokens(up.url, messages) for messages in asked)) == expected


HOSTILE: Mapping[str, dict[str, Any]] = {
    "kv_kills": {"kv_transfer_params": {"do_remote_prefill": True}},
    "kv_reads_others": {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": "x",
            "remote_request_id": "y",
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "tp_size": 1,
        }
    },
    "kv_pins_blocks": {"kv_transfer_params": {"do_remote_decode": True}},
    "kv_in_xargs": {"vllm_xargs": {"kv_transfer_params": "x"}},
    "ec": {"ec_transfer_params": {"h": {"peer_host": "127.0.0.1", "peer_port": 9}}},
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
async def test_what_a_client_may_not_send_harms_no_engine(engines: Engines, plain: str, body: dict[str, Any]) -> None:
    messages = ask(picture(41))
    expected = await tokens(plain, messages)
    async with gateway(**e_p_d(engines)) as split, gateway(combined=[engines.url("decode-0")]) as single:
        assert await tokens(split.url, messages, **body) == expected
        assert await tokens(single.url, messages, **body) == expected
    assert all(alive(engines.url(f"{role}-0")) for role in ("encode", "prefill", "decode"))


async def test_a_metadata_only_part_of_a_clients_is_refused_before_it_kills_the_engine(engines: Engines) -> None:
    part = {"type": "text", "text": "x", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": "unknown"}
    async with gateway(**e_p_d(engines)) as up:
        with pytest.raises(BadRequestError, match="open: embeds"):
            await tokens(up.url, ask(part))
    assert all(alive(engines.url(f"{role}-0")) for role in ("encode", "prefill", "decode"))


async def test_a_clients_uuid_cannot_make_one_picture_stand_for_another(engines: Engines, plain: str) -> None:
    first, second = picture(51) | {"uuid": "same"}, picture(52) | {"uuid": "same"}
    async with gateway(**e_pd(engines)) as up:
        answers = [await tokens(up.url, ask(part)) for part in (first, second)]
    assert answers == [await tokens(plain, ask(picture(n))) for n in (51, 52)]
    assert answers[0] != answers[1]


async def test_uuids_with_paths_in_them_are_harmless(engines: Engines, plain: str) -> None:
    part = picture(53) | {"uuid": "../../evil"}
    async with gateway(**e_pd(engines)) as up:
        assert await tokens(up.url, ask(part)) == await tokens(plain, ask(picture(53)))


async def test_other_apis_take_the_same_way(engines: Engines) -> None:
    """Completions (text) by P+D, messages and responses (with a picture) by E+P+D."""
    data = picture(61)["image_url"]["url"]
    async with gateway(**e_p_d(engines)) as up, client(up.url) as openai, httpx.AsyncClient(timeout=120) as http:
        done = await openai.completions.create(model="tiny", prompt="once upon a time " * 4, max_tokens=4)
        assert done.usage is not None
        assert done.usage.completion_tokens == 4
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.split(",")[1]}}
        body = {"model": "tiny", "max_tokens": 4, "messages": ask(block)}
        said = await http.post(up.url + "/v1/messages", json=body)
        assert (said.status_code, said.json()["usage"]["output_tokens"]) == (200, 4)
        part = {"type": "input_image", "image_url": data, "detail": "auto"}
        text = {"type": "input_text", "text": "what is it? " * 4}
        body = {"model": "tiny", "max_output_tokens": 4, "input": [{"role": "user", "content": [part, text]}]}
        said = await http.post(up.url + "/v1/responses", json=body)
        assert said.status_code == 200, said.text
        plans = [record.plan for record in up.gateway.requests]
    assert plans == ["p_d", "e_p_d", "e_p_d"]


async def test_an_engines_own_4xx_reaches_the_client_as_it_is(engines: Engines) -> None:
    async with gateway(**e_p_d(engines)) as up:
        with pytest.raises(BadRequestError) as caught:
            await tokens(up.url, ask(picture(71)), temperature=-5)
    assert "temperature" in str(caught.value)


async def test_vllm_bench_serve_runs_against_the_gateway_unchanged(engines: Engines, tmp_path: Path) -> None:
    tokenizer = write_tiny("image", tmp_path / "model")
    async with gateway(**e_p_d(engines)) as up:
        command = [
            *(sys.executable, "-m", "triptych.engine.vllm", "bench", "serve", "--backend", "openai-chat"),
            *("--base-url", up.url, "--endpoint", "/v1/chat/completions", "--model", "tiny"),
            *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "40"),
            *("--random-output-len", "6", "--num-prompts", "4", "--save-result", "--result-dir", str(tmp_path)),
        ]
        bench = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
        output, _ = await asyncio.wait_for(bench.communicate(), 240)
        assert bench.returncode == 0, output.decode()[-3000:]
        plans = [record.plan for record in up.gateway.requests if record.status == 200]
    (result,) = tmp_path.glob("*.json")
    assert json.loads(result.read_text())["completed"] == 4
    assert plans.count("p_d") >= 4


class KillsPrefill(Nixl):
    """NIXL, but the prefill engine dies between the legs: after its answer was read, before decode is called."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def decode_members(self, context: KvContext, handed: bytes | None) -> Mapping[str, bytes]:
        self._engines.kill("prefill-0")
        return super().decode_members(context, handed)


async def test_an_encoder_killed_mid_request_costs_nothing_but_time(engines: Engines, plain: str) -> None:
    """The soft policy: the consumer still has the media. Both modes; the encoder hangs, then dies."""
    expected = await tokens(plain, ask(picture(81)))
    async with gateway(**e_pd(engines, media_to_consumer="metadata")) as up:
        engines.signal("encode-0", signal.SIGSTOP)
        answer = asyncio.create_task(tokens(up.url, ask(picture(81))))
        await until(lambda: any(leg.started for record in up.gateway.requests for leg in record.legs))
        engines.kill("encode-0")
        assert await answer == expected
        (record,) = up.gateway.requests
    assert [leg.status for leg in record.legs if leg.role == "encode"] == ["connect_error"]


async def test_a_prefill_killed_between_the_legs_fails_that_request_alone(engines: Engines, plain: str) -> None:
    await engines.healthy_again("encode-0")
    async with gateway(**e_p_d(engines, health={"interval": 0.5, "timeout": 15.0})) as up:
        (deployment,) = up.gateway.fleet.deployments
        dialects = up.gateway._dialects[deployment]
        up.gateway._dialects[deployment] = type(dialects)(dialects.ec, KillsPrefill(engines))
        with pytest.raises(InternalServerError):
            await tokens(up.url, ask(picture(91)))
        up.gateway._dialects[deployment] = dialects
        assert alive(engines.url("decode-0"))
        await engines.healthy_again("prefill-0")
        await until(lambda: deployment.prefill.healthy)
        before = kv_taken(engines.url("decode-0"))
        assert await tokens(up.url, ask(picture(92))) == await tokens(plain, ask(picture(92)))
        assert kv_taken(engines.url("decode-0")) > before
