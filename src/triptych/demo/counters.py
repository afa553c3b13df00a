"""What the engines count: read from their /metrics pages, since an answer alone cannot show who made it.

Names are vLLM 0.32's, and the Triptych EC connector's (docs/ec-connector.md).
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of the three engines; subtract an earlier reading to get what one request did.

    items_taken: encoder outputs that prefill took from the encoder. items_missed: those it
    encoded by itself, or failed. kv_tokens: prompt tokens whose KV decode took from prefill. kv_bytes: what NIXL moved.
    """

    items_taken: int = 0
    items_missed: int = 0
    kv_tokens: int = 0
    kv_bytes: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.items_taken - other.items_taken,
            self.items_missed - other.items_missed,
            self.kv_tokens - other.kv_tokens,
            self.kv_bytes - other.kv_bytes,
        )


async def read_counts(prefill: str, decode: str, *, simulated: bool) -> Counts:
    """The counters now. prefill, decode: addresses of the engines. Raises OSError."""
    taken, missed = await asyncio.to_thread(_items_simulated if simulated else _items, prefill)
    page = _samples(await asyncio.to_thread(_get, decode + "/metrics"))
    return Counts(
        items_taken=taken,
        items_missed=missed,
        kv_tokens=_sum(page, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"),
        kv_bytes=_sum(page, "vllm:nixl_bytes_transferred_sum"),
    )


def _items(prefill: str) -> tuple[int, int]:
    page = _samples(_get(prefill + "/metrics"))
    every = _sum(page, "triptych_ec_items_total")
    taken = _sum(page, "triptych_ec_items_total", result="hit")
    return taken, every - taken


def _items_simulated(prefill: str) -> tuple[int, int]:
    seen = json.loads(_get(prefill + "/sim/seen"))
    return sum(seen["taken"].values()), sum(seen["encodes"].values())


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


Samples = list[tuple[str, dict[str, str], float]]


def _samples(page: str) -> Samples:
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(page) for s in family.samples]


def _sum(samples: Samples, name: str, **labels: str) -> int:
    return int(sum(value for sample, given, value in samples if sample == name and labels.items() <= given.items()))
