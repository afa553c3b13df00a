"""Asking one question through the gateway and of a plain engine, with the official `openai` client."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from triptych.demo.counters import Counts
from triptych.demo.questions import Question

MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A text and its tokens. request_id as the gateway told it. seconds: whole; first: until the first event."""

    text: str
    tokens: tuple[int, ...]
    request_id: str
    seconds: float
    first: float | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """All that is known of one question. timeline: the gateway's record; counts: what the engines counted for it."""

    question: Question
    answer: Answer
    plain: Answer
    timeline: dict[str, Any]
    counts: Counts

    @property
    def plan(self) -> str:
        return str(self.timeline["plan"])

    @property
    def same(self) -> bool:
        """Whether the answer is the plain engine's, token for token."""
        return bool(self.answer.tokens) and self.answer.tokens == self.plain.tokens

    @property
    def legs(self) -> list[tuple[str, float]]:
        """Name and seconds of each leg, in the order in which they were called."""
        legs = sorted((leg for leg in self.timeline["legs"] if leg["ended"]), key=lambda leg: leg["started"])
        return [(leg["name"], leg["ended"] - leg["started"]) for leg in legs]


async def ask(client: AsyncOpenAI, model: str, question: Question) -> Answer:
    """One answer, greedily decoded so that two engines of the same weights must agree."""
    began = time.monotonic()
    wish: dict[str, Any] = {
        "model": model,
        "messages": question.messages(),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    if not question.stream:
        raw = await client.chat.completions.with_raw_response.create(**wish)
        choice = raw.parse().choices[0]
        tokens = tuple(getattr(choice, "token_ids", None) or ())
        request_id = raw.headers.get("x-request-id", "")
        return Answer(choice.message.content or "", tokens, request_id, time.monotonic() - began)
    raw = await client.chat.completions.with_raw_response.create(stream=True, **wish)
    text = ""
    ids: list[int] = []
    first: float | None = None
    async for event in raw.parse():
        first = first or time.monotonic() - began
        for part in event.choices:
            text += part.delta.content or ""
            ids += getattr(part, "token_ids", None) or []
    return Answer(text, tuple(ids), raw.headers.get("x-request-id", ""), time.monotonic() - began, first)


async def timeline_of(admin: str, request_id: str) -> dict[str, Any]:
    """The gateway's record of a request, once it is complete. Raises OSError."""
    deadline = time.monotonic() + 5
    while True:
        record = await asyncio.to_thread(_get_json, f"{admin}/debug/requests/{request_id}")
        if not record["running"] or time.monotonic() > deadline:
            return record
        await asyncio.sleep(0.01)


def _get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=5) as response:
        record: dict[str, Any] = json.load(response)
    return record
