"""Contract, "Plans": which engines a request is for, seen from the engines' side of the wire."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pydantic import ValidationError

from tests.gateway.contract.kit import EC, KV, Gate, Scripted, copies, eventually, media
from tests.gateway.rig import Rig, chat, completions, image
from triptych.gateway.settings import GatewaySettings
from triptych.sim import Sim

TEXT = chat()
IMAGE = chat(images=1)


async def scripted(stack: AsyncExitStack, order: list[str], **counts: int) -> dict[str, list[Scripted]]:
    """Engines of each role that note in `order` when they are called."""
    return {
        role: [await stack.enter_async_context(Scripted(order=order, name=role)) for _ in range(count)]
        for role, count in counts.items()
    }


def urls(engines: Mapping[str, list[Scripted]]) -> dict[str, list[str]]:
    return {role: [engine.url for engine in of] for role, of in engines.items()}


@pytest.mark.parametrize(
    ("pools", "body", "legs"),
    [
        pytest.param(("combined",), TEXT, ["combined"], id="plain: no media"),
        pytest.param(("combined",), IMAGE, ["combined"], id="plain: no encoders"),
        pytest.param(("encode", "combined"), TEXT, ["combined"], id="plain: no media, though encoders"),
        pytest.param(("encode", "combined"), IMAGE, ["encode", "combined"], id="E+PD"),
        pytest.param(("prefill", "decode"), TEXT, ["prefill", "decode"], id="P+D: no media"),
        pytest.param(("prefill", "decode"), IMAGE, ["prefill", "decode"], id="P+D: no encoders"),
        pytest.param(("encode", "prefill", "decode"), TEXT, ["prefill", "decode"], id="P+D: no media, though encoders"),
        pytest.param(("encode", "prefill", "decode"), IMAGE, ["encode", "prefill", "decode"], id="E+P+D"),
        pytest.param(("decode",), IMAGE, ["decode"], id="decode without prefill is combined"),
        pytest.param(("encode", "decode"), IMAGE, ["encode", "decode"], id="decode without prefill, E+PD"),
    ],
)
async def test_a_plans_legs_are_called_in_its_order_and_no_other_engine_is(
    pools: tuple[str, ...], body: dict[str, Any], legs: list[str]
) -> None:
    order: list[str] = []
    async with AsyncExitStack() as stack:
        engines = await scripted(stack, order, **dict.fromkeys(pools, 1))
        gate = await stack.enter_async_context(Gate(**urls(engines)))
        assert (await gate.post(body)).status == 200
        assert order == legs
        plan = {1: "plain", 2: "e_pd" if legs[0] == "encode" else "p_d", 3: "e_p_d"}[len(legs)]
        assert gate.count("requests", plan=plan, status="200") == 1


async def test_decode_urls_without_prefill_ones_make_combined_engines_that_take_encoder_output() -> None:
    said = b'{"ec_transfer_params":{"h":{"item_indices":[0]}}}'
    async with Scripted(said) as e, Scripted() as d, Gate(encode=[e.url], decode=[d.url]) as gate:
        assert (await gate.post(IMAGE)).status == 200
        assert copies(d.last.body, EC) == [{"h": {"item_indices": [0]}}]
        assert [engine.role for engine in gate.gateway.fleet.find(d.url)] == ["combined"]


def test_a_prefill_pool_without_a_decode_pool_is_a_configuration_error() -> None:
    with pytest.raises(ValidationError, match="prefill engines without decode engines"):
        GatewaySettings.model_validate({"prefill": ["http://p:1"], "combined": ["http://c:1"]})


@pytest.mark.parametrize(
    ("prefer", "legs"), [({}, ["prefill", "decode"]), ({"prefer": "combined"}, ["combined"])], ids=["default", "set"]
)
async def test_with_both_combined_and_pd_engines_the_setting_prefer_decides(
    prefer: dict[str, str], legs: list[str]
) -> None:
    order: list[str] = []
    async with AsyncExitStack() as stack:
        engines = await scripted(stack, order, prefill=1, decode=1, combined=1)
        gate = await stack.enter_async_context(Gate(**urls(engines), **prefer))
        assert (await gate.post(TEXT)).status == 200
        assert order == legs


# -- models


async def test_a_pool_belongs_to_one_model_with_its_polled_aliases_and_lora_names() -> None:
    one = Sim(model="one", aliases=("uno",), loras=("one-lora",), keep_bodies=9)
    other = Sim(model="other", loras=("other-lora",), keep_bodies=9)
    async with one, other:
        models = [{"name": "first", "combined": [one.url]}, {"name": "second", "combined": [other.url]}]
        async with Gate(models=models) as gate:
            for name, engine in [
                ("one", one), ("uno", one), ("one-lora", one), ("other", other), ("other-lora", other),
            ]:  # fmt: skip
                engine.seen.bodies.clear()
                answer = await gate.post(chat(model=name))
                assert answer.status == 200, (name, answer)
                assert copies(engine.seen.bodies[-1].body, "model") == [name]
            # The configured names are names too: the request is for that engine, which is the judge of it.
            await gate.post(chat(model="second"))
            assert copies(other.seen.bodies[-1].body, "model") == ["second"]


async def test_names_are_polled_again_so_that_a_lora_loaded_later_is_found() -> None:
    async with (
        Scripted(names=("base",)) as one,
        Scripted(names=("else",)) as other,
        Gate(
            models=[{"name": "m", "combined": [one.url]}, {"name": "n", "combined": [other.url]}],
            health={"interval": 0.01, "models_interval": 0.01},
        ) as gate,
    ):
        assert (await gate.post(chat(model="late"))).status == 404
        one.names = ("base", "late")
        await eventually(lambda: "late" in gate.gateway.fleet.names, "the new name", 10.0)
        assert (await gate.post(chat(model="late"))).status == 200
        assert len(one.seen) == 1


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}], ids=["absent", "null", "empty"])
async def test_a_request_without_model_takes_the_only_one_there_is(model: dict[str, Any]) -> None:
    body = {k: v for k, v in TEXT.items() if k != "model"} | model
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(body)).status == 200
        assert len(c.seen) == 1


async def test_a_request_without_model_is_400_where_there_are_several_and_an_unknown_one_is_404() -> None:
    async with Scripted(names=("a",)) as a, Scripted(names=("b",)) as b:
        models = [{"name": "a", "combined": [a.url]}, {"name": "b", "combined": [b.url]}]
        async with Gate(models=models) as gate:
            missing = await gate.post({"messages": []})
            assert missing.status == 400
            assert missing.json["error"]["param"] == "model"
            assert "a, b" in missing.json["error"]["message"]
            unknown = await gate.post({"model": "c", "messages": []})
            assert unknown.status == 404
            assert unknown.json["error"]["code"] == 404
            assert "`c`" in unknown.json["error"]["message"]
            assert not a.seen
            assert not b.seen


async def test_an_unknown_model_is_404_where_there_is_one_model_too() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await gate.post(chat(model="other"))).status == 404
        assert not c.seen


# -- engines that are not there


def eject(rig: Rig, role: str) -> None:
    """Take every engine of the role out of service."""
    for engine in rig.gateway.fleet.engines():
        if engine.role == role:
            engine.hold()


@pytest.mark.parametrize(("plan", "left"), [("e_pd", "plain"), ("e_p_d", "p_d")])
async def test_no_healthy_encoder_is_the_plan_without_the_encode_stage_under_its_reason(plan: Any, left: str) -> None:
    async with Rig(plan) as rig:
        eject(rig, "encode")
        assert (await rig.post(IMAGE)).status == 200
        assert rig.seen("encode") == 0
        assert rig.count("requests", plan=left, status="200") == 1
        assert rig.count("requests_degraded", reason="no_encoder") == 1


@pytest.mark.parametrize("plan", ["e_pd", "e_p_d"])
async def test_no_healthy_encoder_is_503_under_the_strict_policy(plan: Any) -> None:
    async with Rig(plan, encode_failure="strict") as rig:
        eject(rig, "encode")
        answer = await rig.post(IMAGE)
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        assert rig.seen(rig.final) == 0
        assert (await rig.post(TEXT)).status == 200, "text needs no encoder"


async def test_a_plan_is_of_the_engines_as_they_are_when_the_request_comes() -> None:
    async with Rig("e_pd") as rig:
        for plan, change in (("e_pd", None), ("plain", "hold"), ("e_pd", "restore")):
            for engine in rig.gateway.fleet.engines():
                if change and engine.role == "encode":
                    getattr(engine, change)()
            before = rig.count("requests", plan=plan, status="200")
            assert (await rig.post(IMAGE)).status == 200
            assert rig.count("requests", plan=plan, status="200") == before + 1


async def test_no_healthy_prefill_is_503() -> None:
    async with Rig("p_d") as rig:
        eject(rig, "prefill")
        answer = await rig.post(TEXT)
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        assert rig.seen("decode") == 0


async def test_no_healthy_prefill_is_decode_alone_by_setting() -> None:
    async with Rig("p_d", no_prefill="decode") as rig:
        eject(rig, "prefill")
        answer = await rig.post(TEXT)
        assert answer.status == 200
        assert rig.count("requests_degraded", reason="no_prefill") == 1
        assert copies(rig.sim("decode").seen.bodies[-1].body, KV) == []


# -- shapes


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", chat(n=2), "no_hop_n"),
        ("/v1/chat/completions", chat(n=0), "no_hop_n"),
        ("/v1/completions", completions(n=3), "no_hop_n"),
        ("/v1/completions", completions(best_of=2), "no_hop_best_of"),
        ("/v1/chat/completions", chat(use_beam_search=True), "no_hop_beam_search"),
        ("/v1/completions", completions() | {"prompt": ["a", "b"]}, "no_hop_prompts"),
        ("/v1/completions", completions() | {"prompt": [[1, 2], [3]]}, "no_hop_prompts"),
        ("/v1/completions", completions(echo=True, prompt_logprobs=1), "no_hop_echo"),
        ("/v1/completions", completions(echo=True, logprobs=1), "no_hop_echo"),
    ],
)
async def test_shapes_that_kv_hand_over_would_corrupt_take_no_prefill_hop(
    path: str, body: dict[str, Any], reason: str
) -> None:
    async with Scripted() as p, Scripted() as d, Gate(prefill=[p.url], decode=[d.url]) as gate:
        assert (await gate.post(body, path)).status == 200
        assert not p.seen
        assert copies(d.last.body, KV) == []
        assert gate.count("requests_degraded", reason=reason) == 1
        assert gate.count("requests", plan="plain", status="200") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(n=1)),
        ("/v1/chat/completions", chat(n=None)),
        ("/v1/completions", completions(best_of=1)),
        ("/v1/completions", completions() | {"prompt": ["one"]}),
        ("/v1/completions", completions() | {"prompt": [1, 2, 3]}),
        ("/v1/completions", completions(echo=True)),
        ("/v1/chat/completions", chat(use_beam_search=False)),
    ],
)
async def test_one_sequence_of_one_prompt_takes_the_hop(path: str, body: dict[str, Any]) -> None:
    async with Scripted() as p, Scripted() as d, Gate(prefill=[p.url], decode=[d.url]) as gate:
        assert (await gate.post(body, path)).status == 200
        assert len(p.seen) == len(d.seen) == 1


async def test_several_sequences_are_answered_as_a_plain_engine_answers_them() -> None:
    body = chat(n=3)
    async with Rig("plain") as plain:
        wanted = (await plain.post(body)).json["choices"]
    async with Rig("p_d") as rig:
        assert (await rig.post(body)).json["choices"] == wanted
    assert len(wanted) == 3


async def test_a_shape_that_needs_no_hop_keeps_its_encode_stage_where_combined_engines_take_it() -> None:
    order: list[str] = []
    async with AsyncExitStack() as stack:
        engines = await scripted(stack, order, encode=1, prefill=1, decode=1, combined=1)
        gate = await stack.enter_async_context(Gate(**urls(engines)))
        assert (await gate.post(media(image(), n=2))).status == 200
        assert order == ["encode", "combined"]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [image()]}]}, "media_on_endpoint"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aW1h"}}]}]},
         "media_on_endpoint"),
        ("/v1/completions", {"prompt": [image()]}, "media_out_of_place"),
        ("/v1/chat/completions", {"messages": [], "image_url": {"url": "http://x/y"}}, "media_out_of_place"),
    ],
)  # fmt: skip
async def test_media_that_cannot_be_planned_for_is_counted_under_a_reason(
    path: str, body: dict[str, Any], reason: str
) -> None:
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        assert (await gate.post({"model": "sim", **body}, path)).status == 200
        assert not e.seen
        assert len(c.seen) == 1
        assert gate.count("requests_degraded", reason=reason) == 1


async def test_an_uploaded_file_is_counted_as_media_that_cannot_be_planned_for() -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        assert (await gate.post(form, "/v1/audio/transcriptions", headers=headers)).status == 200
        assert gate.count("requests_degraded", reason="media_on_endpoint") == 1
