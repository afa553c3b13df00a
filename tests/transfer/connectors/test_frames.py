"""Messages to bytes and back: whole, byte by byte, and what is none."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.connectors.frames import (
    ALIGN,
    MAX_NAME,
    MAX_PARTS,
    Answer,
    Chunk,
    Consumed,
    Failed,
    FrameReader,
    Goodbye,
    Hello,
    Leave,
    Limits,
    Message,
    Returned,
    Unwatch,
    Watch,
    gather,
    layout,
    pack,
    scatter,
)
from triptych.transfer.errors import WireError

U64 = st.integers(0, 2**64 - 1)
# Ids may be any str, and so may hold what UTF-8 has no bytes for.
TEXT = st.text(st.characters(exclude_categories=()), max_size=300)
SIZES = st.lists(U64, min_size=1, max_size=20).map(tuple)
PARTS = st.lists(st.binary(max_size=200), min_size=1, max_size=12)


def chunk(watch: int, number: int, generation: int, terminal: bool, parts: list[bytes]) -> Chunk:
    return Chunk(watch, number, generation, terminal, tuple(map(len, parts)), body=gather(parts))


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, st.binary(max_size=500)),
    st.builds(Watch, U64, TEXT),
    st.builds(Unwatch, U64, st.sampled_from(Leave), TEXT),
    st.builds(Consumed, U64, U64),
    st.builds(Returned, U64),
    st.builds(Answer, U64, st.booleans()),
    st.builds(Failed, U64, U64, TEXT),
    st.builds(Goodbye, TEXT),
    st.builds(chunk, U64, U64, U64, st.booleans(), PARTS),
    st.builds(Chunk, U64, U64, U64, st.booleans(), SIZES, st.integers(1, 2**64 - 1), U64, st.just(b"")),
)


def wire(*messages: Message) -> bytes:
    return b"".join(bytes(buffer) for message in messages for buffer in pack(message))


def plain(message: Message) -> tuple[object, ...]:
    values = tuple(bytes(value) if isinstance(value, memoryview | bytearray) else value for value in message)
    return (type(message), *values)


def same(left: list[Message], right: list[Message]) -> None:
    assert [plain(message) for message in left] == [plain(message) for message in right]


@given(st.lists(MESSAGES, max_size=6))
def test_messages_arrive_as_they_were_sent(messages: list[Message]) -> None:
    same(FrameReader(Limits()).feed(wire(*messages)), messages)


@given(st.lists(MESSAGES, max_size=4), st.integers(16, 64))
def test_messages_arrive_the_same_byte_by_byte(messages: list[Message], buffer: int) -> None:
    reader, out = FrameReader(Limits(), buffer), []
    for byte in wire(*messages):
        out += reader.feed(bytes([byte]))
    same(out, messages)
    assert not reader.partial


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 90), min_size=1), st.integers(16, 4096))
def test_messages_arrive_the_same_in_any_pieces(messages: list[Message], cuts: list[int], buffer: int) -> None:
    reader, out, data, at, turn = FrameReader(Limits(), buffer), [], wire(*messages), 0, 0
    while at < len(data):
        out += reader.feed(data[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        turn += 1
    same(out, messages)


@given(st.binary(max_size=400))
def test_any_bytes_are_messages_or_a_wire_error(data: bytes) -> None:
    try:
        FrameReader(Limits()).feed(data)
    except WireError:
        pass


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_damaged_messages_are_messages_or_a_wire_error(messages: list[Message], data: st.DataObject) -> None:
    bad = bytearray(wire(*messages))
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    try:
        FrameReader(Limits()).feed(bad)
    except WireError:
        pass


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=9))
def test_parts_come_out_of_a_body_as_they_went_in_and_are_aligned(parts: list[bytes]) -> None:
    body = memoryview(gather(parts))
    assert [bytes(part) for part in scatter(body, tuple(map(len, parts)))] == parts
    assert all(at % ALIGN == 0 for at in layout(tuple(map(len, parts)))[0])


@pytest.mark.parametrize("kind", [0, 10, 255])
def test_an_unknown_kind_is_refused_before_its_body_comes(kind: int) -> None:
    with pytest.raises(WireError, match=f"kind {kind}"):
        FrameReader(Limits()).feed(struct.pack("<IB", 5, kind))


def test_a_size_beyond_the_limit_is_refused_before_memory_is_taken_for_it() -> None:
    limits = Limits(chunk=1000)
    for kind, most in ((7, 1000), (2, limits.control)):
        with pytest.raises(WireError, match=f"at most {most}"):
            FrameReader(limits).feed(struct.pack("<IB", 2**32 - 1, kind))


def test_a_name_of_any_length_that_is_allowed_fits() -> None:
    name = "é" * (MAX_NAME // 2)
    same(FrameReader(Limits()).feed(wire(Watch(1, name))), [Watch(1, name)])


def test_a_long_reason_is_cut_and_still_arrives() -> None:
    (failed,) = FrameReader(Limits()).feed(wire(Failed(1, 2, "x" * 100_000)))
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("xxx")
    assert len(failed.reason) < 3000


@pytest.mark.parametrize("body", [b"", b"x" * 15, b"x" * 17])
def test_a_body_of_another_length_than_its_kind_has_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="kind 4"):
        FrameReader(Limits()).feed(struct.pack("<IB", len(body), 4) + body)


def test_a_chunk_whose_sizes_do_not_make_its_body_is_refused() -> None:
    good = chunk(1, 0, 0, False, [b"head", b"tensor"])
    for sizes in ((4, 5), (4, 6, 1), (2**63, 2**63), (4,)):
        with pytest.raises(WireError, match="a chunk of"):
            FrameReader(Limits()).feed(wire(good._replace(sizes=sizes)))


@pytest.mark.parametrize("count", [0, MAX_PARTS + 1, 2**32 - 1])
def test_a_chunk_that_claims_no_or_too_many_parts_is_refused(count: int) -> None:
    data = bytearray(wire(chunk(1, 0, 0, False, [b"head"])))
    struct.pack_into("<I", data, 5 + 40, count)
    with pytest.raises(WireError, match=f"{count} parts"):
        FrameReader(Limits()).feed(data)


def test_a_chunk_in_shared_memory_carries_no_bytes_itself() -> None:
    lent = Chunk(1, 0, 0, False, (10, 20), loan=7, offset=4096)
    same(FrameReader(Limits()).feed(wire(lent)), [lent])
    with pytest.raises(WireError, match="a chunk of"):
        FrameReader(Limits()).feed(wire(lent._replace(body=b"x" * 36)))


def test_a_chunks_bytes_are_its_readers_own_and_can_be_written_to() -> None:
    reader = FrameReader(Limits())
    (first,) = reader.feed(wire(chunk(1, 0, 0, False, [b"a" * 100])))
    reader.feed(wire(chunk(1, 1, 0, False, [b"b" * 100])))
    assert isinstance(first, Chunk)
    body = memoryview(first.body)
    assert bytes(body) == b"a" * 100
    assert not body.readonly
