"""Chunks between processes of one host: an arena of the sender's that receivers map, and a Unix socket beside it.

The socket is doorbell, control channel and death notice in one, and carries small chunks itself. A larger one is copied
once, into the arena; its receiver reads it there until the last view of it is gone, or, where it holds much of the
arena already, takes a copy.

Options: `stage_id`, `deployment` (connectors of another one are never met), `arena_bytes`, `credit_chunks`,
`credit_bytes`, `inline_bytes`, `tensors` ("torch", "view"; by default torch where that is loaded), `port` (of this
replica, so that a receiver can ask for it), `runtime_dir` (of the sockets). Others are left to whom they concern.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from triptych.transfer.connectors.arena import ALIGN, PAGE, ArenaStore, Window, block
from triptych.transfer.connectors.frames import Buffer, Chunk, Hello, Limits, layout
from triptych.transfer.connectors.hub import Hub
from triptych.transfer.connectors.inbound import Source
from triptych.transfer.connectors.link import Link
from triptych.transfer.connectors.links import GREETING
from triptych.transfer.connectors.loop import READ
from triptych.transfer.connectors.options import integer, options, text
from triptych.transfer.connectors.peers import MIB
from triptych.transfer.connectors.records import Credit
from triptych.transfer.connectors.sockets import BELL, SENDER, Folder, Name, label, peer
from triptych.transfer.errors import ClosedError, ConnectorError, WireError
from triptych.transfer.wire import tensor_maker

VERSION: Final = 1
DEPLOYMENT: Final = "default"
LARGEST: Final = 1 << 40
_AGAIN: Final = 0.5  # seconds until a sender whose connection broke is looked for
_BUSY: Final = 0.05  # seconds until a sender whose backlog was full is tried again


class ReceiverHello(msgspec.Struct, forbid_unknown_fields=True):
    """A receiver greets first."""

    version: int
    stage: int


class SenderHello(msgspec.Struct, forbid_unknown_fields=True):
    """The answer; the descriptor of the arena, of `size` bytes, comes with it."""

    version: int
    stage: str
    port: int
    size: int


class UnixTransport:
    """A Unix socket that can carry one descriptor: given at the sender, `taken` at the receiver."""

    short_is_all = True

    def __init__(self, sock: socket.socket, *, takes: bool) -> None:
        self._sock = sock
        self._give: int | None = None
        self._takes = takes
        self._taken: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def give(self, fd: int) -> None:
        """Send a descriptor with the next bytes. It stays the caller's."""
        self._give = fd

    def take(self) -> list[int]:
        """Descriptors that came; they are the caller's now. No more are taken."""
        taken, self._taken = self._taken, []
        self._takes = False
        return taken

    def send(self, buffers: Collection[Buffer]) -> int:
        if self._give is None:
            return self._sock.sendmsg(buffers)
        rights = array.array("i", [self._give])
        sent = self._sock.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._give = None
        return sent

    def recv_into(self, view: memoryview) -> int:
        if not self._takes:
            return self._sock.recv_into(view)
        count, ancillary, _, _ = self._sock.recvmsg_into([view], socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._taken += fds
        return count

    def close(self) -> None:
        self._sock.close()
        for fd in self.take():
            os.close(fd)


class SharedMemoryConnector(Hub):
    """See the module's text."""

    kind = "shm"
    mortal = True
    align = ALIGN

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConnectorError for an option that cannot be."""
        given = options(config)
        self._deployment = text(given, "deployment", DEPLOYMENT)
        runtime = text(given, "runtime_dir", "")
        self._base = Path(runtime) if runtime else None
        self._port = integer(given, "port", 0, 0, 65535)
        inline = integer(given, "inline_bytes", 8192, 0, MIB)
        size = -(-integer(given, "arena_bytes", 256 * MIB, PAGE, LARGEST) // PAGE) * PAGE
        stage = integer(given, "stage_id", 0, 0, 1 << 16)
        tensors = given.get("tensors")
        tensor_maker(tensors)
        self._arena = ArenaStore(size, inline, f"triptych:{self._deployment[:100]}:{stage}".replace("\0", "?"))
        self._setup = threading.Lock()
        self._folder: Folder | None = None
        self._listener: tuple[Name, socket.socket] | None = None
        self._stage = ""
        self._bell: tuple[Name, socket.socket] | None = None
        self._sought: set[str] = set()
        self._known: dict[Name, Link] = {}
        self._array = functools.lru_cache(512)(lambda nbytes: ctypes.c_ubyte * nbytes)
        super().__init__(
            {**config, "extra": given},
            stage_id=stage,
            store=self._arena,
            credit=Credit(
                integer(given, "credit_chunks", 8, 1, 1024), integer(given, "credit_bytes", 64 * MIB, 1, LARGEST)
            ),
            limits=Limits(),
            tensors=tensors,
        )

    # --- finding each other

    def _place(self) -> Folder:
        """With the setup lock."""
        if self._closed:
            raise ClosedError(f"the connector of stage {self.stage_id} is closed")
        if self._folder is None:
            self._folder = Folder(self._deployment, self._base)
            self._folder.sweep()
        return self._folder

    def _offer(self, stage: str) -> None:
        if self._listener is None:
            with self._setup:
                if self._listener is None:
                    self._listen(stage)
        if stage != self._stage:
            raise ConnectorError(f"a connector sends for one stage: for {self._stage!r}, and not for {stage!r} too")

    def _listen(self, stage: str) -> None:
        folder = self._place()
        self._arena.open()
        name = Name.ours(SENDER, stage, self._port)
        sock = folder.bind(name)
        self._stage = stage
        self._listener = name, sock
        self._loop.add(sock.fileno(), READ, lambda mask: self._accept(sock))
        folder.ring()

    def _accept(self, sock: socket.socket) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            pid, uid = peer(connection)
            if uid != os.getuid():
                connection.close()
                continue
            link = self._adopt(UnixTransport(connection, takes=False), to_sender=False)
            link.pid = pid

    def _seek(self, source: Source, *, again: bool = False) -> None:
        if source.stage in self._sought and not again:
            return
        with self._setup:
            folder = self._place()
            if self._bell is None:
                name = Name.ours(BELL, str(self.stage_id), 0)
                sock = folder.bind(name)
                self._bell = name, sock
                self._loop.add(sock.fileno(), READ, lambda mask: self._rung(sock))
            self._sought.add(source.stage)
            self._look()

    def _rung(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.recv(16)
        with self._setup, contextlib.suppress(ClosedError):
            self._look()

    def _look(self) -> None:
        """Connect to senders that are not known yet. With the setup lock."""
        folder = self._place()
        sought = {label(stage) for stage in self._sought}
        ours = None if self._listener is None else self._listener[0]
        for name in folder.names(SENDER):
            if name.stage in sought and name != ours and name not in self._known:
                self._connect(folder, name, time.monotonic() + GREETING)

    def _connect(self, folder: Folder, name: Name, until: float) -> None:
        try:
            sock = folder.connect(name)
        except BlockingIOError:
            if time.monotonic() < until:
                self._loop.call_later(_BUSY, self._again)
            return
        except OSError:
            return
        if sock is None:
            return
        pid, uid = peer(sock)
        if uid != os.getuid():
            sock.close()
            return
        link = self._adopt(UnixTransport(sock, takes=True), to_sender=True)
        with self._lock:
            link.pid = pid
            link.stage = name.stage
            if not link.closed:
                self._known[name] = link
            link.post(Hello(msgspec.msgpack.encode(ReceiverHello(VERSION, self.stage_id))))
            self._after()

    def _again(self) -> None:
        with self._setup, contextlib.suppress(ClosedError):
            self._look()

    # --- greeting

    def _greet(self, link: Link, body: bytes) -> bool:
        transport = link.transport
        assert isinstance(transport, UnixTransport)
        try:
            if not link.to_sender:
                receiver = msgspec.msgpack.decode(body, type=ReceiverHello)
                _same(receiver.version)
                link.stage = str(receiver.stage)
                transport.give(self._arena.shared)
                hello = SenderHello(VERSION, self._stage, self._port, self._arena.size)
                link.post(Hello(msgspec.msgpack.encode(hello)))
                return True
            sender = msgspec.msgpack.decode(body, type=SenderHello)
        except msgspec.MsgspecError as error:
            raise WireError(f"its greeting does not decode: {error}") from None
        _same(sender.version)
        fds = transport.take()
        try:
            if len(fds) != 1:
                raise WireError(f"{len(fds)} descriptors came with its greeting, not one")
            link.carrier = Window(fds[0], sender.size, LARGEST)
        finally:
            for fd in fds:
                os.close(fd)
        link.stage = sender.stage
        link.source = Source(sender.stage, "", sender.port)
        return True

    def _matches(self, link: Link, source: Source) -> bool:
        own = link.source
        return own.stage == source.stage and (not source.port or not own.port or own.port == source.port)

    def _lost(self, link: Link) -> None:
        for name in [name for name, known in self._known.items() if known is link]:
            del self._known[name]
        if link.to_sender and not self._closed:
            # It may be alive, and it rings only once: without another look nothing of it would ever come again.
            self._loop.call_later(_AGAIN, self._again)

    def _broke(self, error: OSError) -> str:
        # No network is between the two: a socket whose owner lives does not break.
        return "its process ended" if isinstance(error, ConnectionError) else super()._broke(error)

    # --- memory

    def _check_loan(self, link: Link, chunk: Chunk) -> None:
        end = chunk.offset + layout(chunk.sizes, ALIGN)[1]
        if chunk.offset % PAGE or end > link.carrier.size:
            raise WireError(f"a chunk at {chunk.offset} that ends at {end} of {link.carrier.size} bytes")

    def _borrow(self, link: Link, chunk: Chunk) -> memoryview:
        window: Window = link.carrier
        nbytes = layout(chunk.sizes, ALIGN)[1]
        with self._lock:
            in_place = link.borrowed + nbytes <= window.size // 8
            if in_place:
                link.borrowed += nbytes
        if not in_place:
            # Its reader holds so much that the sender could run out of memory: a copy, and this comes back at once.
            copied = window.copy(chunk.offset, nbytes)
            self._give_back(link, chunk, 0)
            return memoryview(copied)
        size = min(block(nbytes), window.size - chunk.offset)
        owner = self._array(size).from_buffer(window.map, chunk.offset)
        weakref.finalize(owner, self._give_back, link, chunk, nbytes).atexit = False
        return memoryview(owner).cast("B")[:nbytes]

    def _on_return(self, link: Link, chunk: Chunk, nbytes: int) -> None:
        if nbytes:
            size = -(-nbytes // PAGE) * PAGE
            link.carrier.forget(chunk.offset, size)

    # --- the end

    def _end(self) -> None:
        with self._setup:
            for place in (self._listener, self._bell):
                if place is not None:
                    name, sock = place
                    if self._folder is not None:
                        self._folder.remove(name)
                    sock.close()
            if self._folder is not None:
                self._folder.close()
        self._arena.close()

    def _forked(self) -> None:
        super()._forked()
        for place in (self._listener, self._bell):
            if place is not None:
                place[1].close()
        self._arena.close()


def _same(version: int) -> None:
    if version != VERSION:
        raise WireError(f"it speaks version {version} of this protocol, and this end version {VERSION}")
