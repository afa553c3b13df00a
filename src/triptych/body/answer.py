"""Engines' answers: reading hand-over parameters out of them, merging them, nulling them for the client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from triptych.body.edit import Buffer, Splice, apply
from triptych.body.request import HANDLES
from triptych.body.scan import BodyError, Hint, Member, Scanner, check_utf8, validate_object


class _Handles(msgspec.Struct, gc=False):
    """The members that tell handles (`HANDLES`); msgspec finds their values while it validates."""

    ec_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_decode_handles: Final = msgspec.json.Decoder(_Handles).decode
_decode_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class AnswerError(ValueError):
    """An engine's answer that cannot be used: not one JSON object, or a hand-over parameter of a wrong type."""


def _hint(answer: bytes) -> Hint:
    try:
        try:
            check_utf8(answer, "answer")
            return _decode_object(answer).get
        except (msgspec.MsgspecError, RecursionError):
            # It may still be valid: msgspec has no lone surrogates in keys.
            return validate_object(answer, "answer")
    except BodyError as error:
        raise AnswerError(error.message) from None


def _members(answer: bytes) -> list[Member]:
    hint = _hint(answer)
    try:
        return Scanner(answer).members(answer.index(b"{"), hint=hint)[0]
    except BodyError as error:
        raise AnswerError(error.message) from None


def top_level_value(answer: bytes, key: str) -> bytes | None:
    """The value of a top-level member, byte for byte; the last copy, as in `json.loads`. None if absent or null.

    Raises:
        AnswerError: the answer is not one JSON object.
    """
    value = None
    for member in _members(answer):
        if member.key == key:
            value = answer[member.value : member.end]
    return None if value == b"null" else value


def top_level_object(answer: bytes, key: str) -> bytes | None:
    """The same for a value that must be an object: `ec_transfer_params`, `kv_transfer_params`.

    Raises:
        AnswerError: the answer is not one JSON object, or the value is neither absent, null nor an object.
    """
    value = top_level_value(answer, key)
    if value is not None and not value.startswith(b"{"):
        raise AnswerError(f"{key} is not an object")
    return value


def entries(raw: bytes) -> dict[str, bytes]:
    """Decoded keys and raw values of an object; the last copy of a key, as in `json.loads`.

    Raises:
        AnswerError: it is not one JSON object.
    """
    return {member.key: raw[member.value : member.end] for member in _members(raw)}


def merge_handles(handles: Iterable[bytes | None]) -> bytes | None:
    """Union of objects keyed by media hash, in item order; None where there is nothing.

    The first of a repeated hash wins (keys are compared decoded; within one object the last copy is its value, as in
    `json.loads`). Keys and values travel byte for byte.

    Raises:
        AnswerError: one of them is not one JSON object.
    """
    merged: dict[str, bytes] = {}
    for raw in handles:
        if raw is None or raw == b"null":
            continue
        own: dict[str, bytes] = {m.key: raw[m.start : m.end] for m in _members(raw)}
        for key, member in own.items():
            merged.setdefault(key, member)
    return b"{" + b",".join(merged.values()) + b"}" if merged else None


def nulled(answer: bytes) -> Sequence[Buffer]:
    """An answer to the client, with the handles at its top level nulled, as segments.

    Raises:
        AnswerError: the answer is not one JSON object.
    """
    quick = _quickly_nulled(answer)
    return (quick,) if quick is not None else apply(answer, null_splices(answer))


def null_splices(answer: bytes) -> list[Splice]:
    """Splices that null the handles at the top level of an answer to the client; none where all are absent or null.

    Raises:
        AnswerError: the answer is not one JSON object.
    """
    return [
        Splice(member.value, member.end, b"null")
        for member in _members(answer)
        if member.key in HANDLES and answer[member.value : member.end] != b"null"
    ]


def nulled_inside(answer: bytes, members: Collection[str]) -> bytes:
    """The answer with handles nulled at top level and in those of `members` that are objects.

    Raises:
        AnswerError: the answer is not one JSON object.
    """
    splices = null_splices(answer)
    for member in _members(answer):
        if member.key in members and answer[member.value] == 0x7B:
            inner = null_splices(answer[member.value : member.end])
            splices += [Splice(member.value + at, member.value + end, new) for at, end, new in inner]
    return b"".join(apply(answer, splices))


def _quickly_nulled(answer: bytes) -> bytes | None:
    """The same without a walk, where each key is written plainly and once; None where it takes a walk to tell.

    msgspec finds the values while it validates, but not where they are. A key that stands once in the text, with its
    quotes, is the top-level one, since inside a string its quotes would be escaped; the value behind it is compared.
    """
    if answer.find(b"\\u00") >= 0:
        return None
    try:
        if not answer.isascii():
            check_utf8(answer, "answer")
        found = _decode_handles(answer)
    except (msgspec.MsgspecError, RecursionError, BodyError):
        return None
    out = answer
    named = (b'"ec_transfer_params":', found.ec_transfer_params), (b'"kv_transfer_params":', found.kv_transfer_params)
    for name, value in named:
        raw = bytes(value)
        if answer.count(name[:-1]) > 1:
            return None
        if raw != b"null":
            before = out
            out = before.replace(name + raw, name + b"null", 1)
            if out is before:  # white space before the value
                return None
    return out
