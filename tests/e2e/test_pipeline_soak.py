"""Long runs of a pipeline of real stages: exactness over prompts and chunk sizes, and no cross-talk."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline_rig import Pipeline, all_or_first_error, hear, left, pipeline, shared_memory
from triptych.families.tiny_omni.sound import TAIL

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?äöü漢字🙂"
PROMPTS = 200
REQUESTS = 500
AT_ONCE = 16


def text(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(1, 120)))


async def nothing_left(up: Pipeline) -> None:
    async with asyncio.timeout(60):
        while any((await asyncio.to_thread(left, up)).values()):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)


async def exact(up: Pipeline, openai: Any, gate: asyncio.Semaphore, rng: random.Random) -> None:
    most = rng.randint(1, 120)
    async with gate:
        heard = await hear(openai, text(rng), most)
    assert heard.pcm == up.whole(heard.request_id)
    assert len(up.codes(heard.request_id)) == most + TAIL - 1


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (4, 25), (13, 64)])
async def test_sound_is_exact_for_random_prompts_and_chunk_sizes(sizes: tuple[int, int], tmp_path: Path) -> None:
    rng = random.Random(sizes[1])
    chunk = dict(zip(("initial_codec_chunk_frames", "codec_chunk_frames"), sizes, strict=True))
    with pipeline(tmp_path, chunk=chunk) as up:
        async with up.client() as openai:
            for at_once in (1, AT_ONCE):
                gate = asyncio.Semaphore(at_once)
                await all_or_first_error(*(exact(up, openai, gate, rng) for _ in range(PROMPTS // 8)))
        await nothing_left(up)


async def test_no_request_hears_another_though_a_third_of_them_leave(tmp_path: Path) -> None:
    rng = random.Random(5)
    with pipeline(tmp_path) as up:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, openai: Any) -> None:
            leaves = rng.random() < 1 / 3
            pieces = rng.randint(1, 3) if leaves else None
            async with gate:
                heard = await hear(openai, f"{number} {text(rng)}", rng.randint(20, 80), until_sound=pieces)
            if not leaves:
                assert heard.pcm == up.whole(heard.request_id)

        async with up.client() as openai:
            await all_or_first_error(*(one(number, openai) for number in range(REQUESTS)))
        await nothing_left(up)
        run = up.deployment()
        assert shared_memory(run)
    assert not shared_memory(run)
