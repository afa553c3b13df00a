"""One TCP connection: its bytes, with TLS or without, and the link on it that cuts what is large."""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Collection
from typing import Final, Protocol

from triptych.transfer.connectors.auth import MAX_BODY
from triptych.transfer.connectors.frames import Buffer, Consumed, Goodbye, Limits, Message, Unwatch, Watch
from triptych.transfer.connectors.link import ACKS, Link, Transport
from triptych.transfer.connectors.pieces import PING, PONG, Cutter, Joiner
from triptych.transfer.errors import WireError

_AT_ONCE: Final = 64  # buffers of one system call
_BURST: Final = 1 << 20  # bytes that one flush sends, so that its caller keeps the lock for a moment only
_RECORD: Final = 1 << 14  # bytes that TLS encrypts together
_STRANGER: Final = Limits(chunk=0, control=MAX_BODY)
_EARLY: Final = 4 * MAX_BODY
"""Bytes that a peer may send before it has shown who it is."""


class TcpTransport(Transport, Protocol):
    """A transport that may have to be set up first."""

    def ready(self) -> bool:
        """Go on with that; whether it is done. Raises OSError where it cannot be."""

    @property
    def wants_write(self) -> bool:
        """What it waits for until it is ready: room to send, or something to receive."""

    @property
    def pending(self) -> bool:
        """Whether there is something to receive that the kernel does not know of."""

    @property
    def binding(self) -> bytes:
        """The server's certificate in DER, at a client that is ready."""


class PlainTransport:
    """A socket as it is. It may still be connecting: the kernel sends when it can."""

    short_is_all = True
    wants_write = True
    pending = False
    binding = b""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def ready(self) -> bool:
        return True

    def send(self, buffers: Collection[Buffer]) -> int:
        return self._sock.sendmsg(buffers)

    def recv_into(self, view: memoryview) -> int:
        return self._sock.recv_into(view)

    def close(self) -> None:
        self._sock.close()


class TlsTransport:
    """TLS on a socket that may still be connecting. `hostname`: whom a client expects; None at a server."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, hostname: str | None) -> None:
        self._sock = sock
        self._context = context
        self._hostname = hostname
        self._secure: ssl.SSLSocket | None = None
        self._done = False
        self.wants_write = hostname is not None
        self.binding = b""

    def fileno(self) -> int:
        return self._sock.fileno() if self._secure is None else self._secure.fileno()

    @property
    def pending(self) -> bool:
        return self._secure is not None and self._done and self._secure.pending() > 0

    def ready(self) -> bool:
        if self._done:
            return True
        if self._secure is None and not self._wrap():
            return False
        assert self._secure is not None
        try:
            self._secure.do_handshake()
        except ssl.SSLWantReadError:
            self.wants_write = False
            return False
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return False
        if self._hostname is not None:
            self.binding = self._secure.getpeercert(binary_form=True) or b""
        self._done = True
        return True

    def _wrap(self) -> bool:
        """TLS begins once the socket is connected. Raises OSError where it cannot be."""
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            self._sock.getpeername()
        except OSError:
            return False
        server = self._hostname is None
        self._secure = self._context.wrap_socket(
            self._sock, server_side=server, do_handshake_on_connect=False, server_hostname=self._hostname
        )
        return True

    def send(self, buffers: Collection[Buffer]) -> int:
        assert self._secure is not None
        try:
            return self._secure.send(_record(buffers))
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recv_into(self, view: memoryview) -> int:
        assert self._secure is not None
        try:
            return self._secure.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def close(self) -> None:
        self._sock.close()
        if self._secure is not None:
            self._secure.close()


def _record(buffers: Collection[Buffer]) -> Buffer:
    """About a record's worth of bytes. Always from the first on, and never less than before for the same first: TLS
    wants what it could not send to be offered again."""
    size = 0
    parts: list[Buffer] = []
    for buffer in buffers:
        if not parts and len(buffer) >= _RECORD:
            return buffer
        parts.append(buffer)
        size += len(buffer)
        if size >= _RECORD:
            break
    return b"".join(parts)


class TcpLink(Link):
    """A link whose large messages go in pieces, and which notices a peer that is silent."""

    transport: TcpTransport

    def __init__(
        self, transport: TcpTransport, dirty: set[Link], *, to_sender: bool, limits: Limits, budget: int, address: str
    ) -> None:
        super().__init__(transport, dirty, to_sender=to_sender, limits=_STRANGER)
        self.address = address
        self.refused = False  # one end has said that the two do not belong together
        self.began = self.heard = time.monotonic()
        self._established = limits
        self._cutter = Cutter()
        self._joiner = Joiner(_STRANGER, budget=budget, buffer=1 << 12)
        self._queue: deque[memoryview] = deque()
        self._open = False
        self._failure: OSError | None = None  # of sending
        self._early = 0
        self._answering = False

    @property
    def name(self) -> str:
        if not self.greeted:
            return self.address
        return f"stage {self.stage} at {self.address} (pid {self.pid})"

    def establish(self) -> None:
        """The peer has shown who it is: take from it what an established link takes."""
        self._joiner.grow(self._established)

    def post(self, message: Message) -> None:
        if self.closed or self._mute or (isinstance(message, Goodbye) and not self.greeted):
            return
        match message:
            case Watch(number):
                self._joiner.open(number)
            case Unwatch(number):
                self._joiner.close(number)
            case Consumed():
                self._acks += 1
        self._cutter.post(message)
        self._dirty.add(self)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._cutter.urgent(PING)
        self._dirty.add(self)

    @property
    def can_wait(self) -> bool:
        return not self._queue and 0 < self._acks == self._cutter.urgent_only <= ACKS

    def flush(self) -> bool:
        """Send what can be sent now, up to a burst. Returns whether that was all. Raises OSError."""
        if self.closed:
            return True
        if not self._ready():
            return not self.transport.wants_write
        queue = self._queue
        left = _BURST
        try:
            while left > 0:
                if not queue:
                    queue.extend(self._cutter.cut())
                    self._acks = 0
                    self._answering = False
                    if not queue:
                        return True
                sent = self.transport.send(queue if len(queue) <= _AT_ONCE else list(itertools.islice(queue, _AT_ONCE)))
                left -= sent
                while queue and sent >= len(queue[0]):
                    sent -= len(queue.popleft())
                if sent:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure = error
            raise
        return False

    def _ready(self) -> bool:
        try:
            return self.transport.ready()
        except ssl.SSLCertVerificationError:
            self.refused = True
            raise

    def read(self) -> list[Message] | None:
        if not self._open:
            self._open = self._ready()
            self._dirty.add(self)  # it waits for something else now
            if not self._open:
                raise BlockingIOError
        room = self._joiner.room()
        count = self.transport.recv_into(room)
        self.drained = self._short_is_all and count < len(room)
        if not count:
            # The kernel tells of an error once, and after that of an end.
            if self._failure is not None:
                raise self._failure
            return None
        self.received += count
        self.heard = time.monotonic()
        if not self.greeted:
            self._early += count
            if self._early > _EARLY:
                raise WireError(f"{self._early} bytes before it has shown who it is")
        messages = self._joiner.filled(count)
        if self._joiner.pings:
            self._joiner.pings = 0
            if not self._answering:
                self._answering = True  # once, however many ask before that is sent
                self._cutter.urgent(PONG)
                self._dirty.add(self)
        for message in messages:
            if isinstance(message, Unwatch):
                self._cutter.drop(message.watch)
        return messages

    def mute(self) -> None:
        super().mute()
        self._queue.clear()
        self._cutter = Cutter()

    def close(self) -> None:
        super().close()
        self._queue.clear()
        self._cutter = Cutter()
