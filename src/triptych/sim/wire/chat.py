"""The chat API."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from triptych.sim.answer import FINGERPRINT, Answer, Choice
from triptych.sim.errors import EngineError
from triptych.sim.job import Job

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


def usage(prompt: int, output: int) -> dict[str, Any]:
    """The usage object of a whole answer, null details and all."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def short_usage(prompt: int, output: int) -> dict[str, Any]:
    """The usage object of a stream."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def event(value: Any) -> bytes:
    """A `data:` frame."""
    return b"data: " + encode(value) + b"\n\n"


def logprob(piece: str) -> dict[str, Any]:
    """Log probability of a token: every token of a simulated engine is as likely as the next."""
    return {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []}


class ChatWire:
    """`/v1/chat/completions`."""

    def __init__(self) -> None:
        self._created = int(time.time())

    def full(self, answer: Answer) -> bytes:
        job = answer.job
        choices = [
            {
                "index": choice.index,
                "message": {
                    "role": job.role,
                    "content": choice.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": {"content": [logprob(p) for p in choice.pieces]} if job.logprobs else None,
                "finish_reason": choice.finish,
                "stop_reason": None,
                "token_ids": choice.ids if job.token_ids else None,
                "routed_experts": None,
            }
            for choice in answer.choices
        ]
        return encode(
            {
                "id": f"chatcmpl-{job.request_id}",
                "object": "chat.completion",
                "created": answer.created,
                "model": job.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage(answer.prompt_tokens, answer.output_tokens),
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "prompt_text": None,
                "kv_transfer_params": answer.kv,
                "ec_transfer_params": answer.ec,
                "metrics": None,
            }
        )

    def _chunk(self, job: Job, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{job.request_id}",
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": job.model,
            "choices": choices,
        }

    def opening(self, job: Job) -> list[bytes]:
        return []

    def _roles(self, job: Job, prompt_tokens: int) -> list[bytes]:
        events = []
        for index in range(job.n):
            delta = {"role": job.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._chunk(job, [choice])
            if job.continuous_usage:
                chunk["usage"] = short_usage(prompt_tokens, 0)
            events.append(event(chunk | {"prompt_token_ids": None, "prompt_text": None}))
        return events

    def start(self, answer: Answer) -> list[bytes]:
        return self._roles(answer.job, answer.prompt_tokens)

    def token(self, answer: Answer, choice: Choice, number: int) -> bytes:
        job = answer.job
        last = number == len(choice.pieces) - 1
        piece = choice.pieces[number]
        body: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": piece},
            "logprobs": {"content": [logprob(piece)]} if job.logprobs else None,
            "finish_reason": choice.finish if last else None,
        }
        if last:
            body["stop_reason"] = None
        body["token_ids"] = [choice.ids[number]] if job.token_ids else None
        chunk = self._chunk(job, [body])
        if last and not job.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        if job.continuous_usage:
            chunk["usage"] = short_usage(answer.prompt_tokens, number + 1)
        return event(chunk)

    def end(self, answer: Answer) -> list[bytes]:
        events = []
        if answer.job.include_usage:
            chunk = self._chunk(answer.job, [])
            chunk["usage"] = short_usage(answer.prompt_tokens, answer.output_tokens)
            chunk["system_fingerprint"] = FINGERPRINT
            events.append(event(chunk))
        return [*events, DONE]

    def error(self, job: Job, error: EngineError) -> list[bytes]:
        return [*self._roles(job, 0), event(error.openai()), DONE]
