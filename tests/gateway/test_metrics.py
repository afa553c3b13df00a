"""Metrics: what is counted comes out, under names and labels that stay bounded."""

from __future__ import annotations

import re
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.gateway.admission import Admission
from triptych.gateway.engines import Fleet
from triptych.gateway.metrics import BUCKETS, ENCODE_STATUSES, MAX_SERIES, Metrics
from triptych.gateway.settings import GatewaySettings, Limits

ENGINE = "http://10.0.0.1:8000"
ENCODER = "http://10.0.0.1:9000"


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    _, body = metrics.render()
    out = {}
    for family in text_string_to_metric_families(body.decode()):
        for s in family.samples:
            key = s.name, frozenset(s.labels.items())
            assert key not in out, f"{key} is there twice"
            out[key] = s.value
    return out


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)["triptych_" + name, frozenset(labels.items())]


@pytest.fixture
def fleet() -> Fleet:
    settings = {"models": [{"name": "m", "encode": [ENCODER], "combined": [{"url": ENGINE, "max_in_flight": 1}]}]}
    return Fleet(GatewaySettings.model_validate(settings))


def test_requests_by_plan_and_status() -> None:
    metrics = Metrics()
    metrics.request("E+PD", 200, 0.3, "m")
    metrics.request("E+PD", 200, 0.4, "m")
    metrics.request("plain", 502, 0.1, "m")
    assert value(metrics, "requests_total", model="m", plan="E+PD", status="200") == 2
    assert value(metrics, "requests_total", model="m", plan="plain", status="502") == 1
    assert value(metrics, "request_seconds_count", model="m", plan="E+PD") == 2
    assert value(metrics, "request_seconds_sum", model="m", plan="E+PD") == pytest.approx(0.7)


def test_histogram_buckets_are_cumulative_and_closed_above() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.001, 0.0011, 0.7, 299.0, 300.0, 301.0):
        metrics.leg("decode", "success", seconds)
    counts = {
        dict(labels)["le"]: v
        for (name, labels), v in samples(metrics).items()
        if name == "triptych_leg_seconds_bucket" and ("leg", "decode") in labels
    }
    assert [counts[str(b)] for b in (0.001, 0.0025, 0.5, 1.0, 120.0, 300.0)] == [2, 3, 3, 4, 4, 6]
    assert counts["+Inf"] == 7
    assert len(counts) == len(BUCKETS) + 1
    assert value(metrics, "leg_seconds_count", leg="decode") == 7


def test_encode_legs_are_counted_by_status_from_zero() -> None:
    metrics = Metrics()
    metrics.leg("encode", "timeout", 30.0)
    got = {s: value(metrics, "legs_total", leg="encode", status=s) for s in ENCODE_STATUSES}
    assert got == {s: float(s == "timeout") for s in ENCODE_STATUSES}


def test_every_event_has_its_counter() -> None:
    metrics = Metrics()
    metrics.first_token("plain", 0.05, "m")
    metrics.retry("decode")
    metrics.refused("queue_full")
    metrics.degraded("no_encoder")
    metrics.stream_error("decode", "cut")
    metrics.stripped("ec_transfer_params", 3)
    metrics.stripped("kv_transfer_params", 0)
    metrics.uuids("removed", 2)
    metrics.uuids("replaced", 0)
    metrics.handles_merged += 4
    metrics.parts_rewritten += 5
    metrics.log_lines_dropped = lambda: 6
    assert value(metrics, "time_to_first_token_seconds_count", model="m", plan="plain") == 1
    assert value(metrics, "leg_retries_total", leg="decode") == 1
    assert value(metrics, "requests_refused_total", reason="queue_full") == 1
    assert value(metrics, "requests_degraded_total", reason="no_encoder") == 1
    assert value(metrics, "stream_errors_total", leg="decode", kind="cut") == 1
    assert value(metrics, "handles_stripped_total", kind="ec_transfer_params") == 3
    assert value(metrics, "media_uuids_total", action="removed") == 2
    assert value(metrics, "media_uuids_total", action="replaced") == 0
    assert value(metrics, "handles_merged_total") == 4
    assert value(metrics, "media_parts_rewritten_total") == 5
    assert value(metrics, "log_lines_dropped_total") == 6
    assert ("triptych_handles_stripped_total", frozenset({("kind", "kv_transfer_params")})) not in samples(metrics)


def test_gauges_are_read_at_the_scrape(fleet: Fleet) -> None:
    admission = Admission(Limits(), 10)
    metrics = Metrics(fleet, admission)
    ticket = admission.try_admit(1000)
    encoder, engine = fleet.engines()
    lease = engine.lease()
    encoder.lease()
    assert value(metrics, "requests_in_flight") == 1
    assert value(metrics, "request_bytes_in_flight") == 1000
    assert value(metrics, "requests_queued") == 0
    assert value(metrics, "engine_in_flight", model="m", role="combined", engine=ENGINE) == 1
    assert value(metrics, "legs_in_flight", leg="encode") == 1
    assert value(metrics, "legs_in_flight", leg="prefill") == 0
    assert ticket is not None
    ticket.release()
    lease.release()
    assert value(metrics, "requests_in_flight") == 0
    assert value(metrics, "engine_in_flight", model="m", role="combined", engine=ENGINE) == 0


def test_health_of_engines_and_their_ejections(fleet: Fleet) -> None:
    metrics = Metrics(fleet, None)
    engine = list(fleet.engines())[1]
    assert value(metrics, "engine_healthy", model="m", role="combined", engine=ENGINE) == 1
    engine.probed("refused")
    assert value(metrics, "engine_healthy", model="m", role="combined", engine=ENGINE) == 0
    assert value(metrics, "engine_ejections_total", engine=ENGINE, role="combined") == 1
    engine.probed(None)
    engine.hold()
    assert value(metrics, "engine_healthy", model="m", role="combined", engine=ENGINE) == 0
    assert value(metrics, "engine_ejections_total", engine=ENGINE, role="combined") == 1, "a hold is no ejection"


async def test_those_who_wait_for_an_engine_are_shown(fleet: Fleet) -> None:
    metrics = Metrics(fleet, None)
    pool = fleet.deployments[0].combined
    lease = await pool.take()
    coroutine = pool.take()
    coroutine.send(None)
    assert value(metrics, "pool_waiting", model="m", role="combined") == 1
    coroutine.close()
    assert lease is not None


def test_series_are_bounded_whatever_the_label_values() -> None:
    metrics = Metrics()
    for i in range(MAX_SERIES * 3):
        metrics.request(f"plan {i}", 200, 0.1, "m")
        metrics.degraded(f"reason {i}")
    found = samples(metrics)
    for family, labels in (("requests_total", {"model", "plan", "status"}), ("requests_degraded_total", {"reason"})):
        series = {k: v for k, v in found.items() if k[0] == "triptych_" + family}
        assert len(series) == MAX_SERIES + 1
        assert sum(series.values()) == MAX_SERIES * 3
        assert series["triptych_" + family, frozenset((name, "other") for name in labels)] == MAX_SERIES * 2
    assert found["triptych_request_seconds_count", frozenset({("model", "other"), ("plan", "other")})] > MAX_SERIES


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.degraded('a"b\n# HELP x y\\')
    assert value(metrics, "requests_degraded_total", reason='a"b\n# HELP x y\\') == 1


def test_names_have_our_prefix_and_none_of_the_engines(fleet: Fleet) -> None:
    metrics = Metrics(fleet, Admission(Limits(), 10))
    metrics.request("plain", 200, 0.1)
    _, body = metrics.render()
    families = [f.name for f in text_string_to_metric_families(body.decode())]
    assert len(families) > 20
    assert all(re.fullmatch(r"triptych_[a-z_]+", name) for name in families)
    assert b"vllm" not in body
    assert value(metrics, "process_cpu_seconds_total") > 0


def test_two_gateways_in_a_process_do_not_meet() -> None:
    before = list(prometheus_client.REGISTRY.collect())
    one, two = Metrics(), Metrics()
    one.request("plain", 200, 0.1)
    assert ("triptych_requests_total", frozenset()) not in samples(two)
    assert not [k for k in samples(two) if k[0] == "triptych_requests_total"]
    assert {f.name for f in prometheus_client.REGISTRY.collect()} == {f.name for f in before}


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("", "text/plain"), ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text")],
)
def test_scrape_has_the_form_that_was_asked_for(accept: str, kind: str) -> None:
    content_type, body = Metrics().render(accept)
    assert content_type.startswith(kind)
    assert (b"# EOF" in body) == ("openmetrics" in kind)


def test_model_label_is_the_deployments_not_the_clients(fleet: Fleet) -> None:
    """The label comes from `Deployment.label`, which a client's spelling of a name does not change."""
    deployment = fleet.resolve("m")
    cards: list[dict[str, Any]] = [{"id": "alias"}, {"id": "m"}]
    next(iter(deployment.combined.engines)).reported(cards)
    assert fleet.resolve("alias").label == "m"
