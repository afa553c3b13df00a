"""Server and client together, as a gateway uses them."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from tests.http.peers import Peer, answer, get, post, until
from triptych.http.client import Client, Origin
from triptych.http.errors import CutError
from triptych.http.server import Request
from triptych.http.sse import EventScanner

MEGABYTE = 1_000_000


def relay(client: Client, origin: Origin):
    """The least gateway."""

    async def handler(request: Request) -> None:
        body = await request.read_body(64 * MEGABYTE)
        response = await client.request(origin, request.method.encode(), request.target, request.headers, (body,))
        try:
            if response.header(b"content-type") == b"text/event-stream":
                await request.start(response.status, response.headers)
                scanner = EventScanner()
                try:
                    await response.pump(lambda data: request.send_nowait(scanner.feed(data)), request.drained)
                except CutError:
                    await request.send(b"event: error\ndata: cut\n\n")
                    request.abort()
                else:
                    await request.finish()
            else:
                await request.respond(response.status, response.headers, await response.read(64 * MEGABYTE))
        finally:
            response.close()

    return handler


async def test_bodies_pass_both_ways_unchanged(serve, connect, client, upstream):
    async def script(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await peer.send(answer(body[::-1], extra=b"x-up: 1\r\nconnection: keep-alive\r\n"))

    up = await upstream(script)
    served = await serve(relay(client, up.origin))
    peer = await connect(served)
    for size in (0, 10, 65_536, 65_537, 5 * MEGABYTE):
        body = bytes(i * 7 % 256 for i in range(256)) * (size // 256 + 1)
        await peer.send(post(b"/", body[:size]))
        status, headers, back = await peer.response()
        assert (status, back) == (200, body[:size][::-1])
        assert headers[b"x-up"] == b"1"
    assert len(up.peers) == 1


async def test_events_pass_as_they_come_and_a_cut_stream_ends_in_an_error_without_a_clean_end(
    serve, connect, client, upstream
):
    steps: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while data := await steps.get():
            await peer.send(b"%x\r\n%b\r\n" % (len(data), data))

    up = await upstream(script)
    peer = await connect(await serve(relay(client, up.origin)))
    await peer.send(get())
    await peer.head()
    steps.put_nowait(b"data: 1\n\n")
    assert await peer.chunk() == b"data: 1\n\n"
    steps.put_nowait(b"data: 2\n")
    steps.put_nowait(b"\ndata: 3\n\ndata: part")
    assert await peer.chunk() == b"data: 2\n\ndata: 3\n\n"
    steps.put_nowait(b"")
    assert await peer.chunk() == b"event: error\ndata: cut\n\n"
    assert await peer.rest() == b""


async def test_a_slow_client_holds_the_upstream_back_with_bounded_memory(serve, connect, client, upstream):
    sent = 0
    event = b"data: " + b"x" * 50_000 + b"\n\n"

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(400):
            await peer.send(b"%x\r\n%b\r\n" % (len(event), event))
            sent += 1
        await peer.send(b"0\r\n\r\n")
        await peer.ended()

    up = await upstream(script)
    served = await serve(relay(client, up.origin))
    peer = await connect(served, limit=10_000)
    await peer.send(get())
    await until(lambda: any(c._reading_paused for pool in client.pools() for c in pool.busy))
    (connection,) = served.server.connections
    held = connection._transport.get_write_buffer_size()
    (leg,) = client.pools()[0].busy
    assert held + leg.response.collected < MEGABYTE
    peer.reader._limit = MEGABYTE
    await peer.head()
    count = 0
    while await peer.chunk():
        count += 1
    assert sent == 400
    assert 1 <= count <= 400


@pytest.mark.parametrize("where", ["before the head", "in the stream"])
async def test_a_client_that_leaves_ends_the_leg_that_runs_for_it(serve, connect, client, upstream, where):
    async def script(peer: Peer) -> None:
        await peer.request()
        if where == "in the stream":
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        assert await peer.ended()

    up = await upstream(script)
    peer = await connect(await serve(relay(client, up.origin)))
    await peer.send(post(b"/", b"x" * 3 * MEGABYTE))
    if where == "in the stream":
        await peer.head()
    await up.connected(1)
    peer.writer.close()
    async with asyncio.timeout(1):
        await up.finished(1)


async def test_bodies_in_flight_to_a_stalled_upstream_are_held_once(serve, connect, client, upstream):
    count, size = 12, 4 * MEGABYTE

    async def stalled(peer: Peer) -> None:
        peer.writer.transport.pause_reading()
        await asyncio.Event().wait()

    up = await upstream(stalled)
    handled = []
    inner = relay(client, up.origin)

    async def handler(request: Request) -> None:
        handled.append(request)
        await inner(request)

    served = await serve(handler)
    data = post(b"/", b"x" * size)
    peers = [await connect(served) for _ in range(count)]
    tracemalloc.start()
    try:
        for peer in peers:
            await peer.send(data)
        await until(lambda: sum(len(pool.busy) for pool in client.pools()) == count)
        await up.connected(count)
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 1.3 * count * size
    assert peak < 2 * count * size


async def test_a_declared_length_commits_no_memory(serve, connect):
    async def handler(request: Request) -> None:
        await request.read_body(4_000 * MEGABYTE)

    served = await serve(handler)
    peer = await connect(served)
    tracemalloc.start()
    try:
        await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3000000000\r\n\r\nabc")
        await until(lambda: served.server.running)
        for _ in range(10):
            await asyncio.sleep(0)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()
