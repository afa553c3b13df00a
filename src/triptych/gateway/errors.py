"""Errors as values, and the forms in which a client is told of them.

The shapes are vLLM's: ``{"error": {"message", "type", "param", "code"}}`` for the OpenAI endpoints,
``{"type": "error", "error": {"type", "message"}}`` for ``/v1/messages``; in streams ``data:`` frames for chat and
completions, ``event:`` frames for messages and responses (contract, "Errors, and what the client sees").
"""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.gateway.endpoints import Api
from triptych.http.head import Header

_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_MAX_TEXT = 4096  # characters; keys and model names of a request may be megabytes long


class ApiError(Exception):
    """What the client is told instead of an answer.

    status: the HTTP status; message: what, why, what to do; param: the request's field at fault, if one is;
    retry_after: seconds, sent as `Retry-After`; reason: a short word for metrics and logs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        reason: str = "error",
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _sendable(message)
        self.param = None if param is None else _sendable(param)
        self.retry_after = retry_after
        self.reason = reason
        self.headers = headers

    def head(self) -> list[Header]:
        """Headers that go with the error's body."""
        head: list[Header] = [(b"content-type", b"application/json"), *self.headers]
        if self.retry_after is not None:
            head.append((b"retry-after", b"%d" % self.retry_after))
        return head

    def body(self, api: Api) -> bytes:
        """The JSON body in the form of the endpoint's API."""
        return msgspec.json.encode(_openai(self) if api != "messages" else _anthropic(self))

    def event(self, api: Api) -> bytes:
        """One SSE event that tells the error inside a stream that has begun."""
        if api == "messages":
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(_anthropic(self))
        if api == "responses":
            data = {"type": "error", "code": str(self.status), "message": self.message, "param": self.param}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(data)
        return b"data: %b\n\n" % msgspec.json.encode(_openai(self))


class EngineRefused(Exception):
    """An engine's own refusal, a 4xx (of a pipeline's first stage whatever is no 200): the client gets it as the engine
    wrote it, once, never retried. The answering leg's is relayed like any answer and needs no exception."""

    def __init__(self, leg: str, status: int, headers: list[Header], body: bytes) -> None:
        super().__init__(f"{leg} answered {status}")
        self.leg = leg
        self.status = status
        self.headers = headers
        self.body = body


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _sendable(text: str) -> str:
    """Text with a client's words in it, cut to a length, and as UTF-8 can hold it: JSON has lone surrogates."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode()


def _openai(error: ApiError) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(error.status, "InternalServerError" if error.status >= 500 else "BadRequestError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


def _anthropic(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
