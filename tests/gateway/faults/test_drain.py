"""SIGTERM to a real gateway process: what runs ends, nothing new is taken, exit status 0, no traceback."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.gateway.raw import Raw
from tests.gateway.rig import Rig, chat, eventually
from triptych.sim import MemoryStore, Sim
from triptych.sim.faults import Fault

CHAT = "/v1/chat/completions"  # not /v1/models, which is probed
SIGNALS = [signal.SIGTERM, signal.SIGINT]
pytestmark = pytest.mark.timeout(90)


class Process:
    """`triptych gateway`, with its log as it comes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.api = self.admin = ("", 0)

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())
            if '"listening"' in self.lines[-1]:
                told = json.loads(self.lines[-1])
                self.api, self.admin = (_address(told[key]) for key in ("url", "admin"))

    def client(self, **options: Any) -> Raw:
        return Raw(*self.api, **options)

    def said(self, event: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if f'"{event}"' in line]

    async def exit(self, within: float = 10.0) -> int:
        async with asyncio.timeout(within):
            return await self.process.wait()

    async def refuses(self) -> bool:
        """Whether a new connection is refused, now or as soon as the signal has come through."""
        for _ in range(200):
            try:
                async with self.client() as client:
                    await client.ended()
            except OSError:
                return True
            await asyncio.sleep(0.01)
        return False


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


@asynccontextmanager
async def gateway(*args: str) -> AsyncIterator[Process]:
    """A running gateway process; killed at the end if it is still there. Its stderr must hold no traceback."""
    command: Sequence[str] = (
        sys.executable, "-m", "triptych", "gateway",
        "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-format", "json", *args,
    )  # fmt: skip
    started = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    process = Process(started)
    reading = asyncio.create_task(process.read())
    try:
        await eventually(lambda: process.api[1] or started.returncode is not None, lambda: str(process.lines), 40.0)
        assert process.api[1], process.lines
        yield process
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
        await reading
    assert not [line for line in process.lines if "Traceback" in line or '"error"' in line.split('"event"')[0]]


@pytest.fixture
async def plain() -> AsyncIterator[Sim]:
    async with Sim(costs={"token": 0.05}, output_tokens=16) as sim:
        yield sim


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_requests_in_flight_end_and_nothing_new_is_taken(plain: Sim, number: signal.Signals) -> None:
    async with gateway("--combined", plain.url) as process:
        async with process.client() as idle, process.client() as streams, process.client() as waits:
            idle.get("/health")
            assert (await idle.answer()).status == 200
            streams.send(chat(stream=True))
            waits.send(chat())
            assert (await streams.answer_head())[0] == 200
            await plain.seen.until(lambda: plain.seen.requests[CHAT] == 2)
            process.process.send_signal(number)
            assert await process.refuses()
            assert await idle.ended()
            events = b""
            while piece := await streams.answer_chunk():
                events += piece
            assert events.endswith(b"data: [DONE]\n\n")
            assert await streams.ended()
            whole = await waits.answer()
            assert whole.status == 200
            assert whole.complete
            assert await waits.ended()
        assert await process.exit() == 0
        assert [(line["clean"], line["cut"]) for line in process.said("ended")] == [(True, 0)]
        assert plain.seen.cancels == []


async def test_every_leg_of_a_request_in_flight_still_runs() -> None:
    store = MemoryStore()
    costs = {"request": 0.2}
    async with AsyncExitStack() as stack:
        e = await stack.enter_async_context(Sim(role="encode", ec="example", ec_dir=store, costs=costs))
        p = await stack.enter_async_context(Sim(role="prefill", ec="example", ec_dir=store, costs=costs))
        d = await stack.enter_async_context(Sim(role="decode", costs=costs))
        process = await stack.enter_async_context(gateway("--encode", e.url, "--prefill", p.url, "--decode", d.url))
        async with process.client() as client:
            client.send(chat(images=2, stream=True))
            await e.seen.until(lambda: e.seen.requests[CHAT] == 2)
            process.process.send_signal(signal.SIGTERM)
            answer = await client.answer()
            assert answer.status == 200
            assert answer.events[-2] == b"data: [DONE]"
        assert await process.exit() == 0
        assert d.seen.kv["used"] == 1


async def test_an_idle_gateway_ends_at_once(plain: Sim) -> None:
    async with gateway("--combined", plain.url) as process:
        process.process.send_signal(signal.SIGTERM)
        assert await process.exit(5.0) == 0


async def test_the_drain_deadline_ends_what_does_not_end_by_itself(plain: Sim) -> None:
    plain.faults.add(Fault(kind="hang", path=CHAT))
    async with gateway("--combined", plain.url, "--deadlines.drain", "0.5") as process:
        async with process.client() as client:
            client.send(chat())
            await plain.seen.until(lambda: plain.seen.faults["hang"] == 1)
            process.process.send_signal(signal.SIGTERM)
            assert await client.ended()
        assert await process.exit() == 0
        assert [(line["clean"], line["cut"]) for line in process.said("ended")] == [(False, 1)]
        await plain.seen.until(lambda: len(plain.seen.cancels) == 1)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_a_second_signal_ends_at_once(plain: Sim, number: signal.Signals) -> None:
    plain.faults.add(Fault(kind="hang", path=CHAT))
    async with gateway("--combined", plain.url, "--deadlines.drain", "60") as process:
        async with process.client() as client:
            client.send(chat())
            await plain.seen.until(lambda: plain.seen.faults["hang"] == 1)
            process.process.send_signal(number)
            await eventually(lambda: process.said("draining"), "the word of it", 10.0)
            process.process.send_signal(number)
            assert await client.ended()
            assert await process.exit(5.0) == 0
        await plain.seen.until(lambda: len(plain.seen.cancels) == 1)


async def test_a_drain_by_an_admin_call(plain: Sim) -> None:
    async with gateway("--combined", plain.url) as process:
        async with process.client() as client:
            client.send(chat(stream=True))
            await client.answer_head()
            async with Raw(*process.admin) as admin:
                admin.send(b"{}", "/drain", headers={"host": "127.0.0.1"})
                assert (await admin.answer()).status == 202
            events = b""
            while piece := await client.answer_chunk():
                events += piece
            assert events.endswith(b"data: [DONE]\n\n")
        assert await process.exit() == 0


async def test_an_answer_that_lies_in_buffers_goes_out_whole() -> None:
    """The request is over for the gateway, but its client has not taken all of the answer."""
    async with Rig("plain") as rig:
        sim, server = rig.sim("final"), rig.running.server
        size = 16_000_000
        sim.faults.add(Fault(kind="oversize", size=size, path=CHAT))
        async with rig.client(receive_buffer=4096) as client:
            client.send(chat())
            await eventually(lambda: any(c.write_paused for c in server.connections), "a blocked write", 5.0)
            left = [0, -1]
            while left[-1] != left[-2]:  # until the kernel takes no more
                await asyncio.sleep(0.05)
                left.append(max(c._transport.get_write_buffer_size() for c in server.connections if c._transport))
            client.reset()
        await rig.settled()

        size = size - left[-1] + 40_000  # what the kernel takes, and less than makes a handler wait
        sim.faults.add(Fault(kind="oversize", size=size, path=CHAT))
        async with rig.client(receive_buffer=4096) as client:
            client.send(chat())
            await eventually(lambda: sim.seen.answers[200] == 2 and server.running == 0, "the end of the request", 5.0)

            async def end() -> bool:
                clean = await rig.running.drain()
                await server.close()  # as the process does
                return clean

            ending = asyncio.create_task(end())
            for _ in range(20):
                await asyncio.sleep(0)
            answer = await client.answer()
            assert answer.complete
            assert len(answer.body) == size
            assert await ending


async def test_a_slow_client_gets_its_whole_answer(plain: Sim) -> None:
    size = 16_000_000
    plain.faults.add(Fault(kind="oversize", size=size, path=CHAT))
    async with gateway("--combined", plain.url) as process:
        async with process.client(receive_buffer=4096) as client:
            client.send(chat())
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await plain.seen.until(lambda: plain.seen.answers[200] >= 1 and plain.seen.in_flight == 0)
            process.process.send_signal(signal.SIGTERM)
            await eventually(lambda: process.said("draining"), "the word of it", 10.0)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            answer = await client.answer(within=30.0)
            assert answer.complete
            assert len(answer.body) == size
        assert await process.exit() == 0
