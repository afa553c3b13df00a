"""What running engines have to do, as they say themselves: for the live table."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping
from typing import Final, NamedTuple

EVERY: Final = 2.0
"""Seconds between two looks."""
_TIMEOUT: Final = 1.5
_LONGEST: Final = 4 << 20
_RUNNING: Final = ("vllm:num_requests_running", "triptych_requests_in_flight")
_WAITING: Final = ("vllm:num_requests_waiting", "triptych_requests_queued")
_CACHE: Final = ("vllm:kv_cache_usage_perc",)


class Load(NamedTuple):
    """Requests that are worked on, and that wait (for a place, or for their next chunk); the share of the KV cache
    that is in use, from 0 to 1, None where nothing says."""

    running: int
    waiting: int
    cache: float | None = None


def parse(page: str) -> Load | None:
    """From a page of metrics; None where it has none of these."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in (*_RUNNING, *_WAITING, *_CACHE):
            try:
                sums[name] = sums.get(name, 0.0) + float(rest.rpartition(" ")[2])
            except ValueError:
                continue
    if not sums:
        return None

    def one(names: tuple[str, ...]) -> float | None:
        return next((sums[name] for name in names if name in sums), None)

    return Load(int(one(_RUNNING) or 0), int(one(_WAITING) or 0), one(_CACHE))


async def look(urls: Mapping[str, str]) -> dict[str, Load | None]:
    """The load of each process, by name; None of one that does not say. urls: of their metrics."""
    found = await asyncio.gather(*(asyncio.to_thread(_ask, url) for url in urls.values()))
    return dict(zip(urls, found, strict=True))


def _ask(url: str) -> Load | None:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            return parse(answer.read(_LONGEST).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None
