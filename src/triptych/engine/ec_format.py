"""The file format of one encoder output: a fixed header, then the rows.

A header is 96 bytes, so reading it can neither allocate nor loop on what a file claims; each claim is checked against
the others, and all of them against the file's size, before a byte is reserved for the rows.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from blake3 import blake3

_MAGIC = b"TRIPEC\r\n"
_VERSION = 1
# magic, version, dtype, padding, rows, width, payload bytes, key, checksum of the payload; then a CRC of all that.
_FIELDS = struct.Struct("<8sHBxIIQ32s32s")
_CRC = struct.Struct("<I")
HEADER_SIZE = _FIELDS.size + _CRC.size

#: Bytes per value of each data type that can be stored, by torch's name for it.
DTYPES: Mapping[str, int] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})
_CODES = {name: code for code, name in enumerate(DTYPES, 1)}
_NAMES = {code: name for name, code in _CODES.items()}


class FormatError(ValueError):
    """These bytes are not an item, or not a whole one."""


def item_key(identifier: str) -> bytes:
    """The 32-byte key of an item. It is all that an identifier, which a client may have chosen, becomes on disk."""
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).digest()


def checksum(payload: bytes | bytearray | memoryview) -> bytes:
    """32-byte digest of the rows, against damage (not against forgery: whoever can write here is trusted)."""
    return blake3(payload).digest()


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its rows: `rows` × `width` values of `dtype`, C order, little endian."""

    key: bytes
    dtype: str
    rows: int
    width: int
    checksum: bytes

    @property
    def payload_size(self) -> int:
        """Bytes of the rows."""
        return self.rows * self.width * DTYPES[self.dtype]

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return HEADER_SIZE + self.payload_size

    def pack(self) -> bytes:
        """The header's bytes. Raises FormatError where a value does not fit the format."""
        if self.dtype not in _CODES or self.rows < 1 or self.width < 1:
            raise FormatError(f"cannot store {self.rows} × {self.width} values of type {self.dtype}")
        try:
            fields = _FIELDS.pack(
                _MAGIC,
                _VERSION,
                _CODES[self.dtype],
                self.rows,
                self.width,
                self.payload_size,
                self.key,
                self.checksum,
            )
        except struct.error as error:
            raise FormatError(f"cannot store {self.rows} × {self.width} values: {error}") from None
        return fields + _CRC.pack(zlib.crc32(fields))

    @staticmethod
    def parse(data: bytes) -> Header:
        """Read a header. Raises FormatError unless `data` is exactly one, and consistent in itself."""
        if len(data) != HEADER_SIZE:
            raise FormatError(f"{len(data)} bytes are no header")
        fields = data[: _FIELDS.size]
        if _CRC.unpack(data[_FIELDS.size :])[0] != zlib.crc32(fields):
            raise FormatError("header is damaged")
        magic, version, code, rows, width, size, key, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC or version != _VERSION:
            raise FormatError("not an item of this format version")
        if code not in _NAMES or rows < 1 or width < 1:
            raise FormatError("header makes no sense")
        header = Header(key, _NAMES[code], rows, width, digest)
        if header.payload_size != size:
            raise FormatError("header contradicts itself about the size")
        return header
