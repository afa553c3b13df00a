"""The receiver's half: watched streams, and their chunks until these are taken.

Sans-IO: called with the hub's lock held, it posts messages to peers and appends to `news` what the adapter is to be
told. A watched name is offered to every sender of its stage; the first that sends a chunk has the stream, and the
others are told that they have not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from triptych.transfer.connectors.frames import Chunk, Consumed, Leave, Returned, Unwatch, Watch
from triptych.transfer.connectors.peers import Peer
from triptych.transfer.connectors.records import News, Ready
from triptych.transfer.connectors.streams import ReceiveAct, ReceiveEvent, Receiving, receiving
from triptych.transfer.errors import BrokenStream, EndOfStream, WireError

REMEMBERED: Final = 1024
"""Complete streams whose end is still known, at most, and failed ones that were never watched."""

UNTAKEN: Final = 4096
"""Chunks of one stream that were not taken, at most, whatever credit a sender thinks it has."""


class Source(NamedTuple):
    """Which senders a watch is for: a stage, and one of its replicas where that is known."""

    stage: str
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, stage: str, metadata: Mapping[str, Any] | None) -> Source:
        """As `Connector.get` is told it."""
        if metadata is None:
            return cls(stage)
        host, port = metadata.get("source_host"), metadata.get("source_port")
        return cls(
            stage,
            host if isinstance(host, str) else "",
            port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 1 << 16 else 0,
        )


class Incoming:
    """A watched stream. `asked`: peers that have not answered yet whether they have it."""

    __slots__ = (
        "asked", "chunks", "due", "ended", "first", "generation", "implicit", "life", "name", "number", "peer",
        "reason", "source", "told",
    )  # fmt: skip

    def __init__(self, name: str, number: int, source: Source, *, implicit: bool) -> None:
        self.name = name
        self.number = number
        self.source = source
        self.implicit = implicit  # a `get` without a `watch`
        self.life = receiving()
        self.peer: Peer | None = None  # once it is bound
        self.generation = 0
        self.chunks: dict[int, Chunk] = {}
        self.first = 0  # number of the first chunk that came
        self.due: int | None = None  # of the next one
        self.reason = ""
        self.told: set[Peer] = set()
        self.asked: set[Peer] = set()
        self.ended: int | None = None  # chunks that the stream had which last was complete under this name


class Inbound:
    """All streams that this process watches. Not safe on its own: the hub's lock is held around every call."""

    def __init__(self, news: deque[News]) -> None:
        self._news = news
        self._streams: dict[str, Incoming] = {}
        self._numbers: dict[int, Incoming] = {}
        self._complete: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def __len__(self) -> int:
        return len(self._streams)

    # --- what the hub asks

    def find(self, name: str) -> Incoming | None:
        """The watch of a name."""
        return self._streams.get(name)

    def watch(self, name: str, source: Source, peers: Iterable[Peer], *, implicit: bool = False) -> Incoming:
        """Watch a name, if it is not watched yet, and ask these peers for it."""
        stream = self._streams.get(name)
        if stream is not None:
            stream.implicit = stream.implicit and implicit
            return stream
        self._last += 1
        stream = self._streams[name] = self._numbers[self._last] = Incoming(name, self._last, source, implicit=implicit)
        stream.ended = self._complete.get(name)
        for peer in peers:
            self.ask(stream, peer)
        if implicit and len(self._streams) > REMEMBERED:
            self._forget_failed()
        return stream

    def ask(self, stream: Incoming, peer: Peer) -> None:
        """Ask one more peer for a stream."""
        if stream.life.state is Receiving.WATCHING and peer not in stream.told:
            stream.told.add(peer)
            stream.asked.add(peer)
            peer.post(Watch(stream.number, stream.name))

    def greet(self, peer: Peer, matches: Iterable[Incoming]) -> None:
        """A new sender is there: ask it for these streams."""
        for stream in matches:
            self.ask(stream, peer)

    def watched(self) -> list[Incoming]:
        """All watched streams."""
        return list(self._streams.values())

    def take(self, name: str, number: int) -> tuple[Chunk, Peer] | None:
        """A chunk of a watched stream, once, and whom it is from. It is consumed; lent memory is the caller's.

        Raises:
            EndOfStream: the stream has fewer chunks.
            BrokenStream: it will not be completed.
        """
        stream = self._streams.get(name)
        if stream is None:
            ended = self._complete.get(name)
            if ended is not None and number >= ended:
                raise EndOfStream(f"{name!r} has {ended} chunks")
            return None
        chunk = stream.chunks.pop(number, None)
        if chunk is not None:
            peer = stream.peer
            assert peer is not None
            # Memory that was lent is given back by its reader.
            peer.post(Consumed(stream.number, number))
            if not stream.chunks:
                self._taken(stream)
            return chunk, peer
        if stream.life.state is Receiving.BROKEN:
            if stream.implicit:
                self._remove(stream)
            raise BrokenStream(stream.reason)
        if stream.life.state is Receiving.WATCHING:
            if stream.ended is not None and number >= stream.ended > 0:
                raise EndOfStream(f"{name!r} has {stream.ended} chunks")
        elif number < stream.first:
            raise BrokenStream(f"chunk {number} of {name!r} was taken by somebody else")
        elif stream.life.state is Receiving.ENDING and stream.due is not None and number >= stream.due:
            raise EndOfStream(f"{name!r} has {stream.due} chunks")
        return None

    def _taken(self, stream: Incoming) -> None:
        act = stream.life.on(ReceiveEvent.TAKEN)
        if act is ReceiveAct.FINISH:
            self._remove(stream)
            self._complete[stream.name] = stream.due or 0
            if len(self._complete) > REMEMBERED:
                self._complete.popitem(last=False)
        elif stream.life.state is Receiving.BROKEN:
            self._news.append(Ready(stream.name))

    def unwatch(self, name: str, how: Leave, reason: str = "") -> None:
        """No more of a stream: what was not taken is dropped, or, with `RETURN`, stays with its sender."""
        self._complete.pop(name, None)
        stream = self._streams.get(name)
        if stream is None:
            return
        stream.life.on(ReceiveEvent.UNWATCH)
        for peer in stream.told if stream.peer is None else (stream.peer,):
            peer.post(Unwatch(stream.number, how, reason))
        self._drop_chunks(stream, 0, give_back=how is not Leave.RETURN)
        self._remove(stream)

    def close(self) -> None:
        """Forget everything."""
        for mapping in (self._streams, self._numbers, self._complete):
            mapping.clear()

    def _remove(self, stream: Incoming) -> None:
        del self._streams[stream.name]
        del self._numbers[stream.number]

    def _drop_chunks(self, stream: Incoming, first: int, *, give_back: bool = True) -> None:
        for number in [number for number in stream.chunks if number >= first]:
            chunk = stream.chunks.pop(number)
            if chunk.loan and give_back and stream.peer is not None:
                stream.peer.post(Returned(chunk.loan))

    def _forget_failed(self) -> None:
        """Streams that were asked for once, have failed since, and that nobody asks for again."""
        for stream in list(self._streams.values()):
            if stream.implicit and stream.life.state is Receiving.BROKEN:
                self._remove(stream)

    # --- what peers say

    def chunk(self, peer: Peer, chunk: Chunk) -> None:
        """A chunk came. Raises WireError where it cannot be one of its stream."""
        stream = self._numbers.get(chunk.watch)
        if stream is None or (stream.peer is not None and stream.peer is not peer):
            # It crossed our farewell. Its sender knows by that what to do with the chunk; its memory it knows from us.
            if chunk.loan:
                peer.post(Returned(chunk.loan))
            return
        if stream.peer is None:
            self._bind(stream, peer)
            stream.generation = chunk.generation
            stream.first = chunk.number
        elif chunk.number != stream.due or chunk.generation != stream.generation:
            raise WireError(
                f"chunk {chunk.number} of generation {chunk.generation} came where {stream.due} of "
                f"{stream.generation} is due"
            )
        if len(stream.chunks) >= UNTAKEN:
            raise WireError(f"more than {UNTAKEN} chunks of one stream that are not taken")
        stream.life.on(ReceiveEvent.LAST if chunk.terminal else ReceiveEvent.CHUNK)
        stream.chunks[chunk.number] = chunk
        stream.due = chunk.number + 1
        self._news.append(Ready(stream.name))

    def _bind(self, stream: Incoming, peer: Peer) -> None:
        """The stream is this peer's; the others keep what they have of that name."""
        stream.peer = peer
        stream.ended = None
        self._complete.pop(stream.name, None)
        for other in stream.told:
            if other is not peer:
                other.post(Unwatch(stream.number, Leave.RETURN, ""))
        stream.told = {peer}
        stream.asked &= {peer}

    def failed(self, peer: Peer, number: int, first: int, reason: str) -> None:
        """The sender says that a stream is broken, its chunks from `first` on void."""
        stream = self._numbers.get(number)
        if stream is None or (stream.peer is not None and stream.peer is not peer):
            return
        if stream.life.state is Receiving.BROKEN:
            return  # a sender that fails a stream and then withdraws its chunks says so twice
        if stream.peer is None:
            self._bind(stream, peer)
        act = stream.life.on(ReceiveEvent.FAIL)
        stream.reason = f"{peer.name}: {reason}"
        self._drop_chunks(stream, first if act is ReceiveAct.CUT else 0)
        if not stream.chunks and stream.life.state is Receiving.BREAKING:
            stream.life.on(ReceiveEvent.TAKEN)
        stream.asked.clear()
        self._news.append(Ready(stream.name))

    def answer(self, peer: Peer, number: int, *, found: bool) -> bool:
        """A peer has sent what it has of a stream. Returns whether that was the last answer outstanding."""
        stream = self._numbers.get(number)
        if stream is None or peer not in stream.asked:
            return False
        stream.asked.discard(peer)
        return not stream.asked

    def lost(self, peer: Peer, reason: str, *, others: bool) -> None:
        """A peer is gone. `others`: its stage has more processes; then streams that nobody sends yet go on waiting."""
        for stream in self._streams.values():
            if peer not in stream.told and stream.peer is not peer:
                continue
            stream.told.discard(peer)
            stream.asked.discard(peer)
            if stream.peer is not peer and (others or stream.told or stream.implicit):
                continue
            if stream.life.state in _DEAF:
                continue
            act = stream.life.on(ReceiveEvent.LOST)
            if act is ReceiveAct.BREAK:
                stream.reason = reason
                stream.chunks.clear()
                self._news.append(Ready(stream.name))


_DEAF: Final = frozenset((Receiving.COMPLETE, Receiving.GONE))
