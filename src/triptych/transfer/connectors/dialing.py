"""When to connect to which sender. Decisions and records, no I/O."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from triptych.transfer.connectors.frames import Message
from triptych.transfer.connectors.inbound import Incoming, Source
from triptych.transfer.connectors.loop import Timer
from triptych.transfer.connectors.peers import Peer
from triptych.transfer.connectors.streams import Receiving
from triptych.transfer.connectors.tcplink import TcpLink
from triptych.transfer.errors import ConnectorError

FIRST_WAIT: Final = 0.05
"""Seconds until the second attempt, about; each one after waits twice as long."""
LONGEST_WAIT: Final = 2.0


class Address(NamedTuple):
    """Where a sender of a stage listens."""

    stage: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"stage {self.stage} at {join(self.host, self.port)}"


def join(host: str, port: int) -> str:
    """`host:port`, and `[host]:port` of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Dialer:
    """What is known of one sender's address. `since`: when the present row of failures began."""

    __slots__ = ("address", "busy", "failures", "link", "resolved", "since", "timer", "used", "why")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.link: TcpLink | None = None
        self.busy = False  # an attempt is being made
        self.timer: Timer | None = None  # of the next attempt
        self.failures = 0
        self.since: float | None = None
        self.why = ""  # the last one failed
        self.resolved: list[tuple[int, tuple[Any, ...]]] = []  # family, address: what is left to try
        self.used = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is neither a connection nor an attempt at one, now or planned."""
        return self.link is None and not self.busy and self.timer is None


class Nobody(Peer):
    """A sender that was never reached: whom a stream's failure is from."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._address = address

    @property
    def name(self) -> str:
        return str(self._address)

    def post(self, message: Message) -> None:
        """There is nobody to hear it."""


class Farewells:
    """Streams that were left before their sender was reached: it is to hear of that, for some time to come."""

    MOST: Final = 1024

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: OrderedDict[str, tuple[float, Source, str]] = OrderedDict()  # until, whose, why

    def __len__(self) -> int:
        return len(self._left)

    def add(self, stream: str, source: Source, reason: str, now: float) -> None:
        """The stream was left, for that reason."""
        self._left.pop(stream, None)
        self._left[stream] = now + self._seconds, source, reason
        if len(self._left) > self.MOST:
            self._left.popitem(last=False)

    def owed(self, address: Address, now: float) -> bool:
        """Whether the sender at that address may have one to hear."""
        self._expire(now)
        return any(is_for(address, source) for _, source, _ in self._left.values())

    def say(self, address: Address, now: float) -> list[tuple[str, str]]:
        """What the sender at that address is to hear: streams and reasons. One that was named hears it once; of
        others nobody knows who it is for."""
        self._expire(now)
        out = []
        for stream, (_, source, reason) in list(self._left.items()):
            if is_for(address, source):
                out.append((stream, reason))
                if source.host and source.port:
                    del self._left[stream]
        return out

    def _expire(self, now: float) -> None:
        while self._left:
            stream, (until, _, _) = next(iter(self._left.items()))
            if until > now:
                return
            del self._left[stream]


def wait(failures: int, spread: Callable[[], float] = random.random) -> float:
    """Seconds until the next attempt, after so many that failed; never the same for two receivers."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(failures - 1, 16)) * (0.5 + 0.5 * spread())


def parse_peers(given: object) -> dict[str, list[tuple[str, int]]]:
    """Option `peers`: of each stage, where its replicas listen, as `host:port`. Raises ConnectorError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConnectorError("peers: a mapping from a stage to a list of host:port")
    out: dict[str, list[tuple[str, int]]] = {}
    for stage, places in given.items():
        if isinstance(places, str):
            places = [places]
        if not isinstance(places, Iterable) or isinstance(places, Mapping):
            raise ConnectorError(f"peers: {stage}: a list of host:port")
        out[str(stage)] = [parse_place(place) for place in places]
    return out


def parse_place(place: object) -> tuple[str, int]:
    """`host:port` or `[IPv6]:port` in its parts. Raises ConnectorError."""
    host, _, port = place.rpartition(":") if isinstance(place, str) else ("", "", "")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare) is not (bare != host):
        raise ConnectorError(f"peers: {place!r} is not host:port (IPv6 as [::1]:port)")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConnectorError(f"peers: {place!r} has no port from 1 to 65535")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether that is this machine itself, whatever resolvers say."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Whether that stands for all addresses of this machine, and so for none to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def addresses(source: Source, peers: Mapping[str, list[tuple[str, int]]]) -> list[Address]:
    """Where to look for the senders that a watch is for: the replica that it names, or all that are configured."""
    if source.host and source.port:
        return [Address(source.stage, source.host, source.port)]
    return [Address(source.stage, host, port) for host, port in peers.get(source.stage, ())]


def is_for(address: Address, source: Source) -> bool:
    """Whether a watch is for the sender at that address."""
    named = source.host and source.port
    return address.stage == source.stage and (not named or (address.host, address.port) == (source.host, source.port))


def waiting(address: Address, streams: Iterable[Incoming]) -> list[Incoming]:
    """Which of these streams no sender has yet and the one at that address may have."""
    return [stream for stream in streams if stream.life.state is Receiving.WATCHING and is_for(address, stream.source)]


def resolve(address: Address, flags: int = 0) -> list[tuple[int, tuple[Any, ...]]]:
    """Family and socket address of each, in the resolver's order. Waits for it; raises OSError, UnicodeError."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICSERV)
    return [(family, place) for family, _, _, _, place in found]
