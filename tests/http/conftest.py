"""Both event loops, servers and upstreams on free ports, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
import uvloop

from tests.http.peers import Peer, ScriptedUpstream
from triptych.http.client import Client, Origin
from triptych.http.server import Request, Server, ServerLimits


def pytest_asyncio_loop_factories(config: object, item: object) -> Mapping[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """No task survives a test, and nothing was reported to the loop."""
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not tasks, tasks
    assert not reported, reported


class Served:
    """A server that runs, its address, and what its handlers raised."""

    def __init__(self, server: Server, address: tuple[str, int], errors: list[BaseException]) -> None:
        self.server = server
        self.host, self.port = address
        self.errors = errors
        self.origin = Origin("http", self.host, self.port)


Serve = Callable[..., Awaitable[Served]]
Handler = Callable[[Request], Awaitable[None]]


@pytest.fixture
async def serve(nothing_left_behind: None) -> AsyncIterator[Serve]:
    running: list[Server] = []

    async def start(handler: Handler, *, ssl: Any = None, host: str = "127.0.0.1", **limits: Any) -> Served:
        errors: list[BaseException] = []
        server = Server(handler, ServerLimits(**limits), on_error=lambda _, error: errors.append(error))
        running.append(server)
        addresses = await server.start(host, 0, ssl=ssl)
        return Served(server, addresses[0], errors)

    yield start
    for server in running:
        await server.close()
        assert not server.connections
        assert server.running == 0


@pytest.fixture
async def connect(nothing_left_behind: None) -> AsyncIterator[Callable[[Served], Awaitable[Peer]]]:
    peers: list[Peer] = []

    async def open_one(served: Served, **options: Any) -> Peer:
        peer = await Peer.connect(served.host, served.port, **options)
        peers.append(peer)
        return peer

    yield open_one
    for peer in peers:
        await peer.close()


@pytest.fixture
async def upstream(nothing_left_behind: None) -> AsyncIterator[Callable[..., Awaitable[ScriptedUpstream]]]:
    running: list[ScriptedUpstream] = []

    async def start(script: Callable[[Peer], Awaitable[None]], **options: Any) -> ScriptedUpstream:
        one = await ScriptedUpstream.start(script, **options)
        running.append(one)
        return one

    yield start
    for one in running:
        await one.stop()


@pytest.fixture
async def client(nothing_left_behind: None) -> AsyncIterator[Client]:
    one = Client(sweep_interval=0.02)
    yield one
    await one.close()
    assert all(not pool.busy and not pool.idle and not pool.connecting for pool in one.pools())
