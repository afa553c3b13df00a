"""Everything that can go wrong on one HTTP connection, by whose fault it is.

`ServerSideError` is about the client of this process, `UpstreamError` about the server that this process calls;
an `UpstreamError` always says which origin it waited for. `ParseError` is raised by the sans-IO parsers, which know
neither side.
"""

from __future__ import annotations

from collections.abc import Sequence


class HttpError(Exception):
    """Base of all errors of this package."""


class ParseError(HttpError):
    """The bytes of a peer are not HTTP/1 as this package accepts it.

    `status` is what a server answers such a request with: 400, 431, 501 or 505. `events` are those that came before
    the fault in the same bytes.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.events: Sequence[object] = ()


class UnsafeHeaderError(HttpError, ValueError):
    """A header that would be written holds CR, LF, NUL or a name that is no token (response splitting)."""


# --- the client's side -----------------------------------------------------------------------------------------


class ServerSideError(HttpError):
    """A request could not be read or its answer not be written. `status` is the answer it maps to."""

    status = 400

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(ServerSideError):
    """The request broke HTTP after its head (a malformed chunk, say)."""


class BodyTooLarge(ServerSideError):
    """The request body is, or grew, over the limit that the reader gave."""

    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"request body is larger than {limit} bytes")
        self.limit = limit


class BodyTimeout(ServerSideError):
    """The client sent nothing of the body for the body deadline."""

    status = 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"waited {seconds:g} s for the client to send the rest of the request body")
        self.seconds = seconds


class ClientGone(ServerSideError):
    """The client has left; nothing can be written to it any more."""

    status = 499


class WriteStalled(ClientGone):
    """The client took nothing of the answer for the write deadline; its connection is closed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"waited {seconds:g} s for the client to take the answer")
        self.seconds = seconds


# --- the upstream's side ---------------------------------------------------------------------------------------


class UpstreamError(HttpError):
    """A call failed. `origin` names the upstream; `what` says what happened to it."""

    def __init__(self, origin: object, what: str) -> None:
        super().__init__(f"{origin}: {what}")
        self.origin = origin
        self.what = what


class ConnectError(UpstreamError):
    """No connection came about (refused, unreachable, no name, TLS, or the connect deadline): nothing was sent."""


class ResetError(UpstreamError):
    """The connection was lost before any byte of the response. The request may have run."""


class CutError(UpstreamError):
    """The response ended before its own end."""


class GarbageError(UpstreamError):
    """What came is not an HTTP/1 response."""


class HeaderTooLarge(GarbageError):
    """The response head is over the limit of the client."""


class ResponseTooLarge(UpstreamError):
    """The response body is, or grew, over the limit that the reader gave."""

    def __init__(self, origin: object, limit: int) -> None:
        super().__init__(origin, f"response body is larger than {limit} bytes")
        self.limit = limit


class UpstreamTimeout(UpstreamError):
    """The upstream let a deadline of the caller pass: the head of the response, or the next bytes of its body."""

    def __init__(self, origin: object, what: str, seconds: float) -> None:
        super().__init__(origin, f"waited {seconds:g} s for {what}")
        self.seconds = seconds


class ClientClosed(HttpError):
    """The `Client` was closed; it makes no more requests."""
