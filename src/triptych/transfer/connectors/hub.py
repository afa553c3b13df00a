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

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from triptych.transfer.connectors.base import NO_MARK, Events, Mark, Statistics, StreamConnector
from triptych.transfer.connectors.frames import ALIGN, Buffer, Chunk, Leave, Limits, scatter
from triptych.transfer.connectors.inbound import Source
from triptych.transfer.connectors.link import ACKS, Link
from triptych.transfer.connectors.links import Links
from triptych.transfer.connectors.peers import Peer, Store
from triptych.transfer.connectors.records import Credit, Held, Ready, Stream
from triptych.transfer.connectors.streams import split_key
from triptych.transfer.errors import WouldBlock
from triptych.transfer.wire import Tensor, decode, encode, tensor_maker

ASKING: Final = 1.0
"""Seconds that a `get` without a watch waits for its peers."""
_QUICK: Final = 1 << 16  # bytes that are copied before another thread could take the lock


class Hub(Links, StreamConnector):
    """Streams over links. See the module's text for what a subclass adds."""

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
        super().__init__(stage_id, store, credit, limits)
        self.config = config
        self._store = store
        self._tensors = tensors
        self._make: Callable[[Tensor], Any] | None = None

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<{type(self).__name__} stage {self.stage_id}: {self._outbound.open_streams()} sending, "
                f"{len(self._inbound)} watching, {self._outbound.bytes_held} bytes held, {len(self._links)} peers>"
            )

    # --- putting

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: object, mark: Mark = NO_MARK
    ) -> tuple[bool, int, dict[str, Any] | None]:
        self._check()
        frames = encode(data)
        parts: list[Buffer] = [frames.head, *frames.buffers]
        sizes = tuple(map(len, parts))
        self._offer(from_stage)
        nbytes = sum(sizes)
        with self._lock:
            if self._closed:
                self._check()
            try:
                stream, held = self._begin(put_key, to_stage, mark, sizes)
                if held is not None and nbytes <= _QUICK:
                    self._store.fill(held.stored, parts)
                    self._commit(stream, held)
                    held = None
            finally:
                self._after()
        if held is not None:
            self._write(stream, held, parts)
        return True, nbytes, None

    def _begin(self, key: str, stage: str, mark: Mark, sizes: tuple[int, ...]) -> tuple[Stream, Held | None]:
        try:
            return self._outbound.begin(key, stage, mark, sizes)
        except WouldBlock:
            # What was consumed meanwhile may be with the kernel already.
            for link in [link for link in self._links if not link.to_sender]:
                self._read(link)
            return self._outbound.begin(key, stage, mark, sizes)

    def _write(self, stream: Stream, held: Held, parts: Sequence[Buffer]) -> None:
        """Copy a large chunk while others go on."""
        try:
            self._store.fill(held.stored, parts)
        except BaseException:
            with self._lock:
                self._outbound.abandon(stream, held)
            raise
        with self._lock:
            try:
                self._commit(stream, held)
            finally:
                self._after()

    def _commit(self, stream: Stream, held: Held) -> None:
        if self._closed:
            self._check()
        self._outbound.commit(stream, held)
        if self._inbound.find(stream.name) is not None:
            self._news.append(Ready(stream.name))

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
            own = self._take_own(name, number) if name in self._outbound.streams else None
            found = None if own else self._inbound.take(name, number)
            stream = self._inbound.find(name)
            # While its reader has more to take than that, what was consumed is told several chunks at a time.
            more = stream is not None and len(stream.chunks) > ACKS
            self._after(may_wait=found is not None and (more or self._loop.inside))
        if own is not None:
            return own
        if found is None and stream is None:
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
        return decode(head, buffers, self._maker()), stored.nbytes

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
                self._asking += 1
                self._answered.wait(left)
                self._asking -= 1
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
            view, align = memoryview(chunk.body), ALIGN
        head, *buffers = scatter(view, chunk.sizes, align)
        return decode(head, buffers, self._maker())

    def _maker(self) -> Callable[[Tensor], Any] | None:
        if self._make is None:
            self._make = tensor_maker(self._tensors)  # torch may be loaded later
        return self._make

    def listen(self, events: Events) -> None:
        self._events = events

    def statistics(self) -> Statistics:
        with self._lock:
            return Statistics(
                self._outbound.open_streams(), len(self._inbound), self._outbound.bytes_held, len(self._links)
            )

    def close(self) -> None:
        self._shut()
