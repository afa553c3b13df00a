"""A connector within one process that keeps the promises of `StreamConnector`, and shows what it was asked to do."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.transfer.connectors.base import NO_MARK, Events, Mark, Statistics, StreamConnector
from triptych.transfer.errors import BrokenStream, ClosedError, EndOfStream, WouldBlock
from triptych.transfer.payload import StagePayload, to_dict


def split(key: str) -> tuple[str, int]:
    """Stream and number of a chunk's key."""
    stream, _, number = key.rpartition("_")
    return (stream, int(number)) if stream and number.isdigit() else (key, 0)


@dataclass
class Stream:
    """One generation of a stream, as both ends see it."""

    name: str
    generation: int
    owner: MemoryConnector
    chunks: dict[int, object] = field(default_factory=dict)
    put: int = 0
    end: int | None = None
    broken: str | None = None
    stopped: str | None = None
    blocked: bool = False

    @property
    def over(self) -> bool:
        return self.end is not None or self.broken is not None or self.stopped is not None


class Exchange:
    """What connectors of one deployment share. `credit`: chunks of a stream that may wait to be consumed."""

    def __init__(self, credit: int = 8) -> None:
        self.credit = credit
        self.lock = threading.RLock()
        self.streams: dict[str, Stream] = {}
        self.watchers: dict[str, MemoryConnector] = {}
        self.refused: dict[str, int] = {}
        self.bound: dict[str, int] = {}


class MemoryConnector(StreamConnector):
    """`done` lists the calls that change something, in order."""

    def __init__(self, exchange: Exchange, stage_id: int, **options: Any) -> None:
        self.exchange = exchange
        self.stage_id = stage_id
        self.config = {"stage_id": stage_id, **options}
        self.events: Events | None = None
        self.done: list[tuple[Any, ...]] = []
        self.closed = 0

    @property
    def _pending_keys(self) -> Collection[str]:
        with self.exchange.lock:
            mine = [s for s in self.exchange.streams.values() if s.owner is self]
            return {f"{s.name}_{n}" for s in mine for n in s.chunks}

    def listen(self, events: Events) -> None:
        self.events = events

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: object, mark: Mark = NO_MARK
    ) -> tuple[bool, int, dict[str, Any] | None]:
        if self.closed:
            raise ClosedError("the connector is closed")
        name, number = split(put_key)
        with self.exchange.lock:
            stream = self.exchange.streams.get(name)
            if stream is None or stream.generation != mark.generation:
                if stream is not None and not stream.over:
                    stream.broken = "the sender began the stream anew"
                stream = self.exchange.streams[name] = Stream(name, mark.generation, self)
                if self.exchange.refused.get(name) != mark.generation:
                    self.exchange.refused.pop(name, None)
            if stream.stopped is not None:
                raise BrokenStream(stream.stopped)
            if len(stream.chunks) >= self.exchange.credit:
                stream.blocked = True
                raise WouldBlock(name)
            stream.chunks[number] = data
            stream.put = max(stream.put, number + 1)
            if mark.terminal:
                stream.end = number + 1
            self.done.append(("put", put_key, mark))
            self._ring(name)
        return True, 1, None

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        name, number = split(get_key)
        with self.exchange.lock:
            stream = self.exchange.streams.get(name)
            if stream is None or self.exchange.refused.get(name) == stream.generation:
                return None
            if self.exchange.bound.get(name, stream.generation) != stream.generation:
                raise BrokenStream("the sender began the stream anew")
            if number in stream.chunks:
                if name in self.exchange.watchers:
                    self.exchange.bound[name] = stream.generation
                data = stream.chunks.pop(number)
                if stream.blocked:
                    stream.blocked = False
                    self._tell(stream, "writable", name)
                if stream.over and not stream.chunks:
                    self._forget_if_read(stream, number)
                if isinstance(data, Exception):
                    raise data
                return (to_dict(data) if isinstance(data, StagePayload) else data), 1
            if stream.end is not None and number >= stream.end:
                raise EndOfStream(name)
            if stream.broken is not None:
                raise BrokenStream(stream.broken)
            return None

    def _forget_if_read(self, stream: Stream, number: int) -> None:
        """A watched one is kept until it is not: asked for more, it must say that it has ended."""
        read = stream.end is not None and number + 1 >= stream.end
        if read and stream.name not in self.exchange.watchers and self.exchange.streams.get(stream.name) is stream:
            del self.exchange.streams[stream.name]

    def watch(self, from_stage: str, to_stage: str, stream: str, metadata: Mapping[str, Any] | None = None) -> None:
        with self.exchange.lock:
            self.exchange.watchers[stream] = self
            self.done.append(("watch", stream, metadata))
            self._ring(stream)

    def unwatch(self, stream: str, reason: str | None = None) -> None:
        with self.exchange.lock:
            if self.exchange.watchers.get(stream) is self:
                del self.exchange.watchers[stream]
            self.exchange.bound.pop(stream, None)
            self.done.append(("unwatch", stream, reason))
            found = self.exchange.streams.get(stream)
            if found is None:
                return
            over = found.over
            found.chunks.clear()
            if over:
                del self.exchange.streams[stream]
                return
            if reason is not None:
                found.stopped = reason
                self.exchange.refused[stream] = found.generation
                self._tell(found, "stopped", stream, reason)

    def fail(self, from_stage: str, to_stage: str, stream: str, reason: str) -> None:
        with self.exchange.lock:
            self.done.append(("fail", stream, reason))
            found = self.exchange.streams.get(stream)
            if found is None and stream in self.exchange.watchers:
                found = self.exchange.streams[stream] = Stream(stream, -1, self)
            if found is None or found.over:
                return
            found.broken = reason
            self._ring(stream)

    def discard(self, keys: Iterable[str]) -> int:
        count = 0
        with self.exchange.lock:
            for key in keys:
                name, number = split(key)
                stream = self.exchange.streams.get(name)
                if stream is not None and stream.owner is self and number in stream.chunks:
                    del stream.chunks[number]
                    self.done.append(("discard", key))
                    count += 1
        return count

    def reap(self) -> None:
        self.done.append(("reap",))

    def statistics(self) -> Statistics:
        with self.exchange.lock:
            mine = [s for s in self.exchange.streams.values() if s.owner is self]
            watching = sum(owner is self for owner in self.exchange.watchers.values())
            return Statistics(len(mine), watching, sum(len(s.chunks) for s in mine), 0)

    def close(self) -> None:
        self.closed += 1

    def _ring(self, name: str) -> None:
        watcher = self.exchange.watchers.get(name)
        if watcher is not None and watcher.events is not None:
            watcher.events.ready(name)

    @staticmethod
    def _tell(stream: Stream, event: str, *arguments: str) -> None:
        if stream.owner.events is not None:
            getattr(stream.owner.events, event)(*arguments)
