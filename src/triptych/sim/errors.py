"""What goes wrong in an engine, and how vLLM says it."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineError(Exception):
    """An answer other than 200. `param` and the shape are vLLM's own."""

    def __init__(self, status: int, type: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.param = param

    def body(self, anthropic: bool = False) -> bytes:
        """The JSON body in the shape of OpenAI's API, or of Anthropic's."""
        if anthropic:
            return msgspec.json.encode({"type": "error", "error": {"type": self.type, "message": self.message}})
        return msgspec.json.encode(self.openai())

    def openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status,
            }
        }


def invalid(message: str, param: str | None = None, value: object = None) -> EngineError:
    """A `VLLMValidationError`: 400, its parameter is repeated in the message as vLLM does."""
    extras = []
    if param is not None:
        extras.append(f"parameter={param}")
    if value is not None:
        extras.append(f"value={value}")
    text = f"{message} ({', '.join(extras)})" if extras else message
    return EngineError(400, "BadRequestError", text, param)


def malformed(message: str, param: str | None = None) -> EngineError:
    """A `RequestValidationError`: 400 with the web framework's own type."""
    return EngineError(400, "Bad Request", f"1 validation error:\n  {message}", param)


class GenerationFailed(EngineError):
    """A request that failed inside the engine, which lives on (`finish_reason` "error")."""

    def __init__(self, why: str) -> None:
        super().__init__(500, "InternalServerError", "Internal server error")
        self.why = why


class EngineDied(EngineError):
    """The engine core died of this request."""

    def __init__(self, why: str) -> None:
        super().__init__(
            500,
            "InternalServerError",
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        )
        self.why = why
