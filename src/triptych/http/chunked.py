"""The chunked transfer coding, sans-IO and strict (RFC 9112 section 7.1).

Goal: linear in the bytes fed, whatever the split; a payload byte is copied once. What is refused is what proxies have
been split apart with: sizes that are not plain hexadecimal, bare CR or LF, white space around the size, a chunk that
is not followed by CRLF, long extensions, trailers that are not header lines.
"""

from __future__ import annotations

import re

from triptych.http.errors import ParseError

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_SIZE_PREFIX = re.compile(rb"[0-9a-fA-F]{1,15}(?:;[\t\x20-\x7e\x80-\xff]*)?\r?")
_TRAILERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")
_BAD_TRAILER = re.compile(rb"(?<!\r)\n|\r[^\n]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

MAX_SIZE_LINE = 256
"""Bytes of one chunk-size line with its extensions."""
MAX_EXTENSIONS = 16_384
"""Bytes of extensions over one whole message, so that a byte of payload cannot cost kilobytes of traffic for ever."""
MAX_TRAILERS = 8_192
"""Bytes of the trailer section; trailers are checked and dropped."""

_SIZE_LINE, _PAYLOAD, _CRLF, _TRAILER = range(4)


class ChunkDecoder:
    """Decodes one chunked body.

    `feed(data, at, out)` appends the payload found in `data[at:]` to `out` (`bytes` each) and returns the offset just
    behind the body's last byte, or -1 while the body has not ended. Raises ParseError; unusable after either.
    """

    __slots__ = ("_extensions", "_left", "_partial", "_state")

    def __init__(self) -> None:
        self._state = _SIZE_LINE
        self._left = 0
        self._partial = b""
        self._extensions = 0

    def whole(self, data: bytes) -> bytes | None:
        """The payload, if `data` is one whole chunk, no less and no more; else None, and nothing has happened.

        This is what a stream of events looks like on the wire, and the short way for it.
        """
        if self._state == _SIZE_LINE and not self._partial:
            end = data.find(b"\r\n")
            length = len(data) - end - 4
            # Compared with how the size would be written, which costs less than to read it; a size that is written
            # otherwise (capitals, zeros in front, extensions) goes the long way.
            if end > 0 and length > 0 and data[:end] == b"%x" % length and data[-2:] == b"\r\n":
                return data[end + 2 : -2]
        return None

    def feed(self, data: bytes, at: int, out: list[bytes]) -> int:
        base = 0  # offset of `data[0]` in what the caller gave
        if self._partial:
            base = at - len(self._partial)
            data = self._partial + data[at:]
            at = 0
            self._partial = b""
        size = len(data)
        while at < size:
            state = self._state
            if state == _SIZE_LINE:
                match = _SIZE.match(data, at, at + MAX_SIZE_LINE)
                if match is None:
                    self._keep_size_line(data[at:])
                    return -1
                length = int(match[1], 16)
                start = match.end()
                self._extensions += start - at - len(match[1]) - 2
                if self._extensions > MAX_EXTENSIONS:
                    raise ParseError("chunk extensions are too large")
                end = start + length
                if length and data[end : end + 2] == b"\r\n":
                    # The usual case, a whole chunk at once: no change of state.
                    out.append(data[start:end])
                    at = end + 2
                    continue
                at = start
                self._left = length
                self._state = _PAYLOAD if length else _TRAILER
            elif state == _PAYLOAD:
                payload = data[at : at + self._left] if at or self._left < size else data
                out.append(payload)
                at += len(payload)
                self._left -= len(payload)
                if not self._left:
                    self._state = _CRLF
            elif state == _CRLF:
                if data[at : at + 2] != b"\r\n":
                    if size - at > 1 or data[at] != 0x0D:
                        raise ParseError("chunk data is not followed by CRLF")
                    self._partial = b"\r"
                    return -1
                at += 2
                self._state = _SIZE_LINE
            else:
                end = self._trailer_end(data, at)
                return end if end < 0 else end + base
        return -1

    def _keep_size_line(self, line: bytes) -> None:
        """Keep what may become a size line; refuse what cannot any more."""
        if len(line) >= MAX_SIZE_LINE or _SIZE_PREFIX.fullmatch(line) is None:
            raise ParseError("chunk size line is not valid")
        self._partial = line

    def _trailer_end(self, data: bytes, at: int) -> int:
        if data.startswith(b"\r\n", at):
            return at + 2
        found = data.find(b"\r\n\r\n", at, at + MAX_TRAILERS)
        if found < 0:
            if len(data) - at >= MAX_TRAILERS or _BAD_TRAILER.search(data, at):
                raise ParseError("trailers are not valid or too large")
            self._partial = data[at:]
            return -1
        if _TRAILERS.fullmatch(data, at, found + 4) is None:
            raise ParseError("trailers are not valid")
        return found + 4
