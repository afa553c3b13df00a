"""Between the first stage's stream of text and the client's stream of text and sound. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

_DATA: Final = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)
_DONE: Final = b"[DONE]"
KEPT: Final = 3600
"""Seconds that a client is told its sound can be referred to. It cannot: OpenAI's form wants a time."""


class BadEvent(ValueError):
    """An event that is no JSON object of the API."""


def data_of(events: bytes) -> Iterator[dict[str, Any] | None]:
    """The objects of whole events; None for the end mark.

    Raises:
        BadEvent: the data is no JSON object.
    """
    for match in _DATA.finditer(events):
        if match[1] == _DONE:
            yield None
            continue
        try:
            made = json.loads(match[1])
        except (ValueError, RecursionError) as error:
            raise BadEvent(f"an event is no JSON: {error}") from None
        if not isinstance(made, dict):
            raise BadEvent("an event is no JSON object")
        yield made


def event(data: Any) -> bytes:
    """One event of a stream."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


class Spoken:
    """Makes the client's events of one chat. `audio_id`: how the sound is called."""

    def __init__(self, audio_id: str, *, usage: bool, now: int) -> None:
        """now: seconds since the epoch. usage: the client asked for it."""
        self._audio_id = audio_id
        self._usage = usage
        self._expires = now + KEPT
        self._now = now
        self._head: dict[str, Any] = {}
        self._last: list[dict[str, Any]] = []  # what ends the answer: kept until the sound has ended, too

    def text(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """What becomes of an event of the first stage's: its text is the transcript."""
        if not self._head:
            self._head = {key: data.get(key) for key in ("id", "object", "created", "model") if key in data}
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices:
            if self._usage:
                self._last.append(data)
            return []
        made = {**data, "choices": [self._choice(choice) for choice in choices]}
        if not self._usage:
            made.pop("usage", None)
        if any(choice.get("finish_reason") for choice in made["choices"]):
            end = {**made, "choices": [{**choice, "delta": {}} for choice in made["choices"]]}
            self._last.insert(0, end)
            made["choices"] = [{**choice, "finish_reason": None} for choice in made["choices"]]
        return [made] if any(choice.get("delta") for choice in made["choices"]) else []

    def _choice(self, choice: Any) -> dict[str, Any]:
        if not isinstance(choice, dict) or not isinstance(choice.get("delta"), dict):
            raise BadEvent("an event has a choice without a delta")
        delta = dict(choice["delta"])
        content = delta.get("content")
        if content is not None:
            delta["content"] = None
            if content:
                delta["audio"] = {"id": self._audio_id, "transcript": content}
        if not any(value not in (None, "") for value in delta.values()):
            delta = {}
        return {**choice, "delta": delta}

    def sound(self, encoded: bytes) -> dict[str, Any]:
        """A piece of sound."""
        return self._own({"id": self._audio_id, "data": base64.b64encode(encoded).decode()})

    def end(self) -> list[dict[str, Any]]:
        """What ends the answer, but for the end mark."""
        return [self._own({"id": self._audio_id, "expires_at": self._expires}), *self._last]

    def _own(self, audio: dict[str, Any]) -> dict[str, Any]:
        head = self._head or {"id": self._audio_id, "object": "chat.completion.chunk", "created": self._now}
        return {**head, "choices": [{"index": 0, "delta": {"audio": audio}, "finish_reason": None}]}


def whole_answer(answer: bytes, audio_id: str, encoded: bytes, now: int) -> bytes:
    """A whole chat answer of the first stage with the sound in it.

    Raises:
        BadEvent: it has not the form of an answer.
    """
    try:
        made = json.loads(answer)
        message = made["choices"][0]["message"]
        text = message.get("content")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise BadEvent("the answer has no message") from None
    message["content"] = None
    message["audio"] = {
        "id": audio_id,
        "data": base64.b64encode(encoded).decode(),
        "expires_at": now + KEPT,
        "transcript": text if isinstance(text, str) else "",
    }
    for name in HANDED:
        if name in made:
            made[name] = None
    return msgspec.json.encode(made)


HANDED: Final = ("kv_transfer_params", "ec_transfer_params")
"""What engines hand to each other, and clients are not told."""
