"""The completions API."""

from __future__ import annotations

import time
from typing import Any

from triptych.sim.answer import FINGERPRINT, Answer, Choice
from triptych.sim.errors import EngineError
from triptych.sim.job import Job
from triptych.sim.wire.chat import DONE, encode, event, short_usage, usage


class CompletionsWire:
    """`/v1/completions`."""

    def __init__(self) -> None:
        self._created = int(time.time())

    def _base(self, job: Job, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{job.request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": job.model,
            "choices": choices,
        }

    def _text(self, job: Job, choice: Choice) -> str:
        if not job.echo:
            return choice.text
        return choice.prompt.text + (choice.text if job.request.get("max_tokens") != 0 else "")

    def full(self, answer: Answer) -> bytes:
        job = answer.job
        choices = [
            {
                "index": choice.index,
                "text": self._text(job, choice),
                "logprobs": _logprobs(choice.pieces) if job.logprobs else None,
                "finish_reason": choice.finish,
                "stop_reason": None,
                "token_ids": choice.ids if job.token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
            for choice in answer.choices
        ]
        rest = {
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage(answer.prompt_tokens, answer.output_tokens),
            "kv_transfer_params": answer.kv,
            "ec_transfer_params": answer.ec,
            "metrics": None,
        }
        return encode(self._base(job, choices) | rest)

    def opening(self, job: Job) -> list[bytes]:
        return []

    def start(self, answer: Answer) -> list[bytes]:
        return []

    def token(self, answer: Answer, choice: Choice, number: int) -> bytes:
        job = answer.job
        last = number == len(choice.pieces) - 1
        piece = choice.pieces[number]
        body = {
            "index": choice.index,
            "text": choice.prompt.text + piece if job.echo and number == 0 else piece,
            "logprobs": _logprobs([piece]) if job.logprobs else None,
            "finish_reason": choice.finish if last else None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": [choice.ids[number]] if job.token_ids else None,
        }
        chunk = self._base(job, [body])
        if last and not job.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        if job.continuous_usage:
            chunk["usage"] = short_usage(choice.prompt.tokens, number + 1)
        return event(chunk)

    def end(self, answer: Answer) -> list[bytes]:
        events = []
        if answer.job.include_usage:
            chunk = self._base(answer.job, [])
            chunk["usage"] = short_usage(answer.prompt_tokens, answer.output_tokens)
            chunk["system_fingerprint"] = FINGERPRINT
            events.append(event(chunk))
        return [*events, DONE]

    def error(self, job: Job, error: EngineError) -> list[bytes]:
        return [event(error.openai()), DONE]


def _logprobs(pieces: list[str]) -> dict[str, Any]:
    offsets = []
    at = 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    return {
        "text_offset": offsets,
        "token_logprobs": [-0.5] * len(pieces),
        "tokens": pieces,
        "top_logprobs": [{piece: -0.5} for piece in pieces],
    }
