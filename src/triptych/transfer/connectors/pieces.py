"""Messages of many streams on one byte stream, large ones in pieces so that none keeps the others waiting. Sans-IO.

What `frames` packs goes as it is, except a chunk of more than `PIECE` bytes: that is begun with its size and follows in
pieces, between which the messages of other streams go. Each stream is a lane, in order in itself; lanes take turns, and
what concerns no lane (credit, watches, pings) goes before all of them.

    cutter.post(message); cutter.cut()   # the next bytes to send, about a piece
    view = joiner.room(); joiner.filled(sock.recv_into(view))   # the messages that are whole now

A joiner takes memory only for lanes that its own end has opened, one chunk for each, at most `Limits.chunk` bytes and
`budget` bytes in all. What comes for other lanes is passed over: it crossed our farewell.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from typing import Final

from triptych.transfer.connectors.frames import (
    Answer,
    Buffer,
    Chunk,
    Failed,
    Goodbye,
    Limits,
    Message,
    pack,
    unpack,
)
from triptych.transfer.errors import WireError

PIECE: Final = 1 << 19
"""Bytes of a message that goes in one piece, at most."""

# Kinds of our own, beside those of `frames`.
_BEGIN, _PIECE, _DROP, _PING, _PONG = range(32, 37)
_CHUNK: Final = 7
_FIRST, _LAST = 1, 9

_HEADER: Final = struct.Struct("<IB")
_LANE: Final = struct.Struct("<Q")
_TWO: Final = struct.Struct("<QQ")  # lane, bytes of the body
_EXACT: Final = {_BEGIN: _TWO.size, _DROP: _LANE.size, _PING: 0, _PONG: 0}

PING: Final = _HEADER.pack(0, _PING)
PONG: Final = _HEADER.pack(0, _PONG)


class _Large:
    """A message that is sent in pieces: what is left of it."""

    __slots__ = ("begun", "parts")

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = deque(parts)
        self.begun = False

    @property
    def left(self) -> int:
        return sum(map(len, self.parts))

    def take(self, count: int) -> list[memoryview]:
        """The next so many bytes, or what there is."""
        out: list[memoryview] = []
        while self.parts and count:
            part = self.parts.popleft()
            if len(part) > count:
                self.parts.appendleft(part[count:])
                part = part[:count]
            out.append(part)
            count -= len(part)
        return out


class Cutter:
    """The sending end: in which order bytes go."""

    def __init__(self) -> None:
        self._first: deque[Buffer] = deque()
        self._lanes: OrderedDict[int, deque[Buffer | _Large]] = OrderedDict()
        self._last: list[Buffer] = []

    def __bool__(self) -> bool:
        return bool(self._first or self._lanes or self._last)

    @property
    def urgent_only(self) -> int:
        """How many buffers go before any stream's, if there are no others; else 0."""
        return 0 if self._lanes or self._last else len(self._first)

    def post(self, message: Message) -> None:
        """Send this: a stream's, behind what was posted of that stream; a farewell, behind everything."""
        buffers = pack(message)
        match message:
            case Goodbye():
                self._last += buffers
            case Chunk(lane) | Failed(lane) | Answer(lane):
                queue = self._lanes.get(lane)
                if queue is None:
                    queue = self._lanes[lane] = deque()
                size = sum(map(len, buffers))
                if size > PIECE:
                    first = memoryview(buffers[0])[_HEADER.size :]
                    queue.append(_Large([first, *(memoryview(buffer) for buffer in buffers[1:])]))
                else:
                    queue.append(b"".join(buffers) if size <= 1 << 12 else buffers[0])
                    queue.extend(buffers[1:] if size > 1 << 12 else ())
            case _:
                self._first += buffers

    def urgent(self, data: Buffer) -> None:
        """Send these bytes (`PING`, `PONG`) before any stream's."""
        self._first.append(data)

    def drop(self, lane: int) -> None:
        """Its receiver has left this stream: what was not sent of it is not sent."""
        queue = self._lanes.pop(lane, None)
        if queue and isinstance(queue[0], _Large) and queue[0].begun:
            self._first.append(_HEADER.pack(_LANE.size, _DROP) + _LANE.pack(lane))

    def cut(self) -> list[memoryview]:
        """The next bytes to send: all that is urgent, about a piece of what streams have. Nothing: that was all."""
        out = [memoryview(buffer) for buffer in self._first]
        self._first.clear()
        room = PIECE
        while self._lanes and room > 0:
            lane, queue = self._lanes.popitem(last=False)
            turn = self._turn(lane, queue)
            out += turn
            room -= sum(map(len, turn))
            if queue:
                self._lanes[lane] = queue  # at the end of the line
        if not self._lanes and room > 0:
            out += [memoryview(buffer) for buffer in self._last]
            self._last = []
        return out

    def _turn(self, lane: int, queue: deque[Buffer | _Large]) -> list[memoryview]:
        """What a lane sends when it is its turn: a piece, or as many small messages as make one."""
        out: list[memoryview] = []
        room = PIECE
        while queue and room > 0:
            item = queue[0]
            if not isinstance(item, _Large):
                out.append(memoryview(item))
                room -= len(out[-1])
                queue.popleft()
                continue
            if out:
                break  # a piece of its own, the next time
            if not item.begun:
                item.begun = True
                out.append(memoryview(_HEADER.pack(_TWO.size, _BEGIN) + _TWO.pack(lane, item.left)))
            parts = item.take(PIECE)
            size = sum(map(len, parts))
            out.append(memoryview(_HEADER.pack(_LANE.size + size, _PIECE) + _LANE.pack(lane)))
            out += parts
            if not item.parts:
                queue.popleft()
            break
        return out


class _Assembly:
    """A chunk that comes in pieces."""

    __slots__ = ("body", "have")

    def __init__(self, size: int) -> None:
        self.body = bytearray(size)
        self.have = 0


class Joiner:
    """The receiving end. `pings` counts what is to be answered with `PONG`."""

    def __init__(self, limits: Limits, *, budget: int, buffer: int = 1 << 16) -> None:
        self.limits = limits
        self.pings = 0
        self._budget = budget
        self._buffer = bytearray(buffer)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was received and not yet parsed
        self._lanes: dict[int, _Assembly | None] = {}
        self._taken = 0  # bytes of all assemblies
        # What comes next, where it does not go through the buffer: a whole message, or the rest of a piece.
        self._whole: bytearray | None = None
        self._kind = 0
        self._have = 0
        self._lane = 0
        self._left = 0  # bytes of a piece still to come

    def open(self, lane: int) -> None:
        """This end wants the stream of that number."""
        self._lanes.setdefault(lane, None)

    def close(self, lane: int) -> None:
        """No more of it."""
        assembly = self._lanes.pop(lane, None)
        if assembly is not None:
            self._taken -= len(assembly.body)

    @property
    def lanes(self) -> int:
        """How many are open."""
        return len(self._lanes)

    def grow(self, limits: Limits, buffer: int = 1 << 16) -> None:
        """From now on this much may come: the other end has shown that it may."""
        rest = self._buffer[self._start : self._end]
        self.limits = limits
        self._buffer = rest + bytes(max(0, buffer - len(rest)))
        self._view = memoryview(self._buffer)
        self._start, self._end = 0, len(rest)

    def room(self) -> memoryview:
        """Where to receive into next; never empty."""
        if self._whole is not None:
            return memoryview(self._whole)[self._have :]
        if self._left:
            assembly = self._lanes.get(self._lane)
            if assembly is None:
                return self._view[: self._left]  # passed over
            return memoryview(assembly.body)[assembly.have : assembly.have + self._left]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def filled(self, count: int) -> list[Message]:
        """`count` bytes were received into `room()`: the messages that are whole now. Raises WireError."""
        out: list[Message] = []
        if self._whole is not None:
            self._have += count
            if self._have == len(self._whole):
                whole, self._whole = self._whole, None
                self._done(unpack(self._kind, whole), out)
            return out
        if self._left:
            self._grow(count, out)
            return out
        self._end += count
        while self._whole is None and not self._left and self._end - self._start >= _HEADER.size:
            if not self._parse(out):
                break
        return out

    def _parse(self, out: list[Message]) -> bool:
        """One header and what follows it, as far as that is there. Returns whether there was enough to go on."""
        size, kind = _HEADER.unpack_from(self._buffer, self._start)
        at = self._start + _HEADER.size
        have = self._end - at
        if kind == _PIECE:
            return self._piece(size, at, have, out)
        if kind in _EXACT:
            if size != _EXACT[kind]:
                raise WireError(f"a message of kind {kind} with {size} bytes")
            if have < size:
                return False
            self._control(kind, at)
            self._start = at + size
            return True
        if size > min(self.limits.of(kind), PIECE):
            raise WireError(f"a message of kind {kind} with {size} bytes in one piece")
        if have >= size:
            self._start = at + size
            self._done(unpack(kind, self._buffer[at : at + size]), out)
            return True
        if _HEADER.size + size > len(self._buffer):
            self._whole, self._kind, self._have = bytearray(size), kind, have
            self._whole[:have] = self._view[at : self._end]
            self._start = self._end = 0
        return False

    def _piece(self, size: int, at: int, have: int, out: list[Message]) -> bool:
        if not _LANE.size < size <= _LANE.size + PIECE:
            raise WireError(f"a piece of {size} bytes")
        if have < _LANE.size:
            return False
        (self._lane,) = _LANE.unpack_from(self._buffer, at)
        at += _LANE.size
        self._left = size - _LANE.size
        assembly = self._assembly()
        have = min(have - _LANE.size, self._left)
        if assembly is not None:
            assembly.body[assembly.have : assembly.have + have] = self._view[at : at + have]
        self._start = at + have
        self._grow(have, out)
        return True

    def _assembly(self) -> _Assembly | None:
        """Where the piece that begins goes. Raises WireError where it does not fit."""
        if self._lane not in self._lanes:
            return None
        assembly = self._lanes[self._lane]
        if assembly is None:
            raise WireError(f"a piece of stream {self._lane}, of which nothing was begun")
        if assembly.have + self._left > len(assembly.body):
            raise WireError(f"{assembly.have + self._left} bytes of a chunk of {len(assembly.body)}")
        return assembly

    def _grow(self, count: int, out: list[Message]) -> None:
        """So many bytes of the piece were received."""
        self._left -= count
        assembly = self._lanes.get(self._lane)
        if assembly is None:
            return
        assembly.have += count
        if assembly.have == len(assembly.body):
            self._lanes[self._lane] = None
            self._taken -= len(assembly.body)
            self._done(unpack(_CHUNK, assembly.body), out)

    def _control(self, kind: int, at: int) -> None:
        if kind == _PING:
            self.pings += 1
        elif kind == _DROP:
            (lane,) = _LANE.unpack_from(self._buffer, at)
            if lane in self._lanes:
                raise WireError(f"stream {lane} was dropped, and this end has not left it")
        elif kind == _BEGIN:
            lane, size = _TWO.unpack_from(self._buffer, at)
            if lane not in self._lanes:
                return
            if self._lanes[lane] is not None:
                raise WireError(f"a chunk of stream {lane} was begun before the last was whole")
            if not PIECE - _HEADER.size < size <= self.limits.chunk:
                raise WireError(f"a chunk of {size} bytes in pieces: at most {self.limits.chunk}")
            if self._taken + size > self._budget:
                raise WireError(f"chunks of {self._taken + size} bytes in pieces at once: at most {self._budget}")
            self._lanes[lane] = _Assembly(size)
            self._taken += size

    def _done(self, message: Message, out: list[Message]) -> None:
        """A message is whole. Streams that are over have no lane any more."""
        if isinstance(message, Failed) or (isinstance(message, Chunk) and message.terminal):
            self.close(message.watch)
        out.append(message)
