"""What peers do that are no connectors, that do not belong here, or that die; and what they cost."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.transfer.connectors.tcp_rig import PATIENCE, SECRET, End, Stranger, end, pair, reset, until
from triptych.transfer.connectors.auth import MAX_BODY
from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.frames import Chunk, Consumed, Goodbye, Hello, Leave, Message, Unwatch, Watch, pack
from triptych.transfer.connectors.pieces import PING
from triptych.transfer.connectors.tcp import STRANGERS
from triptych.transfer.errors import BrokenStream, WouldBlock
from triptych.transfer.wire import Tensor


def still_serves(sender: End, **config: Any) -> None:
    """Whether a receiver that belongs here gets what it came for."""
    with end(1, **config) as receiver:
        metadata = sender.put("check_0_0", "served")
        receiver.watch("check_0", metadata)
        assert receiver.take("check_0_0") == "served"
    sender.connector.fail("0", "1", "check_0", "over")
    sender.connector.discard(["check_0_0"])


# -- before it is known who it is


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\0" * 100,
        b"\xff" * 5000,
        b"\xff\xff\xff\xff\x01",  # a greeting of 4 GiB
        (MAX_BODY + 17).to_bytes(4, "little") + b"\x01",
        (1 << 19).to_bytes(4, "little") + b"\x07",  # a chunk
        b"\x05\0\0\0\x01hello",
        PING * 10_000,
    ],
)
def test_garbage_before_the_handshake_costs_its_connection_and_nothing_else(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with end(0, secret=SECRET) as sender, Stranger(sender.where()) as stranger:
        try:
            stranger.send(garbage)
        except ConnectionError:
            pass
        heard = stranger.hear()
        assert heard is None or isinstance(heard, Hello)
        assert stranger.hear() is None
        assert "127.0.0.1" in caplog.text
        still_serves(sender, secret=SECRET)


@pytest.mark.parametrize("message", [Watch(1, "r_0"), Consumed(1, 0), Unwatch(1, Leave.STOP, "no"), Goodbye("no")])
def test_nothing_but_a_greeting_is_taken_from_a_stranger(message: Message) -> None:
    with end(0) as sender:
        metadata = sender.put("r_0_0", "private")
        with Stranger(metadata) as stranger:
            stranger.send(message)
            assert stranger.hear() is None
        assert "r_0_0" in sender.connector._pending_keys


def test_a_handshake_byte_by_byte_is_a_handshake() -> None:
    with end(0) as sender:
        metadata = sender.put("r_0_0", "x")
        with Stranger(metadata) as stranger:

            def drip(*messages: Any) -> bytes:
                data = b"".join(b"".join(pack(message)) for message in messages)
                for byte in data:
                    stranger.sock.sendall(bytes([byte]))
                return data

            stranger.send = drip  # type: ignore[method-assign]
            stranger.greet()
            stranger.send(Watch(1, "r_0"))
            heard = stranger.hear()
            assert isinstance(heard, Chunk)
            assert heard.watch == 1


def test_a_recorded_handshake_is_refused_when_it_is_played_again(caplog: pytest.LogCaptureFixture) -> None:
    with end(0, secret=SECRET) as sender:
        metadata = sender.put("r_0_0", "private")
        with Stranger(metadata) as stranger:
            recorded = stranger.greet(secret=SECRET)
        with Stranger(metadata) as replay:
            for body in recorded:
                replay.send(Hello(body))
                heard = replay.hear()
                assert isinstance(heard, Hello)
            assert b"not the same" in heard.body
            assert replay.hear() is None
        until(lambda: "secret is another one" in caplog.text, "a line in the log")


def test_a_peer_that_never_finishes_its_greeting_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transfer.connectors.tcp.GREETING", 0.2)
    with end(0) as sender:
        metadata = sender.where()
        with Stranger(metadata) as silent, Stranger(metadata) as slow:
            slow.send(b"\x50\0\0\0\x01trip")
            assert silent.hear() is None
            assert slow.hear() is None
        assert sender.connector.statistics().peers == 0


def test_strangers_are_few_at_a_time_and_the_one_who_waited_longest_goes() -> None:
    with end(0) as sender:
        metadata = sender.where()
        strangers = [Stranger(metadata) for _ in range(STRANGERS)]
        until(lambda: sender.connector.statistics().peers == STRANGERS, "strangers to come")
        strangers.append(Stranger(metadata))
        assert strangers[0].hear() is None
        assert sender.connector.statistics().peers <= STRANGERS
        still_serves(sender)
        for stranger in strangers:
            stranger.sock.close()


def test_connections_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with end(0, max_peers=2) as sender:
        metadata = sender.where()
        with Stranger(metadata) as first, Stranger(metadata) as second:
            first.greet()
            second.greet()
            with Stranger(metadata) as third:
                assert third.hear() is None
            assert "one too many: at most 2" in caplog.text
        until(lambda: sender.connector.statistics().peers == 0, "peers to go")
        still_serves(sender)


# -- who does not belong here


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ({"secret": SECRET}, {"secret": SECRET + "!"}, "secret"),
        ({"secret": SECRET}, {}, "secret"),
        ({}, {"secret": SECRET}, "secret"),
        ({"deployment": "blue"}, {"deployment": "green"}, "deployment"),
    ],
)
def test_ends_that_do_not_belong_together_say_so_at_both_and_the_watch_fails_at_once(
    ours: dict[str, Any], theirs: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with end(0, **ours) as sender, end(1, **theirs) as receiver:
        metadata = sender.put("r_0_0", "private")
        receiver.watch("r_0", metadata)
        error = receiver.end_of("r_0_0")
        assert isinstance(error, BrokenStream)
        assert reason in str(error)
        assert f"stage 0 at 127.0.0.1:{metadata['source_port']}" in str(error)
        for stage in (0, 1):
            said = re.compile(rf"tcp: stage {stage} and 127\.0\.0\.1:\d+ have not come together: .*{reason}")
            until(lambda said=said: said.search(caplog.text), f"a line at stage {stage}")  # type: ignore[misc]
        assert SECRET not in caplog.text
        # That is no reason to try again and again.
        assert not receiver.connector._dialers
        assert sender.connector._pending_keys == {"r_0_0"}


def test_a_sender_of_another_stage_than_was_looked_for_is_told_apart() -> None:
    with end(3) as sender, end(1) as receiver:
        metadata = sender.put("r_0_0", "x")
        receiver.watch("r_0", metadata)
        assert "it is stage 3, not 0" in str(receiver.end_of("r_0_0"))


# -- after the handshake


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"\xff\xff\xff\xff\x07",
        b"\x10\0\0\0\x20" + (1).to_bytes(8, "little") + (1 << 63).to_bytes(8, "little"),
        b"\x0c\0\0\0\x21" + (9).to_bytes(8, "little") + b"1234",  # of no stream: passed over; then
    ],
)
def test_garbage_after_the_handshake_breaks_that_peer_s_streams_and_no_others(garbage: bytes) -> None:
    with end(0, credit_chunks=1) as sender:
        metadata = sender.put("r_0_0", "x")
        with end(1) as receiver, Stranger(metadata) as stranger:
            sender.put("good_0_0", 1)
            receiver.watch("good_0", metadata)
            assert receiver.take("good_0_0") == 1
            stranger.greet()
            stranger.send(Watch(1, "r_0"))
            assert isinstance(stranger.hear(), Chunk)
            stranger.send(garbage, b"\xff" * 64)
            while stranger.hear() is not None:
                pass
            assert "broke the protocol" in sender.told.wait("stopped", "r_0")[2]
            sender.put("good_0_1", 2)
            assert receiver.take("good_0_1") == 2


def test_a_consumption_of_what_was_never_sent_is_a_fault_of_that_peer() -> None:
    with end(0) as sender:
        metadata = sender.put("r_0_0", "x")
        with Stranger(metadata) as stranger:
            stranger.greet()
            stranger.send(Watch(1, "r_0"))
            assert isinstance(stranger.hear(), Chunk)
            stranger.send(Consumed(1, 5))
            while stranger.hear() is not None:
                pass
        assert "broke the protocol" in sender.told.wait("stopped", "r_0")[2]
        still_serves(sender)


def test_a_receiver_that_does_not_read_costs_its_streams_credit_and_nobody_else_anything() -> None:
    with end(0, credit_chunks=4) as sender:
        metadata = sender.where()
        with Stranger(metadata) as stranger:
            stranger.greet()
            stranger.send(Watch(1, "stuck_0"))
            large = Tensor("uint8", (6 << 20,), bytes(6 << 20))
            for number in range(4):
                sender.put(f"stuck_0_{number}", large)
            with pytest.raises(WouldBlock):
                sender.put("stuck_0_4", large)
            still_serves(sender)
            held = sender.connector.statistics().bytes_held
            assert held > 20 << 20
        assert sender.told.wait("stopped", "stuck_0")
        assert sender.connector.statistics().bytes_held == 0


def test_a_peer_that_vanished_without_a_word_is_noticed_in_time() -> None:
    # As when its host lost power: the socket is open, and nobody answers.
    with end(0, silence_s=1) as sender:
        metadata = sender.put("r_0_0", "x")
        with Stranger(metadata) as stranger:
            stranger.greet()
            stranger.send(Watch(1, "r_0"))
            began = time.monotonic()
            assert "nothing was heard of it for" in sender.told.wait("stopped", "r_0")[2]
            assert time.monotonic() - began < 3


def test_two_ends_that_have_nothing_to_say_stay_together() -> None:
    with pair(silence_s=1) as (sender, receiver):
        metadata = sender.put("r_0_0", "x")
        receiver.watch("r_0", metadata)
        receiver.take("r_0_0")
        (link,) = receiver.connector._links
        heard = link.heard  # type: ignore[attr-defined]
        until(lambda: link.heard > heard + 1.2, "signs of life")  # type: ignore[attr-defined]
        sender.put("r_0_1", "y")
        assert receiver.take("r_0_1") == "y"


# -- connections that are lost


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """A port that nobody listens at, and that nobody else gets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def cut(made: End) -> None:
    """The network breaks all of its connections."""
    for link in list(made.connector._links):
        sock = link.transport._sock  # type: ignore[attr-defined]
        sock.shutdown(socket.SHUT_RDWR)


def test_a_lost_connection_breaks_what_was_open_on_it_at_both_ends_and_the_next_stream_connects_again() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", "x")
        receiver.watch("r_0", metadata)
        receiver.take("r_0_0")
        cut(receiver)
        error = receiver.end_of("r_0_1")
        assert isinstance(error, BrokenStream)
        assert "stage 0 at 127.0.0.1" in str(error)
        assert "stage 1 at 127.0.0.1" in sender.told.wait("stopped", "r_0")[2]
        with pytest.raises(BrokenStream):
            sender.put("r_0_1", "y")
        sender.put("next_0_0", "z")
        receiver.watch("next_0", metadata)
        assert receiver.take("next_0_0") == "z"


def test_a_sender_that_comes_back_on_its_port_is_found_again() -> None:
    with end(0) as first:
        port = first.where()["source_port"]
        receiver = End(1, peers={"0": [f"127.0.0.1:{port}"]})
        first.put("r_0_0", 1)
        receiver.watch("r_0")
        receiver.take("r_0_0")
    try:
        assert "closed its connector" in str(receiver.end_of("r_0_1"))
        receiver.watch("new_0")
        with end(0, port=port) as second:
            second.put("new_0_0", "back")
            assert receiver.take("new_0_0") == "back"
    finally:
        receiver.connector.close()


def test_a_sender_that_cannot_be_reached_fails_its_watches_in_time_and_is_named() -> None:
    # Bound and not listening: else the port might be anybody's, the connecting end's own for one.
    with socket.socket() as deaf, end(1, reach_s=1) as receiver:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        receiver.watch("r_0", {"source_host": "127.0.0.1", "source_port": port})
        error = receiver.end_of("r_0_0")
        assert f"stage 0 at 127.0.0.1:{port}: it could not be reached in" in str(error)
        assert "refused" in str(error) or "its process ended" in str(error)
        assert not receiver.connector._dialers


def test_a_sender_hears_that_a_stream_was_left_before_it_was_reached() -> None:
    with end(0) as sender, end(1) as receiver:
        metadata = sender.put("r_0_0", "x", mark=Mark(1))
        receiver.watch("r_0", {**metadata, "source_host": "localhost"})  # takes a moment longer
        receiver.connector.unwatch("r_0", "the client went away")
        assert "the client went away" in sender.told.wait("stopped", "r_0")[2]
        assert sender.connector.statistics().bytes_held == 0
        # Whoever watches the name anew gets what is begun anew.
        receiver.watch("r_0", metadata)
        with pytest.raises(BrokenStream):
            sender.put("r_0_1", "y", mark=Mark(1))
        sender.put("r_0_0", "new", mark=Mark(2))
        assert receiver.take("r_0_0") == "new"
        assert not receiver.connector._farewells


def test_a_name_that_does_not_exist_is_told() -> None:
    with end(1, reach_s=1, secret=SECRET) as receiver:
        receiver.watch("r_0", {"source_host": "no-such-host.invalid", "source_port": 7})
        assert "no such host" in str(receiver.end_of("r_0_0"))


def test_a_host_that_does_not_answer_keeps_nobody_waiting_who_only_watches() -> None:
    # Its queue of connections is full: packets are dropped, as by a firewall.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        place = deaf.getsockname()
        fill = [socket.socket() for _ in range(3)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(place)
        with end(1) as receiver:
            began = time.monotonic()
            receiver.watch("r_0", {"source_host": place[0], "source_port": place[1]})
            assert receiver.get("r_0_0") is None
            assert time.monotonic() - began < 0.5
        for sock in fill:
            sock.close()


def test_an_attempt_that_was_reset_is_made_again() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with end(1) as receiver:
            receiver.watch("r_0", {"source_host": "127.0.0.1", "source_port": port})
            listener.settimeout(PATIENCE)
            for _ in range(3):
                reset(listener.accept()[0])


# -- processes that die

CHILD = """
import sys, threading
from triptych.transfer.connectors.tcp import TcpConnector
role, port = sys.argv[1], int(sys.argv[2])
if role == "sender":
    connector = TcpConnector({"stage_id": 0})
    _, _, metadata = connector.put("0", "1", "r_0_0", "x")
    print(metadata["source_port"], flush=True)
else:
    connector = TcpConnector({"stage_id": 1, "peers": {"0": [f"127.0.0.1:{port}"]}})
    connector.watch("0", "1", "r_0")
    while connector.get("0", "1", "r_0_0") is None:
        threading.Event().wait(0.01)
    print("taken", flush=True)
sys.stdin.read()
"""


def child(role: str, port: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, role, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def children() -> Any:
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


def test_a_sender_that_is_killed_breaks_its_streams_at_once(children: list[subprocess.Popen[str]]) -> None:
    children.append(child("sender"))
    assert children[0].stdout is not None
    port = int(children[0].stdout.readline())
    with end(1) as receiver:
        receiver.watch("r_0", {"source_host": "127.0.0.1", "source_port": port})
        assert receiver.take("r_0_0") == "x"
        began = time.monotonic()
        os.kill(children[0].pid, signal.SIGKILL)
        error = receiver.end_of("r_0_1")
        assert time.monotonic() - began < 1
        assert f"stage 0 at 127.0.0.1:{port} (pid {children[0].pid})" in str(error)


def test_a_receiver_that_is_killed_gives_its_sender_s_memory_back_and_stops_the_stream(
    children: list[subprocess.Popen[str]],
) -> None:
    with end(0) as sender:
        metadata = sender.put("r_0_0", "x")
        children.append(child("receiver", metadata["source_port"]))
        assert children[0].stdout is not None
        assert children[0].stdout.readline() == "taken\n"
        sender.put("r_0_1", Tensor("uint8", (1 << 20,), bytes(1 << 20)))
        os.kill(children[0].pid, signal.SIGKILL)
        assert f"pid {children[0].pid}" in sender.told.wait("stopped", "r_0")[2]
        assert sender.connector.statistics().bytes_held == 0
        with pytest.raises(BrokenStream):
            sender.put("r_0_2", "y")
        still_serves(sender)


def test_accepting_goes_on_after_the_process_had_no_descriptors_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triptych.transfer.connectors.tcp._PAUSE", 0.05)
    with end(0) as sender:
        metadata = sender.where()
        listener = sender.connector._listener
        assert listener is not None
        full = threading.Event()

        class Full:
            def fileno(self) -> int:
                return listener.fileno()

            def close(self) -> None:
                listener.close()

            def accept(self) -> Any:
                if not full.is_set():
                    full.set()
                    raise OSError(24, "Too many open files")
                return listener.accept()

        fake: Any = Full()
        accept = sender.connector._accept
        sender.connector._listener = fake
        sender.connector._loop._calls[listener.fileno()] = lambda mask: accept(fake)
        with end(1) as receiver:
            sender.put("r_0_0", "x")
            receiver.watch("r_0", metadata)
            assert receiver.take("r_0_0") == "x"
        assert full.is_set()
        assert "Too many open files" in caplog.text


def test_a_fork_of_the_process_does_not_keep_its_connections() -> None:
    with pair() as (sender, receiver):
        metadata = sender.put("r_0_0", "x")
        receiver.watch("r_0", metadata)
        receiver.take("r_0_0")
        port = metadata["source_port"]
        pid = os.fork()
        if not pid:
            # The child: it has nothing open of what its parent has.
            left = [fd for fd in os.listdir("/proc/self/fd") if _is_socket_of(fd, port)]
            os._exit(1 if left else 0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        sender.put("r_0_1", "y")
        assert receiver.take("r_0_1") == "y"


def _is_socket_of(fd: str, port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(int(fd))) as sock:
            return port in (sock.getsockname()[1], sock.getpeername()[1])
    except (OSError, IndexError):
        return False


def test_retries_are_logged_once_and_not_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with nobody() as port, end(1) as receiver:
        receiver.watch("r_0", {"source_host": "127.0.0.1", "source_port": port})
        until(lambda: any(d.failures >= 3 for d in receiver.connector._dialers.values()), "three failures")
    assert len(caplog.records) == 1
