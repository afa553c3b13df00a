"""Chunks between hosts: the same streams as in shared memory, over TCP.

A sender listens; a receiver connects to the replica that a chunk's metadata names (`source_host`, `source_port`), or
to those that are configured for the stage. Both show that they know the same secret before anything else is taken
(`auth`). Large chunks go in pieces, so that they do not keep others waiting (`pieces`); what a sender may have on its
way is bounded by each stream's credit. A connection that is lost breaks the streams that were open on it, and is made
again while others wait for it.

Options: `stage_id`, `deployment` (of another one nothing is taken); `host` and `port` to listen at (default 127.0.0.1
and any), `advertise` (host that receivers connect to, where it is another); `peers` ({stage: ["host:port", …]});
`secret`, `secret_file`, or the environment's TRIPTYCH_TRANSFER_SECRET; `tls` ({cert, key, ca, hostname}, see `tls`);
`credit_chunks`, `credit_bytes`, `buffer_bytes` (memory for chunks that are not consumed), `tensors`; `silence_s`
(seconds until a peer that says nothing is given up), `reach_s` (seconds until a sender that cannot be reached fails
the streams that wait for it), `max_peers`. Others are left to whom they concern.

Without a secret it stays on the loopback interface. TLS is what keeps out those who can change packets on their way.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from triptych.transfer.connectors.auth import VARIABLE, Client, Refused, Secret, Server, Who, find_secret, name, refusal
from triptych.transfer.connectors.base import NO_MARK, Mark
from triptych.transfer.connectors.dialing import (
    Address,
    Dialer,
    Farewells,
    Nobody,
    addresses,
    is_any,
    is_for,
    is_loopback,
    join,
    parse_peers,
    resolve,
    wait,
    waiting,
)
from triptych.transfer.connectors.frames import Goodbye, Hello, Leave, Limits, Unwatch, Watch
from triptych.transfer.connectors.hub import ASKING, Hub
from triptych.transfer.connectors.inbound import Source
from triptych.transfer.connectors.link import Link
from triptych.transfer.connectors.links import GREETING
from triptych.transfer.connectors.loop import READ
from triptych.transfer.connectors.options import integer, options, text
from triptych.transfer.connectors.peers import MIB, HeapStore
from triptych.transfer.connectors.records import Credit
from triptych.transfer.connectors.streams import Receiving
from triptych.transfer.connectors.tcplink import PlainTransport, TcpLink, TcpTransport, TlsTransport
from triptych.transfer.connectors.tls import Tls
from triptych.transfer.errors import ConnectorError
from triptych.transfer.wire import tensor_maker

_LOG: Final = logging.getLogger(__name__)
DEPLOYMENT: Final = "default"
LARGEST: Final = 1 << 32
"""Bytes of a chunk, at most; of all chunks that are on their way to a receiver, as well."""
STRANGERS: Final = 32
"""Connections that have not shown yet who they are, at most."""
UNUSED: Final = 60.0
"""Seconds after which a connection that only metadata named, and that nothing is watched on, is closed."""
_FAREWELL: Final = 1 << 62  # numbers of watches that only say farewell begin here
_PAUSE: Final = 1.0  # seconds without accepting, where there are no descriptors left
_FULL: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class TcpConnector(Hub):
    """See the module's text."""

    kind = "tcp"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConnectorError for an option that cannot be."""
        given = options(config)
        deployment = name(text(given, "deployment", DEPLOYMENT), "deployment")
        secret = find_secret(given, os.environ)
        self._secret = Secret(secret, deployment)
        self._deployment = deployment
        self._tls = None if given.get("tls") is None else Tls(given["tls"])
        self._peers = parse_peers(given.get("peers"))
        self._host = text(given, "host", "127.0.0.1")
        self._port = integer(given, "port", 0, 0, 65535)
        self._advertise = text(given, "advertise", "" if is_any(self._host) else self._host)
        self._silence = integer(given, "silence_s", 15, 1, 3600)
        self._reach = integer(given, "reach_s", 30, 1, 3600)
        self._most = integer(given, "max_peers", 256, 1, 1 << 16)
        self._budget = integer(given, "receive_bytes", 1024 * MIB, 1, LARGEST)
        for host in {self._host, *(host for places in self._peers.values() for host, _ in places)}:
            self._allow(host)
        tensors = given.get("tensors")
        tensor_maker(tensors)
        self._setup = threading.Lock()
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._stage: str | None = None  # that this end sends for
        self._dialers: dict[Address, Dialer] = {}
        self._dialed: dict[Link, Dialer] = {}
        self._farewells = Farewells(self._reach)
        shown = {key: value for key, value in given.items() if key != "secret"}
        super().__init__(
            {**{key: value for key, value in config.items() if key != "secret"}, "extra": shown},
            stage_id=integer(given, "stage_id", 0, 0, 1 << 16),
            store=HeapStore(integer(given, "buffer_bytes", 256 * MIB, 1, LARGEST)),
            credit=Credit(
                integer(given, "credit_chunks", 8, 1, 1024), integer(given, "credit_bytes", 64 * MIB, 1, LARGEST)
            ),
            limits=Limits(chunk=self._budget),
            tensors=tensors,
        )
        if self._port and given.get("role") != "receiver":
            try:
                self._listen()
            except BaseException:
                self.close()
                raise

    def _allow(self, host: str) -> None:
        """Raise ConnectorError where nothing would protect a connection with that host."""
        if not self._secret.given and not is_loopback(host):
            raise ConnectorError(
                f"{host} is not this machine, and there is no secret: give both ends the same one (option secret or "
                f"secret_file, or {VARIABLE}; openssl rand -hex 32 makes one)"
            )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that receivers are to connect to, once this end listens."""
        return self._address

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: object, mark: Mark = NO_MARK
    ) -> tuple[bool, int, dict[str, Any] | None]:
        done, nbytes, _ = super().put(from_stage, to_stage, put_key, data, mark)
        assert self._address is not None
        host, port = self._address
        return done, nbytes, {"source_host": host, "source_port": port}

    # --- listening

    def _offer(self, stage: str) -> None:
        with self._setup:
            self._check()
            if self._listener is None:
                self._listen()
            if self._stage is None:
                self._stage = stage
        if stage != self._stage:
            raise ConnectorError(f"a connector sends for one stage: for {self._stage!r}, and not for {stage!r} too")

    def _listen(self) -> None:
        if self._tls is not None:
            _ = self._tls.server  # or say at once what is missing
        if not self._advertise:
            raise ConnectorError(f"host {self._host!r} is none to connect to: advertise is to say which receivers take")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A port whose last owner has just died is free.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, self._port))
            sock.listen(128)
        except OSError as error:
            sock.close()
            place = join(self._host, self._port)
            raise ConnectorError(f"cannot listen at {place}: {error.strerror or error}") from None
        self._address = self._advertise, sock.getsockname()[1]
        self._listener = sock
        self._loop.add(sock.fileno(), READ, lambda mask: self._accept(sock))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(STRANGERS):
            try:
                sock, place = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    _LOG.error("tcp: cannot accept: %s", error.strerror)
                    self._loop.modify(listener.fileno(), 0)
                    self._loop.call_later(_PAUSE, lambda: self._accept_again(listener))
                    return
                continue  # that one has gone already
            sock.setblocking(False)
            self._tune(sock)
            with self._lock:
                full = self._closed or len(self._links) >= self._most
                strangers = [link for link in self._links if not link.to_sender and not link.greeted]
                if len(strangers) >= STRANGERS:
                    oldest = min(strangers, key=_began)
                    self._lose(oldest, "too many others have not shown who they are either")
            if full:
                _LOG.warning("tcp: a connection from %s is one too many: at most %d", join(*place[:2]), self._most)
                sock.close()
                continue
            transport: TcpTransport = PlainTransport(sock)
            if self._tls is not None:
                transport = TlsTransport(sock, self._tls.server, None)
            self._take(transport, join(*place[:2]), None)

    def _accept_again(self, listener: socket.socket) -> None:
        with self._setup:
            if self._listener is listener:
                self._loop.modify(listener.fileno(), READ)

    # --- connecting

    def _seek(self, source: Source, *, again: bool = False) -> None:
        found = addresses(source, self._peers)
        for address in found:
            self._allow(address.host)
        if found and self._tls is not None:
            _ = self._tls.client
        due = []
        with self._lock:
            if not (found or again or any(is_for(address, source) for address in self._dialers)):
                raise ConnectorError(
                    f"nobody knows where stage {source.stage} is: neither does the chunk's metadata name its sender "
                    f"(source_host, source_port), nor does option peers have it"
                )
            for address in found:
                dialer = self._dialers.setdefault(address, Dialer(address))
                dialer.used = time.monotonic()
                if dialer.idle:
                    dialer.busy = True
                    due.append(dialer)
        for dialer in due:
            self._dial(dialer)
        if again and due and not self._loop.inside:
            with self._lock:  # for a name to be resolved, so that there is somebody to ask
                self._answered.wait_for(lambda: not any(dialer.busy for dialer in due), ASKING)

    def _watch(self, name: str, source: Source, *, implicit: bool = False) -> None:
        super()._watch(name, source, implicit=implicit)
        for address in addresses(source, self._peers):
            # An attempt of `_seek` may have failed for good already, when nobody was waiting yet.
            if address not in self._dialers:
                dialer = self._dialers[address] = Dialer(address)
                self._plan(dialer, 0.0)

    def unwatch(self, stream: str, reason: str | None = None) -> None:
        with self._lock:
            left = self._inbound.find(stream)
            if reason is not None and left is not None and not left.told and left.life.state is Receiving.WATCHING:
                self._farewells.add(stream, left.source, reason, time.monotonic())
        super().unwatch(stream, reason)

    def _plan(self, dialer: Dialer, seconds: float) -> None:
        dialer.timer = self._loop.call_later(seconds, lambda: self._again(dialer))

    def _dial(self, dialer: Dialer) -> None:
        """Make an attempt, which `busy` says that nobody else makes. Without the lock."""
        if not dialer.resolved:
            try:
                dialer.resolved = resolve(dialer.address, socket.AI_NUMERICHOST)
            except socket.gaierror:
                # Resolvers may take their time, and whoever called us has none.
                threading.Thread(target=self._look_up, args=(dialer,), daemon=True).start()
                return
        self._connect(dialer)

    def _look_up(self, dialer: Dialer) -> None:
        try:
            dialer.resolved = resolve(dialer.address)
        except (OSError, UnicodeError) as error:
            why = f"no such host: {error}"
            self._loop.call_soon(lambda: self._failed(dialer, why))
            return
        self._loop.call_soon(lambda: self._connect(dialer))

    def _connect(self, dialer: Dialer) -> None:
        family, place = dialer.resolved.pop(0)
        try:
            self._allow(place[0])
            transport = self._transport(family, place, dialer.address.host)
        except (OSError, ConnectorError) as error:
            self._failed(dialer, getattr(error, "strerror", None) or str(error))
            return
        self._take(transport, join(dialer.address.host, dialer.address.port), dialer)

    def _transport(self, family: int, place: tuple[Any, ...], host: str) -> TcpTransport:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._tune(sock)
        error = sock.connect_ex(place)
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(error, os.strerror(error))
        if self._tls is None:
            return PlainTransport(sock)
        return TlsTransport(sock, self._tls.client, self._tls.hostname or host)

    def _failed(self, dialer: Dialer, why: str) -> None:
        with self._lock:
            dialer.busy = False
            self._retry(dialer, why)
            self._after()

    def _retry(self, dialer: Dialer, why: str, *, refused: bool = False) -> None:
        """An attempt has failed, or a connection was lost: plan the next one while anybody waits. With the lock.

        `refused`: no attempt will do better.
        """
        now = time.monotonic()
        dialer.failures += 1
        dialer.since = now if dialer.since is None else dialer.since
        streams = waiting(dialer.address, self._inbound.watched())
        never = refused or (now - dialer.since >= self._reach and not dialer.resolved)
        if never:
            others = any(
                other is not dialer and other.address.stage == dialer.address.stage and not other.failures
                for other in self._dialers.values()
            )
            nobody = Nobody(dialer.address)
            reason = why if refused else f"it could not be reached in {now - dialer.since:.0f} s: {why}"
            for stream in streams:
                if stream.source.host or not others:
                    self._inbound.failed(nobody, stream.number, 0, reason)
        # Whoever has looked for it a moment ago may not have said yet for what.
        wanted = streams or now - dialer.used < GREETING or self._farewells.owed(dialer.address, now)
        if wanted and not (never or self._closed):
            self._plan(dialer, 0.0 if dialer.resolved else wait(dialer.failures))
        elif self._dialers.get(dialer.address) is dialer:
            del self._dialers[dialer.address]
        self._answered.notify_all()

    def _again(self, dialer: Dialer) -> None:
        with self._lock:
            if self._closed or self._dialers.get(dialer.address) is not dialer:
                return
            dialer.timer = None
            dialer.busy = True
        self._dial(dialer)

    # --- links

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Bytes that the other host never acknowledges: the kernel notices before our own heart-beat has to.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * self._silence)

    def _take(self, transport: TcpTransport, address: str, dialer: Dialer | None) -> None:
        """Take over a new connection, and greet whom it is to."""
        link = TcpLink(
            transport,
            self._dirty,
            to_sender=dialer is not None,
            limits=self._limits,
            budget=self._budget,
            address=address,
        )
        stage = str(self.stage_id) if self._stage is None else self._stage
        who = Who(self._deployment, stage, os.getpid())
        with self._lock:
            if self._closed:
                transport.close()
                return
            self._links.add(link)
            if dialer is None:
                link.carrier = Server(who, self._secret, b"" if self._tls is None else self._tls.certificate)
            else:
                link.carrier = client = Client(who, self._secret)
                dialer.busy, dialer.link = False, link
                self._dialed[link] = dialer
                link.post(Hello(client.opening()))
            self._loop.add(transport.fileno(), READ, lambda mask: self._on_ready(link, mask))
            self._answered.notify_all()
            self._after()
            link.deadline = self._loop.call_later(GREETING, lambda: self._too_late(link))

    def _greet(self, link: Link, body: bytes) -> bool:
        assert isinstance(link, TcpLink)
        handshake: Client | Server = link.carrier
        dialer = self._dialed.get(link)
        try:
            if isinstance(handshake, Client):
                handshake.certificate = link.transport.binding
            answer = handshake.receive(body)
            assert handshake.peer is not None
            if dialer is not None and handshake.peer.stage != dialer.address.stage:
                raise Refused(
                    f"it is stage {handshake.peer.stage}, not {dialer.address.stage}",
                    f"this end looks for stage {dialer.address.stage}",
                )
        except Refused as refused:
            self._refuse(link, refused)
            return False
        if answer is not None:
            link.post(Hello(answer))
        if not handshake.done:
            return False
        link.stage, link.pid = handshake.peer.stage, handshake.peer.pid
        if dialer is not None:
            link.source = Source(*dialer.address)
            dialer.failures, dialer.since, dialer.resolved = 0, None, []
            for number, (stream, reason) in enumerate(self._farewells.say(dialer.address, time.monotonic())):
                link.post(Watch(_FAREWELL + number, stream))
                link.post(Unwatch(_FAREWELL + number, Leave.STOP, reason))
        link.establish()
        self._loop.call_later(self._silence / 3, lambda: self._beat(link))
        return True

    def _refuse(self, link: TcpLink, refused: Refused) -> None:
        link.refused = True
        if refused.tell is not None:
            link.post(Hello(refusal(refused.tell)))
            with contextlib.suppress(OSError):
                link.flush()
        self._lose(link, str(refused))

    def _lose(self, link: Link, reason: str) -> None:
        if link not in self._links:
            return
        super()._lose(link, reason)
        assert isinstance(link, TcpLink)
        dialer = self._dialed.pop(link, None)
        if not (link.greeted or self._closed or (dialer is not None and dialer.failures)):
            _LOG.warning("tcp: stage %s and %s have not come together: %s", self.stage_id, link.name, reason)
        if dialer is not None:
            dialer.link = None
            self._retry(dialer, reason, refused=link.refused)

    def _read(self, link: Link) -> None:
        super()._read(link)
        assert isinstance(link, TcpLink)
        if not link.closed and link.transport.pending:
            self._loop.call_soon(lambda: self._on_ready(link, READ))

    def _matches(self, link: Link, source: Source) -> bool:
        return is_for(Address(*link.source), source)

    def _beat(self, link: TcpLink) -> None:
        """See that the peer is still there; now and then."""
        with self._lock:
            if link.closed:
                return
            if time.monotonic() - link.heard >= self._silence:
                self._read(link)  # it may be this end that was asleep
            silent = time.monotonic() - link.heard
            dialer = self._dialed.get(link)
            if silent >= self._silence:
                self._lose(link, f"nothing was heard of it for {silent:.0f} s")
            elif dialer is not None and self._unused(link, dialer):
                link.post(Goodbye("it is not needed any more"))
                self._after()
                self._lose(link, "it is not needed any more")
            elif silent >= self._silence / 4:
                link.ping()
            self._after()
        if not link.closed:
            self._loop.call_later(self._silence / 3, lambda: self._beat(link))

    def _unused(self, link: TcpLink, dialer: Dialer) -> bool:
        place = dialer.address.host, dialer.address.port
        if place in self._peers.get(dialer.address.stage, ()) or time.monotonic() - dialer.used < UNUSED:
            return False
        streams = self._inbound.watched()
        return not waiting(dialer.address, streams) and not any(stream.peer is link for stream in streams)

    # --- the end

    def _end(self) -> None:
        with self._setup:
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _forked(self) -> None:
        super()._forked()
        if self._listener is not None:
            self._listener.close()


def _began(link: Link) -> float:
    assert isinstance(link, TcpLink)
    return link.began
