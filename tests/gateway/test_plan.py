"""Which stages a request takes, as tables (contract, "Plans")."""

from __future__ import annotations

import random
from typing import Any

import pytest

from triptych.gateway.engines import Deployment, Fleet
from triptych.gateway.errors import ApiError
from triptych.gateway.plan import Shape, choose, ready, route
from triptych.gateway.settings import ROLES, GatewaySettings, Health, Limits, ModelSettings

TEXT = Shape()
MEDIA = Shape(items=2)


def deployment(pools: str, down: str = "", **settings: Any) -> Deployment:
    """Pools by their initials (E, P, D, C), two engines each; `down` those with no healthy engine."""
    initials = {"E": "encode", "P": "prefill", "D": "decode", "C": "combined"}
    listed = {initials[i]: [f"http://{initials[i]}-{n}:80" for n in range(2)] for i in pools}
    model = ModelSettings.model_validate(listed | settings)
    made = Deployment(model, Health(), Limits(), random.Random(1))
    for initial in down:
        for engine in made.pools[initials[initial]].engines:  # type: ignore[index]
            engine.hold()
    return made


@pytest.mark.parametrize(
    ("pools", "shape", "name", "final"),
    [
        ("C", TEXT, "plain", "combined"),
        ("C", MEDIA, "plain", "combined"),
        ("EC", TEXT, "plain", "combined"),
        ("EC", MEDIA, "e_pd", "combined"),
        ("D", TEXT, "plain", "combined"),
        ("ED", MEDIA, "e_pd", "combined"),
        ("PD", TEXT, "p_d", "decode"),
        ("PD", MEDIA, "p_d", "decode"),
        ("EPD", TEXT, "p_d", "decode"),
        ("EPD", MEDIA, "e_p_d", "decode"),
        ("EPDC", MEDIA, "e_p_d", "decode"),
    ],
)
def test_the_table_of_plans(pools: str, shape: Shape, name: str, final: str) -> None:
    made = deployment(pools)
    chosen = route(shape, made.pools, made.settings)
    assert (chosen.name, chosen.final, chosen.degraded) == (name, final, ())


@pytest.mark.parametrize(
    ("pools", "down", "settings", "shape", "name", "final", "reasons"),
    [
        ("EC", "E", {}, MEDIA, "plain", "combined", ("no_encoder",)),
        ("EPD", "E", {}, MEDIA, "p_d", "decode", ("no_encoder",)),
        ("PD", "P", {"no_prefill": "decode"}, TEXT, "plain", "decode", ("no_prefill",)),
        # A decode engine that stands in for prefill takes encoder output only where its pool says so.
        ("EPD", "P", {"no_prefill": "decode"}, MEDIA, "plain", "decode", ("no_prefill", "decode_takes_no_ec")),
        (
            "EPD",
            "P",
            {"no_prefill": "decode", "decode_ec_consumer": True},
            MEDIA,
            "e_pd",
            "decode",
            ("no_prefill",),
        ),
        ("PDC", "P", {}, TEXT, "plain", "combined", ("no_prefill",)),
        ("PDC", "D", {}, TEXT, "plain", "combined", ("no_decode",)),
        ("PDC", "C", {"prefer": "combined"}, TEXT, "p_d", "decode", ("no_combined",)),
        ("PDC", "", {"prefer": "combined"}, TEXT, "plain", "combined", ()),
        ("EPDC", "", {"prefer": "combined"}, MEDIA, "e_pd", "combined", ()),
    ],
)
def test_a_pool_without_a_healthy_engine_degrades_the_plan_under_a_reason(
    pools: str, down: str, settings: dict[str, Any], shape: Shape, name: str, final: str, reasons: tuple[str, ...]
) -> None:
    made = deployment(pools, down, **settings)
    chosen = route(shape, made.pools, made.settings)
    assert (chosen.name, chosen.final, chosen.degraded) == (name, final, reasons)


@pytest.mark.parametrize(
    ("pools", "down", "settings", "shape", "reason"),
    [
        ("C", "C", {}, TEXT, "no_combined"),
        ("PD", "P", {}, TEXT, "no_prefill"),
        ("PD", "D", {}, TEXT, "no_decode"),
        ("PD", "D", {"no_prefill": "decode"}, TEXT, "no_decode"),
        ("EC", "E", {"encode_failure": "strict"}, MEDIA, "no_encode"),
        ("PDC", "PC", {}, TEXT, "no_prefill"),
    ],
)
def test_no_engine_that_could_answer_is_503_with_retry_after(
    pools: str, down: str, settings: dict[str, Any], shape: Shape, reason: str
) -> None:
    made = deployment(pools, down, **settings)
    with pytest.raises(ApiError) as caught:
        route(shape, made.pools, made.settings)
    assert (caught.value.status, caught.value.reason) == (503, reason)
    assert caught.value.retry_after


def test_strict_encoding_does_not_refuse_text_when_no_encoder_is_healthy() -> None:
    made = deployment("EC", "E", encode_failure="strict")
    assert route(TEXT, made.pools, made.settings).name == "plain"


@pytest.mark.parametrize("hazard", ["no_hop_n", "no_hop_echo"])
def test_a_shape_that_kv_hand_over_would_corrupt_takes_no_prefill_hop(hazard: str) -> None:
    made = deployment("PD")
    chosen = route(Shape(no_hop=hazard), made.pools, made.settings)
    assert (chosen.prefill, chosen.final, chosen.degraded) == (False, "decode", (hazard,))
    with_combined = deployment("PDC")
    assert route(Shape(no_hop=hazard), with_combined.pools, with_combined.settings).final == "combined"


def test_such_a_shape_is_no_matter_where_there_is_no_hop() -> None:
    made = deployment("C")
    assert route(Shape(no_hop="no_hop_n"), made.pools, made.settings).degraded == ()


def test_an_endpoint_that_generates_nothing_takes_no_prefill_hop() -> None:
    made = deployment("PD")
    chosen = route(Shape(generates=False), made.pools, made.settings)
    assert (chosen.prefill, chosen.final, chosen.degraded) == (False, "decode", ())


def test_media_that_cannot_be_planned_for_is_counted_where_there_are_encoders() -> None:
    shape = Shape(unplanned=("media_on_endpoint",))
    with_encoders, without = deployment("EC"), deployment("C")
    assert route(shape, with_encoders.pools, with_encoders.settings).degraded == ("media_on_endpoint",)
    assert route(shape, without.pools, without.settings).degraded == ()


def test_a_plan_without_encode_stage_has_no_encode_legs() -> None:
    made = deployment("C")
    assert choose(route(MEDIA, made.pools, made.settings), made, 2).items == 0


def test_every_engine_at_its_limit_is_429_not_503() -> None:
    model = ModelSettings.model_validate({"combined": [{"url": "http://a:1", "max_in_flight": 1}]})
    made = Deployment(model, Health(), Limits(), random.Random(1))
    lease = made.combined.engines[0].lease()
    with pytest.raises(ApiError) as caught:
        choose(route(TEXT, made.pools, made.settings), made, 0)
    assert caught.value.status == 429
    lease.release()
    assert choose(route(TEXT, made.pools, made.settings), made, 0).final is made.combined.engines[0]


def test_fleet_is_ready_when_every_model_can_be_answered_and_nothing_is_unknown() -> None:
    model = {"name": "a", "encode": ["http://e:1"], "combined": ["http://c:1"]}
    fleet = Fleet(GatewaySettings.model_validate({"models": [model]}))
    encoder, engine = fleet.engines()
    assert not ready(fleet)
    engine.probed(None)
    assert not fleet.probed
    encoder.probed("refused")
    assert fleet.probed
    assert ready(fleet), "without encoders it answers by plans without the encode stage"
    for _ in range(3):
        engine.probed("refused")
    assert not ready(fleet)


def test_fleet_is_not_ready_where_text_would_be_refused() -> None:
    model = {"name": "a", "prefill": ["http://p:1"], "decode": ["http://d:1"]}
    fleet = Fleet(GatewaySettings.model_validate({"models": [model]}))
    prefill, decode = fleet.engines()
    decode.probed(None)
    prefill.probed("refused")
    assert fleet.probed
    assert not ready(fleet)


def test_every_role_is_a_pool() -> None:
    assert set(deployment("EPDC").pools) == set(ROLES)
