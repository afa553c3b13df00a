"""A pipeline under conditions that its engines are seldom in: no room, small steps, a network between, no overlap."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline_rig import Heard, Pipeline, all_or_first_error, hear, left, pipeline
from tests.e2e.rig import counter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def ask(up: Pipeline, count: int, most: int) -> list[Heard]:
    async with up.client() as openai:
        return await all_or_first_error(*(hear(openai, f"number {n}", most) for n in range(count)))


def right(up: Pipeline, heard: list[Heard], most: int) -> None:
    for each in heard:
        assert each.pcm == up.whole(each.request_id)
        assert len(up.codes(each.request_id)) == most + 3


async def nothing_left(up: Pipeline) -> None:
    async with asyncio.timeout(30):
        while any((await asyncio.to_thread(left, up)).values()):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)


async def test_over_tcp_talkers_that_are_preempted_say_every_frame_once(tmp_path: Path) -> None:
    stage: dict[str, Any] = {"talker": {"args": ["--num-gpu-blocks-override=14", "--max-model-len=256"]}}
    with pipeline(tmp_path, connector="tcp", stages_more=stage) as up:
        right(up, await ask(up, 8, 100), 100)
        assert counter(up.engines.url("talker-0"), "vllm:num_preemptions_total") > 0
        await nothing_left(up)


@pytest.mark.soak
async def test_without_overlap_the_same_is_heard_after_the_last_word(tmp_path: Path) -> None:
    with pipeline(tmp_path, overlap=False) as up:
        heard = await ask(up, 4, 60)
        right(up, heard, 60)
        for each in heard:
            assert each.sound_at[0] > each.words_at[-1]
        await nothing_left(up)
