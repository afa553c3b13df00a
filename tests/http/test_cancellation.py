"""Cancel at every place where a call can wait: the pool stays consistent, no connection stays open, no task is left.

Also on a deadline of the caller's, which is a cancellation from within.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.http.peers import Peer, answer, get, until
from triptych.http.client import Client, Origin
from triptych.http.server import Request


def open_sockets(client: Client) -> int:
    return sum(len(pool.busy) + len(pool.idle) + pool.connecting for pool in client.pools())


async def reads_head_only(peer: Peer) -> None:
    await peer.head()
    await asyncio.Event().wait()


async def reads_all(peer: Peer) -> None:
    await peer.request()
    assert await peer.ended()


async def answers_a_part(peer: Peer) -> None:
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
    assert await peer.ended()


async def before_the_head(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    waiting.set()
    await client.request(origin, b"POST", b"/", [], b"x")


async def before_the_head_with_a_deadline(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    waiting.set()
    await client.request(origin, b"POST", b"/", [], b"x", timeout=60)


async def mid_write(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    waiting.set()
    await client.request(origin, b"POST", b"/", [], b"x" * 16_000_000)


async def mid_write_of_a_stream(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    async def endless():
        while True:
            yield b"x" * 65_536

    waiting.set()
    await client.request(origin, b"POST", b"/", [], endless())


async def while_the_stream_waits_for_its_source(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    async def silent():
        yield b"x"
        await asyncio.Event().wait()

    waiting.set()
    await client.request(origin, b"POST", b"/", [], silent())


async def in_read(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    response = await client.request(origin, b"POST", b"/", [], b"x")
    waiting.set()
    await response.read(1000)


async def in_chunks(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    response = await client.request(origin, b"POST", b"/", [], b"x")
    async for _ in response.chunks():
        waiting.set()


async def in_pump(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    response = await client.request(origin, b"POST", b"/", [], b"x")
    await response.pump(lambda _: waiting.set() or True, asyncio.Event().wait)


async def in_pump_behind_a_slow_sink(client: Client, origin: Origin, waiting: asyncio.Event) -> None:
    response = await client.request(origin, b"POST", b"/", [], b"x")

    async def drained() -> None:
        waiting.set()
        await asyncio.Event().wait()

    await response.pump(lambda _: False, drained)


MATRIX = [
    (reads_all, before_the_head),
    (reads_all, before_the_head_with_a_deadline),
    (reads_head_only, mid_write),
    (reads_head_only, mid_write_of_a_stream),
    (reads_head_only, while_the_stream_waits_for_its_source),
    (answers_a_part, in_read),
    (answers_a_part, in_chunks),
    (answers_a_part, in_pump),
    (answers_a_part, in_pump_behind_a_slow_sink),
]


@pytest.mark.parametrize("turns", [0, 1, 3, 20])
@pytest.mark.parametrize(("script", "call"), MATRIX)
async def test_a_cancelled_call_leaves_no_connection(client, upstream, script, call, turns):
    up = await upstream(script)
    waiting = asyncio.Event()
    task = asyncio.ensure_future(call(client, up.origin, waiting))
    await waiting.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert open_sockets(client) == 0
    if script is not reads_head_only and up.peers:
        await up.finished(len(up.peers))


@pytest.mark.parametrize(("script", "call"), MATRIX)
async def test_a_deadline_around_a_call_leaves_no_connection(client, upstream, script, call):
    up = await upstream(script)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await call(client, up.origin, asyncio.Event())
    assert open_sockets(client) == 0


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_cancelled_on_a_reused_connection(client, upstream, turns):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        assert await peer.ended()

    up = await upstream(script)
    await (await client.request(up.origin, b"GET", b"/", [])).read(10)
    task = asyncio.ensure_future(client.request(up.origin, b"GET", b"/", []))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert open_sockets(client) == (1 if turns == 0 else 0)  # at 0 the task had not begun


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 20])
async def test_cancelled_while_connecting(client, turns):
    """A listener whose queue is full lets a connection neither come about nor fail."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        task = asyncio.ensure_future(client.request(Origin("http", "127.0.0.1", port), b"GET", b"/", []))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        for filler in fillers:
            filler.close()
    assert task.cancelled()
    assert open_sockets(client) == 0


@pytest.mark.parametrize("call", [in_read, in_chunks, in_pump, before_the_head, mid_write])
async def test_a_client_that_leaves_closes_the_call_made_for_it(client, serve, connect, upstream, call):
    script = reads_head_only if call is mid_write else reads_all if call is before_the_head else answers_a_part
    up = await upstream(script)
    waiting = asyncio.Event()

    async def handler(request: Request) -> None:
        await call(client, up.origin, waiting)

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    await waiting.wait()
    await up.connected(1)
    peer.reset()
    async with asyncio.timeout(1):
        await until(lambda: open_sockets(client) == 0)
        await until(lambda: served.server.running == 0)
    assert not served.errors
