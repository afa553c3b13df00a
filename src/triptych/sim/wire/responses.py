"""The responses API."""

from __future__ import annotations

import time
import uuid
from typing import Any

from triptych.sim.answer import Answer, Choice
from triptych.sim.errors import EngineError
from triptych.sim.job import Job
from triptych.sim.wire.chat import encode
from triptych.sim.wire.messages import named


class ResponsesWire:
    """`/v1/responses`. Keeps the sequence number of its one stream."""

    def __init__(self) -> None:
        self._created = int(time.time())
        self._sequence = 0
        self._item = f"msg_{uuid.uuid4().hex[:16]}"

    def _response(self, job: Job, status: str, text: str | None, answer: Answer | None) -> dict[str, Any]:
        request = job.request
        output = [] if text is None else [self._message("completed", [self._part(text)] if text else [])]
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{job.request_id}",
            "created_at": self._created,
            "incomplete_details": reason,
            "instructions": request.get("instructions"),
            "metadata": request.get("metadata"),
            "model": job.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "temperature": request.get("temperature") or 1.0,
            "tool_choice": request.get("tool_choice", "auto") if request.get("tools") else "none",
            "tools": request.get("tools") or [],
            "top_p": request.get("top_p") or 1.0,
            "background": False,
            "max_output_tokens": job.max_tokens,
            "max_tool_calls": request.get("max_tool_calls"),
            "previous_response_id": None,
            "prompt": None,
            "reasoning": request.get("reasoning"),
            "service_tier": "auto",
            "status": status,
            "text": request.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None if answer is None else _usage(answer),
            "user": request.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None if answer is None else answer.kv,
            "ec_transfer_params": None if answer is None else answer.ec,
            "input_messages": None,
            "output_messages": None,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._item,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _final(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        status = "incomplete" if choice.finish == "length" else "completed"
        return self._response(answer.job, status, choice.text, answer)

    def full(self, answer: Answer) -> bytes:
        return encode(self._final(answer))

    def _event(self, kind: str, before: dict[str, Any], after: dict[str, Any] | None = None) -> bytes:
        body = before | {"sequence_number": self._sequence} | (after or {}) | {"type": kind}
        self._sequence += 1
        return named(kind, body)

    def opening(self, job: Job) -> list[bytes]:
        response = self._response(job, "in_progress", None, None)
        return [
            self._event("response.created", {"response": response}),
            self._event("response.in_progress", {"response": response}),
        ]

    def start(self, answer: Answer) -> list[bytes]:
        if not answer.output_tokens:
            return []
        part = self._part("") | {"logprobs": []}
        return [
            self._event("response.output_item.added", {"item": self._message("in_progress", []), "output_index": 0}),
            self._event(
                "response.content_part.added",
                {"content_index": 0, "item_id": self._item, "output_index": 0, "part": part},
            ),
        ]

    def token(self, answer: Answer, choice: Choice, number: int) -> bytes:
        delta = choice.pieces[number]
        body = {"content_index": 0, "delta": delta, "item_id": self._item, "logprobs": [], "output_index": 0}
        return self._event("response.output_text.delta", body)

    def end(self, answer: Answer) -> list[bytes]:
        (choice,) = answer.choices
        events = []
        if choice.pieces:
            place = {"content_index": 0, "item_id": self._item}
            part = self._part(choice.text)
            item = self._message("completed", [part])
            events = [
                self._event(
                    "response.output_text.done",
                    place | {"logprobs": [], "output_index": 0},
                    {"text": choice.text},
                ),
                self._event("response.content_part.done", place | {"output_index": 0, "part": part}),
                self._event("response.output_item.done", {"item": item, "output_index": 0}),
            ]
        return [*events, self._event("response.completed", {"response": self._final(answer)})]

    def error(self, job: Job, error: EngineError) -> list[bytes]:
        # The exception escapes vLLM's generator: the stream just breaks off.
        return []


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }
