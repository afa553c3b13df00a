"""Two real vLLM stages: what the first writes is read by the second while it is still being written."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, APIStatusError

from tests.e2e.rig import Engines, client, started

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [300, 301, 302]
SEED = [400, 401, 402, 403]


def stage(number: int, connector: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A topology of one engine that is this stage."""
    config = {"id": number, "role": "receiver", "connector": connector, "chunk_timeout": 60, **more}
    if number == 0:
        config |= {"role": "sender", "processor": "triptych.processors.tokens:forward"}
    args = [
        "--scheduler-cls=triptych.scheduling.ar.ARScheduler",
        f"--additional-config={json.dumps({'stage': config})}",
        "--max-num-seqs=64",
    ]
    return {"model": {"tiny": "image", "name": "tiny"}, "engines": {"combined": {"replicas": 1, "args": args}}}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engines, ...]]:
    shm = {"name": "shm", "extra": {"deployment": f"test-{os.getpid()}-{secrets.token_hex(4)}"}}
    with started(tmp_path_factory.mktemp("stages"), stage(0, shm), stage(1, shm)) as up:
        yield up


@pytest.fixture(scope="module")
def writer(stages: tuple[Engines, ...]) -> str:
    return stages[0].url("combined-0")


@pytest.fixture(scope="module")
def reader(stages: tuple[Engines, ...]) -> str:
    return stages[1].url("combined-0")


@dataclass
class Said:
    """Tokens as they came, and when."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)


async def events(
    url: str, prompt: list[int], most: int, stream: str | None, source: str | None
) -> AsyncIterator[list[int]]:
    extra: dict[str, Any] = {"return_token_ids": True}
    if stream is not None:
        extra["vllm_xargs"] = {"triptych_stream": stream} | ({"triptych_source": source} if source else {})
    async with client(url) as openai:
        answer = await openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=most, temperature=0, stream=True, extra_body=extra
        )
        async with answer:
            async for event in answer:
                for choice in event.choices:
                    yield list(getattr(choice, "token_ids", None) or [])


async def ask(
    url: str,
    prompt: list[int],
    most: int,
    stream: str | None = None,
    said: Said | None = None,
    source: str | None = None,
) -> Said:
    said = said or Said()
    async with aclosing(events(url, prompt, most, stream, source)) as coming:
        async for ids in coming:
            if ids:
                said.tokens += ids
                said.times += [time.monotonic()] * len(ids)
                said.first.set()
    return said


def name() -> str:
    return f"stream/{secrets.token_hex(8)}"


async def test_the_second_stage_speaks_before_the_first_has_finished(writer: str, reader: str) -> None:
    await asyncio.gather(ask(writer, SEED, 2), ask(reader, SEED, 2))  # the first step of an engine is a slow one
    stream = name()
    second = asyncio.create_task(ask(reader, PROMPT, 8, stream))
    first = await ask(writer, SEED, 120, stream)
    heard = await second
    assert len(first.tokens) == 120
    assert heard.times[0] < first.times[-1]
    # One token for each chunk, of which only the last is kept, and then the rest of the answer: as if all that the
    # first stage wrote had been the prompt.
    whole = await ask(reader, [*PROMPT, *first.tokens], 8)
    assert heard.tokens[-8:] == whole.tokens
    assert len(heard.tokens) >= 60


async def test_stages_on_two_hosts_do_the_same_over_tcp(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = secrets.token_hex(16)
    sends = {"name": "tcp", "extra": {"host": "127.0.0.1", "port": port, "secret": secret}}
    takes = {"name": "tcp", "extra": {"peers": {"0": [f"127.0.0.1:{port}"]}, "secret": secret}}
    with started(tmp_path, stage(0, sends), stage(1, takes)) as (first, second):
        writer, reader = first.url("combined-0"), second.url("combined-0")
        await test_the_second_stage_speaks_before_the_first_has_finished(writer, reader)
        stream = name()
        other = asyncio.create_task(ask(reader, PROMPT, 4, stream, source=f"127.0.0.1:{port}"))
        written = await ask(writer, SEED, 10, stream)
        whole = await ask(reader, [*PROMPT, *written.tokens], 4)
        assert (await other).tokens[-4:] == whole.tokens


async def test_requests_of_no_stream_are_served_as_ever(writer: str, reader: str) -> None:
    one, two = await asyncio.gather(ask(writer, SEED, 12), ask(reader, SEED, 12))
    assert one.tokens == two.tokens
    assert len(one.tokens) == 12


async def test_many_streams_at_once_do_not_meet(writer: str, reader: str) -> None:
    async def pair(number: int) -> None:
        stream, seed = name(), [400 + number, 401, 402]
        second = asyncio.create_task(ask(reader, PROMPT, 4, stream))
        first = await ask(writer, seed, 12, stream)
        heard = await second
        whole = await ask(reader, [*PROMPT, *first.tokens], 4)
        assert heard.tokens[-4:] == whole.tokens, number

    await asyncio.gather(*(pair(number) for number in range(16)))


async def test_a_reader_that_comes_late_gets_all_of_it(writer: str, reader: str) -> None:
    stream = name()
    first = await ask(writer, SEED, 6, stream)
    heard = await ask(reader, PROMPT, 4, stream)
    whole = await ask(reader, [*PROMPT, *first.tokens], 4)
    assert heard.tokens[-4:] == whole.tokens


async def test_a_stream_that_is_aborted_ends_its_reader_and_its_id_can_be_used_again(writer: str, reader: str) -> None:
    stream = name()
    heard = Said()
    second = asyncio.create_task(ask(reader, PROMPT, 4, stream, heard))
    first = asyncio.create_task(ask(writer, SEED, 900, stream))
    await asyncio.wait_for(heard.first.wait(), 60)
    first.cancel()
    await asyncio.wait([first])
    await asyncio.wait([second], timeout=30)
    assert second.done()
    again = asyncio.create_task(ask(reader, PROMPT, 4, stream))
    written = await ask(writer, [405, 406], 10, stream)
    whole = await ask(reader, [*PROMPT, *written.tokens], 4)
    assert (await again).tokens[-4:] == whole.tokens


@pytest.mark.parametrize("given", [7, "", "x" * 5000])
async def test_a_stream_that_is_named_wrongly_is_an_error_of_that_request(reader: str, given: Any) -> None:
    async with client(reader) as openai:
        with pytest.raises(APIStatusError):
            await openai.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=4, extra_body={"vllm_xargs": {"triptych_stream": given}}
            )
    assert len((await ask(reader, SEED, 3)).tokens) == 3


async def test_a_second_request_of_a_running_stream_fails_and_the_first_goes_on(writer: str, reader: str) -> None:
    stream = name()
    heard = Said()
    second = asyncio.create_task(ask(reader, PROMPT, 4, stream, heard))
    first = asyncio.create_task(ask(writer, SEED, 40, stream))
    await asyncio.wait_for(heard.first.wait(), 60)
    with pytest.raises(APIError):
        await ask(reader, PROMPT, 4, stream)
    written = await first
    whole = await ask(reader, [*PROMPT, *written.tokens], 4)
    assert (await second).tokens[-4:] == whole.tokens


async def test_a_stream_without_a_reader_holds_up_no_other(writer: str, reader: str) -> None:
    stalled = asyncio.create_task(ask(writer, SEED, 300, name()))

    async def pair(number: int) -> None:
        stream = name()
        second = asyncio.create_task(ask(reader, [300 + number], 3, stream))
        first = await ask(writer, [400, 401 + number], 8, stream)
        heard = await second
        assert len(heard.tokens) >= 3
        assert len(first.tokens) == 8

    await asyncio.gather(*(pair(number) for number in range(63)))
    stalled.cancel()
    await asyncio.wait([stalled])


async def stopped_by_a_kill(stages: tuple[Engines, ...], killed: int, writer: str, reader: str) -> str:
    """Kill a stage in the middle of a stream; what the other one's client is told of, within seconds."""
    stream = name()
    heard = Said()
    second = asyncio.create_task(ask(reader, PROMPT, 4, stream, heard))
    first = asyncio.create_task(ask(writer, SEED, 900, stream))
    await asyncio.wait_for(heard.first.wait(), 60)
    stages[killed].kill("combined-0")
    survivor = second if killed == 0 else first
    await asyncio.wait([survivor], timeout=20)
    assert survivor.done()
    error = survivor.exception()
    assert isinstance(error, APIError)
    await asyncio.wait([first, second])
    for task in (first, second):
        assert task.exception() is not None
    await stages[killed].healthy_again("combined-0")
    return stages[1 - killed].log("combined-0")


@pytest.mark.parametrize(("killed", "told"), [(0, "stage 0 -> 1: "), (1, "stage 0 -> 1: ")])
async def test_a_stage_that_is_killed_fails_the_streams_of_the_other_by_name_and_new_ones_work(
    stages: tuple[Engines, ...], writer: str, reader: str, killed: int, told: str
) -> None:
    log = await stopped_by_a_kill(stages, killed, writer, reader)
    assert told in log.rpartition("failed: ")[2]
    stream = name()
    second = asyncio.create_task(ask(reader, PROMPT, 4, stream))
    written = await ask(writer, SEED, 10, stream)
    whole = await ask(reader, [*PROMPT, *written.tokens], 4)
    assert (await second).tokens[-4:] == whole.tokens
