"""The links of a connector: an I/O thread that reads and writes them, and whom their messages are for.

What a carrier adds is said in `hub`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from triptych.transfer.connectors.base import Events
from triptych.transfer.connectors.frames import (
    Answer,
    Chunk,
    Consumed,
    Failed,
    Goodbye,
    Hello,
    Limits,
    Message,
    Returned,
    Unwatch,
    Watch,
)
from triptych.transfer.connectors.inbound import Inbound, Source
from triptych.transfer.connectors.link import Link, Transport
from triptych.transfer.connectors.loop import READ, WRITE, Loop
from triptych.transfer.connectors.outbound import Outbound
from triptych.transfer.connectors.peers import Store
from triptych.transfer.connectors.records import Credit, News, Ready, Stopped
from triptych.transfer.errors import ClosedError, ConnectorError, WireError

_LOG: Final = logging.getLogger(__name__)
GREETING: Final = 5.0
"""Seconds that two ends have to greet each other."""
FAREWELL: Final = 1.0
"""Seconds that `close` waits for peers to take what was put."""
LATE: Final = 0.001
"""Seconds that the consumption of a few chunks, taken on the I/O thread, may wait for that of more."""
READS: Final = 16
"""Reads of one link in one go, so that a busy one does not keep the others waiting."""


class Links(ABC):
    """Links, and the streams that go over them, under one lock."""

    kind = "connector"
    mortal = False
    """A link that ends without a farewell means that its process has ended, and not that a network has."""

    def __init__(self, stage_id: int, store: Store, credit: Credit, limits: Limits) -> None:
        self.stage_id = stage_id
        self._limits = limits
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._news: deque[News] = deque()
        self._outbound = Outbound(store, credit, f"stage {stage_id} -> {stage_id + 1}", self._news)
        self._inbound = Inbound(self._news)
        self._links: set[Link] = set()
        self._dirty: set[Link] = set()
        self._hurry = False  # what was posted on the I/O thread is not only what can wait
        self._late = False  # a timer will write what can wait
        self._asking = 0  # threads that wait for an answer
        self._returned: deque[tuple[Link, Chunk, int]] = deque()
        self._events: Events | None = None
        self._closed = False
        self._pid = os.getpid()
        self._loop = Loop(f"triptych-{self.kind}-{stage_id}", self._turn)
        forked = weakref.WeakMethod(self._forked)
        # A child that inherits these sockets would keep peers from seeing that this process is gone.
        os.register_at_fork(after_in_child=lambda: (call := forked()) and call())

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

    def _lost(self, link: Link) -> None:  # noqa: B027
        """The link is gone."""

    def _end(self) -> None:  # noqa: B027
        """The connector is closing: links are gone already."""

    def _broke(self, error: OSError) -> str:
        """What it means that a link fails so."""
        return f"its connection broke: {error}"

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
        link.deadline = self._loop.call_later(GREETING, lambda: self._too_late(link))
        return link

    def _too_late(self, link: Link) -> None:
        with self._lock:
            if not link.greeted and not link.closed:
                self._lose(link, f"it has not greeted within {GREETING:g} s")

    def _give_back(self, link: Link, chunk: Chunk, nbytes: int) -> None:
        """Lent memory has no reader any more. For finalizers: takes no lock, as the collector may hold it already."""
        self._returned.append((link, chunk, nbytes))
        self._loop.wake()

    def _on_return(self, link: Link, chunk: Chunk, nbytes: int) -> None:  # noqa: B027
        """Before a peer is told that its memory is not read any more."""

    # --- links

    def _on_ready(self, link: Link, mask: int) -> None:
        with self._lock:
            if mask & WRITE:
                self._dirty.add(link)
            if mask & ~WRITE:
                self._read(link)
            self._after(may_wait=True)

    def _read(self, link: Link) -> None:
        """Act on what came. With the lock."""
        try:
            for _ in range(READS):
                if link.closed:
                    return
                messages = link.read()
                if messages is None:
                    link.ended = True
                    self._lose(link, link.farewell or "its process ended")
                    return
                for message in messages:
                    self._handle(link, message)
                if link.drained:
                    return
        except BlockingIOError:
            return
        except WireError as error:
            _LOG.warning("%s of %s broke the protocol: %s", self.kind, link.name, error)
            self._lose(link, f"it broke the protocol: {error}")
        except OSError as error:
            link.ended = True
            self._lose(link, link.farewell or self._broke(error))

    def _handle(self, link: Link, message: Message) -> None:
        kind = type(message)
        if kind is Hello or not link.greeted:
            self._hear(link, message)
        elif isinstance(message, Goodbye):
            link.farewell = f"it has closed its connector: {message.reason}"
        elif link.to_sender:
            self._handle_sender(link, message)
        else:
            self._handle_receiver(link, message)

    def _hear(self, link: Link, message: Message) -> None:
        if link.greeted or not isinstance(message, Hello):
            raise WireError(f"{type(message).__name__} {'after' if link.greeted else 'before'} the greeting")
        link.greeted = self._greet(link, message.body)
        if link.greeted and link.deadline is not None:
            link.deadline.cancel()
        if link.greeted and link.to_sender:
            self._inbound.greet(link, (s for s in self._inbound.watched() if self._matches(link, s.source)))
        self._answered.notify_all()

    def _handle_sender(self, link: Link, message: Message) -> None:
        if type(message) is Chunk:
            if message.loan:
                self._check_loan(link, message)
            self._inbound.chunk(link, message)
            if self._asking:
                self._answered.notify_all()
            return
        match message:
            case Answer(watch, found):
                self._inbound.answer(link, watch, found=found)
            case Failed(watch, number, reason):
                self._inbound.failed(link, watch, number, reason)
            case _:
                raise WireError(f"{type(message).__name__} from a sender")
        self._answered.notify_all()

    def _check_loan(self, link: Link, chunk: Chunk) -> None:
        """Raise WireError where a chunk lies outside of what is shared. With the lock."""
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
        if link.deadline is not None:
            link.deadline.cancel()
        if link.to_sender:
            others = any(other.to_sender and other.source.stage == link.source.stage for other in self._links)
            self._inbound.lost(link, f"{link.name}: {reason}", others=others)
        else:
            self._outbound.lost(link, f"{link.name}: {reason}")
            others = any(not other.to_sender and other.stage == link.stage for other in self._links)
            if self.mortal and link.greeted and link.ended and not link.farewell and not others:
                self._outbound.orphaned(link.stage, f"{link.name}: {reason}")
        self._lost(link)
        self._answered.notify_all()

    # --- after every step

    def _after(self, *, may_wait: bool = False) -> None:
        """Write what was posted; have the adapter told. With the lock. `may_wait`: if it is only that a few chunks were
        consumed, it can go with what is posted next; this is called again soon."""
        if self._loop.inside:
            # At the end of the turn, when the adapter has been told what came.
            self._hurry = self._hurry or not may_wait
            return
        self._write_all(may_wait=may_wait)
        if self._news:
            self._loop.wake()

    def _write_all(self, *, may_wait: bool) -> None:
        if self._returned:
            self._tell_returned()
        if self._dirty:
            if len(self._dirty) == 1 and not may_wait:
                self._flush(self._dirty.pop())
            waiting = [link for link in self._dirty if link.can_wait] if may_wait else ()
            while self._dirty:
                link = self._dirty.pop()
                if link not in waiting:
                    self._flush(link)
            self._dirty.update(waiting)

    def _flush(self, link: Link) -> None:
        try:
            done = link.flush()
        except OSError as error:
            # What it had said before it went comes first.
            link.mute()
            before = -1
            while not link.closed and link.received > before:
                before = link.received
                self._read(link)
            self._lose(link, link.farewell or self._broke(error))
            return
        if done is link.writing:
            link.writing = not done
            self._loop.modify(link.transport.fileno(), READ | (0 if done else WRITE))

    def _tell_returned(self) -> None:
        while self._returned:
            link, chunk, nbytes = self._returned.popleft()
            self._on_return(link, chunk, nbytes)
            link.borrowed -= nbytes
            link.post(Returned(chunk.loan))

    def _turn(self) -> None:
        """What follows a round of reading, on the I/O thread: tell the adapter, then write."""
        while True:
            self._tell_adapter()
            if self._returned or self._dirty:
                with self._lock:
                    hurry, self._hurry = self._hurry, False
                    self._write_all(may_wait=not hurry)
                    if self._dirty and not self._late:
                        self._late = True
                        self._loop.call_later(LATE, self._write_late)
            if not self._news:
                return

    def _write_late(self) -> None:
        with self._lock:
            self._late = False
            self._write_all(may_wait=False)

    def _tell_adapter(self) -> None:
        events = self._events
        while self._news:
            news = self._news.popleft()
            if events is None:
                continue
            if type(news) is Ready:
                events.ready(news.stream)
            elif isinstance(news, Stopped):
                events.stopped(news.stream, news.reason, news.generation)
            else:
                events.writable(news.stream)

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

    def _shut(self) -> None:
        """Close everything. May be called twice."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for link in self._links:
                link.post(Goodbye("bye"))
            self._write_all(may_wait=False)
            self._answered.notify_all()
        self._drain(time.monotonic() + FAREWELL)
        self._loop.close()
        with self._lock:
            for link in list(self._links):
                self._lose(link, "this end was closed")
            self._outbound.close()
            self._inbound.close()
            self._news.clear()
            self._returned.clear()
        self._end()

    def _drain(self, until: float) -> None:
        """Wait until the kernel has what was posted."""
        if self._loop.inside:
            return
        with self._lock:
            while any(link.writing for link in self._links) and time.monotonic() < until:
                self._answered.wait(0.01)
