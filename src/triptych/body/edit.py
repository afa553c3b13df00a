"""Splices: edits of a JSON text at known offsets. Every byte outside of a splice stays as it was sent.

Values that are put in are raw JSON bytes and travel as they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from triptych.body.scan import STRIPPED, Member

Buffer = bytes | memoryview

_MAX_SEGMENTS: Final = 64
_NOTHING: Final[Mapping[str, bytes]] = {}


class Splice(NamedTuple):
    """Bytes `start..end` of the original are replaced by `new`."""

    start: int
    end: int
    new: bytes


def apply(raw: bytes, splices: Iterable[Splice], start: int = 0, end: int | None = None) -> list[Buffer]:
    """The text (or its range `start..end`) after the splices, as segments.

    Ranges that no splice touches are views, not copies; without a splice the very same object comes back. Splices
    may come in any order but must not overlap (ValueError). More than 64 segments are joined into one.
    """
    ordered = sorted(splices)
    if end is None:
        end = len(raw)
    if not ordered and start == 0 and end == len(raw):
        return [raw]
    view = memoryview(raw)
    out: list[Buffer] = []
    pos = start
    for first, last, new in ordered:
        if first < pos or last < first:
            raise ValueError(f"splices overlap at byte {first}")
        if first > pos:
            out.append(view[pos:first])
        if new:
            out.append(new)
        pos = last
    if pos > end:
        raise ValueError("a splice ends behind the range")
    if pos < end:
        out.append(view[pos:end])
    return out if len(out) <= _MAX_SEGMENTS else [b"".join(out)]


def quote(key: str) -> bytes:
    """A key as JSON, in ASCII."""
    return json.dumps(key).encode("ascii")


def object_splices(
    raw: bytes,
    span: tuple[int, int],
    members: Sequence[Member],
    remove: Collection[str] = (),
    put: Mapping[str, bytes] = _NOTHING,
) -> list[Splice]:
    """Splices for the object at offsets `span` (its braces included) whose members are `members`.

    Removes every copy of the keys in `remove` and every `STRIPPED` run, with exactly one comma each. Afterwards each
    key in `put` is there exactly once with that value: in place where it was there once, else appended.
    """
    inplace: dict[str, int] = {}
    if put:
        for member in members:
            if member.key in put and member.key is not STRIPPED:
                inplace[member.key] = inplace.get(member.key, 0) + 1
    out: list[Splice] = []
    kept_end = -1
    run_start = -1
    for key, start, _, stop in members:
        if key is STRIPPED or key in remove or inplace.get(key, 1) > 1:
            if run_start < 0:
                run_start = start
            continue
        if run_start >= 0:
            out.append(Splice(run_start, start, b""))
            run_start = -1
        if key in inplace:
            # The key is written anew as well: it may have been spelled with escapes.
            out.append(Splice(start, stop, quote(key) + b":" + put[key]))
        kept_end = stop
    new = b",".join([quote(key) + b":" + value for key, value in put.items() if inplace.get(key) != 1])
    if run_start >= 0:
        # The last members go: with the comma before them, if one is kept before.
        first, last = (run_start if kept_end < 0 else kept_end), members[-1].end
    elif new:
        first = last = span[0] + 1 if kept_end < 0 else kept_end
    else:
        return out
    out.append(Splice(first, last, b"," + new if new and kept_end >= 0 else new))
    return out
