"""`/metrics` and `/v1/models`: what a gateway, a test or a dashboard reads off a vLLM server."""

from __future__ import annotations

import time
from typing import Any

from triptych.sim.config import SimConfig
from triptych.sim.seen import Seen


def metrics(config: SimConfig, seen: Seen) -> bytes:
    """The counters in Prometheus' text format, under vLLM's names."""
    label = f'engine="0",model_name="{config.model}"'
    lines: list[str] = []

    def add(name: str, kind: str, value: float, extra: str = "", sample: str | None = None) -> None:
        if not lines or not any(line == f"# TYPE {name} {kind}" for line in lines):
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{sample or name}{{{label}{extra}}} {float(value)}")

    add("vllm:num_requests_running", "gauge", seen.in_flight)
    add("vllm:num_requests_waiting", "gauge", 0)
    add("vllm:prompt_tokens_total", "counter", seen.prompt_tokens)
    for source, value in (("local_compute", seen.local_tokens), ("external_kv_transfer", seen.kv_tokens)):
        add("vllm:prompt_tokens_by_source_total", "counter", value, f',source="{source}"')
    add("vllm:generation_tokens_total", "counter", seen.output_tokens)
    add("vllm:external_prefix_cache_queries_total", "counter", seen.prompt_tokens)
    add("vllm:external_prefix_cache_hits_total", "counter", seen.kv_tokens)
    add("vllm:request_success_total", "counter", seen.answers[200], ',finished_reason="stop"')
    add("vllm:nixl_num_kv_expired_reqs_total", "counter", seen.kv["expired"])
    add("vllm:nixl_bytes_transferred", "histogram", seen.kv_tokens * 2048, sample="vllm:nixl_bytes_transferred_sum")
    add("vllm:nixl_bytes_transferred", "histogram", seen.kv["used"], sample="vllm:nixl_bytes_transferred_count")
    return ("\n".join(lines) + "\n").encode()


def models(config: SimConfig) -> dict[str, Any]:
    """The model list: served names, then adapters with their parent."""
    now = int(time.time())
    cards = []
    for name in config.names:
        lora = name in config.loras
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards.append(
            {
                "id": name,
                "object": "model",
                "created": now,
                "owned_by": "vllm",
                "root": config.model,
                "parent": config.model if lora else None,
                "max_model_len": None if lora else config.max_model_len,
                "permission": [permission],
            }
        )
    return {"object": "list", "data": cards}
