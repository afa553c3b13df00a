"""TLS: who is let in, and that what goes through it is the same."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.transfer.connectors.tcp_rig import SECRET, Stranger, end, until
from triptych.transfer.connectors.tcp import TcpConnector
from triptych.transfer.errors import BrokenStream, ConnectorError
from triptych.transfer.wire import Tensor


class Papers:
    """A certificate authority, and certificates for this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str) -> dict[str, str]:
        """`cert` and `key`."""
        made = self._ca.issue_cert(*names)
        cert, key = (str(self._folder / f"{names[0]}.{kind}".replace(":", "-")) for kind in ("pem", "key"))
        made.private_key_pem.write_to_path(key)
        made.cert_chain_pems[0].write_to_path(cert)
        return {"cert": cert, "key": key}


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("foreign"))


def sender_tls(papers: Papers, *names: str) -> dict[str, Any]:
    return {"tls": {**papers.issue(*(names or ("127.0.0.1",)))}, "secret": SECRET}


def receiver_tls(papers: Papers, **more: Any) -> dict[str, Any]:
    return {"tls": {"ca": papers.ca, **more}, "secret": SECRET}


@pytest.mark.parametrize("size", [0, 100, 16_384, 16_385, 300_000, 5_000_000])
def test_chunks_of_any_size_go_through(papers: Papers, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    with end(0, **sender_tls(papers)) as sender, end(1, **receiver_tls(papers)) as receiver:
        metadata = sender.put("r_0_0", {"x": Tensor("uint8", (size,), data[:size])})
        receiver.watch("r_0", metadata)
        assert bytes(receiver.take("r_0_0")["x"].buffer) == data[:size]
        for number in range(1, 30):
            sender.put(f"r_0_{number}", number)
            assert receiver.take(f"r_0_{number}") == number


def test_many_streams_both_ways_of_credit(papers: Papers) -> None:
    with end(0, **sender_tls(papers)) as sender, end(1, **receiver_tls(papers)) as receiver:
        metadata = sender.where()
        for i in range(64):
            receiver.watch(f"r{i}_0", metadata)
        for i in range(64):
            for number in range(4):
                sender.put(f"r{i}_0_{number}", {"x": Tensor("uint8", (9000,), bytes([i]) * 9000)})
        for number in range(4):
            for i in range(64):
                assert bytes(receiver.take(f"r{i}_0_{number}")["x"].buffer) == bytes([i]) * 9000
        until(lambda: not sender.connector._pending_keys, "consumption to be told")


def test_nothing_readable_is_on_the_wire(papers: Papers) -> None:
    with end(0, **sender_tls(papers)) as sender, tap(sender.where()["source_port"]) as (port, seen):
        with end(1, **receiver_tls(papers)) as receiver:
            sender.put("private-stream_0_0", "private text of a user")
            receiver.watch("private-stream_0", {"source_host": "127.0.0.1", "source_port": port})
            assert receiver.take("private-stream_0_0") == "private text of a user"
        assert len(seen) > 500
        assert b"private" not in seen
        assert b"triptych" not in seen


def test_without_tls_it_is_so_that_the_test_before_can_fail() -> None:
    with end(0, secret=SECRET) as sender, tap(sender.where()["source_port"]) as (port, seen):
        with end(1, secret=SECRET) as receiver:
            sender.put("private-stream_0_0", "x")
            receiver.watch("private-stream_0", {"source_host": "127.0.0.1", "source_port": port})
            assert receiver.take("private-stream_0_0") == "x"
        assert b"private" in seen
        assert SECRET.encode() not in seen


@pytest.mark.parametrize("who", ["foreign authority", "another name"])
def test_a_sender_with_another_certificate_is_refused(papers: Papers, foreign: Papers, who: str) -> None:
    config = sender_tls(foreign) if who == "foreign authority" else sender_tls(papers, "elsewhere.example")
    with end(0, **config) as sender, end(1, **{**receiver_tls(papers), "reach_s": 1}) as receiver:
        metadata = sender.put("r_0_0", "x")
        receiver.watch("r_0", metadata)
        error = receiver.end_of("r_0_0")
        assert isinstance(error, BrokenStream)
        # It is tried again until `reach_s`; the last try may have been cut off by the other end before this one spoke.
        assert "certificate verify failed" in str(error) or "EOF occurred" in str(error)
        assert sender.connector._pending_keys == {"r_0_0"}


def test_the_name_that_a_certificate_has_to_have_can_be_given(papers: Papers) -> None:
    with (
        end(0, **sender_tls(papers, "stage-0.example")) as sender,
        end(1, **receiver_tls(papers, hostname="stage-0.example")) as receiver,
    ):
        receiver.watch("r_0", sender.put("r_0_0", "x"))
        assert receiver.take("r_0_0") == "x"


def test_a_sender_with_an_authority_asks_receivers_for_certificates_too(papers: Papers) -> None:
    server = sender_tls(papers)
    server["tls"]["ca"] = papers.ca
    with end(0, **server) as sender:
        metadata = sender.put("r_0_0", "x")
        with end(1, **{**receiver_tls(papers), "reach_s": 1}) as without:
            without.watch("r_0", metadata)
            assert isinstance(without.end_of("r_0_0"), BrokenStream)
        with end(1, **receiver_tls(papers, **papers.issue("receiver.example"))) as receiver:
            receiver.watch("r_0", metadata)
            assert receiver.take("r_0_0") == "x"


def test_a_valid_certificate_is_no_secret(papers: Papers) -> None:
    config = {**receiver_tls(papers), "secret": "another secret of theirs"}
    with end(0, **sender_tls(papers)) as sender, end(1, **config) as receiver:
        receiver.watch("r_0", sender.put("r_0_0", "x"))
        assert "secret" in str(receiver.end_of("r_0_0"))


def test_whoever_stands_between_with_a_certificate_of_the_same_authority_is_noticed(papers: Papers) -> None:
    # It ends TLS at both sides and passes everything on, the whole handshake too.
    with end(0, **sender_tls(papers)) as sender, end(1, **receiver_tls(papers)) as receiver:
        metadata = sender.put("r_0_0", "private")
        with between(papers, metadata["source_port"]) as port:
            receiver.watch("r_0", {**metadata, "source_port": port})
            assert "the secrets of both ends are not the same" in str(receiver.end_of("r_0_0"))
        assert sender.connector._pending_keys == {"r_0_0"}


@pytest.mark.parametrize("plain", ["sender", "receiver"])
def test_one_end_with_tls_and_one_without_do_not_come_together_and_are_told_in_time(papers: Papers, plain: str) -> None:
    secret = {"secret": SECRET, "reach_s": 1}
    configs = (
        secret if plain == "sender" else sender_tls(papers),
        secret if plain == "receiver" else {**receiver_tls(papers), "reach_s": 1},
    )
    with end(0, **configs[0]) as sender, end(1, **configs[1]) as receiver:
        receiver.watch("r_0", sender.put("r_0_0", "x"))
        error = receiver.end_of("r_0_0")
        assert isinstance(error, BrokenStream)
        assert "stage 0 at 127.0.0.1" in str(error)


def test_a_stranger_that_never_finishes_tls_is_dropped_in_time(papers: Papers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transfer.connectors.tcp.GREETING", 0.2)
    with end(0, **sender_tls(papers)) as sender, Stranger(sender.where()) as stranger:
        stranger.send(b"\x16\x03\x01")
        assert stranger.hear() is None


def test_what_tls_lacks_is_said(papers: Papers, tmp_path: Path) -> None:
    with end(0, **receiver_tls(papers)) as sender, pytest.raises(ConnectorError, match="cert and key are missing"):
        sender.put("r_0_0", 1)
    with end(1, **sender_tls(papers)) as receiver, pytest.raises(ConnectorError, match="ca is missing"):
        receiver.watch("r_0", {"source_host": "127.0.0.1", "source_port": 7})
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate", "ascii")
    for tls in ({"ca": str(wrong)}, {"cert": str(wrong), "key": str(wrong)}, {"cert": str(wrong)}, "yes"):
        with pytest.raises(ConnectorError, match="tls"):
            TcpConnector({"tls": tls})


# -- what stands between


def exchange(a: socket.socket, b: socket.socket, seen: bytearray) -> None:
    """Pass on what comes, either way, until one of them ends. On one thread: a TLS connection is not for two."""
    for sock in (a, b):
        sock.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            ready = [s for s in (a, b) if isinstance(s, ssl.SSLSocket) and s.pending()]
            for sock in ready or select.select([a, b], [], [])[0]:
                try:
                    data = sock.recv(1 << 16)
                except (BlockingIOError, ssl.SSLWantReadError):
                    continue  # readable, and nothing for us: TLS has things of its own to say
                if not data:
                    return
                seen += data
                (b if sock is a else a).sendall(data)


@contextlib.contextmanager
def relay(port: int, wrap: Any = None) -> Iterator[tuple[int, bytearray]]:
    """Passes one connection on; its port, and all bytes that went through."""
    seen = bytearray()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                inner, _ = listener.accept()
                outer = socket.create_connection(("127.0.0.1", port))
                with inner, outer:
                    a, b = (inner, outer) if wrap is None else wrap(inner, outer)
                    with a, b:
                        exchange(a, b, seen)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], seen
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            assert not thread.is_alive()


def tap(port: int) -> Any:
    return relay(port)


@contextlib.contextmanager
def between(papers: Papers, port: int) -> Iterator[int]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = papers.issue("127.0.0.1", "between.example")
    server.load_cert_chain(made["cert"], made["key"])
    client = ssl.create_default_context(cafile=papers.ca)

    def wrap(inner: socket.socket, outer: socket.socket) -> tuple[socket.socket, socket.socket]:
        return server.wrap_socket(inner, server_side=True), client.wrap_socket(outer, server_hostname="127.0.0.1")

    with relay(port, wrap) as (place, _):
        yield place
