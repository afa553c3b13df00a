"""The client against upstreams that follow a script, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.http.peers import Peer, answer, until
from triptych.http.client import Client, Origin, Response
from triptych.http.errors import (
    ClientClosed,
    ConnectError,
    CutError,
    GarbageError,
    HeaderTooLarge,
    ResetError,
    ResponseTooLarge,
    UnsafeHeaderError,
    UpstreamTimeout,
)


async def polite(peer: Peer) -> None:
    """Answers every request with its own body."""
    while True:
        _, body = await peer.request()
        await peer.send(answer(body or b"ok"))


def once(data: bytes, *, then: str = "wait"):
    """A script: read one request, send `data`, then wait, close or reset."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        if then == "wait":
            await peer.ended()
        elif then == "reset":
            peer.reset()

    return script


async def ask(client: Client, origin: Origin, **options) -> bytes:
    response = await client.request(origin, b"POST", b"/", [], options.pop("body", b"x"), **options)
    return await response.read(1_000_000)


async def never() -> None:
    raise AssertionError("nobody is behind")


async def consume(response: Response, way: str, seen: list[bytes], timeout: float | None = None) -> None:
    """Read a body in one of the three ways; `seen` has what came, also when it breaks."""
    if way == "read":
        seen.append(await response.read(1_000_000, timeout=timeout))
    elif way == "chunks":
        async for data in response.chunks(timeout=timeout):
            seen.append(data)
    else:
        await response.pump(lambda data: seen.append(data) or True, never, timeout=timeout)


WAYS = pytest.mark.parametrize("way", ["read", "chunks", "pump"])


async def test_a_request_and_its_response(client, upstream):
    heads = []

    async def script(peer: Peer) -> None:
        heads.append(await peer.request())
        await peer.send(b"HTTP/1.1 203 Fine\r\nX-One: 1 \r\ncontent-length: 2\r\n\r\nhi")
        await peer.ended()

    up = await upstream(script)
    response = await client.request(
        up.origin,
        b"POST",
        b"/v1?q",
        [(b"x-a", b"b"), (b"Host", b"evil"), (b"content-length", b"7"), (b"connection", b"close")],
        [b"ab", memoryview(b"cd")],
    )
    assert (response.status, response.reason, response.length, response.reused) == (203, b"Fine", 2, False)
    assert response.headers == [(b"x-one", b"1"), (b"content-length", b"2")]
    assert response.header(b"x-one") == b"1"
    assert await response.read(2) == b"hi"
    head = b"POST /v1?q HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-a: b\r\ncontent-length: 4\r\n\r\n" % up.origin.port
    assert heads == [(head, b"abcd")]


async def test_bodies_in_every_form(client, upstream):
    up = await upstream(polite)

    async def pieces():
        for piece in (b"one", b"", b"two", b"x" * 300_000):
            yield piece

    large = bytes(range(256)) * 20_000
    for body, expected in (
        ((), b"ok"),
        (b"", b"ok"),
        (b"bytes", b"bytes"),
        (bytearray(b"array"), b"array"),
        ([b"a", b"b"], b"ab"),
        (large, large),
        ((large, b"tail", memoryview(large)), large + b"tail" + large),
        (pieces(), b"onetwo" + b"x" * 300_000),
    ):
        response = await client.request(up.origin, b"POST", b"/", [], body)
        assert await response.read(20_000_000) == expected
    response = await client.request(up.origin, b"POST", b"/", [], pieces(), content_length=300_006)
    assert await response.read(20_000_000) == b"onetwo" + b"x" * 300_000
    assert len(up.peers) == 1


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_request_without_a_body_has_no_length(client, upstream, method):
    heads = []

    async def script(peer: Peer) -> None:
        heads.append(await peer.head())
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" + (b"" if method == b"HEAD" else b"hello"))
        await peer.ended()

    up = await upstream(script)
    response = await client.request(up.origin, method, b"/", [])
    assert await response.read(10) == (b"" if method == b"HEAD" else b"hello")
    assert b"content-length" not in heads[0]
    assert repr(client.pools()[0]).endswith("0 active, 1 idle, 0 connecting>")


async def test_informational_responses_are_skipped(client, upstream):
    up = await upstream(once(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + answer(b"final")))
    assert await ask(client, up.origin) == b"final"


async def test_chunks_come_as_they_arrive_and_together_what_arrived_together(client, upstream):
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await go.wait()
        await peer.send(b"3\r\ntwo\r\n5\r\nthree\r\n")
        go.clear()
        await go.wait()
        await peer.send(b"4\r\nfour\r\n0\r\n\r\n")
        await peer.ended()

    up = await upstream(script)
    response = await client.request(up.origin, b"GET", b"/", [])
    seen = []
    async for data in response.chunks():
        seen.append(data)
        go.set()
    assert seen == [b"one", b"twothree", b"four"]
    assert response.ended
    response.close()
    assert repr(client.pools()[0]).endswith("0 active, 1 idle, 0 connecting>")


async def test_a_body_without_a_length_ends_with_the_connection(client, upstream):
    up = await upstream(once(b"HTTP/1.1 200 OK\r\n\r\nall of it", then="close"))
    assert await ask(client, up.origin) == b"all of it"
    assert repr(client.pools()[0]).endswith("0 active, 0 idle, 0 connecting>")


# --- the pool --------------------------------------------------------------------------------------------------


async def test_connections_are_used_again_the_last_one_first(client, upstream):
    hold = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await hold.wait()
            await peer.send(answer(b"%d" % up.peers.index(peer)))

    up = await upstream(script)
    both = [asyncio.ensure_future(ask(client, up.origin)) for _ in range(2)]
    await up.connected(2)
    assert repr(client.pools()[0]) == f"<Pool {up.origin}: 2 active, 0 idle, 0 connecting>"
    hold.set()
    assert {await one for one in both} == {b"0", b"1"}
    last = client.pools()[0].idle[-1]
    first = await client.request(up.origin, b"GET", b"/", [])
    assert first.reused
    await first.read(10)
    assert client.pools()[0].idle[-1] is last
    assert len(up.peers) == 2
    assert repr(client) == f"<Client [<Pool {up.origin}: 0 active, 2 idle, 0 connecting>]>"
    assert repr(last) == f"<UpstreamConnection to {up.origin}: idle>"


async def test_idle_connections_are_retired(upstream):
    client = Client(idle_timeout=0.05, sweep_interval=0.01)
    up = await upstream(polite)
    await ask(client, up.origin)
    await until(lambda: not client.pools()[0].idle)
    await client.close()


async def test_a_connection_idle_for_too_long_is_not_used_even_before_the_sweep(upstream):
    client = Client(idle_timeout=0.02, sweep_interval=60)
    up = await upstream(polite)
    await ask(client, up.origin)
    await asyncio.sleep(0.03)
    response = await client.request(up.origin, b"POST", b"/", [], b"x")
    assert not response.reused
    await response.read(10)
    assert len(client.pools()[0].idle) == 1
    await client.close()


async def test_no_more_idle_connections_are_kept_than_allowed(upstream):
    client = Client(max_idle=2)
    up = await upstream(polite)
    await asyncio.gather(*[ask(client, up.origin) for _ in range(5)])
    assert len(client.pools()[0].idle) == 2
    await client.close()


@pytest.mark.parametrize("how", ["close", "reset", "garbage"])
async def test_an_idle_connection_that_the_upstream_ends_leaves_the_pool(client, upstream, how):
    up = await upstream(polite)
    await ask(client, up.origin)
    if how == "garbage":
        await up.peers[0].send(b"HTTP/1.1 408 Timeout\r\n\r\n")
    elif how == "reset":
        up.peers[0].reset()
    else:
        up.peers[0].writer.close()
    await until(lambda: not client.pools()[0].idle)
    assert await ask(client, up.origin) == b"x"
    assert len(up.peers) == 2


@pytest.mark.parametrize(
    "data",
    [
        answer(b"ok", extra=b"connection: close\r\n"),
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        answer(b"ok") + b"more",
    ],
)
async def test_a_connection_that_cannot_be_used_again_is_not_kept(client, upstream, data):
    up = await upstream(once(data))
    assert await ask(client, up.origin) == b"ok"
    assert not client.pools()[0].idle
    assert not client.pools()[0].busy


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_reset_on_a_reused_connection_is_sent_again_once_on_a_fresh_one(client, upstream, how):
    bodies = []

    async def script(peer: Peer) -> None:
        first = len(up.peers) == 1
        _, body = await peer.request()
        bodies.append(body)
        await peer.send(answer(body))
        _, body = await peer.request()
        bodies.append(body)
        if first:
            # The race of an upstream that closes while a request is on its way.
            peer.reset() if how == "reset" else peer.writer.close()

    up = await upstream(script)
    assert await ask(client, up.origin, body=b"1") == b"1"
    response = await client.request(up.origin, b"POST", b"/", [], [b"2"])
    assert not response.reused
    assert await response.read(10) == b"2"
    assert bodies == [b"1", b"2", b"2"]


async def test_a_request_is_not_sent_a_third_time(client, upstream):
    async def script(peer: Peer) -> None:
        if len(up.peers) == 1:
            await peer.request()
            await peer.send(answer())
        await peer.request()
        peer.writer.close()

    up = await upstream(script)
    await ask(client, up.origin)
    with pytest.raises(ResetError, match="before any byte of the response") as caught:
        await ask(client, up.origin)
    assert str(up.origin) in str(caught.value)
    assert len(up.peers) == 2


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_reset_on_a_fresh_connection_is_a_reset_error(client, upstream, how):
    up = await upstream(once(b"", then=how))
    with pytest.raises(ResetError):
        await ask(client, up.origin)
    assert len(up.peers) == 1


async def test_a_body_that_cannot_be_replayed_is_not_sent_again(client, upstream):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        peer.writer.close()

    async def pieces():
        yield b"x"

    up = await upstream(script)
    await ask(client, up.origin)
    with pytest.raises(ResetError):
        await client.request(up.origin, b"POST", b"/", [], pieces())
    assert len(up.peers) == 1


async def test_a_cut_inside_the_head_on_a_reused_connection_is_not_sent_again(client, upstream):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n")
        peer.writer.close()

    up = await upstream(script)
    await ask(client, up.origin)
    with pytest.raises(CutError):
        await ask(client, up.origin)
    assert len(up.peers) == 1


# --- what goes wrong -------------------------------------------------------------------------------------------


async def test_a_refused_connection_names_the_origin(client):
    origin = Origin("http", "127.0.0.1", 1)
    with pytest.raises(ConnectError, match=r"http://127\.0\.0\.1:1: cannot connect") as caught:
        await ask(client, origin)
    assert caught.value.origin == origin


async def test_a_name_that_does_not_resolve_is_a_connect_error(client):
    for host in ("does-not-exist.invalid", "a..b", "x" * 70):
        with pytest.raises(ConnectError):
            await ask(client, Origin("http", host, 80))


@pytest.mark.parametrize(
    ("data", "then", "error"),
    [
        (b"garbage\r\n\r\n", "wait", GarbageError),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "wait", GarbageError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "wait", GarbageError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000, "wait", HeaderTooLarge),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "close", CutError),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "reset", CutError),
    ],
)
async def test_a_head_that_is_not_one(client, upstream, data, then, error):
    up = await upstream(once(data, then=then))
    with pytest.raises(error, match=f"{up.origin}: "):
        await ask(client, up.origin)


@pytest.mark.parametrize(
    ("rest", "then", "error"),
    [
        (b"content-length: 9\r\n\r\nab", "close", CutError),
        (b"content-length: 9\r\n\r\nab", "reset", CutError),
        (b"\r\nab", "reset", CutError),
        (b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", "close", CutError),
        (b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", "reset", CutError),
        (b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", "close", CutError),
        (b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\noops\r\n", "wait", GarbageError),
    ],
)
@WAYS
async def test_a_body_that_breaks(client, upstream, rest, then, error, way):
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n" + rest[:-6])
        await go.wait()
        await peer.send(rest[-6:])
        if then == "wait":
            await peer.ended()
        elif then == "reset":
            peer.reset()

    up = await upstream(script)
    task = asyncio.ensure_future(client.request(up.origin, b"GET", b"/", []))
    await up.connected(1)
    go.set()
    response = await task
    seen = []
    with pytest.raises(error, match=f"{up.origin}: "):
        await consume(response, way, seen)
    if way != "read" and then != "reset":
        assert b"".join(seen) == b"ab"
    assert not response.ended
    assert "broken" in repr(response)


async def test_a_response_larger_than_allowed_is_refused_by_its_length_or_while_it_comes(client, upstream):
    for data in (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ):
        up = await upstream(once(data))
        response = await client.request(up.origin, b"GET", b"/", [])
        with pytest.raises(ResponseTooLarge, match="1000 bytes"):
            await response.read(1000)
        await up.finished(1)


async def test_headers_that_would_split_the_request_are_refused_before_anything_is_sent(client, upstream):
    up = await upstream(polite)
    for method, target, headers in (
        (b"POST", b"/", [(b"x", b"a\r\nb: c")]),
        (b"POST", b"/", [(b"x y", b"a")]),
        (b"POST", b"/ HTTP/1.1\r\nx: y", []),
        (b"PO ST", b"/", []),
    ):
        with pytest.raises(UnsafeHeaderError):
            await client.request(up.origin, method, target, headers, b"x")
    assert not up.peers


async def test_an_upstream_that_does_not_answer_in_time_is_named(client, upstream):
    up = await upstream(once(b""))
    with pytest.raises(UpstreamTimeout, match=rf"{up.origin}: waited 0\.05 s for the head of the response"):
        await client.request(up.origin, b"POST", b"/", [], b"x", timeout=0.05)
    await up.finished(1)


@pytest.mark.parametrize("drip", [b"HTTP/1.1 102 Processing\r\n\r\n", b"x: y\r\n"], ids=["informational", "headers"])
async def test_an_upstream_that_drips_has_no_more_time_for_its_head(client, upstream, drip):
    async def script(peer: Peer) -> None:
        await peer.request()
        if drip.startswith(b"x"):
            await peer.send(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                await peer.send(drip)
                await asyncio.sleep(0.01)

    up = await upstream(script)
    async with asyncio.timeout(5):
        with pytest.raises(UpstreamTimeout, match="for the head of the response"):
            await client.request(up.origin, b"POST", b"/", [], b"x", timeout=0.1)


@WAYS
async def test_an_upstream_that_falls_silent_is_named(client, upstream, way):
    up = await upstream(once(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"))
    response = await client.request(up.origin, b"GET", b"/", [], timeout=10)
    with pytest.raises(UpstreamTimeout, match=rf"{up.origin}: waited 0\.05 s"):
        await consume(response, way, [], 0.05)
    await up.finished(1)


@WAYS
async def test_an_upstream_that_keeps_talking_has_all_the_time(client, upstream, way):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.04)
            await peer.send(b"x")
        await peer.ended()

    up = await upstream(script)
    response = await client.request(up.origin, b"GET", b"/", [])
    seen: list[bytes] = []
    await consume(response, way, seen, 0.15)
    assert b"".join(seen) == b"x" * 8
    assert response.ended


# --- a response that comes before the request has gone ---------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_early_response_is_delivered_and_its_connection_not_used_again(client, upstream, streamed):
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer(b"too large", b"413 Content Too Large"))
        await asyncio.Event().wait()

    gone = []

    async def endless():
        try:
            while True:
                yield b"x" * 65_536
        finally:
            gone.append(True)

    up = await upstream(script)
    response = await client.request(up.origin, b"POST", b"/", [], endless() if streamed else b"x" * 16_000_000)
    assert response.status == 413
    assert await response.read(100) == b"too large"
    pool = client.pools()[0]
    assert not pool.idle
    assert not pool.busy
    assert not streamed or gone


async def test_an_early_response_of_an_upstream_that_then_resets_is_delivered(client, upstream):
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(answer(b"too large", b"413 Content Too Large", b"connection: close\r\n"))
        # Closing with unread bytes is a reset.

    up = await upstream(script)
    for _ in range(20):
        response = await client.request(up.origin, b"POST", b"/", [], b"x" * 16_000_000)
        assert response.status == 413
        assert await response.read(100) == b"too large"


async def test_an_early_response_still_streams(client, upstream):
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await go.wait()
        await peer.send(b"3\r\nend\r\n0\r\n\r\n")
        await asyncio.Event().wait()

    up = await upstream(script)
    response = await client.request(up.origin, b"POST", b"/", [], b"x" * 16_000_000)
    go.set()
    assert await response.read(100) == b"end"
    assert not client.pools()[0].idle


async def test_an_error_of_the_body_s_iterator_closes_the_connection_and_is_raised(client, upstream):
    async def broken():
        yield b"x"
        raise LookupError("mine")

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.chunk()
        assert await peer.ended()

    up = await upstream(script)
    with pytest.raises(LookupError, match="mine"):
        await client.request(up.origin, b"POST", b"/", [], broken())
    await up.finished(1)


@pytest.mark.parametrize("declared", [1, 3])
async def test_a_streamed_body_that_is_not_as_long_as_declared_is_refused(client, upstream, declared):
    async def two():
        yield b"xx"

    up = await upstream(polite)
    with pytest.raises(ValueError, match="content-length"):
        await client.request(up.origin, b"POST", b"/", [], two(), content_length=declared)


# --- pumping ---------------------------------------------------------------------------------------------------


async def test_a_sink_that_is_behind_holds_the_upstream_back(client, upstream):
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 30000000\r\n\r\n")
        for _ in range(300):
            await peer.send(b"x" * 100_000)
            sent += 100_000
        await peer.ended()

    room = asyncio.Event()
    taken = 0

    def sink(data: bytes) -> bool:
        nonlocal taken
        taken += len(data)
        return False

    async def drained() -> None:
        await room.wait()

    up = await upstream(script)
    response = await client.request(up.origin, b"GET", b"/", [])
    pumping = asyncio.ensure_future(response.pump(sink, drained))
    await until(lambda: taken)
    connection = next(iter(client.pools()[0].busy))
    await until(lambda: connection._reading_paused)
    assert response.collected <= 262_144 + 262_144
    assert not pumping.done()
    room.set()
    await pumping
    assert taken == 30_000_000


async def test_an_error_of_the_sink_is_raised_and_closes_the_connection(client, upstream):
    up = await upstream(once(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"))

    def sink(data: bytes) -> bool:
        raise LookupError("mine")

    response = await client.request(up.origin, b"GET", b"/", [])
    with pytest.raises(LookupError, match="mine"):
        await response.pump(sink, never)
    await up.finished(1)


async def test_an_error_of_the_sink_in_the_middle_is_raised(client, upstream):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await go.wait()
        await peer.send(b"1\r\nx\r\n")
        await peer.ended()

    def sink(data: bytes) -> bool:
        raise LookupError("mine")

    go = asyncio.Event()
    up = await upstream(script)
    response = await client.request(up.origin, b"GET", b"/", [])
    pumping = asyncio.ensure_future(response.pump(sink, never))
    await until(lambda: response.sink is not None)
    go.set()
    with pytest.raises(LookupError, match="mine"):
        await pumping
    assert not client.pools()[0].busy


# --- closing ---------------------------------------------------------------------------------------------------


async def test_a_response_given_up_closes_its_connection(client, upstream):
    up = await upstream(once(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx"))
    response = await client.request(up.origin, b"GET", b"/", [])
    assert "open" in repr(response)
    response.close()
    response.close()
    assert "closed" in repr(response)
    await up.finished(1)
    with pytest.raises(RuntimeError, match="closed"):
        await response.read(1000)


async def test_a_closed_client_fails_what_is_in_flight_and_takes_nothing_new(upstream):
    client = Client()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.ended()

    up = await upstream(script)
    asking = asyncio.ensure_future(ask(client, up.origin))
    await up.connected(1)
    await until(lambda: client.pools()[0].busy)
    await client.close()
    with pytest.raises(ResetError):
        await asking
    with pytest.raises(ClientClosed):
        await ask(client, up.origin)
    await client.close()


async def test_closing_the_client_does_not_end_a_body_that_ends_with_its_connection(upstream):
    client = Client()
    up = await upstream(once(b"HTTP/1.1 200 OK\r\n\r\nsome"))
    response = await client.request(up.origin, b"GET", b"/", [])
    reading = asyncio.ensure_future(response.read(100))
    await until(lambda: response._waiter is not None)
    await client.close()
    with pytest.raises(CutError, match="closing"):
        await reading


def test_origins() -> None:
    assert Origin.parse("http://a.example:8000/v1") == ("http", "a.example", 8000)
    assert Origin.parse("https://a.example") == ("https", "a.example", 443)
    assert str(Origin.parse("http://[::1]:80")) == "http://[::1]"
    assert Origin("https", "::1", 8443).netloc == "[::1]:8443"
    for url in ("a.example:80", "ftp://a", "http://", "http://a:x", "http://a:99999"):
        with pytest.raises(ValueError):
            Origin.parse(url)
