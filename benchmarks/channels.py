"""Ways for a chunk to get from one process to another: a bare shared segment, pyzmq, and our connectors.

Each has a sending end, made in the measuring process, and a receiving end, made in the other one from `Ends`, a value
that can be sent there. Both are used by one thread. `receive` sleeps until something comes; an end that waits longer
than `PATIENCE` raises TimeoutError.
"""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Semaphore
from typing import Any, Final

from triptych.transfer.connectors.base import ConnectorSpec, StreamConnector
from triptych.transfer.connectors.registry import ConnectorFactory
from triptych.transfer.errors import BrokenStream, WouldBlock
from triptych.transfer.wire import Tensor, decode, encode

PATIENCE: Final = 60.0
IN_FLIGHT: Final = 8
SLOT: Final = 16 << 20
STAGES: Final = ("0", "1")


def payload(size: int) -> dict[str, Any]:
    """A chunk with that many bytes of tensor."""
    return {"codes": {"audio": Tensor("uint8", (size,), os.urandom(size))}, "meta": {"finished": False, "n": 7}}


@dataclass(frozen=True)
class Ends:
    """What the receiving end needs to know: `kind` as in `sender`."""

    kind: str
    where: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    filled: Semaphore | None = None
    free: Semaphore | None = None


class Sender(ABC):
    """The sending end."""

    ends: Ends

    @abstractmethod
    def send(self, obj: dict[str, Any], stream: str, number: int) -> None:
        """Send it; waits while as many as may be are in flight."""

    def end(self, stream: str) -> None:  # noqa: B027
        """No more of this stream."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class Receiver(ABC):
    """The receiving end."""

    def open(self, streams: Sequence[str], metadata: dict[str, Any] | None) -> None:  # noqa: B027
        """These will be sent."""

    @abstractmethod
    def receive(self, stream: str, number: int) -> int:
        """Wait for an object, decode it and let go of it; when it was there, in ns of the monotonic clock."""

    def end(self, streams: Sequence[str]) -> None:  # noqa: B027
        """No more of these."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


def _acquire(semaphore: Semaphore | None) -> None:
    assert semaphore is not None
    if not semaphore.acquire(timeout=PATIENCE):
        raise TimeoutError(f"the other end has not moved in {PATIENCE:g} s")


# -- one memcpy in, one out


class RawSender(Sender):
    """A ring of slots in one persistent shared segment, and semaphores: one copy in, one out, nothing else."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._file = os.memfd_create("triptych-benchmark")
        os.ftruncate(self._file, IN_FLIGHT * SLOT)
        where = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = _segment(where)
        self._view = memoryview(self._memory)
        self.ends = Ends("raw", where, filled=context.Semaphore(0), free=context.Semaphore(IN_FLIGHT))

    def send(self, obj: dict[str, Any], stream: str, number: int) -> None:
        data = obj["codes"]["audio"].buffer
        _acquire(self.ends.free)
        at = number % IN_FLIGHT * SLOT
        self._view[at : at + len(data)] = data
        assert self.ends.filled is not None
        self.ends.filled.release()

    def close(self) -> None:
        self._view.release()
        self._memory.close()
        os.close(self._file)


class RawReceiver(Receiver):
    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._memory = _segment(ends.where)
        self._view = memoryview(self._memory)
        self._out = memoryview(bytearray(SLOT))
        self._size = 0

    def open(self, streams: Sequence[str], metadata: dict[str, Any] | None) -> None:
        # Both ends know the size beforehand: the most favourable case there is.
        self._size = int((metadata or {})["size"])

    def receive(self, stream: str, number: int) -> int:
        _acquire(self._ends.filled)
        at = number % IN_FLIGHT * SLOT
        # Into memory that is there already: what the kernel takes for fresh pages is no part of a copy.
        self._out[: self._size] = self._view[at : at + self._size]
        there = time.monotonic_ns()
        assert self._ends.free is not None
        self._ends.free.release()
        return there

    def close(self) -> None:
        self._view.release()
        self._memory.close()


def _segment(path: str) -> mmap.mmap:
    """The file mapped, each page touched once: page faults of a first pass are nobody's cost."""
    with open(path, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), 0)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 0
    return memory


# -- pyzmq


class ZmqSender(Sender):
    """The same encode and decode as ours around PUSH and PULL, without copies where pyzmq can."""

    def __init__(self, kind: str, where: str) -> None:
        context = multiprocessing.get_context("spawn")
        zmq: Any = importlib.import_module("zmq")  # comes with vLLM, and the gateway alone has none
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.bind(where)
        where = self._socket.last_endpoint.decode()
        self._socket.linger = 0
        self._socket.sndtimeo = int(PATIENCE * 1000)
        self.ends = Ends(kind, where, free=context.Semaphore(IN_FLIGHT))

    def send(self, obj: dict[str, Any], stream: str, number: int) -> None:
        frames = encode(obj)
        _acquire(self.ends.free)
        self._socket.send_multipart([frames.head, *frames.buffers], copy=False)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ZmqReceiver(Receiver):
    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        zmq: Any = importlib.import_module("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvtimeo = int(PATIENCE * 1000)
        self._socket.connect(ends.where)

    def receive(self, stream: str, number: int) -> int:
        head, *buffers = self._socket.recv_multipart(copy=False)
        decode(head.buffer, [frame.buffer for frame in buffers])
        there = time.monotonic_ns()
        assert self._ends.free is not None
        self._ends.free.release()
        return there

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class BareZmqSender(ZmqSender):
    """One message of the tensor's bytes, not encoded."""

    def send(self, obj: dict[str, Any], stream: str, number: int) -> None:
        _acquire(self.ends.free)
        self._socket.send(obj["codes"]["audio"].buffer, copy=False)


class BareZmqReceiver(ZmqReceiver):
    def receive(self, stream: str, number: int) -> int:
        self._socket.recv(copy=False)
        there = time.monotonic_ns()
        assert self._ends.free is not None
        self._ends.free.release()
        return there


# -- connectors


class News:
    """What a connector tells a sender: streams that may be written again."""

    def __init__(self) -> None:
        self.credit: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ready(self, stream: str) -> None:
        """It receives nothing."""

    def writable(self, stream: str) -> None:
        self.credit.put(stream)

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        self.credit.put(stream)


class ConnectorSender(Sender):
    """A connector of stage 0. `metadata`: where a receiver finds it, where that has to be told."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.connector = _connector(name.partition("+")[0], {**config, "stage_id": 0, "credit_chunks": IN_FLIGHT})
        self.news = News()
        self.connector.listen(self.news)
        _, _, self.metadata = self.connector.put(*STAGES, "where_0", "here")
        self.connector.discard(["where_0"])
        self.ends = Ends(name, config={**config, "stage_id": 1})

    def try_send(self, obj: dict[str, Any], stream: str, number: int) -> bool:
        """Whether there was credit."""
        with suppress(WouldBlock):
            self.connector.put(*STAGES, f"{stream}_{number}", obj)
            return True
        return False

    def send(self, obj: dict[str, Any], stream: str, number: int) -> None:
        while not self.try_send(obj, stream, number):
            try:
                self.news.credit.get(timeout=PATIENCE)
            except queue.Empty:
                raise TimeoutError(f"{stream}: no credit in {PATIENCE:g} s") from None

    def end(self, stream: str) -> None:
        self.connector.fail(*STAGES, stream, "done")

    def close(self) -> None:
        self.connector.close()


class ConnectorReceiver(Receiver):
    """A connector of stage 1. Objects are taken where they come, on the connector's own thread; or, of a kind
    `…+thread`, by another thread that this one wakes, as in a stage.
    """

    def __init__(self, ends: Ends) -> None:
        name, _, thread = ends.kind.partition("+")
        self._connector = _connector(name, ends.config)
        self._metadata: dict[str, Any] | None = None
        self._numbers: dict[str, int] = {}
        self.arrivals: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.ready = self._note if thread else self._take_all
        self.stalled: str | None = None  # nothing is taken of this one
        self._connector.listen(self)

    def writable(self, stream: str) -> None:
        """It sends nothing."""

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        """It sends nothing."""

    def _note(self, stream: str) -> None:
        self.arrivals.put((stream, 0))

    def _take_all(self, stream: str) -> None:
        while there := self._take(stream):
            self.arrivals.put((stream, there))

    def _take(self, stream: str) -> int:
        """Take the next object of a stream, if it is there: when it was; else 0."""
        number = self._numbers.get(stream)
        if number is None or stream == self.stalled:
            return 0
        with suppress(BrokenStream):
            if self._connector.get(*STAGES, f"{stream}_{number}", self._metadata) is not None:
                self._numbers[stream] = number + 1
                return time.monotonic_ns()
        return 0

    def open(self, streams: Sequence[str], metadata: dict[str, Any] | None) -> None:
        self._metadata = metadata if metadata and "source_host" in metadata else None
        while not self.arrivals.empty():
            self.arrivals.get()  # of streams that are over
        self._numbers = dict.fromkeys(streams, 0)
        for stream in streams:
            self._connector.watch(*STAGES, stream, self._metadata)

    def receive(self, stream: str, number: int) -> int:
        return self.receive_any()

    def receive_any(self) -> int:
        """The same for whichever stream has something next."""
        while True:
            try:
                stream, there = self.arrivals.get(timeout=PATIENCE)
            except queue.Empty:
                raise TimeoutError(f"no chunk in {PATIENCE:g} s") from None
            if there or (there := self._take(stream)):
                return there

    def end(self, streams: Sequence[str]) -> None:
        self._numbers = {}
        for stream in streams:
            self._connector.unwatch(stream)

    def close(self) -> None:
        self._connector.close()


def _connector(name: str, config: dict[str, Any]) -> StreamConnector:
    connector = ConnectorFactory.create_connector(ConnectorSpec(name, config))
    assert isinstance(connector, StreamConnector)
    return connector


def sender(kind: str, directory: str) -> Sender:
    """The sending end of a kind. `directory` is for its files, and for nobody else's."""
    match kind:
        case "raw":
            return RawSender()
        case "zmq":
            return ZmqSender(kind, f"ipc://{directory}/zmq")
        case "zmq tcp":
            return ZmqSender(kind, "tcp://127.0.0.1:*")
        case "bare zmq":
            return BareZmqSender(kind, f"ipc://{directory}/zmq")
        case _:
            return ConnectorSender(kind, {"deployment": f"benchmark {directory}", "tensors": "view"})


def receiver(ends: Ends) -> Receiver:
    """The other end."""
    match ends.kind:
        case "raw":
            return RawReceiver(ends)
        case "zmq" | "zmq tcp":
            return ZmqReceiver(ends)
        case "bare zmq":
            return BareZmqReceiver(ends)
        case _:
            return ConnectorReceiver(ends)
