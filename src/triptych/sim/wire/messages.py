"""Anthropic's messages API as vLLM serves it."""

from __future__ import annotations

from typing import Any

from triptych.sim.answer import Answer, Choice
from triptych.sim.errors import EngineError
from triptych.sim.job import Job
from triptych.sim.wire.chat import encode

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def named(name: str, value: Any) -> bytes:
    """A frame with an event name."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


class MessagesWire:
    """`/v1/messages`."""

    def full(self, answer: Answer) -> bytes:
        (choice,) = answer.choices
        body: dict[str, Any] = {
            "id": f"chatcmpl-{answer.job.request_id}",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": choice.text}],
            "model": answer.job.model,
            "stop_reason": STOP_REASONS[choice.finish],
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.output_tokens},
        }
        # This API leaves null fields out.
        if answer.kv is not None:
            body["kv_transfer_params"] = answer.kv
        if answer.ec is not None:
            body["ec_transfer_params"] = answer.ec
        return encode(body)

    def opening(self, job: Job) -> list[bytes]:
        return []

    def _message_start(self, job: Job, prompt_tokens: int) -> bytes:
        message: dict[str, Any] = {
            "id": f"chatcmpl-{job.request_id}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": job.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        return named("message_start", {"type": "message_start", "message": message})

    def start(self, answer: Answer) -> list[bytes]:
        events = [self._message_start(answer.job, answer.prompt_tokens)]
        if answer.output_tokens:
            block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
            events.append(named("content_block_start", block))
        return events

    def token(self, answer: Answer, choice: Choice, number: int) -> bytes:
        delta = {"type": "text_delta", "text": choice.pieces[number]}
        return named("content_block_delta", {"type": "content_block_delta", "delta": delta, "index": 0})

    def end(self, answer: Answer) -> list[bytes]:
        (choice,) = answer.choices
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": STOP_REASONS[choice.finish], "stop_sequence": None},
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.output_tokens},
        }
        events = [named("message_delta", delta), named("message_stop", {"type": "message_stop"})]
        if answer.output_tokens:
            events.insert(0, named("content_block_stop", {"type": "content_block_stop", "index": 0}))
        return events

    def error(self, job: Job, error: EngineError) -> list[bytes]:
        # vLLM fails to parse its own error chunk here, and reports that.
        body = {"type": "error", "error": {"type": "internal_error", "message": error.message}}
        return [self._message_start(job, 0), named("error", body)]
