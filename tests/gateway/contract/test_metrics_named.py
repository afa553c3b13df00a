"""Contract, "Names that users expect": metrics under the project's own prefix."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.rig import Rig, chat
from triptych.sim import Fault

NAMED = {
    "triptych_build_info",
    "triptych_engine_ejections",
    "triptych_engine_healthy",
    "triptych_engine_in_flight",
    "triptych_handles_merged",
    "triptych_handles_stripped",
    "triptych_leg_retries",
    "triptych_leg_seconds",
    "triptych_legs",
    "triptych_legs_in_flight",
    "triptych_log_lines_dropped",
    "triptych_media_parts_rewritten",
    "triptych_media_uuids",
    "triptych_pool_waiting",
    "triptych_request_bytes_in_flight",
    "triptych_request_seconds",
    "triptych_requests",
    "triptych_requests_degraded",
    "triptych_requests_in_flight",
    "triptych_requests_queued",
    "triptych_requests_refused",
    "triptych_stream_errors",
    "triptych_time_to_first_token_seconds",
}
PROCESS = {
    "triptych_process_cpu_seconds",
    "triptych_process_max_fds",
    "triptych_process_open_fds",
    "triptych_process_resident_memory_bytes",
    "triptych_process_start_time_seconds",
    "triptych_process_virtual_memory_bytes",
}


async def test_every_metric_has_the_prefix_none_has_vllm_in_it_and_these_are_all_there_are() -> None:
    async with Rig("e_p_d") as rig:
        await rig.post(chat(images=1, stream=True))
        _, text = rig.gateway.metrics.render()
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert names == NAMED | PROCESS
    assert b"vllm" not in text


async def test_requests_are_counted_by_plan_and_status_and_legs_timed_by_role() -> None:
    async with Rig("e_p_d") as rig:
        await rig.post(chat(images=2))
        await rig.post(chat())
        await rig.post(chat(model="other"))
        rig.sim("decode").faults.add(Fault(kind="status", status=418, path="/v1/*"))
        await rig.post(chat())
        assert rig.count("requests", plan="e_p_d", status="200") == 1
        assert rig.count("requests", plan="p_d", status="200") == 1
        assert rig.count("requests", plan="p_d", status="418") == 1
        assert rig.count("requests", plan="", status="404") == 1
        assert rig.count("requests_refused", reason="unknown_model") == 1
        assert rig.legs() == {
            ("encode", "success"): 2,
            ("prefill", "success"): 3,
            ("decode", "success"): 2,
            ("decode", "http_error"): 1,
        }
        _, text = rig.gateway.metrics.render()
        for role, count in {"encode": 2, "prefill": 3, "decode": 3}.items():
            assert f'triptych_leg_seconds_count{{leg="{role}"}} {count}.0'.encode() in text
        assert rig.count("handles_merged") == 2


async def test_in_flight_gauges_tell_requests_and_legs_and_return_to_nothing() -> None:
    async with Rig("p_d") as rig:
        decode = rig.sim("decode")
        decode.faults.add(Fault(kind="slow_first_byte", seconds=0.2, path="/v1/*"))
        task = asyncio.create_task(rig.post(chat("x" * 1000)))
        await decode.seen.until(lambda: decode.seen.in_flight == 1)
        assert rig.count("requests_in_flight") == 1
        assert rig.count("request_bytes_in_flight") > 1000
        assert rig.count("legs_in_flight", leg="decode") == 1
        assert rig.count("legs_in_flight", leg="prefill") == 0
        assert rig.count("engine_in_flight", engine=decode.url) == 1
        assert (await task).status == 200
        for gauge in ("requests_in_flight", "request_bytes_in_flight", "legs_in_flight", "engine_in_flight"):
            assert rig.count(gauge) == 0


async def test_time_to_first_token_is_observed_once_for_each_stream() -> None:
    async with Rig("p_d") as rig:
        await rig.post(chat(stream=True))
        await rig.post(chat())
        _, text = rig.gateway.metrics.render()
        assert b'triptych_time_to_first_token_seconds_count{model="sim",plan="p_d"} 1.0' in text


async def test_no_label_holds_a_clients_text() -> None:
    async with Rig("e_pd") as rig:
        secret = "s3cret-text"
        await rig.post(chat(model=secret), headers={"x-request-id": secret, "authorization": f"Bearer {secret}"})
        await rig.post({"model": "sim", "messages": [], secret: 1, "n": secret}, f"/{secret}")
        await rig.post(chat(images=1, user=secret))
        assert secret.encode() not in rig.gateway.metrics.render()[1]
