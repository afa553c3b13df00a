"""Memory that is shared: an allocator, and the memory file that it divides.

`Allocator` is pure: offsets and sizes. Blocks are handed out first fit, lowest offset first, so that the same few pages
are used again and again, and may come back in any order.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final

from triptych.transfer.connectors.frames import Buffer, gather, layout
from triptych.transfer.connectors.peers import MIB, Store, Stored
from triptych.transfer.errors import ConnectorError, WireError, WouldBlock

PAGE: Final = 4096
ALIGN: Final = 64
"""Of the parts of a chunk, from its block on."""
KEEP: Final = 64 * MIB
"""An arena that is empty gives the system back what it has beyond this."""
# What makes the file safe to map: its size cannot change.
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
_SHRINK: Final = 0x2
SEALS: Final = 0x1 | _SHRINK | 0x4  # no more seals, no shrinking, no growing


def block(nbytes: int) -> int:
    """The size of a block for so many bytes: whole pages, and one of eight sizes between two powers of two, so that
    blocks which come back fit again."""
    grain = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return max(PAGE, -(-nbytes // grain) * grain)


class Allocator:
    """Divides `size` bytes into blocks that do not overlap."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.top = 0  # no block has gone beyond since this was set to 0
        self._starts = [0]  # of what is free, sorted; neighbours are always one
        self._sizes = {0: size}
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The offset of a block of so many bytes, None where none is free."""
        for index, start in enumerate(self._starts):
            room = self._sizes[start]
            if room < nbytes:
                continue
            del self._sizes[start]
            if room > nbytes:
                self._starts[index] = start + nbytes
                self._sizes[start + nbytes] = room - nbytes
            else:
                del self._starts[index]
            self._taken[start] = nbytes
            self.used += nbytes
            self.top = max(self.top, start + nbytes)
            return start
        return None

    def free(self, start: int) -> None:
        """Give a block back, once. Raises KeyError for what is none."""
        nbytes = self._taken.pop(start)
        self.used -= nbytes
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + nbytes:
            nbytes += self._sizes.pop(self._starts.pop(index))
        if index:
            before = self._starts[index - 1]
            if before + self._sizes[before] == start:
                self._sizes[before] += nbytes
                return
        self._starts.insert(index, start)
        self._sizes[start] = nbytes

    def blocks(self) -> dict[int, int]:
        """Offsets and sizes of what is taken."""
        return dict(self._taken)


class ArenaStore(Store):
    """Small chunks in ordinary memory, larger ones in a memory file of `size` bytes that receivers map.

    The kernel owns the file: it is gone with the last process that maps it, whoever was killed.
    """

    def __init__(self, size: int, inline: int, name: str) -> None:
        self.size = size
        self._inline = inline
        self._name = name
        self._allocator = Allocator(size)
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self.fd = self.shared = -1

    def open(self) -> int:
        """Make the file, once; a descriptor to read it with, which stays this object's. Raises ConnectorError."""
        if self._map is None:
            try:
                self.fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.fd, self.size)
                fcntl.fcntl(self.fd, F_ADD_SEALS, SEALS)
                self._map = mmap.mmap(self.fd, self.size)
                # What peers are given cannot be written to. (A seal against that would keep us from giving pages back.)
                self.shared = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:
                self.close()
                raise ConnectorError(f"no shared memory of {self.size} bytes: {error}") from error
            self._view = memoryview(self._map)
        return self.shared

    @property
    def used(self) -> int:
        return self._allocator.used

    def reserve(self, sizes: tuple[int, ...]) -> Stored:
        nbytes = sum(sizes)
        if nbytes <= self._inline:
            return Stored(sizes, nbytes, nbytes)
        size = block(layout(sizes, ALIGN)[1])
        if size > self.size:
            raise ConnectorError(f"a chunk of {nbytes} bytes is larger than all shared memory, {self.size} bytes")
        offset = self._allocator.take(size)
        if offset is None:
            raise WouldBlock(f"{self.used} of {self.size} bytes of shared memory are taken, and a chunk has {nbytes}")
        return Stored(sizes, nbytes, size, offset)

    def fill(self, stored: Stored, parts: Sequence[Buffer]) -> None:
        if stored.offset is None:
            stored.data = gather(parts)
            return
        for at, part in zip(layout(stored.sizes, ALIGN)[0], parts, strict=True):
            self._view[stored.offset + at : stored.offset + at + len(part)] = part

    def read(self, stored: Stored) -> Buffer:
        if stored.offset is None:
            return stored.data
        return self._view[stored.offset : stored.offset + layout(stored.sizes, ALIGN)[1]]

    def align(self, stored: Stored) -> int:
        return super().align(stored) if stored.offset is None else ALIGN

    def free(self, stored: Stored) -> None:
        if stored.offset is None:
            stored.data = b""
            return
        self._allocator.free(stored.offset)
        if not self._allocator.used:
            if self._allocator.top > KEEP and self._map is not None:
                with contextlib.suppress(OSError):
                    self._map.madvise(mmap.MADV_REMOVE, KEEP, self._allocator.top - KEEP)
            self._allocator.top = 0

    def close(self) -> None:
        """Let go of the file; receivers that map it keep it. May be called twice."""
        self._view.release()
        if self._map is not None:
            # A view of it is still somewhere (a copy that is under way): then it goes with that.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        for fd in (self.fd, self.shared):
            if fd >= 0:
                os.close(fd)
        self.fd = self.shared = -1


class Window:
    """A receiver's view of a sender's arena: private, so that what a reader writes stays with the reader."""

    def __init__(self, fd: int, size: int, most: int) -> None:
        """Raises WireError unless `fd` is a memory file of that size, of at most `most` bytes, that cannot shrink."""
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
            if not seals & _SHRINK:
                raise WireError("its memory file may shrink")
            if os.fstat(fd).st_size != size or not 0 < size <= most or size % PAGE:
                raise WireError(f"its memory file has {os.fstat(fd).st_size} bytes, and it says {size}")
            flags = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, which the module has no name for
            self.map = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise WireError(f"its memory file cannot be mapped: {error}") from None
        self.size = size

    def copy(self, offset: int, nbytes: int) -> bytearray:
        """The bytes, copied."""
        with memoryview(self.map) as view:
            return bytearray(view[offset : offset + nbytes])

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop what a reader may have written there: the next one sees the sender's bytes."""
        with contextlib.suppress(OSError, ValueError):
            self.map.madvise(mmap.MADV_DONTNEED, offset, nbytes)
