"""The server's edges, over real sockets on both event loops."""

from __future__ import annotations

import asyncio

import pytest

from tests.http.peers import get, post, until
from triptych.http.errors import BadRequest, BodyTooLarge
from triptych.http.server import Request


async def hello(request: Request) -> None:
    await request.respond(200, [(b"content-type", b"text/plain")], b"hello")


async def echo(request: Request) -> None:
    await request.respond(200, [], await request.read_body(10_000_000))


async def test_a_request_and_its_answer(serve, connect):
    seen = []

    async def handler(request: Request) -> None:
        seen.append(request)
        await request.respond(
            201, [(b"x-one", b"1"), (b"content-length", b"999")], [b"ab", bytearray(b"cd"), memoryview(b"ef")]
        )

    peer = await connect(await serve(handler))
    await peer.send(post(b"/a%20b?c=d", b"body", b"X-Two:  2 \r\n"))
    status, headers, body = await peer.response()
    assert (status, body) == (201, b"abcdef")
    assert headers[b"x-one"] == b"1"
    assert headers[b"content-length"] == b"6"
    assert b"connection" not in headers
    assert headers[b"date"].endswith(b"GMT")
    (request,) = seen
    assert (request.method, request.target, request.path, request.query) == ("POST", b"/a%20b?c=d", "/a%20b", b"c=d")
    assert (request.version, request.scheme, request.peer, request.content_length) == ("1.1", "http", "127.0.0.1", 4)
    assert request.header(b"x-two") == b"2"
    assert request.header(b"x-none") is None
    assert request.bytes_sent == 6


async def test_a_connection_serves_requests_one_after_another(serve, connect):
    served = await serve(echo)
    peer = await connect(served)
    for size in (0, 1, 70_000, 3_000_000, 5):
        body = bytes(range(256)) * (size // 256 + 1)
        await peer.send(post(b"/", body[:size]))
        assert (await peer.response())[2] == body[:size]
    assert len(served.server.connections) == 1


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(serve, connect):
    running = 0

    async def handler(request: Request) -> None:
        nonlocal running
        running += 1
        assert running == 1
        body = await request.read_body(100)
        await asyncio.sleep(0)
        running -= 1
        await request.respond(200, [], request.path.encode() + body)

    peer = await connect(await serve(handler))
    await peer.send(post(b"/1", b"a") + get(b"/2") + post(b"/3", b"c") + get(b"/4")[:10])
    assert [(await peer.response())[2] for _ in range(3)] == [b"/1a", b"/2", b"/3c"]
    await peer.send(get(b"/4")[10:])
    assert (await peer.response())[2] == b"/4"


async def test_too_much_pipelining_closes_the_connection_after_the_answer(serve, connect):
    release = asyncio.Event()

    async def handler(request: Request) -> None:
        await release.wait()
        await request.respond(200, [], b"one")

    served = await serve(handler, pipelined_bytes=1000)
    peer = await connect(served)
    await peer.send(get())
    await peer.send(post(b"/", b"x" * 5000))
    await until(lambda: any(connection.last_request for connection in served.server.connections))
    release.set()
    status, headers, body = await peer.response()
    assert (status, body, headers[b"connection"]) == (200, b"one", b"close")
    assert await peer.ended()


async def test_head_is_answered_without_a_body(serve, connect):
    async def handler(request: Request) -> None:
        if request.path == "/stream":
            await request.start(200, [])
            await request.send(b"never seen")
            assert request.send_nowait(b"nor this")
            await request.finish()
        else:
            await request.respond(200, [], b"hello")

    peer = await connect(await serve(handler))
    for path in (b"/", b"/stream", b"/"):
        await peer.send(b"HEAD %b HTTP/1.1\r\nhost: h\r\n\r\n" % path)
        head = await peer.head()
        assert (b"content-length: 5\r\n" in head) == (path == b"/")
    await peer.send(get())
    assert (await peer.response())[2] == b"hello"


async def test_an_answer_of_204_has_neither_body_nor_length(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(204, [], b"dropped")

    peer = await connect(await serve(handler))
    await peer.send(get() + get())
    for _ in range(2):
        _, headers, body = await peer.response()
        assert body == b""
        assert b"content-length" not in headers


@pytest.mark.parametrize("keep", [False, True])
async def test_http_1_0_closes_unless_asked_to_keep_the_connection(serve, connect, keep):
    peer = await connect(await serve(hello))
    request = b"GET / HTTP/1.0\r\n" + (b"Connection: Keep-Alive\r\n" if keep else b"") + b"\r\n"
    await peer.send(request)
    status, headers, body = await peer.response()
    assert (status, body) == (200, b"hello")
    assert headers[b"connection"] == (b"keep-alive" if keep else b"close")
    if keep:
        await peer.send(request)
        assert (await peer.response())[0] == 200
    else:
        assert await peer.ended()


async def test_a_stream_is_chunked_for_1_1_and_ends_with_the_connection_for_1_0(serve, connect):
    async def handler(request: Request) -> None:
        await request.start(200, [(b"content-type", b"text/event-stream")])
        await request.send(b"data: 1\n\n")
        await request.send(b"")
        assert request.send_nowait(b"data: 2\n\n")
        await request.send(bytearray(b"x" * 100_000))
        await request.finish()
        assert request.bytes_sent == 100_018

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get() + get())
    for _ in range(2):
        await peer.head()
        assert await peer.chunk() == b"data: 1\n\n"
        assert await peer.chunk() == b"data: 2\n\n"
        assert await peer.chunk() == b"x" * 100_000
        assert await peer.chunk() == b""
    old = await connect(served)
    await old.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    head, _, body = (await old.rest()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert body == b"data: 1\n\ndata: 2\n\n" + b"x" * 100_000


async def test_a_stream_of_known_length_carries_its_length(serve, connect):
    async def handler(request: Request) -> None:
        await request.start(200, [], length=6)
        await request.send(b"abc")
        assert request.send_nowait(b"def")
        with pytest.raises(RuntimeError, match="more bytes"):
            await request.send(b"g")
        await request.finish()

    peer = await connect(await serve(handler))
    await peer.send(get() + get())
    for _ in range(2):
        assert (await peer.response())[2] == b"abcdef"


async def test_an_answer_shorter_than_declared_is_cut_not_padded(serve, connect):
    async def handler(request: Request) -> None:
        await request.start(200, [], length=6)
        await request.send(b"abc")
        await request.finish()

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    assert (await peer.rest()).endswith(b"\r\n\r\nabc")
    assert "3 bytes" in str(served.errors[0])


async def test_calls_out_of_order_are_refused(serve, connect):
    async def handler(request: Request) -> None:
        for call in (request.send(b"x"), request.finish()):
            with pytest.raises(RuntimeError):
                await call
        with pytest.raises(RuntimeError):
            request.send_nowait(b"x")
        await request.respond(200, [], b"ok")
        for again in (request.respond(200, []), request.start(200, []), request.send(b"x"), request.finish()):
            with pytest.raises(RuntimeError):
                await again

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    assert (await peer.response())[2] == b"ok"
    assert not served.errors


async def test_100_continue_is_sent_when_the_body_is_asked_for_and_not_before(serve, connect):
    asked = asyncio.Event()

    async def handler(request: Request) -> None:
        await asked.wait()
        await request.respond(200, [], await request.read_body(100))

    peer = await connect(await serve(handler))
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n")
    reading = asyncio.ensure_future(peer.head())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    asked.set()
    assert await reading == b"HTTP/1.1 100 Continue\r\n\r\n"
    await peer.send(b"body")
    assert (await peer.response())[2] == b"body"


async def test_100_continue_is_not_sent_when_the_body_is_not_consumed(serve, connect):
    peer = await connect(await serve(hello))
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n")
    status, headers, _ = await peer.response()
    assert (status, headers[b"connection"]) == (200, b"close")
    assert await peer.ended()


async def test_100_continue_is_not_sent_when_the_body_came_unasked(serve, connect):
    peer = await connect(await serve(echo))
    await peer.send(post(b"/", b"body", b"expect: 100-continue\r\n"))
    assert (await peer.response())[0] == 200


async def test_a_body_that_is_declared_too_large_is_refused_at_once(serve, connect):
    async def handler(request: Request) -> None:
        with pytest.raises(BodyTooLarge):
            request.body_chunks(10)
        await request.read_body(10)

    peer = await connect(await serve(handler))
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 11\r\nexpect: 100-continue\r\n\r\n")
    status, headers, body = await peer.response()
    assert status == 413
    assert headers[b"connection"] == b"close"
    assert b"10 bytes" in body


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_chunked_body_that_grows_too_large_is_refused_while_it_comes(serve, connect, streaming):
    async def handler(request: Request) -> None:
        assert request.content_length is None
        if streaming:
            async for _ in request.body_chunks(1000):
                pass
        else:
            await request.read_body(1000)

    peer = await connect(await serve(handler))
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    await peer.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\ny\r\n")
    assert (await peer.response())[0] == 413


async def test_an_early_answer_reaches_a_client_that_is_still_sending(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(413, [], b"too large")

    served = await serve(handler)
    peer = await connect(served)
    upload = asyncio.ensure_future(peer.send(post(b"/", b"x" * 20_000_000)))
    status, headers, body = await peer.response()
    assert (status, body, headers[b"connection"]) == (413, b"too large", b"close")
    await upload


async def test_a_body_that_came_but_was_not_read_leaves_the_connection_usable(serve, connect):
    peer = await connect(await serve(hello))
    for _ in range(2):
        await peer.send(post(b"/", b"small"))
        assert (await peer.response())[0] == 200


async def test_a_body_is_streamed_as_it_comes(serve, connect):
    taken = asyncio.Queue()

    async def handler(request: Request) -> None:
        async for data in request.body_chunks(100):
            taken.put_nowait(data)
        await request.respond(200, [])

    peer = await connect(await serve(handler))
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    for data in (b"one", b"two"):
        await peer.send(b"3\r\n%b\r\n" % data)
        assert await taken.get() == data
    await peer.send(b"0\r\n\r\n")
    assert (await peer.response())[0] == 200
    await peer.send(post(b"/", b"three"))
    assert (await peer.response())[0] == 200
    assert taken.get_nowait() == b"three"


async def test_a_body_that_nobody_takes_holds_its_client_back(serve, connect):
    release = asyncio.Event()
    requests = []

    async def handler(request: Request) -> None:
        requests.append(request)
        await release.wait()
        size = 0
        async for data in request.body_chunks(50_000_000):
            size += len(data)
        await request.respond(200, [], b"%d" % size)

    served = await serve(handler, body_buffer=100_000)
    peer = await connect(served)
    upload = asyncio.ensure_future(peer.send(post(b"/", b"x" * 40_000_000)))
    await until(lambda: requests and any(c._reading_paused for c in served.server.connections))
    assert 100_000 < requests[0].buffered <= 100_000 + 262_144
    assert not upload.done()
    release.set()
    await upload
    assert (await peer.response())[2] == b"40000000"


async def test_a_malformed_request_is_answered_in_the_hook_s_words_and_the_connection_closes(serve, connect):
    served = await serve(hello)
    served.server.on_bad_request = lambda status, message: ([(b"x-shape", b"mine")], f"{status}: {message}".encode())
    for data, status in (
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % (b"x" * 70_000), 431),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: h\r\n\r\n", 501),
        (b"GET / HTTP/2.0\r\nhost: h\r\n\r\n", 505),
        (b"garbage", 400),
    ):
        peer = await connect(served)
        await peer.send(data)
        got, headers, body = await peer.response()
        assert got == status
        assert headers[b"x-shape"] == b"mine"
        assert headers[b"connection"] == b"close"
        assert body.startswith(b"%d: " % status)
        assert await peer.ended()
    assert not served.errors


async def test_garbage_behind_a_good_request_does_not_harm_its_answer(serve, connect):
    peer = await connect(await serve(echo))
    await peer.send(post(b"/", b"good") + b"garbage\r\n\r\n")
    assert (await peer.response())[2] == b"good"
    assert (await peer.response())[0] == 400
    assert await peer.ended()


async def test_a_malformed_chunk_is_the_client_s_fault(serve, connect):
    raised = []
    begun = asyncio.Event()

    async def handler(request: Request) -> None:
        begun.set()
        try:
            await request.read_body(1000)
        except BadRequest as error:
            raised.append(error)
            raise

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    await begun.wait()
    await peer.send(b"oops\r\n")
    assert (await peer.response())[0] == 400
    assert await peer.ended()
    assert "chunk" in str(raised[0])
    assert not served.errors


async def test_a_handler_that_fails_before_its_answer_is_a_500_and_is_reported(serve, connect):
    async def handler(request: Request) -> None:
        await request.read_body(100)
        raise LookupError("a secret")

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(post(b"/", b"x"))
    status, headers, body = await peer.response()
    assert (status, headers[b"connection"]) == (500, b"close")
    assert b"secret" not in body
    assert await peer.ended()
    assert isinstance(served.errors[0], LookupError)


async def test_a_handler_that_fails_within_its_answer_cuts_it(serve, connect):
    async def handler(request: Request) -> None:
        await request.start(200, [])
        await request.send(b"data: 1\n\n")
        raise LookupError

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    await peer.head()
    assert await peer.rest() == b"9\r\ndata: 1\n\n\r\n"
    assert isinstance(served.errors[0], LookupError)


async def test_a_handler_that_is_cancelled_from_within_is_a_500(serve, connect):
    async def handler(request: Request) -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    assert (await peer.response())[0] == 500
    assert isinstance(served.errors[0], asyncio.CancelledError)


async def test_what_follows_a_malformed_head_is_thrown_away(serve, connect):
    peer = await connect(await serve(hello))
    await peer.send(b"GET / HTTP/1.1\r\nno colon\r\n\r\n" + get() + b"x" * 100_000)
    assert (await peer.response())[0] == 400
    assert await peer.ended()


async def test_a_handler_without_an_answer_is_a_500(serve, connect):
    async def handler(request: Request) -> None:
        pass

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    assert (await peer.response())[0] == 500
    assert "without an answer" in str(served.errors[0])


async def test_an_aborted_answer_flushes_what_was_sent_and_has_no_clean_end(serve, connect):
    async def handler(request: Request) -> None:
        await request.start(200, [])
        await request.send(b"x" * 3_000_000)
        await request.send(b"event: error\n\n")
        request.abort()

    peer = await connect(await serve(handler))
    await peer.send(get())
    await peer.head()
    assert len(await peer.chunk()) == 3_000_000
    assert await peer.rest() == b"e\r\nevent: error\n\n\r\n"


@pytest.mark.parametrize("bad", [(b"x", b"a\r\nset-cookie: b"), (b"x\r\ny", b"z"), (b"x", b"a\0")])
async def test_response_header_splitting(serve, connect, bad):
    async def handler(request: Request) -> None:
        await request.respond(200, [bad], b"hello")

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get())
    status, headers, _ = await peer.response()
    assert status == 500
    assert b"set-cookie" not in headers
    assert len(served.errors) == 1


async def test_a_date_given_by_the_handler_is_kept(serve, connect):
    async def handler(request: Request) -> None:
        await request.respond(200, [(b"a", b"b"), (b"date", b"then")] if request.query else [(b"date", b"then")])

    peer = await connect(await serve(handler))
    await peer.send(get(b"/") + get(b"/?x"))
    for _ in range(2):
        assert (await peer.response())[1][b"date"] == b"then"


async def test_a_repr_says_what_goes_on(serve, connect):
    reprs = []
    served = None

    async def handler(request: Request) -> None:
        reprs.append(repr(request))
        (connection,) = served.server.connections
        reprs.append(repr(connection))
        reprs.append(repr(served.server))
        await request.respond(200, [])

    served = await serve(handler)
    peer = await connect(served)
    await peer.send(get(b"/v1"))
    await peer.response()
    assert reprs == [
        "<Request GET /v1 from 127.0.0.1: waiting>",
        "<Connection from 127.0.0.1: <Request GET /v1 from 127.0.0.1: waiting>>",
        "<Server listening: 1 connections, 1 requests running>",
    ]
