"""Ports that stay ours: chosen before anything starts, and held until everything has ended.

A reservation is a socket that is bound (with SO_REUSEADDR) but never listens. Linux lets an engine bind the same port
and listen on it, since servers set SO_REUSEADDR too; but gives it to nobody as a source port, and no other launcher
takes it while its engine is down for a restart.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class PortError(Exception):
    """A port that cannot be had. The message says who needs it and, if it can be seen, who has it."""


@dataclass(frozen=True, slots=True)
class Need:
    """A row of `width` adjacent ports for one process. `port` None: any that are free."""

    process: str
    label: str
    host: str
    port: int | None = None
    width: int = 1


class Reservations:
    """Holds ports until `close`. A context manager."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[socket.socket, Need]] = {}

    def __enter__(self) -> Reservations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives all ports back."""
        while self._held:
            self._held.popitem()[1][0].close()

    def take(self, needs: Iterable[Need]) -> dict[tuple[str, str], int]:
        """The first port of each need, by (process, label). Fixed ones first, so that no free choice takes them.

        Raises PortError, holding nothing.
        """
        found: dict[tuple[str, str], int] = {}
        try:
            for need in sorted(needs, key=lambda need: need.port is None):
                found[need.process, need.label] = self._fixed(need) if need.port else self._free(need)
        except PortError:
            self.close()
            raise
        return found

    def _fixed(self, need: Need) -> int:
        assert need.port is not None
        for port in range(need.port, need.port + need.width):
            where = f"port {port} on {need.host}, for {need.label} of {need.process},"
            if port in self._held:
                _, other = self._held[port]
                raise PortError(f"{where} is also for {other.label} of {other.process}")
            error = self._hold(need, port, exclusive=False)
            if error is not None and error.errno != errno.EADDRINUSE:
                raise PortError(f"{where} cannot be used: {error.strerror}")
            if error is not None:
                owner = listener(port)
                raise PortError(f"{where} is already in use{f' by {owner}' if owner else ''}")
        return need.port

    def _free(self, need: Need) -> int:
        # Below the ephemeral range, so that the choice is not one that outgoing connections make all the time.
        top = _ephemeral_start() - need.width
        for _ in range(512):
            start = random.randrange(min(15000, top - 1), top)
            row = range(start, start + need.width)
            if not any(port in self._held for port in row):
                if all(self._hold(need, port, exclusive=True) is None for port in row):
                    return start
                for port in row:
                    if port in self._held:
                        self._held.pop(port)[0].close()
        raise PortError(f"no free port found on {need.host} for {need.label} of {need.process}")

    def _hold(self, need: Need, port: int, *, exclusive: bool) -> OSError | None:
        """Binds a port. Exclusive: not one that another launcher holds (or that has connections dying on it)."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(need.host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            return error
        try:
            if not exclusive:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the engine in
        except OSError as error:
            sock.close()
            return error
        self._held[port] = (sock, need)
        return None


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def listener(port: int) -> str | None:
    """`pid N (command)` of the process that listens on a TCP port here, if /proc shows it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(fd.readlink()) in inodes:
                process = fd.parent.parent
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {process.name} ({command[:80]})"
    return None


def reachable(host: str) -> str:
    """A host to connect to for a host to listen on: loopback for a wildcard, brackets around IPv6."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.version == 6:
            return "[::1]" if address.is_unspecified else f"[{host}]"
    return host
