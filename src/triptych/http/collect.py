"""Bytes that come in pieces and are wanted as one `bytes`."""

from __future__ import annotations

import io

_SMALL = 65_536


class Collector:
    """Collects the pieces of a body; `collected` is their size, `_take()` gives them as one object and starts anew.

    Beyond 64 KiB they are written one behind the other into memory that grows in place and is given away without a
    copy: one copy of a large body, where a list of pieces and their join are two, and never more memory than has come.
    A base class, because one object less for each message can be measured.
    """

    __slots__ = ("_file", "_pieces", "collected")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._file: io.BytesIO | None = None
        self.collected = 0

    def _add(self, data: bytes | memoryview) -> int:
        """Add a piece (a memoryview is copied now); returns the new size."""
        size = self.collected = self.collected + len(data)
        if self._file is not None:
            self._file.write(data)
        elif size > _SMALL:
            self._file = io.BytesIO()
            self._file.writelines(self._pieces)
            self._file.write(data)
            self._pieces.clear()
        else:
            self._pieces.append(bytes(data))
        return size

    def _take(self) -> bytes:
        """All that has come since the last time; a single piece is returned as it is."""
        self.collected = 0
        if self._file is not None:
            data = self._file.getvalue()
            self._file = None
            return data
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces.pop()
        data = b"".join(pieces)
        pieces.clear()
        return data

    def _drop(self) -> None:
        """Forget what has come."""
        self._pieces.clear()
        self._file = None
        self.collected = 0
