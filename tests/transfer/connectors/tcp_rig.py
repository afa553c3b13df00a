"""Connectors over real sockets, what they tell, and peers that are no connectors."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from triptych.transfer.connectors.auth import Client, Secret, Who
from triptych.transfer.connectors.frames import Hello, Limits, Message, pack
from triptych.transfer.connectors.pieces import Joiner
from triptych.transfer.connectors.tcp import TcpConnector
from triptych.transfer.errors import TransferError

PATIENCE = 10.0
SECRET = "a secret for these tests"
DEPLOYMENT = "default"


class Told:
    """Events of a connector, to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.log: list[tuple[str, ...]] = []

    def _note(self, *what: str) -> None:
        with self._changed:
            self.log.append(what)
            self._changed.notify_all()

    def ready(self, stream: str) -> None:
        self._note("ready", stream)

    def writable(self, stream: str) -> None:
        self._note("writable", stream)

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        self._note("stopped", stream, reason)

    def count(self, *what: str) -> int:
        return sum(entry[: len(what)] == what for entry in self.log)

    def wait(self, *what: str, count: int = 1) -> tuple[str, ...]:
        """The last entry that begins so, once there are so many."""
        with self._changed:
            found = self._changed.wait_for(lambda: self.count(*what) >= count, PATIENCE)
            assert found, f"{what} was not told {count} times: {self.log[-20:]}"
            return [entry for entry in self.log if entry[: len(what)] == what][-1]


class End:
    """A connector of a stage, and what it told."""

    def __init__(self, stage: int, **config: Any) -> None:
        self.stage = stage
        self.told = Told()
        self.connector = TcpConnector({"stage_id": stage, "tensors": "view", **config})
        self.connector.listen(self.told)

    def put(self, key: str, data: object, **more: Any) -> dict[str, Any]:
        """Where it can be had."""
        done, _, metadata = self.connector.put(str(self.stage), str(self.stage + 1), key, data, **more)
        assert done
        assert metadata is not None
        return metadata

    def where(self) -> dict[str, Any]:
        """The same without a chunk."""
        metadata = self.put("where", "here")
        self.connector.discard(["where"])
        return metadata

    def watch(self, stream: str, metadata: Mapping[str, Any] | None = None) -> None:
        self.connector.watch(str(self.stage - 1), str(self.stage), stream, metadata)

    def get(self, key: str, metadata: Mapping[str, Any] | None = None) -> Any:
        """The object, or None."""
        found = self.connector.get(str(self.stage - 1), str(self.stage), key, metadata)
        return None if found is None else found[0]

    def take(self, key: str) -> Any:
        """The object, once it has come; what `get` raises, once it does."""
        stream = key.rpartition("_")[0]
        seen = 0
        while (found := self.get(key)) is None:
            self.told.wait("ready", stream, count=seen + 1)
            seen = self.told.count("ready", stream)
            if (found := self.get(key)) is not None:
                break
        return found

    def end_of(self, key: str) -> TransferError:
        """What `get` raises, once it does."""
        try:
            found = self.take(key)
        except TransferError as error:
            return error
        raise AssertionError(f"{key} is there: {found!r}")


@contextlib.contextmanager
def end(stage: int, **config: Any) -> Iterator[End]:
    """One, closed at the end."""
    made = End(stage, **config)
    try:
        yield made
    finally:
        made.connector.close()


@contextlib.contextmanager
def pair(**config: Any) -> Iterator[tuple[End, End]]:
    """A sender of stage 0 and a receiver of stage 1 that know of each other what metadata says."""
    with end(0, **config) as sender, end(1, **config) as receiver:
        yield sender, receiver


def until(true: Callable[[], object], what: str) -> None:
    """Wait for something that nobody tells of."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        threading.Event().wait(0.002)


class Stranger:
    """A bare socket to a connector."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.sock = socket.create_connection((metadata["source_host"], metadata["source_port"]), PATIENCE)
        self._joiner = Joiner(Limits(), budget=1 << 20)
        self._heard: list[Message] = []

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *messages: Message | bytes) -> bytes:
        """The bytes that were sent."""
        data = b"".join(m if isinstance(m, bytes) else b"".join(pack(m)) for m in messages)
        self.sock.sendall(data)
        return data

    def hear(self) -> Message | None:
        """The next message; None at the end of the connection, however that came."""
        while not self._heard:
            try:
                count = self.sock.recv_into(self._joiner.room())
            except ConnectionError:
                return None
            if not count:
                return None
            self._heard += self._joiner.filled(count)
        return self._heard.pop(0)

    def greet(self, stage: str = "1", secret: str | None = None) -> list[bytes]:
        """Shake hands as a receiver does; the bodies that were sent."""
        client = Client(Who(DEPLOYMENT, stage, 1), Secret(secret, DEPLOYMENT))
        body: bytes | None = client.opening()
        said = []
        while body is not None:
            said.append(body)
            self.send(Hello(body))
            heard = self.hear()
            assert isinstance(heard, Hello)
            body = client.receive(heard.body)
        assert client.done
        return said


def reset(sock: socket.socket) -> None:
    """Close it as a host does that is in a hurry."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
