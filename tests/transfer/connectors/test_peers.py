"""What a peer that does not keep to the protocol can do: lose its link, and nothing else."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from tests.transfer.connectors.rig import Bench, Recorder, take, until
from triptych.transfer.connectors.arena import ArenaStore
from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.frames import (
    Answer,
    Chunk,
    Consumed,
    Failed,
    FrameReader,
    Goodbye,
    Hello,
    Leave,
    Limits,
    Message,
    Returned,
    Unwatch,
    Watch,
    pack,
)
from triptych.transfer.connectors.shm import ReceiverHello, SenderHello, SharedMemoryConnector
from triptych.transfer.connectors.sockets import SENDER, Folder, Name
from triptych.transfer.errors import BrokenStream
from triptych.transfer.wire import Tensor, encode

MIB = 1 << 20
PATIENCE = 20


class Stranger:
    """The other end of a link, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE)
        self._reader = FrameReader(Limits())
        self._messages: list[Message] = []

    def send(self, *messages: Message, fd: int | None = None) -> None:
        data = b"".join(bytes(buffer) for message in messages for buffer in pack(message))
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.sock.sendmsg([data], rights)

    def next(self) -> Message | None:
        """What comes next; None at the end."""
        while not self._messages:
            data = self.sock.recv(65536)
            if not data:
                return None
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def dropped(self) -> bool:
        """Whether the link is ended, whatever comes before that."""
        try:
            while self.next() is not None:
                pass
        except ConnectionResetError:
            pass
        return True


@pytest.fixture
def folder(bench: Bench) -> Iterator[Folder]:
    folder = Folder("default", bench.folder)
    yield folder
    folder.close()


def receiver(folder: Folder, hello: bytes | None = None) -> Stranger:
    """A receiver by hand, connected to the only sender."""
    (name,) = folder.names(SENDER)
    sock = folder.connect(name)
    assert sock is not None
    stranger = Stranger(sock)
    stranger.send(Hello(msgspec.msgpack.encode(ReceiverHello(1, 1)) if hello is None else hello))
    return stranger


class FakeSender:
    """A sender by hand: an arena, and a socket that a receiver finds."""

    def __init__(self, folder: Folder) -> None:
        self.arena = ArenaStore(MIB, 0, "triptych:fake")
        self.arena.open()
        self.name = Name.ours(SENDER, "0", 0)
        self._folder = folder
        self._listener = folder.bind(self.name)
        self._listener.settimeout(PATIENCE)
        self.stranger: Stranger | None = None

    def accept(self, hello: bytes | None = None, fd: int | None = None) -> Stranger:
        sock, _ = self._listener.accept()
        self.stranger = Stranger(sock)
        assert isinstance(self.stranger.next(), Hello)
        body = msgspec.msgpack.encode(SenderHello(1, "0", 0, self.arena.size)) if hello is None else hello
        self.stranger.send(Hello(body), fd=self.arena.shared if fd is None else fd)
        return self.stranger

    def close(self) -> None:
        self._folder.remove(self.name)
        self._listener.close()
        if self.stranger is not None:
            self.stranger.sock.close()
        self.arena.close()


@pytest.fixture
def fake(folder: Folder) -> Iterator[FakeSender]:
    fake = FakeSender(folder)
    yield fake
    fake.close()


def sender_with_a_chunk(bench: Bench, size: int = 100_000) -> SharedMemoryConnector:
    connector = bench.make()
    connector.put("0", "1", "s_0", {"x": Tensor("uint8", (size,), bytes(size))}, Mark(1))
    return connector


# --- receivers


def test_a_receiver_by_hand_gets_a_chunk_and_gives_its_memory_back(bench: Bench, folder: Folder) -> None:
    sender = sender_with_a_chunk(bench)
    stranger = receiver(folder)
    stranger.send(Watch(9, "s"), Watch(10, "nothing"))
    assert isinstance(stranger.next(), Hello)
    chunk = stranger.next()
    assert isinstance(chunk, Chunk)
    assert (chunk.watch, chunk.number, chunk.generation, chunk.terminal) == (9, 0, 1, False)
    assert chunk.loan > 0
    assert [stranger.next(), stranger.next()] == [Answer(9, True), Answer(10, False)]
    stranger.send(Consumed(9, 0), Returned(chunk.loan))
    until(lambda: sender.reap() or (not sender._pending_keys and sender.statistics().bytes_held == 0), "it is freed")
    stranger.sock.close()


@pytest.mark.parametrize(
    "messages",
    [
        [Consumed(9, 5)],  # was never put
        [Watch(9, "again")],
        [Returned(1)],  # before it was consumed
        [Hello(b"")],  # once more
        [Answer(9, True)],  # a sender's word
        [Failed(9, 0, "")],
        [Chunk(9, 0, 0, True, (1,), body=b"x")],
    ],
    ids=lambda messages: type(messages[0]).__name__,
)
def test_a_receiver_that_breaks_the_protocol_loses_its_link_and_stops_its_streams_alone(
    bench: Bench, folder: Folder, messages: list[Message]
) -> None:
    sender = sender_with_a_chunk(bench)
    events = Recorder()
    sender.listen(events)
    sender.put("0", "1", "other_0", "untouched")
    stranger = receiver(folder)
    stranger.send(Watch(9, "s"), *messages)
    assert stranger.dropped()
    assert "broke the protocol" in events.wait("stopped", "s")[2]
    until(lambda: sender.statistics().peers == 0, "it is gone")
    assert sender.statistics().bytes_held < 100
    assert bench.make(1).get("0", "1", "other_0") == ("untouched", 10)
    stranger.sock.close()


def test_a_stage_whose_last_process_died_stops_also_streams_that_it_had_not_asked_for(
    bench: Bench, folder: Folder
) -> None:
    sender, events = bench.told()
    sender.put("0", "1", "s_0", 1, Mark(1))
    sender.put("0", "1", "ended_0", 1, Mark(1, terminal=True))
    first, second = receiver(folder), receiver(folder)
    for stranger in (first, second):
        assert isinstance(stranger.next(), Hello)
    first.sock.close()
    until(lambda: sender.statistics().peers == 1, "one is gone")
    assert sender._pending_keys == {"s_0", "ended_0"}
    second.sock.close()
    assert "its process ended" in events.wait("stopped", "s")[2]
    assert sender._pending_keys == {"ended_0"}


@pytest.mark.parametrize("messages", [[Consumed(3, 0)], [Returned(77)], [Unwatch(3, Leave.STOP, "")], [Goodbye("")]])
def test_what_may_have_crossed_another_message_is_minded_by_nobody(
    bench: Bench, folder: Folder, messages: list[Message]
) -> None:
    sender = sender_with_a_chunk(bench)
    stranger = receiver(folder)
    stranger.send(*messages, Watch(9, "s"))
    assert isinstance(stranger.next(), Hello)
    assert isinstance(stranger.next(), Chunk)
    assert sender.statistics().peers == 1
    stranger.sock.close()


def test_the_same_memory_given_back_twice_is_freed_once(bench: Bench, folder: Folder) -> None:
    sender = sender_with_a_chunk(bench)
    stranger = receiver(folder)
    stranger.send(Watch(9, "s"))
    assert isinstance(stranger.next(), Hello)
    chunk = stranger.next()
    assert isinstance(chunk, Chunk)
    stranger.send(Consumed(9, 0), Consumed(9, 0), Returned(chunk.loan), Returned(chunk.loan))
    until(lambda: sender.reap() or sender.statistics().bytes_held == 0, "it is freed")
    assert sender._arena.used == 0
    stranger.sock.close()


@pytest.mark.parametrize(
    "hello",
    [b"", b"\xc1", msgspec.msgpack.encode({"version": 1}), msgspec.msgpack.encode(ReceiverHello(2, 1)), b"\x93" * 5000],
    ids=["empty", "junk", "incomplete", "version", "deep"],
)
def test_a_greeting_that_is_none_ends_the_link(bench: Bench, folder: Folder, hello: bytes) -> None:
    sender_with_a_chunk(bench)
    stranger = receiver(folder, hello)
    assert stranger.dropped()
    stranger.sock.close()


def test_bytes_that_are_no_message_end_the_link(bench: Bench, folder: Folder) -> None:
    sender_with_a_chunk(bench)
    stranger = receiver(folder)
    stranger.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert stranger.dropped()
    stranger.sock.close()


def test_who_does_not_greet_is_let_go(bench: Bench, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transfer.connectors.links.GREETING", 0.05)
    sender_with_a_chunk(bench)
    (name,) = folder.names(SENDER)
    sock = folder.connect(name)
    assert sock is not None
    stranger = Stranger(sock)
    assert stranger.dropped()
    sock.close()


# --- senders


def lend(fake: FakeSender, watch: int, **changes: object) -> Chunk:
    """A chunk in the fake sender's arena."""
    frames = encode({"x": Tensor("uint8", (50_000,), b"\7" * 50_000)})
    parts = [frames.head, *frames.buffers]
    stored = fake.arena.reserve(tuple(map(len, parts)))
    fake.arena.fill(stored, parts)
    assert stored.offset is not None
    return Chunk(watch, 0, 1, False, stored.sizes, 1, stored.offset)._replace(**changes)


def watched(fake: FakeSender, bench: Bench) -> tuple[SharedMemoryConnector, Recorder, Stranger, int]:
    connector, events = bench.told(1)
    connector.watch("0", "1", "s")
    stranger = fake.accept()
    watch = stranger.next()
    assert isinstance(watch, Watch)
    assert watch.stream == "s"
    return connector, events, stranger, watch.watch


def test_a_sender_by_hand_is_understood(bench: Bench, fake: FakeSender) -> None:
    connector, events, stranger, watch = watched(fake, bench)
    stranger.send(lend(fake, watch))
    found = take(connector, events, "s_0")
    assert bytes(found["x"].buffer) == b"\7" * 50_000
    assert stranger.next() == Consumed(watch, 0)
    del found
    assert stranger.next() == Returned(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": MIB},
        {"offset": 2**63},
        {"offset": 4096 * 255},
        {"offset": 5},
        {"sizes": (2**62, 2**62)},
        {"sizes": (MIB + 1,)},
    ],
    ids=str,
)
def test_a_place_outside_of_the_shared_memory_is_never_read(
    bench: Bench, fake: FakeSender, changes: dict[str, object]
) -> None:
    connector, events, stranger, watch = watched(fake, bench)
    stranger.send(lend(fake, watch, **changes))
    assert stranger.dropped()
    with pytest.raises(BrokenStream, match=r"stage 0 \(pid \d+\): it broke the protocol"):
        take(connector, events, "s_0")


@pytest.mark.parametrize("second", [{"number": 2}, {"number": 0}, {"number": 1, "generation": 2}], ids=str)
def test_a_gap_or_another_generation_breaks_the_stream(
    bench: Bench, fake: FakeSender, second: dict[str, object]
) -> None:
    connector, events, stranger, watch = watched(fake, bench)
    chunk = Chunk(watch, 0, 1, False, (1,), body=b"\xc0")
    stranger.send(chunk, chunk._replace(**second))
    assert stranger.dropped()
    events.wait("ready", "s", 2)
    with pytest.raises(BrokenStream, match="is due"):
        connector.get("0", "1", "s_1")


def test_a_chunk_behind_the_last_breaks_the_link(bench: Bench, fake: FakeSender) -> None:
    connector, events, stranger, watch = watched(fake, bench)
    chunk = Chunk(watch, 0, 1, True, (1,), body=b"\xc0")
    stranger.send(chunk, chunk._replace(number=1))
    assert stranger.dropped()
    assert take(connector, events, "s_0") is None  # complete all the same


@pytest.mark.parametrize("message", [Watch(1, "x"), Consumed(1, 0), Hello(b"")], ids=lambda m: type(m).__name__)
def test_a_sender_that_speaks_as_a_receiver_loses_its_link(bench: Bench, fake: FakeSender, message: Message) -> None:
    _, _, stranger, _ = watched(fake, bench)
    stranger.send(message)
    assert stranger.dropped()


def test_a_chunk_of_a_watch_that_is_none_is_given_back_unread(bench: Bench, fake: FakeSender) -> None:
    connector, _, stranger, _ = watched(fake, bench)
    stranger.send(lend(fake, 12345))
    assert stranger.next() == Returned(1)
    assert connector.statistics().watching == 1


def test_a_descriptor_of_something_else_is_refused(bench: Bench, fake: FakeSender) -> None:
    connector = bench.make(1)
    connector.watch("0", "1", "s")
    read, write = os.pipe()
    try:
        assert fake.accept(fd=read).dropped()
    finally:
        os.close(read)
        os.close(write)


def test_a_size_that_its_memory_file_does_not_have_is_refused(bench: Bench, fake: FakeSender) -> None:
    connector = bench.make(1)
    connector.watch("0", "1", "s")
    assert fake.accept(msgspec.msgpack.encode(SenderHello(1, "0", 0, 64 * MIB))).dropped()


def test_a_socket_of_another_user_is_not_spoken_to(
    bench: Bench, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = sender_with_a_chunk(bench)
    monkeypatch.setattr("triptych.transfer.connectors.shm.peer", lambda sock: (1, os.getuid() + 1))
    (name,) = folder.names(SENDER)
    sock = folder.connect(name)
    assert sock is not None
    assert Stranger(sock).dropped()
    sock.close()
    assert bench.make(1).get("0", "1", "s_0") is None
    assert sender.statistics().peers == 0
