"""E+P+D with KV through files (vLLM's ExampleConnector): nothing is carried in the requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.media import ask, picture
from tests.e2e.rig import Engines, computed, counter, gateway, items_taken, started, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    topology: dict[str, Any] = {
        "model": {"tiny": "image", "name": "tiny"},
        "ec": "triptych",
        "kv": "example",
        "engines": {"encode": 1, "prefill": 1, "decode": 1},
    }
    with started(tmp_path_factory.mktemp("file-kv"), topology) as (up,):
        yield up


@pytest.mark.parametrize("mode", ["raw", "metadata"])
async def test_decode_loads_the_blocks_that_prefill_wrote(engines: Engines, mode: str) -> None:
    """The same engine with its prefix cache warm, asked directly, has the last word: it computes without any hop."""
    decode, prefill = engines.url("decode-0"), engines.url("prefill-0")
    settings: dict[str, Any] = {
        "encode": [engines.url("encode-0")],
        "prefill": [prefill],
        "decode": [decode],
        "kv": "example",
        "decode_ec_consumer": True,
        "media_to_consumer": mode,
    }
    messages = ask(picture(11 if mode == "raw" else 12))
    taken, own = items_taken(prefill), computed(decode)
    hits = counter(decode, "vllm:external_prefix_cache_hits_total")
    async with gateway(**settings) as up:
        answer = await tokens(up.url, messages)
        assert next(iter(up.gateway.requests)).plan == "e_p_d"
    assert items_taken(prefill) - taken == 1
    # Whole blocks of 32 tokens come from files, the tail is computed.
    assert counter(decode, "vllm:external_prefix_cache_hits_total") - hits >= 64
    assert computed(decode) - own <= 33
    assert await tokens(decode, messages) == answer
