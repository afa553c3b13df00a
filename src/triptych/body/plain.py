"""A quick proof that a request is plain text, from one pass of msgspec: most requests are, and pay for nothing else.

A yes says: one JSON object, of known members whose values have the usual types, each member that the gateway reads or
sets there at most once, nothing to strip, no media anywhere, no reason against a prefill hop. A no says nothing: the
scanner then looks, and it alone decides what is refused. Whatever is listed here must be harmless in every API.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Final, Literal

import msgspec

_MOST: Final = 1 << 14
"""Bytes: above, the scanner is not much dearer than the proof."""

_Any = msgspec.Raw
_NO: Final = msgspec.Raw(b"")


class _Part(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Message(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: _Any = _NO
    reasoning_content: str | None = None


class Plain(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """The members that a plain request may have. `model` is decoded; of the others only the types are known."""

    model: str | None = None
    messages: list[_Message] = []
    prompt: str = ""
    input: str = ""
    stream: bool | None = None
    stream_options: _Any = _NO
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    min_tokens: int | None = None
    priority: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    response_format: _Any = _NO
    tools: _Any = _NO
    tool_choice: _Any = _NO
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _Any = _NO
    metadata: _Any = _NO


_decode: Final = msgspec.json.Decoder(Plain).decode
_KEYS: Final = frozenset(field.encode_name for field in msgspec.structs.fields(Plain))


class Proof:
    """Looks for plain requests; `owned` are the members that may be there once only."""

    __slots__ = ("_names",)

    def __init__(self, owned: frozenset[str], strip: frozenset[str]) -> None:
        assert not _KEYS & strip
        # By first letters, which halves the time of the search.
        names = groupby(sorted(owned & _KEYS), key=lambda name: name[0])
        by_letter = (f"{letter}(?:{'|'.join(name[1:] for name in group)})" for letter, group in names)
        self._names = re.compile(f'"(?:{"|".join(by_letter)})"'.encode()).findall

    def of(self, raw: bytes) -> Plain | None:
        """The members, or None where this is no proof."""
        # A key could be spelled with escapes, and bytes that are not UTF-8 stand unseen in what is not decoded.
        if len(raw) > _MOST or raw.find(b"\\u") >= 0 or not raw.isascii():
            return None
        try:
            found = _decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            return None
        # msgspec takes the last copy of a member. Inside a string the quotes of such a name would be escaped.
        names = self._names(raw)
        return found if len(set(names)) == len(names) else None
