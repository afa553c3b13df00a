"""A stage dies, a replica dies: requests end with its name, and what comes after is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from openai import APIError, APIStatusError

from tests.e2e.pipeline_rig import STAGES, Pipeline, all_or_first_error, hear, pipeline, shared_memory
from triptych.transfer.connectors.survey import deployments

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pipeline(tmp_path_factory.mktemp("faults"), talkers=2) as up:
        yield up
        run = up.deployment()
        assert run in {deployment.name for deployment in deployments()}
        assert shared_memory(run)
    assert not shared_memory(run)
    assert run not in {deployment.name for deployment in deployments()}  # though engines of it were killed


async def test_two_talkers_share_the_work_and_each_stream_stays_with_one(speaking: Pipeline) -> None:
    async with speaking.client() as openai:
        heard = await all_or_first_error(*(hear(openai, f"story {n}", 60) for n in range(8)))
    talkers = set()
    for each in heard:
        assert each.pcm == speaking.whole(each.request_id)
        (leg,) = [leg for leg in speaking.timeline(each.request_id)["legs"] if leg["role"] == "talker"]
        talkers.add(leg["engine"])
    assert len(talkers) == 2


async def test_with_one_talker_dead_the_other_goes_on(speaking: Pipeline) -> None:
    dead = speaking.engines.url("talker-0")
    async with speaking.client() as openai:
        speaking.engines.kill("talker-0")
        answered = 0
        async with asyncio.timeout(60):
            while answered < 6:
                try:
                    heard = await hear(openai, "go on", 20)
                except APIError:
                    continue
                answered += 1
                (leg,) = [leg for leg in speaking.timeline(heard.request_id)["legs"] if leg["role"] == "talker"]
                assert leg["engine"] != dead
    await speaking.engines.healthy_again("talker-0")


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_that_dies_ends_its_requests_at_once_with_its_name(speaking: Pipeline, stage: str) -> None:
    names = [name for name in speaking.engines.names() if name.startswith(f"{stage}-")]

    async def one(openai: object, number: int) -> tuple[float, str]:
        try:
            await hear(openai, f"story {number}", 800)  # type: ignore[arg-type]
        except (APIError, APIStatusError) as error:
            return time.monotonic(), str(error)
        return time.monotonic(), ""

    async with speaking.client() as openai:
        running = [asyncio.create_task(one(openai, number)) for number in range(4)]
        await hear(openai, "begin", 800, until_sound=1)  # by now the others are under way
        killed = time.monotonic()
        for name in names:
            speaking.engines.kill(name)
        ended = await asyncio.gather(*running)
        assert all(when - killed < 2 for when, _ in ended), ended
        assert all(stage in what for _, what in ended), ended
        for name in names:
            await speaking.engines.healthy_again(name)
        async with asyncio.timeout(60):
            while True:
                try:
                    heard = await hear(openai, "after", 20)
                    break
                except APIError:
                    await asyncio.sleep(0.5)
    assert heard.pcm == speaking.whole(heard.request_id)
