"""One connection to a peer: bytes in and out without blocking, and what is known of who is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Final, Protocol

from triptych.transfer.connectors.frames import Buffer, Consumed, FrameReader, Limits, Message, pack
from triptych.transfer.connectors.inbound import Source
from triptych.transfer.connectors.loop import Timer
from triptych.transfer.connectors.peers import Peer

_AT_ONCE: Final = 64  # buffers of one system call
ACKS: Final = 3
"""Chunks whose consumption may be told later, at most."""


class Transport(Protocol):
    """A non-blocking byte stream. `send` and `recv_into` raise BlockingIOError where they would wait, any other OSError
    where the connection is of no more use; `recv_into` returns 0 at its end.

    With an attribute `short_is_all` that is true, a read of less than there was room for has left nothing.
    """

    def fileno(self) -> int:
        """What the loop waits for."""

    def send(self, buffers: Collection[Buffer]) -> int:
        """Send some of the bytes: how many."""

    def recv_into(self, view: memoryview) -> int:
        """Receive some bytes: how many."""

    def close(self) -> None:
        """May be called twice."""


class Link(Peer):
    """A connection. `to_sender`: its peer sends streams and we receive them; otherwise the other way round."""

    def __init__(self, transport: Transport, dirty: set[Link], *, to_sender: bool, limits: Limits) -> None:
        super().__init__()
        self.transport = transport
        self.to_sender = to_sender
        self.source = Source("?")  # of the peer, where it sends
        self.stage = "?"  # of the peer
        self.pid = 0
        self.greeted = False
        self.closed = False
        self.ended = False  # from the other side
        self.farewell = ""  # what the peer said when it closed
        self.carrier: Any = None  # the carrier's own: what it shares with this peer
        self.deadline: Timer | None = None  # of its greeting
        self.writing = False  # waits for room to write
        self.received = 0  # bytes so far
        self.drained = False  # the last read has left nothing
        self._short_is_all = bool(getattr(transport, "short_is_all", False))
        self._reader = FrameReader(limits)
        self._out: deque[Buffer] = deque()
        self._acks = 0
        self._mute = False
        self._dirty = dirty

    @property
    def name(self) -> str:
        return f"stage {self.stage}" + (f" (pid {self.pid})" if self.pid else "")

    def post(self, message: Message) -> None:
        if self.closed or self._mute:
            return
        self._out += pack(message)
        if type(message) is Consumed:
            self._acks += 1
        self._dirty.add(self)

    @property
    def can_wait(self) -> bool:
        """Only a few chunks' consumption is to be told: it can go with what comes next."""
        return self._acks == len(self._out) <= ACKS

    def flush(self) -> bool:
        """Send what can be sent now. Returns whether that was all. Raises OSError."""
        out = self._out
        try:
            while out:
                sent = self.transport.send(out if len(out) <= _AT_ONCE else [out[i] for i in range(_AT_ONCE)])
                self._acks = 0
                while out and sent >= len(out[0]):
                    sent -= len(out.popleft())
                if sent:
                    out[0] = memoryview(out[0])[sent:]
        except BlockingIOError:
            return False
        return True

    def read(self) -> list[Message] | None:
        """The messages that are whole after one read; None at the end. Raises BlockingIOError, OSError, WireError."""
        room = self._reader.room()
        count = self.transport.recv_into(room)
        self.received += count
        self.drained = self._short_is_all and count < len(room)
        return self._reader.filled(count) if count else None

    def mute(self) -> None:
        """Nothing can be sent any more; something may still be read."""
        self._mute = True
        self._out.clear()

    def close(self) -> None:
        """May be called twice."""
        self.closed = True
        self._out.clear()
        self.transport.close()
