"""What connectors that keep connections have in common: streams over links, on one I/O thread.

A *carrier* (shared memory, TCP) is a subclass that knows how two ends find each other, greet, and move a chunk's bytes:

- `_offer(stage)`: called before each `put`. The first time: listen, and let receivers know.
- `_seek(source, again)`: called before each watch. The first time for a source: connect to its senders, now and
  whenever one appears. `again`: a `get` without a watch wants to know now.
- `_adopt(transport, to_sender=…)`: the carrier calls it with each new connection, of either kind. The hub then reads
  and writes; `post` a `Hello` on the link to greet. For connecting, accepting, and timers, `self._loop`.
- `_greet(link, body)`: a `Hello` came. Check it, set `link.stage`, `link.pid` and (of a sender) `link.source`, answer
  with `link.post(Hello(…))` where that is due, and return True once the link is established: only then other messages
  are taken. As many rounds as it likes; raise WireError to refuse.
- `_matches(link, source)`: whether a watch for `source` is for this sender.
- `_lost(link)`: it is gone (reconnect, forget).
- where bytes are: the `Store` given to the constructor. One whose `Stored.offset` is set lends memory: a chunk's
  message then only names the place, and `_borrow(link, chunk)` at the receiver makes a view of it, which gives the
  memory back when its last reader is gone (`_give_back`). With a `HeapStore` chunks travel whole, behind their
  message, and are freed when they are consumed.

All of `_greet`, `_matches`, `_lost` are called with the lock held: no waiting there. `_offer`, `_seek` and `_borrow`
without it. `_adopt` takes it.

The lock guards every stream and link; messages are posted under it and written before it is let go. So what `get`
consumed is with the kernel when it returns. Nobody waits for anything while holding it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from triptych.transfer.connectors.base import NO_MARK, Events, Mark, Statistics, StreamConnector
from triptych.transfer.connectors.frames import (
    Answer,
    Buffer,
    Chunk,
    Consumed,
    Failed,
    Goodbye,
    Hello,
    Leave,
    Limits,
    Message,
    Returned,
    Unwatch,
    Watch,
    scatter,
)
from triptych.transfer.connectors.inbound import Inbound, Source
from triptych.transfer.connectors.link import Link, Transport
from triptych.transfer.connectors.loop import READ, WRITE, Loop
from triptych.transfer.connectors.outbound import Outbound
from triptych.transfer.connectors.peers import Peer, Store
from triptych.transfer.connectors.records import Credit, News, Ready, Stopped
from triptych.transfer.connectors.streams import split_key
from triptych.transfer.errors import ClosedError, ConnectorError, WireError
from triptych.transfer.wire import decode, encode, tensor_maker

_LOG: Final = logging.getLogger(__name__)
GREETING: Final = 5.0
"""Seconds that two ends have to greet each other."""
ASKING: Final = 1.0
"""Seconds that a `get` without a watch waits for its peers."""
FAREWELL: Final = 1.0
"""Seconds that `close` waits for peers to take what was put."""
READS: Final = 16
"""Reads of one link in one go, so that a busy one does not keep the others waiting."""


class Hub(StreamConnector):
    """Streams over links. See the module's text for what a subclass adds."""

    kind = "connector"

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        stage_id: int,
        store: Store,
        credit: Credit,
        limits: Limits,
        tensors: str | None = None,
    ) -> None:
        self.config = config
        self.stage_id = stage_id
        self._store = store
        self._limits = limits
        self._tensors = tensors
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._news: deque[News] = deque()
        self._outbound = Outbound(store, credit, f"stage {stage_id} -> {stage_id + 1}", self._news)
        self._inbound = Inbound(self._news)
        self._links: set[Link] = set()
        self._dirty: set[Link] = set()
        self._returned: deque[tuple[Link, Chunk, int]] = deque()
        self._events: Events | None = None
        self._closed = False
        self._pid = os.getpid()
        self._loop = Loop(f"triptych-{self.kind}-{stage_id}", self._turn)
        forget = weakref.WeakMethod(self._forked)
        # A child that inherits these sockets would keep peers from seeing that this process is gone.
        os.register_at_fork(after_in_child=lambda: (call := forget()) and call())

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<{type(self).__name__} stage {self.stage_id}: {self._outbound.open_streams()} sending, "
                f"{len(self._inbound)} watching, {self._outbound.bytes_held} bytes held, {len(self._links)} peers>"
            )

    # --- for carriers

    @abstractmethod
    def _offer(self, stage: str) -> None:
        """Be there for receivers, as a sender of this stage."""

    @abstractmethod
    def _seek(self, source: Source, *, again: bool = False) -> None:
        """Find senders. `again`: look once more, also where all should be known."""

    @abstractmethod
    def _greet(self, link: Link, body: bytes) -> bool:
        """A greeting came: whether the link is established now."""

    @abstractmethod
    def _matches(self, link: Link, source: Source) -> bool:
        """Whether a watch is for this sender."""

    def _lost(self, link: Link) -> None:
        """The link is gone."""

    def _end(self) -> None:
        """The connector is closing: links are gone already."""

    def _borrow(self, link: Link, chunk: Chunk) -> memoryview:
        """The memory of a chunk that was lent."""
        raise WireError(f"{link.name} lends memory, and this connector has none to share")

    align = 16
    """Of the parts of a chunk in memory that was lent."""

    def _adopt(self, transport: Transport, *, to_sender: bool) -> Link:
        """Take over a new connection. Raises ClosedError, after which the connection is closed."""
        link = Link(transport, self._dirty, to_sender=to_sender, limits=self._limits)
        with self._lock:
            if self._closed:
                transport.close()
                raise ClosedError("the connector is closed")
            self._links.add(link)
            self._loop.add(transport.fileno(), READ, lambda mask: self._on_ready(link, mask))
        self._loop.call_later(GREETING, lambda: self._too_late(link))
        return link

    def _too_late(self, link: Link) -> None:
        with self._lock:
            if not link.greeted and not link.closed:
                self._lose(link, f"it has not greeted within {GREETING:g} s")

    def _give_back(self, link: Link, chunk: Chunk, nbytes: int) -> None:
        """Lent memory has no reader any more. For finalizers: takes no lock, as the collector may hold it already."""
        self._returned.append((link, chunk, nbytes))
        self._loop.wake()

    def _on_return(self, link: Link, chunk: Chunk, nbytes: int) -> None:
        """Before a peer is told that its memory is not read any more."""

    # --- putting

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: object, mark: Mark = NO_MARK
    ) -> tuple[bool, int, dict[str, Any] | None]:
        self._check()
        frames = encode(data)
        parts: list[Buffer] = [frames.head, *frames.buffers]
        sizes = tuple(map(len, parts))
        self._offer(from_stage)
        with self._lock:
            self._check()
            try:
                stream, held = self._outbound.begin(put_key, to_stage, mark, sizes)
            finally:
                self._after()
        if held is None:
            return True, sum(sizes), None
        try:
            self._store.fill(held.stored, parts)
        except BaseException:
            with self._lock:
                self._outbound.abandon(stream, held)
            raise
        with self._lock:
            try:
                self._check()
                self._outbound.commit(stream, held)
                if self._inbound.find(stream.name) is not None:
                    self._news.append(Ready(stream.name))
            finally:
                self._after()
        return True, held.stored.nbytes, None

    def fail(self, from_stage: str, to_stage: str, stream: str, reason: str) -> None:
        self._check()
        self._offer(from_stage)
        with self._lock:
            self._outbound.fail(stream, to_stage, reason)
            self._after()

    def discard(self, keys: Iterable[str]) -> int:
        with self._lock:
            count = self._outbound.discard(keys)
            self._after()
        return count

    @property
    def _pending_keys(self) -> Collection[str]:
        with self._lock:
            return self._outbound.pending()

    def reap(self) -> None:
        with self._lock:
            for link in [link for link in self._links if not link.to_sender]:
                self._read(link)
            self._after()

    # --- getting

    def watch(self, from_stage: str, to_stage: str, stream: str, metadata: Mapping[str, Any] | None = None) -> None:
        self._check()
        source = Source.of(from_stage, metadata)
        self._seek(source)
        with self._lock:
            self._watch(stream, source)
            self._after()

    def _watch(self, name: str, source: Source, *, implicit: bool = False) -> None:
        peers = [link for link in self._links if link.to_sender and link.greeted and self._matches(link, source)]
        self._inbound.watch(name, source, peers, implicit=implicit)

    def unwatch(self, stream: str, reason: str | None = None) -> None:
        with self._lock:
            self._inbound.unwatch(stream, Leave.DROP if reason is None else Leave.STOP, reason or "")
            self._after()

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        self._check()
        name, number, _ = split_key(get_key)
        with self._lock:
            own = self._take_own(name, number)
            found = None if own else self._inbound.take(name, number)
            asked = own is not None or found is not None or self._inbound.find(name) is not None
            self._after()
        if own is not None:
            return own
        if not asked:
            found = self._ask(name, number, Source.of(from_stage, metadata))
        if found is None:
            return None
        chunk, peer = found
        assert isinstance(peer, Link)
        return self._decode(peer, chunk), sum(chunk.sizes)

    def _take_own(self, name: str, number: int) -> tuple[Any, int] | None:
        stored = self._outbound.take_own(name, number)
        if stored is None:
            return None
        body = memoryview(bytearray(self._store.read(stored)))
        self._outbound.consumed_own(name, number)
        head, *buffers = scatter(body, stored.sizes, self._store.align(stored))
        return decode(head, buffers, tensor_maker(self._tensors)), stored.nbytes

    def _ask(self, name: str, number: int, source: Source) -> tuple[Chunk, Peer] | None:
        """Watch for as long as peers take to answer. The watch stays if there is such a stream."""
        self._seek(source, again=True)
        until = time.monotonic() + ASKING
        with self._lock:
            self._watch(name, source, implicit=True)
            self._after()
            while (stream := self._inbound.find(name)) is not None and stream.peer is None and not self._closed:
                strangers = any(link.to_sender and not link.greeted for link in self._links)
                left = until - time.monotonic()
                if not (stream.asked or strangers) or left <= 0 or self._loop.inside:
                    break
                self._answered.wait(left)
            try:
                found = self._inbound.take(name, number)
            finally:
                stream = self._inbound.find(name)
                if stream is not None and stream.implicit and stream.peer is None:
                    self._inbound.unwatch(name, Leave.RETURN)
                self._after()
        return found

    def _decode(self, link: Link, chunk: Chunk) -> Any:
        if chunk.loan:
            view, align = self._borrow(link, chunk), self.align
        else:
            view, align = memoryview(chunk.body), 16
        head, *buffers = scatter(view, chunk.sizes, align)
        return decode(head, buffers, tensor_maker(self._tensors))

    # --- links

    def _on_ready(self, link: Link, mask: int) -> None:
        with self._lock:
            if mask & WRITE:
                self._dirty.add(link)
            if mask & ~WRITE:
                self._read(link)
            self._after()

    def _read(self, link: Link) -> None:
        """Act on what came. With the lock."""
        try:
            for _ in range(READS):
                if link.closed:
                    return
                messages = link.read()
                if messages is None:
                    self._lose(link, link.farewell or "its process ended")
                    return
                for message in messages:
                    self._handle(link, message)
        except BlockingIOError:
            return
        except WireError as error:
            _LOG.warning("%s of %s broke the protocol: %s", self.kind, link.name, error)
            self._lose(link, f"it broke the protocol: {error}")
        except OSError as error:
            self._lose(link, link.farewell or f"its connection broke: {error}")

    def _handle(self, link: Link, message: Message) -> None:
        if not link.greeted:
            if not isinstance(message, Hello):
                raise WireError(f"{type(message).__name__} before the greeting")
            link.greeted = self._greet(link, message.body)
            if link.greeted and link.to_sender:
                self._inbound.greet(link, (s for s in self._inbound.watched() if self._matches(link, s.source)))
            self._answered.notify_all()
        elif isinstance(message, Goodbye):
            link.farewell = f"it has closed its connector: {message.reason}"
        elif link.to_sender:
            self._handle_sender(link, message)
        else:
            self._handle_receiver(link, message)

    def _handle_sender(self, link: Link, message: Message) -> None:
        match message:
            case Chunk():
                self._check_chunk(link, message)
                self._inbound.chunk(link, message)
            case Answer(watch, found):
                self._inbound.answer(link, watch, found=found)
            case Failed(watch, number, reason):
                self._inbound.failed(link, watch, number, reason)
            case _:
                raise WireError(f"{type(message).__name__} from a sender")
        self._answered.notify_all()

    def _check_chunk(self, link: Link, chunk: Chunk) -> None:
        """Raise WireError where a chunk lies outside of what is shared. With the lock."""
        if chunk.loan:
            raise WireError("memory is lent, and none is shared")

    def _handle_receiver(self, link: Link, message: Message) -> None:
        match message:
            case Consumed(watch, number):
                self._outbound.consumed(link, watch, number)
            case Returned(loan):
                self._outbound.returned(link, loan)
            case Watch(watch, stream):
                self._outbound.watch(link, watch, stream)
            case Unwatch(watch, how, reason):
                self._outbound.unwatch(link, watch, how, reason)
            case _:
                raise WireError(f"{type(message).__name__} from a receiver")

    def _lose(self, link: Link, reason: str) -> None:
        """A link is over. With the lock."""
        if link not in self._links:
            return
        self._links.discard(link)
        self._dirty.discard(link)
        self._loop.remove(link.transport.fileno())
        link.close()
        if link.to_sender:
            others = any(other.to_sender and other.source.stage == link.source.stage for other in self._links)
            self._inbound.lost(link, f"{link.name}: {reason}", others=others)
        else:
            self._outbound.lost(link, f"{link.name}: {reason}")
        self._lost(link)
        self._answered.notify_all()

    # --- after every step

    def _after(self) -> None:
        """Write what was posted; have the adapter told. With the lock."""
        while self._returned:
            link, chunk, nbytes = self._returned.popleft()
            self._on_return(link, chunk, nbytes)
            link.borrowed -= nbytes
            link.post(Returned(chunk.loan))
        while self._dirty:
            link = self._dirty.pop()
            try:
                done = link.flush()
            except OSError as error:
                self._lose(link, link.farewell or f"its connection broke: {error}")
                continue
            if done is link.writing and not link.closed:
                link.writing = not done
                self._loop.modify(link.transport.fileno(), READ | (0 if done else WRITE))
        if self._news and not self._loop.inside:
            self._loop.wake()

    def _turn(self) -> None:
        """Tell the adapter, on the I/O thread, without the lock."""
        if self._returned:
            with self._lock:
                self._after()
        events = self._events
        while self._news:
            news = self._news.popleft()
            if events is None:
                continue
            if isinstance(news, Ready):
                events.ready(news.stream)
            elif isinstance(news, Stopped):
                events.stopped(news.stream, news.reason)
            else:
                events.writable(news.stream)

    def listen(self, events: Events) -> None:
        self._events = events

    def statistics(self) -> Statistics:
        with self._lock:
            return Statistics(
                self._outbound.open_streams(), len(self._inbound), self._outbound.bytes_held, len(self._links)
            )

    # --- the end

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ConnectorError(
                f"this connector belongs to process {self._pid}, and this is a fork of it: make one here"
            )
        if self._closed:
            raise ClosedError(f"the connector of stage {self.stage_id} is closed")

    def _forked(self) -> None:
        """In a forked child: let go of what the parent has open, so that its end is seen when it ends."""
        self._closed = True
        self._loop.forget()
        for link in self._links:
            link.transport.close()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for link in self._links:
                link.post(Goodbye("bye"))
            self._after()
            self._answered.notify_all()
        self._drain(time.monotonic() + FAREWELL)
        self._loop.close()
        with self._lock:
            for link in list(self._links):
                self._lose(link, "this end was closed")
            self._outbound.close()
            self._news.clear()
        self._end()

    def _drain(self, until: float) -> None:
        """Wait until the kernel has what was posted."""
        if self._loop.inside:
            return
        with self._lock:
            while any(link.writing for link in self._links) and time.monotonic() < until:
                self._answered.wait(0.01)
