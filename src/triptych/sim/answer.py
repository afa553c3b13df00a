"""What an engine produced for a request, before any API gives it a form."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from triptych.sim.content import TOKEN_BASE, natural_length, pieces, tokens
from triptych.sim.job import Job, Prompt

FINGERPRINT = "vllm-0.32.0-sim"


@dataclass(slots=True)
class Choice:
    """One sequence: token by token, and why it ended."""

    index: int
    prompt: Prompt
    pieces: list[str]
    ids: list[int]
    finish: str

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Answer:
    """All sequences of a request with the hand-over parameters that go back."""

    job: Job
    choices: list[Choice]
    kv: dict[str, Any] | None = None
    ec: dict[str, Any] | None = None
    keys: list[bytes] = field(default_factory=list)
    created: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.job.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)


def answer_of(job: Job, keys: list[bytes], fixed: int | None, empty: bool = False) -> Answer:
    """The answer of an engine that has read the prompts; `empty`: of one that has no language model."""
    choices: list[Choice] = []
    for prompt, key in zip(job.prompts, keys, strict=True):
        for number in range(job.n):
            ids, finish = (b"", "stop") if empty else _draw(job, key, number, fixed)
            tokens_ = [TOKEN_BASE + i for i in ids]
            choices.append(Choice(len(choices), prompt, pieces(ids), tokens_, finish))
    return Answer(job, choices, keys=keys, created=int(time.time()))


def _draw(job: Job, key: bytes, number: int, fixed: int | None) -> tuple[bytes, str]:
    """The tokens of one sequence, and why it ends."""
    limit = job.max_tokens or 0
    wanted = limit if job.ignore_eos else max(natural_length(key) if fixed is None else fixed, job.min_tokens)
    return tokens(key, min(wanted, limit), number), "length" if wanted >= limit else "stop"
