"""Messages of many streams on one byte stream: all arrive, in the order of each, and none waits for a large one."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.transfer.connectors.frames import (
    Answer,
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
    gather,
)
from triptych.transfer.connectors.pieces import PIECE, PING, PONG, Cutter, Joiner
from triptych.transfer.errors import WireError

LIMITS = Limits(chunk=8 * PIECE)
HEADER = struct.Struct("<IB")
BEGIN, PART, DROP = 32, 33, 34


def joiner(lanes: Iterable[int] = range(8), **more: Any) -> Joiner:
    """One that wants these streams."""
    out = Joiner(more.pop("limits", LIMITS), budget=more.pop("budget", 64 * PIECE), **more)
    for lane in lanes:
        out.open(lane)
    return out


def chunk(lane: int, number: int, *sizes: int, terminal: bool = False) -> Chunk:
    parts = [random.Random(lane << 20 | number << 4 | i).randbytes(size) for i, size in enumerate(sizes)]
    return Chunk(lane, number, 1, terminal, sizes, 0, 0, gather(parts))


def same(message: Message) -> Message:
    """To compare by value: where a chunk's bytes are makes no difference."""
    return message._replace(body=bytes(message.body)) if isinstance(message, Chunk) else message


def sent(cutter: Cutter) -> bytes:
    """All that it sends."""
    out = b""
    while cut := cutter.cut():
        out += b"".join(cut)
    return out


def receive(to: Joiner, data: bytes, *, at_once: int | None = None) -> list[Message]:
    """Feed it, so many bytes at a time at most."""
    out: list[Message] = []
    rest = memoryview(data)
    while rest:
        room = to.room()
        count = min(len(room), len(rest), at_once or len(rest))
        assert count
        room[:count] = rest[:count]
        del room
        rest = rest[count:]
        out += to.filled(count)
    return [same(message) for message in out]


SMALL: Sequence[Message] = [
    Hello(b"hello"),
    Watch(3, "a/stream_0"),
    Unwatch(3, Leave.STOP, "enough"),
    Consumed(3, 7),
    Returned(9),
    Answer(3, True),
    Failed(4, 2, "it broke"),
    Goodbye("bye"),
]


@pytest.mark.parametrize("message", [*SMALL, chunk(1, 0, 40, 3000), chunk(1, 0, 40, 3 * PIECE, 0, 17)])
@pytest.mark.parametrize("at_once", [1, 3, 4096, None])
def test_each_message_arrives_however_the_bytes_are_split(message: Message, at_once: int | None) -> None:
    cutter = Cutter()
    cutter.post(message)
    data = sent(cutter)
    if at_once in (1, 3) and len(data) > 1 << 16:
        # The places where something begins or ends, byte by byte; what is between them in larger steps.
        to = joiner()
        out = receive(to, data[:200], at_once=at_once) + receive(to, data[200:-200], at_once=65537)
        out += receive(to, data[-200:], at_once=at_once)
    else:
        out = receive(joiner(), data, at_once=at_once)
    assert out == [same(message)]


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Messages of a few streams, mixed; numbers of each in order."""
    numbers: dict[int, int] = defaultdict(int)
    out: list[Message] = []
    for _ in range(draw(st.integers(1, 12))):
        lane = draw(st.integers(0, 3))
        if draw(st.booleans()):
            size = draw(st.sampled_from([0, 1, 5000, PIECE - 100, PIECE - 53, PIECE, PIECE + 1, 2 * PIECE + 7]))
            out.append(chunk(lane, numbers[lane], 20, size))
            numbers[lane] += 1
        else:
            out.append(draw(st.sampled_from([Consumed(lane, 1), Answer(lane, False), Watch(lane, "x" * 300)])))
    return out


@settings(max_examples=60, deadline=None)
@given(messages=conversations(), seed=st.integers(0, 1 << 30))
def test_every_stream_s_messages_arrive_in_their_order_whatever_they_are_mixed_with(
    messages: list[Message], seed: int
) -> None:
    rng = random.Random(seed)
    cutter, to = Cutter(), joiner()
    out: list[Message] = []
    rest = list(messages)
    while rest or cutter:
        for _ in range(rng.randint(0, 3)):
            if rest:
                cutter.post(rest.pop(0))
        data = b"".join(cutter.cut())
        while data:
            count = rng.choice([1, 5, 13, 100, 70000, 1 << 20])
            out += receive(to, data[:count])
            data = data[count:]
    for lane in range(4):
        ours = [same(m) for m in messages if isinstance(m, Chunk | Answer) and m.watch == lane]
        assert [m for m in out if isinstance(m, Chunk | Answer) and m.watch == lane] == ours
    urgent = [m for m in messages if isinstance(m, Consumed | Watch)]
    assert [m for m in out if isinstance(m, Consumed | Watch)] == urgent
    assert len(out) == len(messages)


def test_a_small_chunk_does_not_wait_for_another_stream_s_large_one() -> None:
    cutter, to = Cutter(), joiner()
    cutter.post(chunk(1, 0, 10, 7 * PIECE))
    first = b"".join(cutter.cut())
    assert len(first) <= PIECE + 100
    receive(to, first)
    cutter.post(chunk(2, 0, 10, 100))
    # One piece may have had its turn before it, and no more.
    assert [m.watch for m in receive(to, b"".join(cutter.cut() + cutter.cut())) if isinstance(m, Chunk)] == [2]


def test_large_streams_take_turns() -> None:
    cutter, to = Cutter(), joiner()
    for lane in range(4):
        cutter.post(chunk(lane, 0, 10, 4 * PIECE))
    order = []
    while cut := cutter.cut():
        order += [m.watch for m in receive(to, b"".join(cut)) if isinstance(m, Chunk)]
        if order:
            break
    # When the first is whole, no other lacks more than its last piece or so.
    left = len(sent(cutter))
    assert left <= 3 * (PIECE + 2000)


def test_what_concerns_no_stream_goes_before_all_streams() -> None:
    cutter, to = Cutter(), joiner()
    for lane in range(4):
        cutter.post(chunk(lane, 0, 10, 4 * PIECE))
    cutter.cut()
    cutter.post(Consumed(9, 9))
    assert b"".join(cutter.cut()).startswith(HEADER.pack(16, 4))
    assert to.lanes == 8


def test_a_farewell_goes_after_everything() -> None:
    cutter = Cutter()
    cutter.post(Goodbye("bye"))
    cutter.post(chunk(1, 0, 10, 3 * PIECE))
    cutter.post(chunk(2, 0, 10))
    out = receive(joiner(), sent(cutter))
    assert isinstance(out[-1], Goodbye)
    assert len(out) == 3
    assert not cutter


def test_a_stream_that_was_left_is_not_sent_on_and_its_begun_chunk_is_forgotten_at_the_other_end() -> None:
    cutter, to = Cutter(), joiner(budget=4 * PIECE)
    cutter.post(chunk(1, 0, 10, 3 * PIECE))
    cutter.post(chunk(1, 1, 10, 3 * PIECE))
    receive(to, b"".join(cutter.cut()))
    to.close(1)
    cutter.drop(1)
    rest = sent(cutter)
    assert len(rest) < 100
    assert receive(to, rest) == []
    # Its memory counts no more.
    cutter.post(chunk(2, 0, 10, 3 * PIECE))
    assert len(receive(to, sent(cutter))) == 1


def test_pieces_that_crossed_a_farewell_are_passed_over() -> None:
    cutter, to = Cutter(), joiner()
    cutter.post(chunk(1, 0, 10, 3 * PIECE))
    cutter.post(chunk(2, 0, 10, 3 * PIECE))
    data = sent(cutter)
    middle = len(data) // 3 + 1234
    assert receive(to, data[:middle]) == []
    to.close(1)
    out = receive(to, data[middle:], at_once=10_000)
    assert [m.watch for m in out if isinstance(m, Chunk)] == [2]
    assert out == [same(chunk(2, 0, 10, 3 * PIECE))]


def test_a_stream_that_has_ended_leaves_nothing_behind() -> None:
    cutter, to = Cutter(), joiner(range(100))
    for lane in range(100):
        cutter.post(chunk(lane, 0, 10, 100, terminal=True) if lane % 2 else Failed(lane, 0, "no"))
    receive(to, sent(cutter))
    assert to.lanes == 0
    assert not cutter


def test_pings_are_counted_and_pongs_are_only_heard() -> None:
    to = joiner()
    assert receive(to, PING + PONG + PING, at_once=1) == []
    assert to.pings == 2


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("a kind that there is not", HEADER.pack(0, 99)),
        ("kind 0", HEADER.pack(4, 0)),
        ("a control message that is too long", HEADER.pack(1 << 20, 2)),
        ("a chunk of more than a piece in one", HEADER.pack(PIECE + 1, 7)),
        ("a piece of more than a piece", HEADER.pack(PIECE + 9, PART)),
        ("a piece of nothing", HEADER.pack(8, PART)),
        ("a ping with a body", HEADER.pack(1, 35)),
        ("a beginning of a wrong length", HEADER.pack(15, BEGIN)),
        ("a chunk that is too large", HEADER.pack(16, BEGIN) + struct.pack("<QQ", 1, LIMITS.chunk + 1)),
        ("a chunk of 2**64 - 1 bytes", HEADER.pack(16, BEGIN) + struct.pack("<QQ", 1, (1 << 64) - 1)),
        ("a small chunk in pieces", HEADER.pack(16, BEGIN) + struct.pack("<QQ", 1, 10)),
        ("a piece of what was not begun", HEADER.pack(12, PART) + struct.pack("<Q", 1) + b"1234"),
        ("a drop of what was not left", HEADER.pack(8, DROP) + struct.pack("<Q", 1)),
        ("two beginnings", 2 * (HEADER.pack(16, BEGIN) + struct.pack("<QQ", 1, PIECE + 1))),
    ],
)
@pytest.mark.parametrize("at_once", [1, None])
def test_what_no_cutter_sends_is_a_wire_error_and_takes_no_memory(what: str, data: bytes, at_once: int | None) -> None:
    to = joiner()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            receive(to, data, at_once=at_once)
        assert tracemalloc.get_traced_memory()[1] < 2 * PIECE, what
    finally:
        tracemalloc.stop()


def test_a_piece_that_is_longer_than_what_was_begun_is_a_wire_error() -> None:
    begin = HEADER.pack(16, BEGIN) + struct.pack("<QQ", 1, PIECE + 1)
    piece = HEADER.pack(8 + PIECE, PART) + struct.pack("<Q", 1) + bytes(PIECE)
    with pytest.raises(WireError):
        receive(joiner(), begin + piece + piece)


def test_chunks_in_pieces_are_bounded_together() -> None:
    to = joiner(budget=5 * PIECE)
    begin = [HEADER.pack(16, BEGIN) + struct.pack("<QQ", lane, 2 * PIECE) for lane in range(3)]
    receive(to, begin[0] + begin[1])
    with pytest.raises(WireError, match="at once"):
        receive(to, begin[2])


def test_a_joiner_that_grows_keeps_what_it_has_of_a_message() -> None:
    cutter = Cutter()
    cutter.post(Consumed(3, 7))
    cutter.post(Consumed(3, 8))
    data = sent(cutter)
    to = joiner(limits=Limits(chunk=0, control=64), buffer=64)
    assert receive(to, data[:30]) == [Consumed(3, 7)]
    to.grow(LIMITS)
    assert receive(to, data[30:]) == [Consumed(3, 8)]
    cutter.post(chunk(1, 0, 40, 30_000))
    assert receive(to, sent(cutter)) == [same(chunk(1, 0, 40, 30_000))]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), seed=st.integers(0, 1 << 20))
def test_garbage_is_messages_or_a_wire_error_and_never_anything_else(data: bytes, seed: int) -> None:
    cutter, rng = Cutter(), random.Random(seed)
    cutter.post(chunk(1, 0, 10, PIECE))
    cutter.post(Consumed(1, 1))
    good = bytearray(sent(cutter)[:300])
    for _ in range(3):
        good[rng.randrange(len(good))] = rng.randrange(256)
    for stream in (data, bytes(good) + data):
        try:
            receive(joiner(limits=Limits(chunk=PIECE + 4096)), stream, at_once=rng.choice([1, 7, 1000]))
        except WireError:
            pass
