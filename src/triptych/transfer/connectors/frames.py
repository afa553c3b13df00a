"""Messages between the two ends of a link, and their bytes. Sans-IO.

A frame is a u32 with the size of its body, a u8 with the kind of message, and the body. Nothing that a peer says is
believed: sizes are checked before memory for them is taken, and every body has to be exactly as long as its kind and
its own counts say. What is not so is a `WireError`, after which the link is of no more use.

    reader = FrameReader(Limits())
    view = reader.room()          # where the next bytes go
    reader.filled(sock.recv_into(view))   # the messages that are whole now

The receiver names a stream once, in `Watch`, with a number of its own; after that both ends use the number. So no
message can be taken for one of an earlier watch of the same name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from triptych.transfer.errors import WireError

Buffer = bytes | bytearray | memoryview

ALIGN: Final = 16
"""Parts of a chunk's body begin at multiples of this: no element of any dtype is larger."""
MAX_PARTS: Final = 4097
"""A head and what `wire.MAX_BUFFERS` allows beside it."""
MAX_NAME: Final = 1 << 16
"""Bytes of a stream's name, of a reason, of a greeting."""


class Leave(IntEnum):
    """How a receiver leaves a stream."""

    RETURN = 0  # chunks that it has not taken are as if they had not been sent
    DROP = 1  # nobody wants the rest
    STOP = 2  # as DROP, and the sender is to know why


class Hello(NamedTuple):
    """Greetings of the carrier, before anything else."""

    body: bytes


class Watch(NamedTuple):
    """Receiver: send me this stream; `watch` is its number from now on."""

    watch: int
    stream: str


class Unwatch(NamedTuple):
    """Receiver: no more of it."""

    watch: int
    how: Leave
    reason: str


class Consumed(NamedTuple):
    """Receiver: a chunk was taken. Its memory comes back with this, or, where it was lent, with `Returned`."""

    watch: int
    number: int


class Returned(NamedTuple):
    """Receiver: lent memory is not used any more."""

    loan: int


class Answer(NamedTuple):
    """Sender: all that there is of this stream by now was sent; `found`: there is such a stream."""

    watch: int
    found: bool


class Chunk(NamedTuple):
    """Sender: a chunk. `sizes`: bytes of its head and of each buffer. Its bytes are in `body`, laid out by `layout`,
    or, where `loan` is not 0, in the memory that both share, from `offset` on."""

    watch: int
    number: int
    generation: int
    terminal: bool
    sizes: tuple[int, ...]
    loan: int = 0
    offset: int = 0
    body: Buffer = b""


class Failed(NamedTuple):
    """Sender: the stream is broken; chunks from `number` on are void."""

    watch: int
    number: int
    reason: str


class Goodbye(NamedTuple):
    """Either: this end is closing, on purpose."""

    reason: str


Message = Hello | Watch | Unwatch | Consumed | Returned | Answer | Chunk | Failed | Goodbye

_HELLO, _WATCH, _UNWATCH, _CONSUMED, _RETURNED, _ANSWER, _CHUNK, _FAILED, _GOODBYE = range(1, 10)

_HEADER: Final = struct.Struct("<IB")
_ONE: Final = struct.Struct("<Q")
_TWO: Final = struct.Struct("<QQ")
_FLAGGED: Final = struct.Struct("<QB")
_CHUNK_HEAD: Final = struct.Struct("<QQQQQIB")  # watch, number, generation, loan, offset, parts, terminal
_PADDING: Final = tuple(bytes(count) for count in range(ALIGN))
_SHORT: Final = 8192  # to copy this is less work than to send two buffers
_CONSUMED_FRAME: Final = struct.Struct("<IBQQ")
_SIZES: Final = tuple(struct.Struct(f"<{count}Q") for count in range(9))


class Limits(NamedTuple):
    """Bytes of a body, at most."""

    chunk: int = 1 << 20
    control: int = MAX_NAME + 16

    def of(self, kind: int) -> int:
        """The most for a kind of message. Raises WireError for a kind that there is not."""
        if not _HELLO <= kind <= _GOODBYE:
            raise WireError(f"a message of kind {kind}, which is none")
        return self.chunk if kind == _CHUNK else self.control


def layout(sizes: Sequence[int], align: int = ALIGN) -> tuple[list[int], int]:
    """Where parts of these sizes begin, one behind the other, and how long they are together."""
    at = 0
    offsets = []
    for size in sizes:
        at += -at % align
        offsets.append(at)
        at += size
    return offsets, at


def gather(parts: Sequence[Buffer], align: int = ALIGN) -> bytes:
    """The parts in one piece, laid out by `layout`: one copy of each."""
    out: list[Buffer] = []
    at = 0
    for part in parts:
        if -at % align:
            out.append(bytes(-at % align))
            at += -at % align
        out.append(part)
        at += len(part)
    return b"".join(out)


def scatter(body: memoryview, sizes: Sequence[int], align: int = ALIGN) -> list[memoryview]:
    """Views on the parts. Raises WireError where they do not fill the body."""
    offsets, total = layout(sizes, align)
    if total != body.nbytes:
        raise WireError(f"a chunk of {total} bytes came in {body.nbytes}")
    return [body[at : at + size] for at, size in zip(offsets, sizes, strict=True)]


def _text(value: str) -> bytes:
    # An id may be any str, and those may hold lone surrogates.
    return value.encode("utf-8", "surrogatepass")


def clip(reason: str) -> str:
    """A reason that fits into a message."""
    return reason if len(reason) <= 2000 else f"{reason[:2000]}…"


def pack(message: Message) -> list[Buffer]:
    """The bytes of a message. A chunk's body is not copied: it is the last of the buffers, unless it is short."""
    # The two of every chunk first.
    if isinstance(message, Chunk):
        return _pack_chunk(message)
    if isinstance(message, Consumed):
        return [_CONSUMED_FRAME.pack(16, _CONSUMED, *message)]
    match message:
        case Returned(loan):
            return [_HEADER.pack(8, _RETURNED) + _ONE.pack(loan)]
        case Watch(watch, stream):
            return _framed(_WATCH, _ONE.pack(watch) + _text(stream))
        case Answer(watch, found):
            return _framed(_ANSWER, _FLAGGED.pack(watch, found))
        case Unwatch(watch, how, reason):
            return _framed(_UNWATCH, _FLAGGED.pack(watch, how) + _text(clip(reason)))
        case Failed(watch, number, reason):
            return _framed(_FAILED, _TWO.pack(watch, number) + _text(clip(reason)))
        case Goodbye(reason):
            return _framed(_GOODBYE, _text(clip(reason)))
        case Hello(body):
            return _framed(_HELLO, body)
    raise TypeError(f"{message!r} is no message")


def _framed(kind: int, body: bytes) -> list[Buffer]:
    return [_HEADER.pack(len(body), kind) + body]


def _sizes(count: int) -> struct.Struct:
    return _SIZES[count] if count < len(_SIZES) else struct.Struct(f"<{count}Q")


def _pack_chunk(chunk: Chunk) -> list[Buffer]:
    watch, number, generation, terminal, sizes, loan, offset, body = chunk
    count = len(sizes)
    size = _CHUNK_HEAD.size + 8 * count
    padding = -size % ALIGN
    head = (
        _HEADER.pack(size + padding + len(body), _CHUNK)
        + _CHUNK_HEAD.pack(watch, number, generation, loan, offset, count, terminal)
        + _sizes(count).pack(*sizes)
        + _PADDING[padding]
    )
    return [head + body] if len(body) <= _SHORT else [head, body]


def unpack(kind: int, body: bytearray) -> Message:
    """A message from its body, which a chunk keeps. Raises WireError where they do not fit."""
    size = len(body)
    try:
        if kind == _CHUNK:
            return _unpack_chunk(body)
        if kind == _CONSUMED:
            return Consumed(*_TWO.unpack(body))
        if kind == _RETURNED:
            return Returned(*_ONE.unpack(body))
        if kind == _WATCH:
            return Watch(_ONE.unpack_from(body)[0], _read(body, _ONE.size))
        if kind == _ANSWER:
            watch, found = _FLAGGED.unpack(body)
            return Answer(watch, bool(found))
        if kind == _UNWATCH:
            watch, how = _FLAGGED.unpack_from(body)
            return Unwatch(watch, Leave(how), _read(body, _FLAGGED.size))
        if kind == _FAILED:
            watch, number = _TWO.unpack_from(body)
            return Failed(watch, number, _read(body, _TWO.size))
        if kind == _GOODBYE:
            return Goodbye(_read(body, 0))
        if kind == _HELLO:
            return Hello(bytes(body))
    except (struct.error, ValueError) as error:
        raise WireError(f"a message of kind {kind} with {size} bytes: {error}") from None
    raise WireError(f"a message of kind {kind}, which is none")


def _read(body: bytearray, start: int) -> str:
    return body[start:].decode("utf-8", "surrogatepass")


def _unpack_chunk(body: bytearray) -> Chunk:
    watch, number, generation, loan, offset, count, terminal = _CHUNK_HEAD.unpack_from(body)
    if not 1 <= count <= MAX_PARTS or terminal > 1:
        raise WireError(f"a chunk of {count} parts")
    sizes = _sizes(count).unpack_from(body, _CHUNK_HEAD.size)
    at = _CHUNK_HEAD.size + 8 * count
    at += -at % ALIGN
    rest = memoryview(body)[at:]
    _, total = layout(sizes)
    if (0 if loan else total) != len(body) - at:
        raise WireError(f"a chunk of {total} bytes in a message with {len(body) - at}")
    return Chunk(watch, number, generation, bool(terminal), sizes, loan, offset, rest)


class FrameReader:
    """Bytes to messages. Takes memory for what is on its way only: a buffer of 64 KiB, and one body that is longer."""

    def __init__(self, limits: Limits, buffer: int = 1 << 16) -> None:
        self._limits = limits
        self._small = min(limits)
        self._buffer = bytearray(buffer)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was received and not yet parsed
        self._body: bytearray | None = None  # of a frame that does not fit into the buffer
        self._kind = 0
        self._have = 0

    def room(self) -> memoryview:
        """Where to receive into next; never empty."""
        if self._body is not None:
            return memoryview(self._body)[self._have :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            # What is left is shorter than a frame that fits, so that each byte moves once at most.
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._body is not None or self._start != self._end

    def filled(self, count: int) -> list[Message]:
        """`count` bytes were received into `room()`: the messages that are whole now. Raises WireError."""
        if self._body is not None:
            self._have += count
            if self._have < len(self._body):
                return []
            body, self._body = self._body, None
            return [unpack(self._kind, body)]
        self._end += count
        out: list[Message] = []
        while self._end - self._start >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._buffer, self._start)
            if (size > self._small or not _HELLO <= kind <= _GOODBYE) and size > self._limits.of(kind):
                raise WireError(f"a message of kind {kind} with {size} bytes: at most {self._limits.of(kind)}")
            at = self._start + _HEADER.size
            if at + size <= self._end:
                out.append(unpack(kind, self._buffer[at : at + size]))
                self._start = at + size
                continue
            if _HEADER.size + size > len(self._buffer):
                self._body, self._kind, self._have = bytearray(size), kind, self._end - at
                self._body[: self._have] = self._view[at : self._end]
                self._start = self._end = 0
            break
        return out

    def feed(self, data: Buffer) -> list[Message]:
        """The same for bytes that are somewhere else."""
        out: list[Message] = []
        rest = memoryview(data)
        while rest:
            room = self.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            out += self.filled(count)
        return out
