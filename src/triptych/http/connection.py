"""One client connection: bytes to requests, one handler task at a time, deadlines, and the end of it all."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import TYPE_CHECKING, cast

from triptych.http.errors import BadRequest, BodyTimeout, ClientGone, ParseError, ServerSideError, WriteStalled
from triptych.http.head import header_lines, status_line
from triptych.http.parser import END, RequestEvent, RequestParser
from triptych.http.request import Buffer, Request

if TYPE_CHECKING:
    from triptych.http.server import Server

_HEAD, _IDLE, _BODY, _LINGER = "head", "idle", "body", "linger"

_WORTH_SPLITTING = 16_384
"""Bytes of one read from which a head and its body are told apart before they are copied."""

_TCP_ESTABLISHED = 1
_TCP_INFO = getattr(socket, "TCP_INFO", None)


class Connection(asyncio.BufferedProtocol):
    """Server side of one connection.

    Reading goes on while a handler runs, so that a client that leaves is noticed at once; only a body that nobody
    takes pauses it (the sweep then asks the kernel whether the client is still there).
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = server.loop
        self.limits = server.limits
        self.peer = ""
        self.scheme = "https" if server.tls else "http"
        self.gone = False
        self.write_paused = False
        self.last_request = False
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(self.limits.header_bytes)
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._running = False
        self._closing = False
        self._discarding = False
        self._reading_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._waiting_for = _HEAD
        self._patience = math.inf
        self._fresh = False
        self._read_deadline = math.inf
        self._write_deadline = math.inf
        self._unsent = 0

    def __repr__(self) -> str:
        return f"<Connection from {self.peer}: {self._request or self._waiting_for}>"

    # --- from the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        self.server.connections.add(self)
        self._wait_for(_HEAD, self.limits.header_timeout)
        self.server.sweep_soon()
        if self.server.draining:
            self.close()
        elif len(self.server.connections) > self.limits.connections:
            self._discarding = True
            self._answer_error(503, f"there are {self.limits.connections} connections already, which is the limit")
            self._linger()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        # Everything is copied out of the scratch memory before this returns: the next connection reads into it.
        if self._discarding or self._closing:
            return
        scratch = self.server.scratch
        at = 0
        if self._request is None and nbytes > _WORTH_SPLITTING and not self._parser.ended:
            # Keep the large body behind a head from being copied more than once.
            at = self.server.scratch_bytes.find(b"\r\n\r\n", 0, nbytes) + 4
            if at > 3:
                if not self._parse(bytes(scratch[:at])):
                    return
            else:
                at = 0
        left = self._parser.left
        if left > 0:
            end = min(nbytes, at + left)
            self._body(scratch[at:end])
            at = end
        if at < nbytes:
            self._parse(bytes(scratch[at:nbytes]))

    def _body(self, data: memoryview) -> None:
        """Bytes of a fixed-length body, past the parser."""
        request = self._request
        assert request is not None
        request.feed(data)
        if self._parser.skip(len(data)):
            self._patience = math.inf
            request.feed_end()
        else:
            self._fresh = True
            self._hold_back(request)

    def _parse(self, data: bytes) -> bool:
        """Bytes for the parser; False when nothing more is to be read."""
        parser = self._parser
        if parser.ended:
            parser.rest += data
        else:
            try:
                events = parser.feed(data)
            except ParseError as error:
                self._refuse(error)
                return False
            self._handle(events)
        if len(parser.rest) > self.limits.pipelined_bytes:
            self._bound_pipeline()
        return not self._discarding

    def _bound_pipeline(self) -> None:
        """There is much of further requests, early."""
        request = self._request
        if request is not None and request.finished:
            # The handler is about to return, and the client has its answer: the next request may wait in the kernel.
            self._pause_reading()
        else:
            # Reading must go on (or a client that leaves would go unnoticed), so what comes is thrown away: a client
            # has to send again what was not answered when the connection closes.
            self._parser.rest = b""
            self.last_request = self._discarding = True

    def eof_received(self) -> bool:
        request = self._request
        self._left()
        if request is not None and not request.finished:
            self.abort()
        else:
            self.close()  # what was answered still goes out
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._left()
        waiter = self._drain_waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(ClientGone("the client has left"))
        self._patience = self._write_deadline = math.inf
        self.server.lost(self)
        self._transport = None
        if self._task is not None and not self._running:
            # Cancelled before its first step: `_serve` will never run.
            self._task = None
            self.server.ended()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._guard_writing()

    def resume_writing(self) -> None:
        self.write_paused = False
        if not self._closing:
            self._write_deadline = math.inf
        waiter = self._drain_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- requests ----------------------------------------------------------------------------------------------

    def _handle(self, events: list[RequestEvent]) -> None:
        request = self._request
        for event in events:
            if type(event) is bytes:
                assert request is not None
                request.feed(event)
                self._fresh = True
            elif event is END:
                assert request is not None
                self._patience = math.inf
                request.feed_end()
            else:
                request = self._request = Request(event, self)  # type: ignore[arg-type]
                self._patience = math.inf
                self._running = False
                self.server.running += 1
                self._task = self.loop.create_task(self._serve(request))
        if request is not None:
            self._hold_back(request)
        elif self._waiting_for is _IDLE and self._parser.started:
            self._wait_for(_HEAD, self.limits.header_timeout)

    def _hold_back(self, request: Request) -> None:
        """Read no more while much of a body waits to be taken."""
        if not request.body_ended and not request.collecting and request.buffered > self.limits.body_buffer:
            self._pause_reading()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._reading_paused and not self._closing:
            self._reading_paused = True
            self._transport.pause_reading()

    async def _serve(self, request: Request) -> None:
        """One request from its head to its answer."""
        self._running = True
        try:
            await self.server.handler(request)
            if not request.finished and not self.gone:
                raise RuntimeError("the handler returned without an answer")
        except asyncio.CancelledError as error:
            assert self._task is not None
            if self._task.cancelling():
                self.abort()  # by a client that left, or by whoever ends the process
            else:
                self._handler_failed(request, error)
        except Exception as error:
            self._handler_failed(request, error)
        finally:
            self._running = False
            self._task = None
            self.server.ended()
            self._after(request)

    def _handler_failed(self, request: Request, error: BaseException) -> None:
        if not isinstance(error, ServerSideError):
            self.server.report(request, error)
        if self.gone:
            self.abort()
        elif request.started:
            request.abort()
        elif isinstance(error, ServerSideError):
            self._answer_error(error.status, error.message)
        else:
            self._answer_error(500, "internal server error")
        request.finished = True

    def _after(self, request: Request) -> None:
        self._request = None
        if self._closing or self.gone:
            return
        if not request.body_ended:
            self._linger()
        elif not request.keep_alive or self.last_request or self.server.draining:
            self.close()
        else:
            self._wait_for(_IDLE, self.limits.keep_alive_timeout)
            self.relieve()
            parser = self._parser
            early = bool(parser.rest)
            try:
                events = parser.next_message()
            except ParseError as error:
                self._refuse(error)
                return
            if early:
                self._handle(events)

    def _refuse(self, error: ParseError) -> None:
        """What came is not HTTP: say so if nothing else is being said, and close."""
        self._discarding = self.last_request = True
        request = self._request
        if request is not None:
            request.fail(BadRequest(error.message))
        else:
            self._answer_error(error.status, error.message)
            self._linger()

    def _answer_error(self, status: int, message: str) -> None:
        headers, body = self.server.on_bad_request(status, message)
        self.last_request = True
        request = self._request
        if request is not None:
            request.started = True
            request.keep_alive = False
        head = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        hidden = request is not None and request.method == "HEAD"
        parts = (status_line(status), header_lines(headers), self.server.date_line(), head, b"" if hidden else body)
        self.write(b"".join(parts))

    def _left(self) -> None:
        """The client is gone: its handler stops here and now."""
        if self.gone:
            return
        self.gone = True
        request = self._request
        if self._task is not None and request is not None and not request.finished:
            self._task.cancel()

    # --- for the request ---------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Hand bytes to the transport. Raises ClientGone."""
        self._writable().write(data)

    def writelines(self, parts: tuple[Buffer, ...]) -> None:
        """Like `write`, several buffers at once."""
        self._writable().writelines(parts)

    def _writable(self) -> asyncio.Transport:
        transport = self._transport
        # A transport that failed to write is closing for a turn of the loop before it says so.
        if transport is None or self.gone or transport.is_closing():
            raise ClientGone("the client has left")
        return transport

    async def drained(self) -> None:
        """Wait until the client has taken enough of what was written. Raises WriteStalled, ClientGone."""
        if not self.write_paused:
            return
        if self.gone:
            raise ClientGone("the client has left")
        self._drain_waiter = self.loop.create_future()
        try:
            await self._drain_waiter
        finally:
            self._drain_waiter = None

    def want_body(self, wanted: bool) -> None:
        """The handler waits (or stopped waiting) for body bytes: the body deadline runs meanwhile."""
        if wanted:
            self.relieve()
            self._wait_for(_BODY, self.limits.body_timeout)
        else:
            self._patience = math.inf

    def relieve(self) -> None:
        """The handler took body bytes: read on."""
        if self._reading_paused and self._transport is not None and not self._closing:
            self._reading_paused = False
            self._transport.resume_reading()

    # --- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is buffered, then close."""
        if self._transport is not None and not self._closing:
            self._closing = True
            self._guard_writing()
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Close unless a request is running; then close after it."""
        self.last_request = True
        if self._request is None and self._task is None and not self._discarding:
            self.close()

    def _linger(self) -> None:
        """The client is still sending. Closing now would reset the connection and could destroy the answer on its
        way, so end our side, and throw away what comes for a moment."""
        transport = self._transport
        if transport is None or self._closing:
            return
        self._discarding = self.last_request = True
        self._wait_for(_LINGER, self.limits.linger_timeout)
        self._guard_writing()
        if transport.can_write_eof():
            try:
                transport.write_eof()
            except OSError:
                self.abort()  # reset meanwhile
                return
        self.relieve()

    # --- deadlines ---------------------------------------------------------------------------------------------

    def _wait_for(self, what: str, seconds: float) -> None:
        """The client has `seconds` from now; the sweep starts the clock."""
        self._waiting_for = what
        self._patience = seconds
        self._fresh = True

    def _guard_writing(self) -> None:
        if self._transport is not None:
            self._unsent = self._transport.get_write_buffer_size()
            self._write_deadline = self.loop.time() + self.limits.write_timeout

    def sweep(self, now: float) -> None:
        """Called by the server every so often: act on deadlines that passed.

        Clocks are read here only, not each time something comes; a deadline may be seen up to two sweeps late.
        """
        if self._fresh:
            self._fresh = False
            self._read_deadline = now + self._patience
        elif now >= self._read_deadline and self._patience != math.inf:
            self._patience = math.inf
            self._read_timed_out()
        if now >= self._write_deadline:
            self._write_timed_out()
        if self._reading_paused and not self._closing:
            self._look_for_client()

    def _read_timed_out(self) -> None:
        if self._waiting_for is _BODY:
            if self._request is not None:
                self._request.fail(BodyTimeout(self.limits.body_timeout))
        elif self._waiting_for is _LINGER:
            self.close() if not self.write_paused else self.abort()
        elif self._waiting_for is _HEAD and self._parser.started:
            self._answer_error(408, f"waited {self.limits.header_timeout:g} s for the request head")
            self._linger()
        else:
            self.close()

    def _write_timed_out(self) -> None:
        assert self._transport is not None
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._guard_writing()
            return
        self._write_deadline = math.inf
        if unsent or self._closing:
            waiter = self._drain_waiter
            if waiter is not None and not waiter.done():
                waiter.set_exception(WriteStalled(self.limits.write_timeout))
            self.abort()

    def _look_for_client(self) -> None:
        """Reading is paused, so the transport would not tell that the client has left: ask the kernel."""
        if _TCP_INFO is None or self._transport is None or self._request is None or self._request.finished:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.family == socket.AF_UNIX:
            return
        if sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] != _TCP_ESTABLISHED:
            self._left()
            self.abort()
