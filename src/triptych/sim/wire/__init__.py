"""The forms in which vLLM's APIs give an answer: whole, and as events."""

from __future__ import annotations

from typing import Protocol

from triptych.sim.answer import Answer, Choice
from triptych.sim.errors import EngineError
from triptych.sim.job import Api, Job
from triptych.sim.wire.chat import ChatWire
from triptych.sim.wire.completions import CompletionsWire
from triptych.sim.wire.messages import MessagesWire
from triptych.sim.wire.responses import ResponsesWire
from triptych.sim.wire.transcriptions import TranscriptionsWire


class Wire(Protocol):
    """One API's form of one answer. Each `bytes` of a list is one event, blank line included."""

    def full(self, answer: Answer) -> bytes: ...
    def opening(self, job: Job) -> list[bytes]:
        """Before the engine has read the prompt."""

    def start(self, answer: Answer) -> list[bytes]:
        """With the first token."""

    def token(self, answer: Answer, choice: Choice, number: int) -> bytes:
        """Token `number` of a choice, counted from 0."""

    def end(self, answer: Answer) -> list[bytes]: ...
    def error(self, job: Job, error: EngineError) -> list[bytes]:
        """Instead of the rest, for an error after the head; an empty list means that the stream breaks off."""


def wire_of(api: Api) -> Wire:
    """A fresh form for one answer."""
    if api == "completions":
        return CompletionsWire()
    if api == "responses":
        return ResponsesWire()
    if api == "messages":
        return MessagesWire()
    return TranscriptionsWire() if api == "transcriptions" else ChatWire()
