"""TLS on the listener and to upstreams."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme

from tests.http.peers import Peer, answer, get, post, until
from triptych.http.client import Client, Origin
from triptych.http.errors import ConnectError, CutError
from triptych.http.server import Request


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1", "::1").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
async def tls_client(nothing_left_behind, client_context):
    one = Client(ssl_context=client_context)
    yield one
    await one.close()
    await until(lambda: all(not pool.busy and not pool.idle for pool in one.pools()))


async def echo(request: Request) -> None:
    await request.respond(200, [(b"x-scheme", request.scheme.encode())], await request.read_body(20_000_000))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
async def test_requests_over_tls(serve, tls_client, server_context, host):
    served = await serve(echo, ssl=server_context, host="127.0.0.1" if host == "localhost" else host)
    origin = Origin("https", host, served.port)
    for size, reused in ((3, False), (3_000_000, True), (0, True)):
        response = await tls_client.request(origin, b"POST", b"/", [], b"x" * size)
        assert response.header(b"x-scheme") == b"https"
        assert len(await response.read(20_000_000)) == size
        assert response.reused is reused


async def test_ipv6_without_tls(serve, client):
    served = await serve(echo, host="::1")
    response = await client.request(Origin("http", "::1", served.port), b"POST", b"/", [], b"six")
    assert await response.read(10) == b"six"


async def test_a_certificate_for_another_name_is_a_connect_error(upstream, tls_client, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("other.example").configure_cert(context)

    async def script(peer: Peer) -> None:
        raise AssertionError("nothing may be sent")

    up = await upstream(script, ssl=context, scheme="https")
    with pytest.raises(ConnectError, match="certificate") as caught:
        await tls_client.request(up.origin, b"POST", b"/", [], b"secret")
    assert str(up.origin) in str(caught.value)


async def test_an_unknown_authority_is_a_connect_error(nothing_left_behind, upstream, server_context):
    async def script(peer: Peer) -> None:
        raise AssertionError("nothing may be sent")

    client = Client()
    up = await upstream(script, ssl=server_context, scheme="https")
    with pytest.raises(ConnectError, match="certificate"):
        await client.request(up.origin, b"POST", b"/", [], b"secret")
    await client.close()


async def test_a_handshake_that_is_never_answered_is_a_connect_error_in_time(nothing_left_behind, upstream):
    async def script(peer: Peer) -> None:
        await peer.rest()

    client = Client(connect_timeout=0.1)
    up = await upstream(script, scheme="https")
    with pytest.raises(ConnectError, match=r"no connection within 0\.1 s"):
        await client.request(up.origin, b"GET", b"/", [])
    await up.finished(1)
    assert repr(client.pools()[0]).endswith("0 active, 0 idle, 0 connecting>")
    await client.close()


async def test_a_body_cut_over_tls_is_cut(upstream, tls_client, server_context):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab")

    up = await upstream(script, ssl=server_context, scheme="https")
    response = await tls_client.request(up.origin, b"GET", b"/", [])
    with pytest.raises(CutError):
        await response.read(10)


async def test_an_upstream_that_ends_an_idle_tls_connection_is_noticed(upstream, tls_client, server_context):
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())

    up = await upstream(script, ssl=server_context, scheme="https")
    await (await tls_client.request(up.origin, b"GET", b"/", [])).read(10)
    await until(lambda: not tls_client.pools()[0].idle)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_tls_client_that_leaves_cancels_its_handler(serve, connect, server_context, client_context, reset):
    ended = asyncio.Event()
    started = asyncio.Event()

    async def handler(request: Request) -> None:
        try:
            await request.read_body(10_000_000)
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    served = await serve(handler, ssl=server_context)
    peer = await connect(served, ssl=client_context)
    await peer.send(post(b"/", b"x" * 1_000_000))
    await started.wait()
    if reset:
        peer.reset()
    else:
        peer.writer.close()
    await ended.wait()
    await until(lambda: not served.server.connections)


async def test_an_early_answer_over_tls_reaches_a_client_that_is_still_sending(
    serve, connect, server_context, client_context
):
    async def handler(request: Request) -> None:
        await request.respond(413, [], b"too large")

    served = await serve(handler, ssl=server_context, linger_timeout=0.2)
    peer = await connect(served, ssl=client_context)
    upload = asyncio.ensure_future(peer.send(post(b"/", b"x" * 3_000_000)))
    assert (await peer.response())[2] == b"too large"
    await upload
    assert await peer.ended()


async def test_plain_http_on_a_tls_port_is_closed(serve, connect, server_context):
    served = await serve(echo, ssl=server_context)
    peer = await connect(served)
    await peer.send(get())
    await peer.rest()
    assert not served.server.connections
