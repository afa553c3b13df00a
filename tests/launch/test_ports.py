"""Ports are free, distinct and stay ours; a port in use is named with its user."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from triptych.launch.ports import Need, PortError, Reservations, reachable


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def serve_once(host: str, port: int) -> None:
    """Does what a server does on its port, and leaves a connection in TIME_WAIT behind."""
    with socket.create_server((host, port)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.close()
        client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_an_engine_can_listen_on_its_reserved_port_again_and_again_and_nobody_else_gets_it(host: str) -> None:
    with Reservations() as ours, Reservations() as others:
        port = ours.take([Need("a", "http", host)])["a", "http"]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for _ in range(2):
            with socket.socket(family) as engine:
                engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                engine.bind((host, port))
                engine.listen()
            # A plain bind, and another launcher's choice.
            with socket.socket(family) as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind((host, port))
            assert others._hold(Need("b", "http", host), port, exclusive=True) is not None
        if family == socket.AF_INET:
            serve_once(host, port)
            serve_once(host, port)


def test_many_needs_get_distinct_ports_and_rows_are_adjacent() -> None:
    with Reservations() as reserved:
        needs = [Need(f"e{n}", "http", "127.0.0.1", width=3) for n in range(50)]
        taken = reserved.take(needs)
        ports = {port + offset for port in taken.values() for offset in range(3)}
        assert len(ports) == 150


def test_a_port_in_use_is_refused_with_the_name_of_who_wants_and_who_has_it(busy: int) -> None:
    with Reservations() as reserved, pytest.raises(PortError) as caught:
        reserved.take([Need("free", "http", "127.0.0.1"), Need("encode-0", "http", "127.0.0.1", busy)])
    message = str(caught.value)
    assert message.startswith(f"port {busy} on 127.0.0.1, for http of encode-0, is already in use by pid {os.getpid()}")


def test_a_port_in_use_on_all_addresses_is_in_use_on_one() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, Reservations() as reserved:
        port = server.getsockname()[1]
        with pytest.raises(PortError, match="already in use"):
            reserved.take([Need("a", "http", "127.0.0.1", port)])


def test_two_processes_that_want_one_port_are_both_named() -> None:
    with Reservations() as reserved:
        port = reserved.take([Need("probe", "http", "127.0.0.1")])["probe", "http"]
        with pytest.raises(PortError, match=f"{port} on .* for http of gateway, is also for http of probe"):
            reserved.take([Need("gateway", "http", "127.0.0.1", port)])


def test_after_a_refusal_nothing_is_held(busy: int) -> None:
    with Reservations() as reserved:
        free = reserved.take([Need("a", "http", "127.0.0.1")])["a", "http"]
        with pytest.raises(PortError):
            reserved.take([Need("b", "http", "127.0.0.1", busy)])
        socket.create_server(("127.0.0.1", free)).close()


def test_a_host_that_is_not_of_this_machine_is_named() -> None:
    with Reservations() as reserved, pytest.raises(PortError, match=r"on 192\.0\.2\.1, for http of a, cannot be used"):
        reserved.take([Need("a", "http", "192.0.2.1", 4000)])


@pytest.mark.parametrize(
    ("listen", "connect"),
    [("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("host", "host")],
)
def test_the_address_to_connect_to(listen: str, connect: str) -> None:
    assert reachable(listen) == connect
