"""The allocator against a model, and the memory file: bounded, sealed, given back."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.transfer.connectors.arena import ALIGN, F_GET_SEALS, KEEP, PAGE, Allocator, ArenaStore, Window, block
from triptych.transfer.connectors.frames import layout, scatter
from triptych.transfer.errors import ConnectorError, WireError, WouldBlock

MIB = 1 << 20


class AllocatorModel(RuleBasedStateMachine):
    """Blocks are taken and come back in any order."""

    SIZE = 1000

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(self.SIZE)
        self.owner: list[int] = [0] * self.SIZE  # which block each byte is in
        self.blocks: dict[int, tuple[int, int]] = {}
        self.count = 0

    def free_runs(self) -> list[int]:
        runs = "".join("x" if owner else " " for owner in self.owner).split("x")
        return [len(run) for run in runs if run]

    @rule(nbytes=st.integers(1, 400))
    def take(self, nbytes: int) -> None:
        fits = any(run >= nbytes for run in self.free_runs())
        start = self.allocator.take(nbytes)
        assert (start is not None) == fits
        if start is not None:
            assert not any(self.owner[start : start + nbytes])
            assert start + nbytes <= self.SIZE
            self.count += 1
            self.blocks[self.count] = start, nbytes
            self.owner[start : start + nbytes] = [self.count] * nbytes

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.blocks)))
        start, nbytes = self.blocks.pop(number)
        self.allocator.free(start)
        self.owner[start : start + nbytes] = [0] * nbytes
        with pytest.raises(KeyError):
            self.allocator.free(start)

    @invariant()
    def it_knows_what_is_taken(self) -> None:
        assert self.allocator.used == sum(nbytes for _, nbytes in self.blocks.values())
        assert self.allocator.blocks() == dict(self.blocks.values())

    def teardown(self) -> None:
        for start, _ in self.blocks.values():
            self.allocator.free(start)
        assert self.allocator.take(self.SIZE) == 0  # in one piece again


TestAllocator = AllocatorModel.TestCase


@pytest.fixture
def arena() -> Iterator[ArenaStore]:
    arena = ArenaStore(MIB, 1000, "triptych:test")
    yield arena
    arena.close()


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 100_000, MIB, 16 * MIB + 1])
def test_a_block_wastes_at_most_an_eighth_or_a_page(nbytes: int) -> None:
    assert nbytes <= block(nbytes) < nbytes + max(PAGE, nbytes // 4)
    assert block(nbytes) % PAGE == 0


def test_small_chunks_take_no_shared_memory(arena: ArenaStore) -> None:
    stored = arena.reserve((10, 990))
    arena.fill(stored, [b"h" * 10, b"t" * 990])
    assert stored.offset is None
    assert arena.used == 0
    assert [bytes(p) for p in scatter(memoryview(stored.data), stored.sizes)] == [b"h" * 10, b"t" * 990]


def test_a_large_chunk_is_in_shared_memory_its_parts_aligned(arena: ArenaStore) -> None:
    arena.open()
    parts = [b"h" * 70, b"t" * 5000, b"", b"u" * 3]
    stored = arena.reserve(tuple(map(len, parts)))
    arena.fill(stored, parts)
    window = Window(arena.shared, arena.size, MIB)
    assert stored.offset is not None
    body = memoryview(window.copy(stored.offset, layout(stored.sizes, ALIGN)[1]))
    assert [bytes(part) for part in scatter(body, stored.sizes, ALIGN)] == parts


def test_a_full_arena_has_room_again_when_chunks_come_back(arena: ArenaStore) -> None:
    arena.open()
    held = [arena.reserve((100_000,)) for _ in range(9)]
    with pytest.raises(WouldBlock, match=r"of 1048576 bytes of shared memory are taken"):
        arena.reserve((200_000,))
    for stored in held[::2]:
        arena.free(stored)
    again = arena.reserve((100_000,))
    for stored in (again, *held[1::2]):
        arena.free(stored)
    assert arena.used == 0


def test_a_chunk_that_never_fits_is_an_error_and_not_a_wait(arena: ArenaStore) -> None:
    with pytest.raises(ConnectorError, match="larger than all shared memory"):
        arena.reserve((2 * MIB,))


def test_a_receiver_that_writes_changes_neither_the_sender_s_bytes_nor_a_later_chunk(arena: ArenaStore) -> None:
    arena.open()
    stored = arena.reserve((5000,))
    arena.fill(stored, [b"a" * 5000])
    assert stored.offset is not None
    window = Window(arena.shared, arena.size, MIB)
    window.map[stored.offset : stored.offset + 5000] = b"z" * 5000
    assert bytes(arena.read(stored)) == b"a" * 5000
    arena.fill(stored, [b"b" * 5000])
    window.forget(stored.offset, 2 * PAGE)
    assert window.copy(stored.offset, 5000) == b"b" * 5000


def test_nobody_can_shrink_the_file_or_map_it_to_write(arena: ArenaStore) -> None:
    fd = arena.open()
    assert fcntl.fcntl(fd, F_GET_SEALS) & 0x7 == 0x7
    for own in (fd, arena.fd):
        with pytest.raises(OSError, match=r"not permitted|Invalid"):
            os.ftruncate(own, 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE)


def test_a_file_that_could_shrink_under_its_reader_is_refused() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE)
        with pytest.raises(WireError, match="may shrink"):
            Window(fd, PAGE, MIB)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("size", "most"), [(2 * MIB, 4 * MIB), (MIB, MIB - 1), (0, MIB), (MIB - 1, MIB)])
def test_a_file_of_another_size_than_it_is_said_to_have_is_refused(arena: ArenaStore, size: int, most: int) -> None:
    with pytest.raises(WireError, match="its memory file has 1048576 bytes"):
        Window(arena.open(), size, most)


def test_what_is_no_memory_file_is_refused(tmp_path: os.PathLike[str]) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(WireError, match="cannot be mapped"):
            Window(fd, PAGE, MIB)
    finally:
        os.close(fd)


def test_an_empty_arena_gives_back_what_it_has_beyond_what_it_keeps() -> None:
    arena = ArenaStore(2 * KEEP, 0, "triptych:test")
    try:
        fd = arena.open()
        held = [arena.reserve((KEEP - PAGE,)), arena.reserve((KEEP - PAGE,))]
        for stored in held:
            arena.fill(stored, [bytes(KEEP - PAGE)])
        before = os.fstat(fd).st_blocks * 512
        arena.free(held[0])
        assert os.fstat(fd).st_blocks * 512 == before
        arena.free(held[1])
        assert os.fstat(fd).st_blocks * 512 <= KEEP < before
    finally:
        arena.close()


def test_a_closed_arena_leaves_no_descriptor(arena: ArenaStore) -> None:
    fds = (arena.open(), arena.fd)
    arena.close()
    arena.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
