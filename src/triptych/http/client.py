"""Requests to upstreams over keep-alive connections, one pool for each origin."""

from __future__ import annotations

import asyncio
import math
import ssl as ssl_module
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from triptych.http.errors import ClientClosed, ConnectError, ResetError
from triptych.http.head import Header, header_lines, request_line
from triptych.http.request import BUFFERS, Buffer
from triptych.http.response import Response
from triptych.http.upstream import UpstreamConnection

__all__ = ["Client", "Origin", "Response"]

_JOIN_BELOW = 65_536
_SLICE = 524_288
_TAKING = "the upstream to take the request"


class Origin(NamedTuple):
    """Where requests go: scheme (`http`, `https`), host (an IPv6 address without brackets), port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Origin:
        """The origin of an http(s) URL. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        return cls(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))

    @property
    def netloc(self) -> str:
        """The value of a `host` header: no port where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


class Pool:
    """The connections to one origin: busy ones, and idle ones of which the last used is taken first.

    Nothing here waits; methods change the two collections and return what is to be done.
    """

    def __init__(self, client: Client, origin: Origin) -> None:
        self.client = client
        self.origin = origin
        self.loop = client.loop
        self.max_header_bytes = client.max_header_bytes
        self.host_line = b"host: %b\r\n" % origin.netloc.encode("ascii")
        self.idle: list[UpstreamConnection] = []
        self.busy: set[UpstreamConnection] = set()
        self.connecting = 0

    def __repr__(self) -> str:
        return f"<Pool {self.origin}: {len(self.busy)} active, {len(self.idle)} idle, {self.connecting} connecting>"

    def closed(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        if connection.busy:
            self.busy.discard(connection)
        else:
            self.idle.remove(connection)

    def take(self) -> UpstreamConnection | None:
        """An idle connection that is young enough, or None."""
        oldest = self.loop.time() - self.client.idle_timeout
        while self.idle:
            connection = self.idle[-1]
            if connection.idle_since > oldest and connection.usable:
                self.idle.pop()
                connection.busy = True
                self.busy.add(connection)
                return connection
            connection.abort()
        return None

    def put(self, connection: UpstreamConnection) -> None:
        """A connection whose exchange is over and which can be used again."""
        self.busy.discard(connection)
        connection.busy = False
        connection.idle_since = self.loop.time()
        self.idle.append(connection)
        if len(self.idle) > self.client.max_idle:
            self.idle[0].abort()
        if self.client.closing:
            connection.abort()

    def sweep(self, now: float) -> None:
        """Retire connections that idled too long; act on deadlines that passed."""
        oldest = now - self.client.idle_timeout
        while self.idle and self.idle[0].idle_since <= oldest:
            self.idle[0].abort()
        for connection in [c for c in self.busy if c.patience != math.inf]:
            connection.sweep(now)


class Client:
    """An HTTP/1.1 client. Used from one event loop.

    Idle connections are retired after `idle_timeout` seconds, at most `max_idle` are kept for each origin.
    `ssl_context` is for `https` origins (default: the system's trust store).
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 2.0,
        idle_timeout: float = 2.0,
        max_idle: int = 256,
        ssl_context: ssl_module.SSLContext | None = None,
        max_header_bytes: int = 65_536,
        sweep_interval: float = 0.25,
    ) -> None:
        self.connect_timeout = connect_timeout
        self.idle_timeout = idle_timeout
        self.max_idle = max_idle
        self.max_header_bytes = max_header_bytes
        self.sweep_interval = sweep_interval
        self.closing = False
        self.loop: asyncio.AbstractEventLoop
        self._ssl = ssl_context
        self._pools: dict[Origin, Pool] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Client {list(self._pools.values())}>"

    async def request(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: Buffer | Sequence[Buffer] | AsyncIterator[bytes] = (),
        *,
        content_length: int | None = None,
        timeout: float | None = None,
    ) -> Response:
        """Send a request; returns when the head of its response is there (informational ones are skipped).

        `body` is a buffer, a sequence of buffers, or an async iterator (sent with `content_length`, else chunked).
        `host` and framing headers are written here; those among `headers` are left out. `timeout` is the time in
        seconds for the head once the request is on its way, and for each pause in which the upstream takes nothing of
        the request; connecting has its own.

        Raises ConnectError, ResetError, GarbageError, HeaderTooLarge, CutError (cut inside the head), UpstreamTimeout,
        UnsafeHeaderError. A cancelled call closes its connection.
        """
        if self.closing:
            raise ClientClosed("this client is closed")
        pool = self._pools.get(origin) or self._new_pool(origin)
        parts: Sequence[Buffer] = ()
        size = 0
        stream: AsyncIterator[bytes] | None = None
        if isinstance(body, (list, tuple)):
            parts = body
        elif isinstance(body, BUFFERS):
            parts = (body,)
        elif isinstance(body, AsyncIterator):
            stream = body
        else:
            parts = tuple(body)
        if stream is not None:
            framing = b"transfer-encoding: chunked\r\n\r\n"
            if content_length is not None:
                framing = b"content-length: %d\r\n\r\n" % content_length
        else:
            size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            framing = b"\r\n" if not size and method in (b"GET", b"HEAD") else b"content-length: %d\r\n\r\n" % size
        head = (request_line(method, target), pool.host_line, header_lines(headers), framing)
        small = b"".join((*head, *parts)) if stream is None and size <= _JOIN_BELOW else None

        connection = pool.take()
        while True:
            if connection is None:
                connection = await self._connect(pool)
            response = connection.begin(method)
            if small is not None:
                connection.write(small)
                connection.written = True
            elif stream is None:
                await _send(connection, response, b"".join(head), parts, timeout)
            else:
                await _send_stream(connection, response, b"".join(head), stream, content_length, timeout)
            while not response.status and response.error is None:
                await response._wait("the head of the response", timeout)
            if response.status:
                return response
            assert response.error is not None
            if not isinstance(response.error, ResetError) or not response.reused or stream is not None:
                raise response.error
            connection = None  # once more, on a fresh one

    async def close(self) -> None:
        """Close every connection; requests in flight fail with ResetError or CutError."""
        self.closing = True
        for pool in self._pools.values():
            for connection in [*pool.idle, *pool.busy]:
                connection.drop("this client is closing")
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        await asyncio.sleep(0)

    def pools(self) -> list[Pool]:
        """The pools, for a look at them."""
        return list(self._pools.values())

    def _new_pool(self, origin: Origin) -> Pool:
        self.loop = asyncio.get_running_loop()
        pool = self._pools[origin] = Pool(self, origin)
        return pool

    async def _connect(self, pool: Pool) -> UpstreamConnection:
        origin = pool.origin
        tls: ssl_module.SSLContext | None = None
        if origin.scheme == "https":
            if self._ssl is None:
                self._ssl = ssl_module.create_default_context()
            tls = self._ssl
        connection = UpstreamConnection(pool)
        pool.connecting += 1
        try:
            async with asyncio.timeout(self.connect_timeout):
                await self.loop.create_connection(lambda: connection, origin.host, origin.port, ssl=tls)
        except BaseException as error:
            connection.abort()  # a cancelled call may have just been given its connection
            if isinstance(error, TimeoutError):
                raise ConnectError(origin, f"no connection within {self.connect_timeout:g} s") from None
            if isinstance(error, OSError | UnicodeError):
                raise ConnectError(origin, f"cannot connect: {error}") from error
            raise
        finally:
            pool.connecting -= 1
        if self.closing:
            connection.abort()
            raise ClientClosed("this client is closed")
        if not connection.usable:
            raise ConnectError(origin, "the connection was closed as soon as it was made")
        pool.busy.add(connection)
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self.sweep_interval, self._sweep)
        return connection

    def _sweep(self) -> None:
        self._sweeper = None
        now = self.loop.time()
        alive = False
        for pool in self._pools.values():
            pool.sweep(now)
            alive = alive or bool(pool.idle or pool.busy)
        if alive:
            self._sweeper = self.loop.call_later(self.sweep_interval, self._sweep)


def _batches(head: bytes, parts: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """A request as lists of buffers of about `_SLICE` bytes each, nothing copied."""
    batch: list[Buffer] = [head]
    room = _SLICE
    for part in parts:
        view = memoryview(part)
        while len(view) >= room:
            batch.append(view[:room])
            yield batch
            view, batch, room = view[room:], [], _SLICE
        if view:
            batch.append(view)
            room -= len(view)
    if batch:
        yield batch


async def _send(
    connection: UpstreamConnection,
    response: Response,
    head: bytes,
    parts: Sequence[Buffer],
    timeout: float | None,
) -> None:
    """Write a large request, stopping where the response comes first or the connection is lost."""
    for batch in _batches(head, parts):
        connection.writelines(batch)
        while connection.write_paused or not connection.usable:
            if response.status or response.error is not None:
                return
            await response._wait(_TAKING, timeout)
    connection.written = True


async def _send_stream(
    connection: UpstreamConnection,
    response: Response,
    head: bytes,
    stream: AsyncIterator[bytes],
    length: int | None,
    timeout: float | None,
) -> None:
    """Write a request whose body comes from an iterator, which is given up when the response comes first."""

    async def pump() -> None:
        connection.write(head)
        left = math.inf if length is None else length
        try:
            async for data in stream:
                left -= len(data)
                if left < 0:
                    raise ValueError("the request body is longer than its content-length")
                if data:
                    connection.write(data if length is not None else b"%x\r\n%b\r\n" % (len(data), data))
                if not connection.usable:
                    return
                if connection.write_paused and timeout is not None:
                    connection.wait_for(_TAKING, timeout)
                    await connection.room()
                    connection.patience = math.inf
                else:
                    await connection.room()
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        if length is None:
            connection.write(b"0\r\n\r\n")
        elif left:
            raise ValueError("the request body is shorter than its content-length")
        connection.written = True

    task = connection.loop.create_task(pump())

    def pumped(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # looked at here, since a call that is cancelled meanwhile does not
        response.wake()

    task.add_done_callback(pumped)
    try:
        while not task.done() and not response.status and response.error is None:
            await response._wait(_TAKING, None)
    finally:
        if not task.done():
            task.cancel()
            try:
                await asyncio.wait([task])
            except BaseException:
                response.close()
                raise
    if not task.cancelled() and (error := task.exception()) is not None:
        response.close()
        raise error
