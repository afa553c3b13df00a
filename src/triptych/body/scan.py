"""Offsets in a JSON text: members of objects, elements of arrays, without building values.

Rules of this module:

* `validate` runs first. It is one pass at C speed (msgspec) and accepts what `json.loads` accepts of UTF-8 JSON:
  lone surrogates and integers of any size too, but no byte order mark, no UTF-16, no `NaN`. Everything else here
  may then assume valid JSON.
* Keys are decoded, so `ec\\u005ftransfer_params` is `ec_transfer_params`. Nothing else is.
* Work is linear in the bytes walked. Long strings are skipped by `bytes.find`, small values inside one regular
  expression; only what is left costs Python steps, and those are limited to `MAX_STEPS` per body, so that a body made
  of millions of brackets is refused instead of holding the event loop.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

_T = TypeVar("_T")

MAX_STEPS: Final = 1 << 18
"""Members, elements and brackets of one body that the scanner visits one by one before it refuses the body."""

_SLOW: Final = 2  # steps that a member costs besides its own where it is not read by one regular expression
_UTF8_CHUNK: Final = 1 << 20
_WINDOW: Final = 1 << 18
_FIRST_CHUNK: Final = 1 << 10
_CHUNK: Final = 1 << 16
_LONG: Final = 1 << 16
_FEW_ESCAPES: Final = 4

# Nothing in these patterns backtracks. Groups are atomic, `(?>(?:…)*)`, and not possessive, `(?:…)*+`, which says the
# same: until 3.11.5 Python matched a possessive group wrongly where there is a choice in it (gh-106052).
_WS: Final = rb"[ \t\n\r]*+"
_SHORT: Final = rb'"[^"\\]{0,256}+(?>(?:\\.[^"\\]{0,256}+){0,16})"'


def balanced(depth: int) -> bytes:
    """Pattern of a container of short strings that nests at most `depth` levels deep (linear: nothing backtracks)."""
    body = rb'[^][{}"]*+(?>(?:' + _SHORT + rb'[^][{}"]*+)*)'
    for _ in range(depth - 1):
        body = rb'[^][{}"]*+(?>(?:(?:' + _SHORT + rb"|[\[{]" + body + rb'[]}])[^][{}"]*+)*)'
    return rb"[\[{]" + body + rb"[]}]"


# Ten levels: handles nest four deep in vLLM's own dialects.
VALUE: Final = rb"(?:" + _SHORT + rb'|[^][{}", \t\n\r]++|' + balanced(10) + rb")"

_MEMBER: Final = re.compile(
    _WS + rb'"([^"\\]{0,64}+)"' + _WS + rb":" + _WS
    # A short string, a number or word, a flat container; anything else leaves the group empty.
    + rb'((?>(?:"[^"\\]{0,512}+"|[^][{}", \t\n\r]++'
    + rb'|[\[{][^][{}"]{0,256}+(?>(?:"[^"\\]{0,64}+"[^][{}"]{0,64}+){0,16})[]}])?))'
    + _WS + rb",?+"
)  # fmt: skip
_member: Final = _MEMBER.match
_COLON: Final = re.compile(_WS + rb":" + _WS)
_SEPARATOR: Final = re.compile(_WS + rb",?+" + _WS)
_SPACE: Final = re.compile(_WS)
_DATA: Final = re.compile(rb'"data(?::[a-z]{1,16}/[a-z0-9.+-]{1,64};base64,|" ?: ?")').match
_SCALAR: Final = re.compile(rb'[^][{}", \t\n\r]++')
_SMALL: Final = re.compile(balanced(5), re.DOTALL)
_ESCAPES: Final = re.compile(rb'[^"\\]*+(?>(?:\\.[^"\\]*+){0,256})', re.DOTALL)
_GAP: Final = re.compile(rb'[^"\[\]{}]*+(?>(?:"[^"\\]{0,256}+"[^"\[\]{}]*+){0,256})')

_names: Final = {
    name.encode(): name
    for name in (
        "role", "content", "type", "text", "image_url", "url", "detail", "model", "messages", "stream", "max_tokens",
        "temperature", "top_p", "stream_options", "max_completion_tokens", "input", "prompt", "tools", "input_audio",
        "data", "format", "source", "media_type", "name", "tool_calls", "tool_call_id", "uuid", "seed", "n", "stop",
    )
}.get  # fmt: skip

STRIPPED: Final = "<stripped>"
"""Key (by identity) of a run of members that are to be removed; see `Scanner.members`."""


class BodyError(ValueError):
    """A request body that is refused before any engine is called.

    `status` is the HTTP status for the client, `param` the field at fault or None.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class Member(NamedTuple):
    """A member of an object: decoded key, offset of its opening quote, offsets of the value."""

    key: str
    start: int
    value: int
    end: int


_new: Final = tuple.__new__


class Rules(NamedTuple):
    """Keys of an object that are to be removed, and the pattern of a run of such members."""

    keys: frozenset[str]
    run: re.Pattern[bytes] | None

    @classmethod
    def of(cls, keys: frozenset[str]) -> Rules:
        """Compile the rules. A run is any number of these members one after another, however their keys are spelled."""
        if not keys:
            return cls(keys, None)
        names = b"|".join(_spellings(key.encode()) for key in sorted(keys))
        plain = b"|".join(re.escape(key.encode()) for key in sorted(keys))
        member = rb'"(?:' + plain + rb"|" + names + rb')"' + _WS + rb":" + _WS + VALUE
        # A scalar must end before the window of the match does.
        member += rb"(?=[ \t\n\r,}])"
        run = rb"(" + member + rb"(?>(?:" + _WS + rb"," + _WS + member + rb")*))"
        return cls(keys, re.compile(run, re.DOTALL))


NO_RULES: Final = Rules.of(frozenset())


def _spellings(key: bytes) -> bytes:
    """Pattern of every JSON spelling of an ASCII key without characters that have short escapes."""
    return b"".join(rb"(?:%s|\\u00(?i:%02x))" % (re.escape(bytes([c])), c) for c in key)


class _Bulk(msgspec.Struct, gc=False):
    """Fields that are large in real requests; msgspec tells their length while it validates."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    vllm_xargs: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    functions: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    logit_bias: msgspec.Raw = msgspec.Raw(b"")
    response_format: msgspec.Raw = msgspec.Raw(b"")
    structured_outputs: msgspec.Raw = msgspec.Raw(b"")


_BULK: Final = frozenset(_Bulk.__struct_fields__)

Hint = Callable[[str], msgspec.Raw | None]
"""Where a top-level value of that key may end, as the bytes of the value. Only a hint: it is compared before use."""

_decode_bulk: Final = msgspec.json.Decoder(_Bulk).decode
_decode_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode


def _no_hint(_key: str) -> msgspec.Raw | None:
    return None


def check_utf8(raw: bytes, what: str) -> None:
    """Refuse bytes that are not UTF-8. Encoded surrogates pass, as they do in `json.loads`."""
    if raw.isascii():
        return
    try:
        if len(raw) <= _UTF8_CHUNK:
            raw.decode("utf-8", "surrogatepass")
            return
        decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        for at in range(0, len(raw), _UTF8_CHUNK):
            decoder.decode(raw[at : at + _UTF8_CHUNK], at + _UTF8_CHUNK >= len(raw))
    except UnicodeDecodeError:
        raise BodyError(f"{what} is not valid UTF-8") from None


def _checked(raw: bytes, decode: Callable[[bytes], _T], what: str) -> _T:
    """`decode(raw)` with msgspec, its errors as BodyError; what it returns may hold other spellings of surrogates."""
    check_utf8(raw, what)
    try:
        try:
            return decode(raw)
        except msgspec.ValidationError:
            raise BodyError(f"{what} must be one JSON object") from None
        except msgspec.DecodeError:
            # msgspec refuses lone surrogates, json.loads does not. The stand-ins (U+0xxx for U+Dxxx) are of the same
            # length and equally valid wherever they are, also where a preceding backslash makes them plain text.
            plain = raw.replace(b"\\ud", b"\\u0").replace(b"\\uD", b"\\u0")
            if plain == raw:
                raise
            return decode(plain)
    except msgspec.ValidationError:
        raise BodyError(f"{what} must be one JSON object") from None
    except msgspec.DecodeError as error:
        raise BodyError(f"{what} is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    except RecursionError:
        raise BodyError(f"{what} is nested too deeply") from None


def validate(raw: bytes, what: str = "request body") -> None:
    """Check that `raw` is one JSON text in UTF-8.

    Raises:
        BodyError: it is not; the message names the byte offset.
    """
    _checked(raw, _decode_raw, what)


def validate_object(raw: bytes, what: str = "request body") -> Hint:
    """Check that `raw` is one JSON object in UTF-8; gives hints for `Scanner`.

    Raises:
        BodyError: it is not; the message names the byte offset.
    """
    short = _shortened(raw) if len(raw) > _LONG else raw
    if short is not raw:
        check_utf8(raw, what)
        try:
            bulk = _decode_bulk(short)
        except (msgspec.MsgspecError, RecursionError):
            short = raw  # what is wrong, and where
    if short is raw:
        bulk = _checked(raw, _decode_bulk, what)
    return lambda key: getattr(bulk, key) if key in _BULK else None


def _shortened(raw: bytes) -> bytes:
    """`raw` with the middle of long strings of data left out, valid JSON if and only if `raw` is, but for control
    characters within the strings, which engines refuse. The validator's time is per byte, and most bytes are data.

    Only strings that begin as data does are cut. What is before the cut stays, so a quote that does not open a string
    here does not open one in the result either; and a part without quotes and backslashes lies within one string.
    """
    pieces: list[bytes] = []
    kept = pos = 0
    while (pos := raw.find(b'"data', pos)) >= 0:
        found = _DATA(raw, pos)
        if found is None:
            pos += 5
            continue
        start = found.end()
        end = raw.find(b'"', start)
        if end < 0:
            break
        pos = end + 1
        if end - start > _LONG >> 2 and raw.find(b"\\", start, end) < 0:
            pieces.append(raw[kept:start])
            kept = end
    if not kept:
        return raw
    pieces.append(raw[kept:])
    return b"".join(pieces)


class Scanner:
    """Walks one validated JSON text. Each instance has one budget of `MAX_STEPS`."""

    __slots__ = ("_left", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._left = MAX_STEPS

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left <= 0:
            raise BodyError(f"request body has more than {MAX_STEPS} nested values to look at", status=413)

    def members(self, at: int, rules: Rules = NO_RULES, hint: Hint = _no_hint) -> tuple[list[Member], int]:
        """Members of the object whose `{` is at `at`: all copies, in order; and the offset behind its `}`.

        Members whose key is in `rules.keys` are given as runs: one Member with the key `STRIPPED` for many
        neighbours, without the comma behind the last. `hint` tells where values may end.
        """
        raw = self.raw
        strip, run = rules
        out: list[Member] = []
        pos = at + 1
        left = self._left
        following = -1  # where the member behind a stripped one starts
        while (byte := raw[pos]) != 0x7D:
            match = _member(raw, pos)
            if match is not None:
                key = _names(match[1]) or match[1].decode("utf-8", "surrogatepass")
                value, end = match.span(2)
                start = match.start(1) - 1
                pos = match.end()
                if value != end and key not in strip:
                    out.append(_new(Member, (key, start, value, end)))
                    if len(out) >= left:
                        self._spend(len(out))
                    continue
            else:
                start = _SPACE.match(raw, pos).end()  # type: ignore[union-attr]
                if raw[start] == 0x7D:
                    pos = start
                    break
                end = string_end(raw, start)
                # No key that matters is as long as that, so it may stay as it is spelled.
                key = string(raw, start, end) if end - start <= _LONG else raw[start:end].decode("latin-1")
                value = end = _COLON.match(raw, end).end()  # type: ignore[union-attr]
                left = self._left = self._left - _SLOW
            if key in strip:
                left = self._left = self._left - _SLOW
                found = None
                if start == following and run is not None:
                    # The second in a row: there may be thousands. In windows, so that the work of one match is bounded
                    # and paid for.
                    found = run.match(raw, start, start + _WINDOW)
                    if found is not None:
                        end = found.end()
                        self._spend(sum(raw.count(token, start, end) for token in (b'"', b"[", b"{")) >> 3)
                        left = self._left
                if found is None and value == end:
                    end = self._value_end(value, key, hint)
                    left = self._left
                out.append(_new(Member, (STRIPPED, start, start, end)))
            else:
                if value == end:
                    end = self._value_end(value, key, hint)
                    left = self._left
                out.append(Member(key, start, value, end))
            if len(out) >= left:
                self._spend(len(out))
            pos = end
            byte = raw[pos]
            if byte == 0x2C:
                pos += 1
            elif byte != 0x7D:
                pos = _SEPARATOR.match(raw, pos).end()  # type: ignore[union-attr]
            if key in strip:
                following = _SPACE.match(raw, pos).end()  # type: ignore[union-attr]
        self._spend(len(out) + 1)
        return out, pos + 1

    def elements(self, at: int) -> list[tuple[int, int]]:
        """Offsets of the elements of the array whose `[` is at `at`."""
        raw = self.raw
        out = []
        pos = _SPACE.match(raw, at + 1).end()  # type: ignore[union-attr]
        while raw[pos] != 0x5D:
            self._spend(1)
            end = self.value_end(pos)
            out.append((pos, end))
            pos = _SEPARATOR.match(raw, end).end()  # type: ignore[union-attr]
        return out

    def first_element(self, at: int) -> int | None:
        """Offset of the first element of the array whose `[` is at `at`, or None."""
        pos = _SPACE.match(self.raw, at + 1).end()  # type: ignore[union-attr]
        return None if self.raw[pos] == 0x5D else pos

    def has_next(self, end: int) -> bool:
        """Whether another element or member follows the one that ends at `end`."""
        return self.raw[_SPACE.match(self.raw, end).end()] == 0x2C  # type: ignore[union-attr]

    def container(self, pos: int) -> int:
        """Offset of the next `[`, `{` or, at the end of the array that `pos` is inside of, its `]`."""
        raw = self.raw
        while True:
            pos = self._gap(pos)
            if raw[pos] != 0x22:
                return pos
            pos = string_end(raw, pos)

    def _gap(self, pos: int) -> int:
        """Offset of the next bracket or string that is not small, behind small strings and scalars."""
        end = _GAP.match(self.raw, pos).end()  # type: ignore[union-attr]
        self._spend(1 if end - pos < 256 else 1 + (self.raw.count(b'"', pos, end) >> 5))
        return end

    def value_end(self, at: int) -> int:
        """Offset behind the value that starts at `at`."""
        byte = self.raw[at]
        if byte == 0x22:
            return string_end(self.raw, at)
        if byte in b"[{":
            return self._container_end(at)
        return _SCALAR.match(self.raw, at).end()  # type: ignore[union-attr]

    def _value_end(self, at: int, key: str, hint: Hint) -> int:
        if self.raw[at] in b"[{":
            known = hint(key)
            # Two containers of which one is a prefix of the other are the same, so equal bytes prove the end.
            if known is not None and (size := memoryview(known).nbytes) and self.raw.startswith(known, at):
                return at + size
        return self.value_end(at)

    def _container_end(self, at: int) -> int:
        raw = self.raw
        match = _SMALL.match(raw, at, at + 4096)
        if match is not None:
            return match.end()
        if raw[at] == 0x5B:
            # A long list of numbers is skipped by four memchr. The bracket found is never behind this container's end.
            close = raw.index(b"]", at)
            if all(raw.find(token, at + 1, close) < 0 for token in (b'"', b"[", b"{")):
                return close + 1
        depth = 0
        pos = at
        while True:
            byte = raw[pos]
            if byte == 0x22:
                pos = string_end(raw, pos)
            elif byte in b"[{":
                match = _SMALL.match(raw, pos, pos + 1024) if depth else None
                if match is not None:
                    pos = match.end()
                else:
                    depth += 1
                    pos += 1
            else:
                depth -= 1
                pos += 1
                if not depth:
                    return pos
            pos = self._gap(pos)


def string_end(raw: bytes, at: int) -> int:
    """Offset behind the string whose opening quote is at `at`."""
    pos = at + 1
    for _ in range(_FEW_ESCAPES):
        quote = raw.index(b'"', pos)
        # `pos` is behind an escape or the opening quote, so the backslashes before this quote pair up from the left.
        backslashes = 0 if raw[quote - 1] != 0x5C else quote - pos - len(raw[pos:quote].rstrip(b"\\"))
        if not backslashes & 1:
            return quote + 1
        pos = quote + 1
    pos = _ESCAPES.match(raw, pos).end()  # type: ignore[union-attr]
    if raw[pos] == 0x22:
        return pos + 1
    size = _FIRST_CHUNK
    while True:
        # Dense in escapes: blank out those that matter, in chunks that do not end within one. The chunks grow, so that
        # the work is bounded by the string itself, however much follows it.
        chunk = raw[pos : pos + size]
        size = min(size << 1, _CHUNK)
        if (len(chunk) - len(chunk.rstrip(b"\\"))) & 1:
            chunk = chunk[:-1]
        found = chunk.replace(b"\\\\", b"..").replace(b'\\"', b"..").find(b'"')
        if found >= 0:
            return pos + found + 1
        pos += len(chunk)


def string(raw: bytes, start: int, end: int) -> str:
    """The string at these offsets (its quotes included), decoded as `json.loads` decodes it."""
    text = raw[start:end]
    if b"\\" in text:
        decoded: str = json.loads(text.decode("utf-8", "surrogatepass"))  # decoded here: it need not be guessed how
        return decoded
    return text[1:-1].decode("utf-8", "surrogatepass")


def members(raw: bytes, at: int = 0) -> list[Member]:
    """Members of the object whose `{` is at or, behind white space, after `at`: all copies, in order."""
    return Scanner(raw).members(_SPACE.match(raw, at).end())[0]  # type: ignore[union-attr]


def elements(raw: bytes, at: int = 0) -> list[tuple[int, int]]:
    """Offsets of the elements of the array whose `[` is at or, behind white space, after `at`."""
    return Scanner(raw).elements(_SPACE.match(raw, at).end())  # type: ignore[union-attr]
