"""The listener: accepts connections, runs one handler task a request, sweeps deadlines, drains."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl as ssl_module
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from triptych.http.connection import Connection
from triptych.http.head import Header
from triptych.http.request import Request

__all__ = ["Request", "Server", "ServerLimits"]

Handler = Callable[[Request], Awaitable[None]]
ErrorBody = Callable[[int, str], tuple[Sequence[Header], bytes]]

_SCRATCH = 262_144
_CLOSE_TIMEOUT = 5.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bytes and seconds that one connection may take, and how many there may be."""

    header_bytes: int = 65_536
    """Of a request head."""
    body_buffer: int = 262_144
    """Of a body that came before the handler asks for it, or faster than it takes it; then the client is held back."""
    pipelined_bytes: int = 65_536
    """Of further requests sent before the answer; with more, the connection closes after the current answer."""
    header_timeout: float = 10.0
    """For a whole request head, counted from its first byte (or from the accept)."""
    body_timeout: float = 30.0
    """Without a byte of a body that the handler waits for."""
    keep_alive_timeout: float = 75.0
    """Between requests."""
    write_timeout: float = 60.0
    """Without the client taking a byte of what it is sent."""
    connections: int = 1 << 20
    """At once; one more is answered 503 and closed."""
    linger_timeout: float = 2.0
    """For what a client goes on sending after an answer that did not wait for it."""

    def sweep_interval(self) -> float:
        """Seconds between two looks at the deadlines."""
        shortest = min(
            self.header_timeout,
            self.body_timeout,
            self.keep_alive_timeout,
            self.write_timeout,
            self.linger_timeout,
        )
        return min(0.5, max(0.01, shortest / 4))


def plain_error(status: int, message: str) -> tuple[Sequence[Header], bytes]:
    """The default body of an answer that no handler gave."""
    return [(b"content-type", b"text/plain; charset=utf-8")], message.encode() + b"\n"


def log_error(request: Request, error: BaseException) -> None:
    """The default report of a handler that raised."""
    _LOG.error("%r failed", request, exc_info=error)


class Server:
    """An HTTP/1.1 server over one handler.

    `on_bad_request(status, message)` gives headers and body of answers that the server makes itself: malformed
    requests, deadlines, `ServerSideError`s that the handler let pass, and 500 for any other exception, which
    `on_error(request, error)` is told of.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits | None = None,
        *,
        on_bad_request: ErrorBody = plain_error,
        on_error: Callable[[Request, BaseException], None] = log_error,
    ) -> None:
        self.handler = handler
        self.limits = limits or ServerLimits()
        self.on_bad_request = on_bad_request
        self.report = on_error
        self.connections: set[Connection] = set()
        self.draining = False
        self.tls = False
        self.running = 0
        self.scratch_bytes = bytearray(_SCRATCH)
        self.scratch = memoryview(self.scratch_bytes)
        self.loop: asyncio.AbstractEventLoop
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None
        self._empty: asyncio.Future[None] | None = None
        self._date_second = 0
        self._date_line = b""

    def __repr__(self) -> str:
        state = "draining" if self.draining else "listening" if self._listener else "closed"
        return f"<Server {state}: {len(self.connections)} connections, {self.running} requests running>"

    async def start(
        self,
        host: str | None = None,
        port: int = 0,
        *,
        ssl: ssl_module.SSLContext | None = None,
        backlog: int = 2048,
        reuse_port: bool = False,
        sock: socket.socket | None = None,
    ) -> list[tuple[str, int]]:
        """Listen on `host`:`port` (0: any free one) or on `sock`; returns the bound addresses. Raises OSError."""
        self.loop = asyncio.get_running_loop()
        self.tls = ssl is not None
        where: dict[str, Any] = {"sock": sock}
        if sock is None:
            where = {"host": host, "port": port, "reuse_port": reuse_port or None}
        if ssl is not None:
            where["ssl_handshake_timeout"] = self.limits.header_timeout
            where["ssl_shutdown_timeout"] = self.limits.linger_timeout
        listener = await self.loop.create_server(lambda: Connection(self), ssl=ssl, backlog=backlog, **where)
        self._listener = listener
        return [s.getsockname()[:2] for s in listener.sockets]

    async def drain(self, timeout: float) -> bool:
        """Accept no more, close idle connections, let running requests end and their answers go out.

        True if all that was done within `timeout` seconds.
        """
        self.draining = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(timeout):
                if self.running:
                    self._idle = self.loop.create_future()
                    await self._idle
                if self.connections:  # they are closing: what was answered may still lie in their buffers
                    self._empty = self.loop.create_future()
                    await self._empty
        except TimeoutError:
            return False
        finally:
            self._idle = self._empty = None
        return True

    async def close(self) -> None:
        """Abort what is left: every handler is cancelled, every connection closed."""
        await self.drain(0)
        tasks = [c._task for c in self.connections if c._task is not None]
        for connection in list(self.connections):
            connection._left()
            connection.abort()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT)
            if stuck:
                _LOG.error("%d handlers did not end within %g s of being cancelled", len(stuck), _CLOSE_TIMEOUT)
        if self.connections:
            self._empty = self.loop.create_future()
            await self._empty
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # --- for connections ---------------------------------------------------------------------------------------

    def ended(self) -> None:
        """A handler task ended."""
        self.running -= 1
        if not self.running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def lost(self, connection: Connection) -> None:
        """A connection is closed for good."""
        self.connections.discard(connection)
        if not self.connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def sweep_soon(self) -> None:
        """There is a connection: look after its deadlines."""
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self.limits.sweep_interval(), self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = self.loop.time()
        try:
            for connection in list(self.connections):
                connection.sweep(now)
        finally:
            if self.connections:
                self.sweep_soon()

    def date_line(self) -> bytes:
        """The `date` header line of this second."""
        second = int(time.time())
        if second != self._date_second:
            self._date_second = second
            self._date_line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode("ascii")
        return self._date_line
