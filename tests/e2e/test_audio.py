"""Sound over real vLLM: E+PD with the EC connector, the model of Qwen2-Audio's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.media import ask, sound
from tests.e2e.rig import Engines, gateway, items_taken, started, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

COMMON: dict[str, Any] = {"model": {"tiny": "audio", "name": "tiny"}}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engines, ...]]:
    split = COMMON | {"ec": "triptych", "engines": {"encode": 1, "combined": 1}}
    with started(tmp_path_factory.mktemp("audio"), split, COMMON | {"engines": {"combined": 1}}) as up:
        yield up


@pytest.fixture(scope="module")
def engines(both: tuple[Engines, ...]) -> Engines:
    return both[0]


@pytest.fixture(scope="module")
def plain(both: tuple[Engines, ...]) -> str:
    return both[1].url("combined-0")


@pytest.mark.parametrize("mode", ["raw", "metadata"])
async def test_the_consumer_takes_the_encoders_output(engines: Engines, plain: str, mode: str) -> None:
    consumer = engines.url("combined-0")
    seed = 1 if mode == "raw" else 5
    messages = ask(sound(seed), sound(seed + 1), sound(seed))
    before = items_taken(consumer)
    pools = {"encode": [engines.url("encode-0")], "combined": [consumer]}
    async with gateway(**pools, media_to_consumer=mode) as up:
        assert await tokens(up.url, messages) == await tokens(plain, messages)
        record = next(iter(up.gateway.requests))
    assert record.plan == "e_pd"
    assert [leg.status for leg in record.legs if leg.role == "encode"] == ["success", "success"]
    assert items_taken(consumer) - before >= 2


async def test_another_sound_gets_another_answer(engines: Engines) -> None:
    pools = {"encode": [engines.url("encode-0")], "combined": [engines.url("combined-0")]}
    async with gateway(**pools) as up:
        answers = [await tokens(up.url, ask(sound(seed))) for seed in (21, 29)]
    assert answers[0] != answers[1]
