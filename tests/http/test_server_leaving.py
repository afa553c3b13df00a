"""Clients that leave, deadlines that pass, and servers that stop."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.http.peers import Peer, get, post, until
from triptych.http.errors import BodyTimeout, ClientGone, WriteStalled
from triptych.http.server import Request, Server


class Watched:
    """A handler that tells when it runs and how it ended."""

    def __init__(self, body) -> None:
        self._body = body
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.outcome = None

    async def __call__(self, request: Request) -> None:
        self.request = request
        try:
            await self._body(self, request)
        except BaseException as error:
            self.outcome = error
            raise
        finally:
            self.ended.set()


async def waits(watched: Watched, request: Request) -> None:
    watched.started.set()
    await asyncio.Event().wait()


async def reads_then_waits(watched: Watched, request: Request) -> None:
    await request.read_body(100_000_000)
    await waits(watched, request)


async def reads(watched: Watched, request: Request) -> None:
    watched.started.set()
    await request.read_body(100_000_000)


async def streams_then_waits(watched: Watched, request: Request) -> None:
    await request.start(200, [])
    await request.send(b"data: 1\n\n")
    await waits(watched, request)


async def floods(watched: Watched, request: Request) -> None:
    await request.start(200, [])
    watched.started.set()
    while True:
        await request.send(b"x" * 65_536)


async def ignores_the_body(watched: Watched, request: Request) -> None:
    await until(lambda: request.buffered > 100_000)
    await waits(watched, request)


LARGE = post(b"/", b"x" * 8_000_000)
PARTIAL = post(b"/", b"x" * 50_000)[:-10_000]
LEAVING = ["close", "half-close", "reset"]


async def leave(peer: Peer, how: str) -> None:
    if how == "close":
        peer.writer.close()
    elif how == "half-close":
        peer.writer.write_eof()
    else:
        peer.reset()


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize(
    ("body", "data"),
    [
        (waits, get()),
        (reads_then_waits, LARGE),
        (reads, PARTIAL),
        (streams_then_waits, get()),
        (waits, post(b"/", b"abc")),
    ],
)
async def test_a_client_that_leaves_cancels_its_handler_at_once(serve, connect, how, body, data):
    watched = Watched(body)
    served = await serve(watched)
    peer = await connect(served)
    await peer.send(data)
    await watched.started.wait()
    await leave(peer, how)
    async with asyncio.timeout(1):
        await watched.ended.wait()
    assert isinstance(watched.outcome, asyncio.CancelledError)
    assert watched.request.gone
    await until(lambda: not served.server.connections)
    assert served.server.running == 0
    assert not served.errors


async def test_a_client_that_stops_taking_and_leaves_is_noticed_while_nothing_can_be_written(serve, connect):
    watched = Watched(floods)
    served = await serve(watched)
    peer = await connect(served, limit=1000)
    await peer.send(get())
    await watched.started.wait()
    await until(lambda: any(c.write_paused for c in served.server.connections))
    peer.reset()
    await watched.ended.wait()
    assert isinstance(watched.outcome, asyncio.CancelledError)
    assert not served.errors


async def test_a_client_that_leaves_while_its_body_is_held_back_is_noticed_by_the_sweep(serve, connect):
    watched = Watched(ignores_the_body)
    served = await serve(watched, body_buffer=100_000, linger_timeout=0.1)
    peer = await connect(served)
    peer.writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 150_000)
    await watched.started.wait()
    await until(lambda: any(c._reading_paused for c in served.server.connections))
    await peer.writer.drain()
    peer.writer.close()
    async with asyncio.timeout(2):
        await watched.ended.wait()
    assert isinstance(watched.outcome, asyncio.CancelledError)


async def test_a_client_that_pipelined_too_much_is_still_seen_to_leave(serve, connect):
    watched = Watched(waits)
    served = await serve(watched)
    peer = await connect(served)
    await peer.send(get())
    await watched.started.wait()
    await peer.send(get() * 10_000)
    peer.writer.close()
    await watched.ended.wait()


async def test_a_client_gone_before_the_handler_began_runs_nothing(serve):
    ran = []

    async def handler(request: Request) -> None:
        ran.append(request)
        await asyncio.Event().wait()

    served = await serve(handler)
    with socket.create_connection((served.host, served.port)) as sock:
        sock.sendall(get())
    for _ in range(5):
        await asyncio.sleep(0)
    await until(lambda: served.server.running == 0 and not served.server.connections)
    assert not served.errors


async def test_an_answer_that_was_given_is_not_cancelled_by_a_client_that_leaves(serve, connect):
    finished = asyncio.Event()
    release = asyncio.Event()

    async def handler(request: Request) -> None:
        await request.respond(200, [], b"ok")
        await release.wait()
        finished.set()

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    await peer.response()
    peer.reset()
    await until(lambda: not served.server.connections)
    release.set()
    await finished.wait()


async def test_an_answer_that_was_given_still_goes_out_to_a_client_that_half_closes(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(200, [], b"x" * 16_000_000)

    served = await serve(handler)
    peer = await connect(served, limit=10_000)
    await peer.send(get())
    await peer.head()
    peer.writer.write_eof()
    await asyncio.sleep(0.01)
    peer.reader._limit = 1_000_000
    assert len(await peer.reader.readexactly(16_000_000)) == 16_000_000
    assert await peer.ended()


async def test_a_handler_that_fails_after_its_client_left_is_reported_and_nothing_else(serve, connect):
    async def body(watched: Watched, request: Request) -> None:
        try:
            await waits(watched, request)
        except asyncio.CancelledError:
            raise LookupError("in its cleanup") from None

    watched = Watched(body)
    served = await serve(watched)
    peer = await connect(served)
    await peer.send(get())
    await watched.started.wait()
    peer.reset()
    await watched.ended.wait()
    await until(lambda: served.errors)
    assert isinstance(served.errors[0], LookupError)


async def test_a_large_request_sent_before_the_handler_is_done_with_the_last_one_waits_its_turn(serve, connect):
    release = asyncio.Event()

    async def handler(request: Request) -> None:
        body = await request.read_body(10_000_000)
        await request.respond(200, [], b"%d" % len(body))
        await release.wait()

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(post(b"/", b"x"))
    _, headers, _ = await peer.response()
    assert b"connection" not in headers
    upload = asyncio.ensure_future(peer.send(post(b"/", b"x" * 5_000_000)))
    await until(lambda: any(c._reading_paused for c in served.server.connections))
    release.set()
    await upload
    assert (await peer.response())[2] == b"5000000"


async def test_a_reset_between_an_early_answer_and_its_end_does_no_harm(serve, connect, monkeypatch):
    """What `shutdown` says of a connection that was reset after the answer was written."""
    go = asyncio.Event()

    async def handler(request: Request) -> None:
        transport = request._connection._transport
        if isinstance(transport, asyncio.Transport):  # asyncio's own; that of uvloop cannot be changed
            monkeypatch.setattr(transport, "write_eof", not_connected)
        else:
            request._connection._transport = Shut(transport)
        await go.wait()
        await request.respond(413, [])

    def not_connected() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    class Shut:
        def __init__(self, transport) -> None:
            self._inner = transport

        def __getattr__(self, name: str):
            return getattr(self._inner, name)

        def write_eof(self) -> None:
            not_connected()

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(post(b"/", b"x" * 100)[:-1])
    go.set()
    await until(lambda: served.server.running == 0 and not served.server.connections)
    assert not served.errors


async def test_writing_to_a_client_that_left_raises_client_gone(serve, connect):
    outcomes = []

    async def handler(request: Request) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for call in (request.respond(200, []), request.start(200, [])):
                try:
                    await call
                except ClientGone as error:
                    outcomes.append(error)
            raise

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    await until(lambda: served.server.running)
    await asyncio.sleep(0)
    peer.reset()
    await until(lambda: len(outcomes) == 2)


# --- deadlines -------------------------------------------------------------------------------------------------


async def test_a_head_that_does_not_come_is_a_408_and_a_silent_connection_just_closes(serve, connect):
    async def handler(request: Request) -> None:
        raise AssertionError

    served = await serve(handler, header_timeout=0.05)
    silent = await connect(served)
    slow = await connect(served)
    await slow.send(b"GET / HTTP/1.1\r\n")
    status, _, body = await slow.response()
    assert status == 408
    assert b"0.05 s for the request head" in body
    assert await silent.rest() == b""


async def test_a_head_that_dribbles_does_not_earn_more_time(serve, connect):
    async def handler(request: Request) -> None:
        raise AssertionError

    served = await serve(handler, header_timeout=0.1)
    peer = await connect(served)

    async def dribble() -> None:
        while True:
            await peer.send(b"x")
            await asyncio.sleep(0.005)

    await peer.send(b"GET / HTTP/1.1\r\nx: ")
    dribbling = asyncio.ensure_future(dribble())
    try:
        async with asyncio.timeout(2):
            assert (await peer.response())[0] == 408
    finally:
        dribbling.cancel()
        await asyncio.wait([dribbling])


async def test_a_body_that_stops_coming_is_a_408(serve, connect):
    watched = Watched(reads)
    served = await serve(watched, body_timeout=0.05)
    peer = await connect(served)
    await peer.send(PARTIAL)
    status, _, body = await peer.response()
    assert status == 408
    assert b"0.05 s" in body
    assert isinstance(watched.outcome, BodyTimeout)
    assert not served.errors


async def test_a_body_that_keeps_coming_has_all_the_time(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(200, [], await request.read_body(1000))

    peer = await connect(await serve(handler, body_timeout=0.2))
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n")
    for _ in range(10):
        await asyncio.sleep(0.05)
        await peer.send(b"x")
    assert (await peer.response())[0] == 200


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(200, [])

    peer = await connect(await serve(handler, keep_alive_timeout=0.05))
    await peer.send(get())
    await peer.response()
    assert await peer.rest() == b""


@pytest.mark.parametrize("whole", [False, True])
async def test_a_client_that_takes_nothing_stalls_the_write_and_loses_its_connection(serve, connect, whole):
    async def body(watched: Watched, request: Request) -> None:
        if whole:
            await request.respond(200, [], b"x" * 16_000_000)
        else:
            await floods(watched, request)

    watched = Watched(body)
    served = await serve(watched, write_timeout=0.1)
    peer = await connect(served, limit=1000)
    await peer.send(get())
    await watched.ended.wait()
    assert isinstance(watched.outcome, WriteStalled)
    assert "0.1 s" in str(watched.outcome)
    await until(lambda: not served.server.connections)


async def test_a_client_that_takes_a_little_is_slow_not_stalled(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(200, [], b"x" * 12_000_000)

    served = await serve(handler, write_timeout=0.3)
    peer = await connect(served, limit=1000)
    await peer.send(get())
    await peer.head()
    for _ in range(12):
        await asyncio.sleep(0.1)
        await peer.reader.readexactly(1_000_000)
    assert not served.errors


async def test_an_aborted_answer_that_nobody_takes_does_not_keep_its_connection(serve, connect):
    async def handler(request: Request) -> None:
        await request.start(200, [])
        request.send_nowait(b"x" * 20_000_000)
        request.abort()

    served = await serve(handler, write_timeout=0.1)
    peer = await connect(served, limit=1000)
    await peer.send(get())
    await peer.head()
    await until(lambda: not served.server.connections)


# --- stopping --------------------------------------------------------------------------------------------------


async def test_draining_lets_requests_end_and_closes_everything_else(serve, connect):
    release = asyncio.Event()
    running = asyncio.Event()

    async def handler(request: Request) -> None:
        running.set()
        await release.wait()
        await request.respond(200, [], b"done")

    served = await serve(handler)
    busy, idle = await connect(served), await connect(served)
    await busy.send(get())
    await running.wait()
    draining = asyncio.ensure_future(served.server.drain(10))
    assert await idle.ended()
    with pytest.raises(OSError):
        await Peer.connect(served.host, served.port)
    assert not draining.done()
    release.set()
    assert await draining
    status, headers, body = await busy.response()
    assert (status, body, headers[b"connection"]) == (200, b"done", b"close")
    assert await busy.ended()


async def test_draining_gives_up_at_its_deadline_and_closing_cancels_what_is_left(serve, connect):
    watched = Watched(waits)
    served = await serve(watched)
    peer = await connect(served)
    await peer.send(get())
    await watched.started.wait()
    assert not await served.server.drain(0.02)
    assert not watched.ended.is_set()
    await served.server.close()
    assert isinstance(watched.outcome, asyncio.CancelledError)
    assert await peer.ended()
    assert repr(served.server) == "<Server draining: 0 connections, 0 requests running>"


async def test_a_request_pipelined_behind_the_last_one_is_not_begun_while_draining(serve, connect):
    paths = []
    release = asyncio.Event()

    async def handler(request: Request) -> None:
        paths.append(request.path)
        await release.wait()
        await request.respond(200, [])

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get(b"/1") + get(b"/2"))
    await until(lambda: paths)
    draining = asyncio.ensure_future(served.server.drain(10))
    await asyncio.sleep(0)
    release.set()
    assert await draining
    assert (await peer.response())[0] == 200
    assert await peer.ended()
    assert paths == ["/1"]


async def test_a_server_listens_on_a_socket_it_is_given(nothing_left_behind):
    async def handler(request: Request) -> None:
        await request.respond(200, [], b"here")

    server = Server(handler)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    assert await server.start(sock=sock) == [("127.0.0.1", port)]
    peer = await Peer.connect("127.0.0.1", port)
    await peer.send(get())
    assert (await peer.response())[2] == b"here"
    await peer.close()
    await server.close()
