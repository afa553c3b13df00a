"""The sender's half: own streams, their chunks until these are consumed, credit, and who watches.

Sans-IO: called with the hub's lock held, it posts messages to peers and appends to `news` what the adapter is to be
told. One `Stream` is one generation of a name. `_streams` has the newest of each name; an older one lives on only while
its watcher takes what it was sent.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.frames import Answer, Buffer, Chunk, Failed, Leave
from triptych.transfer.connectors.peers import Peer, Store, Stored
from triptych.transfer.connectors.records import Credit, Held, Loan, News, Stopped, Stream, Watching, Writable
from triptych.transfer.connectors.streams import SendAct, SendEvent, Sending, split_key
from triptych.transfer.errors import BrokenStream, ConnectorError, WireError, WouldBlock

TOMBSTONES: Final = 1024
"""Stopped streams that their senders have not acknowledged, at most; the oldest go."""
LINGER: Final = 300.0
"""Seconds that a stream which its sender has ended waits for somebody to watch it."""
WATCHES: Final = 1 << 17
"""Watches of one peer, at most."""


class Outbound:
    """All streams that this process sends. Not safe on its own: the hub's lock is held around every call."""

    def __init__(
        self, store: Store, credit: Credit, edge: str, news: deque[News], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self._credit = credit
        self._edge = edge
        self._news = news
        self._clock = clock
        self.streams: dict[str, Stream] = {}
        self._older: set[Stream] = set()
        self._waiting: dict[str, deque[Watching]] = {}
        self._tombs: OrderedDict[str, Stream] = OrderedDict()
        self._lingering: OrderedDict[Stream, float] = OrderedDict()
        self._starved: OrderedDict[str, None] = OrderedDict()  # wait for memory, not for credit
        self._loans = 0
        self.bytes_held = 0

    # --- what the hub asks

    def _all(self) -> Iterator[Stream]:
        yield from self.streams.values()
        yield from self._older

    def pending(self) -> Collection[str]:
        """Keys of chunks not consumed."""
        return {stream.key(number) for stream in self._all() for number in stream.chunks}

    def open_streams(self) -> int:
        """Streams with a chunk not consumed, or not ended."""
        return sum(stream.life.state is not Sending.STOPPED for stream in self._all())

    # --- put

    def begin(self, key: str, stage: str, mark: Mark, sizes: tuple[int, ...]) -> tuple[Stream, Held | None]:
        """Admit a chunk: its stream and where to write it; None: nobody wants it, it counts as sent.

        Whoever gets room calls `commit` or `abandon`.

        Raises:
            WouldBlock: no credit, or no memory.
            BrokenStream: the stream will not be completed.
            ConnectorError: the number is not the next one, or the chunk never fits.
        """
        name, number, numbered = split_key(key)
        stream = self.streams.get(name)
        if (
            stream is None
            or stream.generation != mark.generation
            or (number == 0 and stream.put and stream.life.state is not Sending.OPEN)
        ):
            if number:
                raise BrokenStream(f"{self._edge}: the stream of {key!r} is not open: it was stopped or withdrawn")
            self._expire_old()
            if stream is not None:
                self._renew(stream)
            stream = self.streams[name] = Stream(name, mark.generation, stage, numbered=numbered)
        try:
            return stream, self._admit(stream, number, sizes, terminal=mark.terminal or not numbered)
        except BaseException:
            if not stream.put and not stream.blocked and stream.life.state is Sending.OPEN:
                del self.streams[name]
            raise

    def _admit(self, stream: Stream, number: int, sizes: tuple[int, ...], *, terminal: bool) -> Held | None:
        if stream.life.state is Sending.OPEN:
            if number != stream.put or stream.writing:
                raise ConnectorError(
                    f"{self._edge}: chunk {number} of {stream.name!r} was put where {stream.put} is due"
                )
            self._afford(stream, sum(sizes))
            try:
                stored = self.store.reserve(sizes)
            except WouldBlock:
                stream.blocked = True
                self._starved[stream.name] = None
                raise
            stream.writing = True
            stream.blocked = False
            stream.nbytes += stored.taken
            self.bytes_held += stored.taken
            return Held(number, stored, terminal=terminal)
        act = stream.life.on(SendEvent.LAST if terminal else SendEvent.PUT)
        if stream.life.state is Sending.OVER:
            self._forget(stream)
        if act is SendAct.REFUSE:
            raise BrokenStream(f"{self._edge}: {stream.reason}")
        return None

    def _afford(self, stream: Stream, nbytes: int) -> None:
        """Raise WouldBlock unless the stream has credit for so many bytes more.

        Beside its own limit, no stream holds more than a quarter of what is left for the others: so a dozen stalled
        ones leave room. One chunk at a time is always allowed, even if a reader keeps the memory of all earlier ones.
        """
        if len(stream.chunks) >= self._credit.chunks:
            stream.blocked = True
            raise WouldBlock(f"{self._edge}: {len(stream.chunks)} chunks of {stream.name!r} are not consumed yet")
        if not stream.chunks:
            return
        free = self.store.size - self.store.used
        if stream.nbytes + nbytes > min(self._credit.nbytes, free // 4):
            stream.blocked = True
            self._starved[stream.name] = None
            raise WouldBlock(f"{self._edge}: {stream.nbytes} bytes of {stream.name!r} are not given back yet")

    def commit(self, stream: Stream, held: Held) -> None:
        """The chunk is written. Raises BrokenStream where the stream was ended meanwhile; the chunk is freed then."""
        stream.writing = False
        if stream.life.state is not Sending.OPEN:  # ended while this was written
            self._free(stream, held.stored)
            swallow = stream.life.state is Sending.DROPPED
            if stream.life.state in (Sending.STOPPED, Sending.DROPPED) and held.terminal:
                stream.life.on(SendEvent.LAST)
                self._forget(stream)
            if swallow:
                return
            raise BrokenStream(f"{self._edge}: {stream.reason or 'the stream was withdrawn'}")
        stream.life.on(SendEvent.LAST if held.terminal else SendEvent.PUT)
        stream.put += 1
        stream.chunks[held.number] = held
        if stream.watching is not None:
            self._send(stream, held)
        elif not self._match(stream) and held.terminal:
            self._lingering[stream] = self._clock()

    def abandon(self, stream: Stream, held: Held) -> None:
        """The chunk could not be written."""
        stream.writing = False
        self._free(stream, held.stored)

    def _renew(self, old: Stream) -> None:
        """A name is begun anew: what is left of its older stream goes, except what a watcher is still to take."""
        if old.watching is None:
            self._expire(old)
            return
        del self.streams[old.name]
        self._older.add(old)
        if old.life.on(SendEvent.RENEW) is SendAct.TELL:
            self._void(old, min(old.chunks, default=old.put), "its sender has begun the stream anew")
        self._settle(old)

    # --- to the watcher

    def _match(self, stream: Stream) -> bool:
        """Bind the stream to whoever waits for it, and send what is there."""
        waiting = self._waiting.get(stream.name)
        if not waiting:
            return False
        watching = waiting.popleft()
        if not waiting:
            del self._waiting[stream.name]
        self._bind(stream, watching)
        return True

    def _bind(self, stream: Stream, watching: Watching) -> None:
        stream.watching = watching
        watching.stream = stream
        self._lingering.pop(stream, None)
        for held in list(stream.chunks.values()):
            if stream.void is None or held.number < stream.void:
                self._send(stream, held)
        self._tell(stream)
        self._settle(stream)

    def _send(self, stream: Stream, held: Held) -> None:
        watching = stream.watching
        assert watching is not None
        stored = held.stored
        held.sent = True
        body: Buffer = stored.data
        offset = 0
        if stored.offset is not None:
            self._loans += 1
            held.loan = self._loans
            offset = stored.offset
            body = b""
            watching.peer.loans[held.loan] = Loan(stream, stored)
        watching.peer.post(
            Chunk(
                watching.number,
                held.number,
                stream.generation or 0,
                held.terminal,
                stored.sizes,
                held.loan,
                offset,
                body,
            )
        )

    def _void(self, stream: Stream, first: int, reason: str) -> None:
        """Chunks from `first` on will not be delivered."""
        stream.void = first if stream.void is None else min(stream.void, first)
        stream.reason = stream.reason or reason
        self._writable(stream)
        self._tell(stream)

    def _tell(self, stream: Stream) -> None:
        """Let the watcher know that the stream failed; chunks that are void for it are given up."""
        if stream.life.state is not Sending.FAILED or stream.watching is None:
            return
        stream.told = True
        first = stream.put if stream.void is None else stream.void
        stream.watching.peer.post(Failed(stream.watching.number, first, stream.reason))
        for number in [number for number in stream.chunks if number >= first]:
            self._drop(stream, stream.chunks.pop(number))

    def _settle(self, stream: Stream) -> None:
        """Forget a stream that has ended and of which nothing is left to consume."""
        if stream.chunks or stream.life.state not in (Sending.ENDED, Sending.FAILED):
            return
        # A failure waits for somebody to tell it to; a withdrawal does not.
        if stream.life.state is Sending.FAILED and not stream.told and stream.void is None:
            return
        stream.life.on(SendEvent.DRAINED)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if self.streams.get(stream.name) is stream:
            del self.streams[stream.name]
        self._older.discard(stream)
        self._lingering.pop(stream, None)
        if self._tombs.get(stream.name) is stream:
            del self._tombs[stream.name]
        if stream.watching is not None:
            stream.watching.peer.watches.pop(stream.watching.number, None)
            stream.watching.stream = None
            stream.watching = None
        self._writable(stream)

    # --- memory

    def _free(self, stream: Stream, stored: Stored) -> None:
        self.store.free(stored)
        stream.nbytes -= stored.taken
        self.bytes_held -= stored.taken
        if stream.blocked and len(stream.chunks) < self._credit.chunks:
            self._writable(stream)
        starved, self._starved = self._starved, OrderedDict()
        for name in starved:
            other = self.streams.get(name)
            if other is not None:
                self._writable(other)

    def _drop(self, stream: Stream, held: Held) -> None:
        """A chunk is over: its memory comes back now, or, where a peer may be reading it, when that says so."""
        watching = stream.watching
        if not held.loan or watching is None or held.loan not in watching.peer.loans:
            self._free(stream, held.stored)
        elif stream.blocked and len(stream.chunks) < self._credit.chunks:
            self._writable(stream)

    def _release(self, stream: Stream) -> None:
        """Give up all chunks of a stream."""
        chunks, stream.chunks = stream.chunks, {}
        for held in chunks.values():
            self._drop(stream, held)

    def _writable(self, stream: Stream) -> None:
        if stream.blocked:
            stream.blocked = False
            self._news.append(Writable(stream.name))

    def _expire(self, stream: Stream) -> None:
        stream.life.on(SendEvent.EXPIRE)
        self._release(stream)
        self._forget(stream)

    def _expire_old(self) -> None:
        """Streams that were ended and that nobody has asked for in a long time go. Looked at when others begin."""
        while self._lingering:
            stream, since = next(iter(self._lingering.items()))
            if self._clock() - since < LINGER:
                return
            self._expire(stream)

    def _bury(self, stream: Stream) -> None:
        """Remember that the stream was stopped, as one of the last of those."""
        self._tombs[stream.name] = stream
        if len(self._tombs) > TOMBSTONES:
            self._expire(next(iter(self._tombs.values())))

    # --- ends of our own

    def fail(self, name: str, stage: str, reason: str) -> None:
        """End a stream as broken, also one of which nothing was put."""
        stream = self.streams.get(name)
        if stream is None:
            self._expire_old()
            stream = self.streams[name] = Stream(name, None, stage)
        act = stream.life.on(SendEvent.FAIL)
        if act is SendAct.FORGET:
            self._forget(stream)
        elif act is SendAct.TELL:
            stream.reason = reason
            self._writable(stream)
            if stream.watching is not None:
                self._tell(stream)
                self._settle(stream)
            elif not self._match(stream):
                self._lingering[stream] = self._clock()

    def discard(self, keys: Iterable[str]) -> int:
        """Withdraw chunks that were not consumed. A stream of which one is missing, or that ends so, is broken."""
        named: dict[str, set[int]] = {}
        for key in keys:
            name, number, _ = split_key(key)
            stream = self.streams.get(name)
            if stream is not None and stream.key(number) == key:
                named.setdefault(name, set()).add(number)
        return sum(self._withdraw(self.streams[name], numbers) for name, numbers in named.items())

    def _withdraw(self, stream: Stream, numbers: set[int]) -> int:
        found = [number for number in stream.chunks if number in numbers]
        last = max(stream.put - 1, 0) in numbers
        if not found and not (last and stream.life.state is not Sending.ENDED):
            return 0
        if stream.life.on(SendEvent.WITHDRAW) is SendAct.FORGET:
            self._forget(stream)
            return 0
        for number in found:
            self._drop(stream, stream.chunks.pop(number))
        self._void(stream, min(found, default=stream.put), "its sender has withdrawn the stream")
        self._settle(stream)
        return len(found)

    def take_own(self, name: str, number: int) -> Stored | None:
        """Take a chunk of our own that no watcher was sent. The caller reads it, then calls `consumed_own`."""
        stream = self.streams.get(name)
        held = None if stream is None else stream.chunks.get(number)
        return None if held is None or held.sent else held.stored

    def consumed_own(self, name: str, number: int) -> None:
        """That chunk was read."""
        stream = self.streams[name]
        self._drop(stream, stream.chunks.pop(number))
        self._settle(stream)

    def close(self) -> None:
        """Forget everything."""
        for stream in list(self._all()):
            stream.watching = None
            if stream.life.state not in (Sending.STOPPED, Sending.DROPPED):
                self._release(stream)
        for mapping in (self.streams, self._tombs, self._lingering, self._waiting, self._starved):
            mapping.clear()
        self._older.clear()

    # --- what peers say

    def watch(self, peer: Peer, number: int, name: str) -> None:
        """A peer watches a name. Raises WireError where it may not."""
        if number in peer.watches or len(peer.watches) >= WATCHES:
            raise WireError(f"watch {number} beside {len(peer.watches)} others, or a second time")
        watching = peer.watches[number] = Watching(peer, number, name)
        stream = self.streams.get(name)
        found = stream is not None and stream.watching is None and stream.life.state in _OFFERED
        if stream is not None and found:
            self._bind(stream, watching)
        else:
            self._waiting.setdefault(name, deque()).append(watching)
        peer.post(Answer(number, found))

    def unwatch(self, peer: Peer, number: int, how: Leave, reason: str) -> None:
        """A peer leaves a stream."""
        watching = peer.watches.get(number)
        if watching is None:
            return
        stream = watching.stream
        if stream is None:
            self._unwait(watching)
        elif how is Leave.RETURN:
            self._unsend(stream)
        else:
            event = SendEvent.STOP if how is Leave.STOP else SendEvent.DROP
            self._end_by_peer(stream, event, f"{peer.name} has stopped the stream: {reason}")

    def _unwait(self, watching: Watching) -> None:
        del watching.peer.watches[watching.number]
        waiting = self._waiting[watching.name]
        waiting.remove(watching)
        if not waiting:
            del self._waiting[watching.name]

    def _unsend(self, stream: Stream) -> None:
        """The watcher gives back what it has not taken, unread."""
        watching = stream.watching
        assert watching is not None
        for held in stream.chunks.values():
            watching.peer.loans.pop(held.loan, None)
            held.loan, held.sent = 0, False
        del watching.peer.watches[watching.number]
        watching.stream = stream.watching = None
        stream.told = False
        if stream in self._older:
            self._expire(stream)
        elif not self._match(stream) and stream.life.state is not Sending.OPEN:
            self._lingering[stream] = self._clock()

    def _end_by_peer(self, stream: Stream, event: SendEvent, reason: str) -> None:
        act = stream.life.on(event)
        stream.reason = reason
        self._release(stream)
        if stream.life.state is Sending.OVER:
            self._forget(stream)
            return
        watching = stream.watching
        if watching is not None:
            del watching.peer.watches[watching.number]
            watching.stream = stream.watching = None
        self._bury(stream)
        if act is SendAct.REPORT:
            stream.blocked = False
            self._news.append(Stopped(stream.name, reason, stream.generation))
        self._writable(stream)

    def consumed(self, peer: Peer, number: int, chunk: int) -> None:
        """A peer has taken a chunk. Raises WireError for one that it cannot have."""
        watching = peer.watches.get(number)
        if watching is None:
            return
        stream = watching.stream
        held = None if stream is None else stream.chunks.get(chunk)
        if stream is None or (chunk >= stream.put if held is None else not held.sent):
            raise WireError(f"chunk {chunk} was consumed of a stream that has none")
        if held is not None:
            self._drop(stream, stream.chunks.pop(chunk))
            self._settle(stream)

    def returned(self, peer: Peer, number: int) -> None:
        """A peer does not read that memory any more. Raises WireError where it has not consumed the chunk either."""
        loan = peer.loans.get(number)
        if loan is None:
            return
        if any(held.loan == number for held in loan.stream.chunks.values()):
            raise WireError(f"memory of chunk {number} came back before the chunk was consumed")
        del peer.loans[number]
        self._free(loan.stream, loan.stored)

    def orphaned(self, stage: str, reason: str) -> None:
        """No process of a stage is left, and the last one died: nobody will ask for what it has not asked for yet."""
        for stream in list(self.streams.values()):
            if stream.stage == stage and stream.watching is None and stream.life.state is Sending.OPEN:
                self._end_by_peer(stream, SendEvent.STOP, reason)

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone, and reads nothing any more."""
        for watching in list(peer.watches.values()):
            if watching.stream is None:
                self._unwait(watching)
            else:
                self._end_by_peer(watching.stream, SendEvent.STOP, reason)
        loans = list(peer.loans.values())
        peer.loans.clear()
        for loan in loans:
            self._free(loan.stream, loan.stored)


_OFFERED: Final = frozenset((Sending.OPEN, Sending.ENDED, Sending.FAILED))
