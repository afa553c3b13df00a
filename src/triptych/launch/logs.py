"""An engine's output: cut into lines, kept in a file, its end kept in memory."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from pathlib import Path

KEPT_LINES = 30
LONGEST_LINE = 16 * 1024
# One older file is kept beside the current one, so that an engine that runs for months does not fill a disk.
FILE_BYTES = 64 << 20

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Log:
    """Takes output in pieces as it comes. `lines` holds the last ones."""

    def __init__(self, path: Path | None, limit: int = FILE_BYTES) -> None:
        self.path = path
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._limit = limit
        self._rest = b""
        self._file = path.open("ab") if path else None

    def feed(self, data: bytes) -> list[str]:
        """Takes a piece of output; returns the lines that it completes, without their ends."""
        *done, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            done.append(self._rest)
            self._rest = b""
        return self._keep(done)

    def flush(self) -> list[str]:
        """The last line, if it came without an end."""
        rest, self._rest = self._rest, b""
        return self._keep([rest]) if rest else []

    def note(self, text: str) -> None:
        """Writes a line of the launcher's own to the file."""
        self._write(f"--- {text}\n".encode())

    def close(self) -> None:
        """Closes the file; the lines stay readable."""
        if self._file:
            self._file.close()
            self._file = None

    def _keep(self, raw: list[bytes]) -> list[str]:
        if not raw:
            return []
        self._write(b"\n".join(raw) + b"\n")
        # Of a progress bar only what it came to.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in raw]
        lines = [_COLOURS.sub("", text) for text in texts]
        self.lines.extend(line for line in lines if line.strip())
        return lines

    def _write(self, data: bytes) -> None:
        if self._file is None or self.path is None:
            return
        # A full disk must not take the engines down with it.
        with contextlib.suppress(OSError):
            if self._file.tell() + len(data) > self._limit:
                self._file.close()
                self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
                self._file = self.path.open("ab")
            self._file.write(data)
            self._file.flush()
