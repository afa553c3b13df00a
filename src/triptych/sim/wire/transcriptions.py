"""The transcription API."""

from __future__ import annotations

import time
from typing import Any

from triptych.sim.answer import Answer, Choice
from triptych.sim.errors import EngineError
from triptych.sim.job import Job
from triptych.sim.wire.chat import DONE, encode, event


class TranscriptionsWire:
    """`/v1/audio/transcriptions`."""

    def __init__(self) -> None:
        self._created = int(time.time())

    def full(self, answer: Answer) -> bytes:
        (choice,) = answer.choices
        return encode({"text": choice.text, "usage": {"type": "duration", "seconds": 1}})

    def opening(self, job: Job) -> list[bytes]:
        return []

    def start(self, answer: Answer) -> list[bytes]:
        return []

    def token(self, answer: Answer, choice: Choice, number: int) -> bytes:
        last = number == len(choice.pieces) - 1
        body: dict[str, Any] = {"delta": {"content": choice.pieces[number]}}
        if last:
            body |= {"finish_reason": choice.finish, "stop_reason": None}
        return event(
            {
                "id": f"trsc-{answer.job.request_id}",
                "object": "transcription.chunk",
                "created": self._created,
                "choices": [body],
                "model": answer.job.model,
            }
        )

    def end(self, answer: Answer) -> list[bytes]:
        return [DONE]

    def error(self, job: Job, error: EngineError) -> list[bytes]:
        return [event(error.openai()), DONE]
