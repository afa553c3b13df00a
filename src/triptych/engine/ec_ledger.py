"""What a store holds, in one small file that all its processes share: exact after every step, rebuilt after a crash."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, replace

# magic, dirty, padding, bytes, items, evicted bytes, evicted items; then a CRC.
_FIELDS = struct.Struct("<8sB7xQQQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"TRIPLGR1"


@dataclass(frozen=True, slots=True)
class Usage:
    """Content of a store, in bytes of files and in items, and what was evicted since it was made."""

    bytes: int = 0
    items: int = 0
    evicted_bytes: int = 0
    evicted_items: int = 0

    def add(self, size: int, items: int) -> Usage:
        """With an item of `size` bytes more (or, with negative numbers, less)."""
        return replace(self, bytes=max(0, self.bytes + size), items=max(0, self.items + items))

    def evict(self, size: int) -> Usage:
        """With an item of `size` bytes evicted."""
        less = self.add(-size, -1)
        return replace(less, evicted_bytes=less.evicted_bytes + size, evicted_items=less.evicted_items + 1)


def load(descriptor: int) -> tuple[Usage, bool]:
    """The recorded usage and whether it can be relied upon: not after a crash in mid-change, nor when damaged."""
    data = os.pread(descriptor, _FIELDS.size + _CRC.size, 0)
    fields, crc = data[: _FIELDS.size], data[_FIELDS.size :]
    if len(data) != _FIELDS.size + _CRC.size or _CRC.unpack(crc)[0] != zlib.crc32(fields):
        return Usage(), False
    magic, dirty, size, items, evicted_bytes, evicted_items = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        return Usage(), False
    return Usage(size, items, evicted_bytes, evicted_items), not dirty


def save(descriptor: int, usage: Usage, *, dirty: bool) -> None:
    """Record `usage`. `dirty` says that files are about to change: whoever finds it so counts them again."""
    fields = _FIELDS.pack(_MAGIC, dirty, usage.bytes, usage.items, usage.evicted_bytes, usage.evicted_items)
    os.pwrite(descriptor, fields + _CRC.pack(zlib.crc32(fields)), 0)
