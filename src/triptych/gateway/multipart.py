"""Multipart endpoints (audio uploads): streamed through on a plain plan, the model read from the form on its way.

The form is parsed by python-multipart, fed with the same bytes that go to the engine; not one of them is changed. So
what a client may not send is refused here rather than removed: vLLM reads a form's `vllm_xargs` as JSON, into the slot
where hand-over parameters stand (vLLM 0.32, speech_to_text/transcription/protocol.py). vLLM's server reads forms with
the same parser, and its handlers do not start before the form's end, which a refused form never reaches.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from triptych.body.request import HANDLES
from triptych.gateway.errors import ApiError
from triptych.http.request import Request

_LOOK_BYTES = 1 << 20
_FIELD_BYTES = 16 << 10
_PARTS = 1000  # as many as the engine's server takes (Starlette, formparsers.py); each costs time here
_LOOKED_AT = frozenset({"model", "vllm_xargs"})


class Form:
    """Looks at a form's fields in bytes as they come. Sans-IO.

    model: the value of that field once known. closed: hand-over parameters that a client may not send.
    """

    def __init__(self, content_type: bytes, closed: Collection[str] = HANDLES) -> None:
        """Raises ApiError 400 if the content type is not multipart/form-data in UTF-8 with a boundary."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "this endpoint takes multipart/form-data with a boundary", reason="not_multipart")
        if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8", b"us-ascii"):
            # The engine would decode the fields' names by it, and find names that are not seen here.
            raise ApiError(400, "a form is taken in UTF-8 only", reason="not_multipart")
        self.model: str | None = None
        self._closed = frozenset(closed)
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._field = ""
        self._parts = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
            },
        )

    def feed(self, data: bytes) -> None:
        """More of the form. Raises ApiError 400 if it is none, or has a field that is closed."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}", reason="bad_form") from None

    def _part_begin(self) -> None:
        self._header = self._value = self._disposition = b""
        self._parts += 1
        if self._parts > _PARTS:
            raise ApiError(400, f"more than {_PARTS} parts in the form", reason="bad_form")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._bound_header(self._header)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bound_header(self._value)

    def _bound_header(self, read: bytes) -> None:
        if len(read) > _FIELD_BYTES:
            raise ApiError(400, "a part of the form has a header that is too long", reason="bad_form")

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._value = b""
        if self._field in self._closed:
            raise _closed(self._field, self._field)
        if self._field == "model" and self.model is not None:
            raise ApiError(400, 'duplicate field "model" in the form', param="model", reason="bad_form")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field in _LOOKED_AT:
            self._value += data[start:end]
            if len(self._value) > _FIELD_BYTES:
                raise ApiError(400, f"`{self._field}` is too long", param=self._field, reason="bad_form")

    def _part_end(self) -> None:
        if self._field == "model":
            self.model = self._value.decode("utf-8", "replace")
        elif self._field == "vllm_xargs":
            self._check_xargs()

    def _check_xargs(self) -> None:
        try:
            text = self._value.decode()
        except UnicodeDecodeError:
            text = self._value.decode("latin-1")  # as the engine's server does (Starlette, formparsers.py)
        try:
            xargs = json.loads(text)
        except (ValueError, RecursionError):
            return  # the engine's to refuse
        if isinstance(xargs, dict):
            for key in sorted(self._closed.intersection(xargs)):
                raise _closed(key, f"vllm_xargs.{key}")


def _closed(key: str, where: str) -> ApiError:
    message = f"`{where}` is not accepted here. The gateway's setting `open: {key}` admits it."
    return ApiError(400, message, param=where, reason="closed")


async def look_for_model(
    request: Request, limit: int, *, must_find: bool, closed: Collection[str] = HANDLES
) -> tuple[str | None, AsyncIterator[bytes]]:
    """Read a form until its `model` is known: its value, and the whole body, what was read included.

    Without must_find it gives up after a megabyte, so that a file that stands before `model` is not held in memory.
    Raises ApiError 400 for what is no form, or has a field that is closed; so does the body as it comes.
    """
    form = Form(request.header(b"content-type") or b"", closed)
    read: list[bytes] = []
    size = 0
    chunks = request.body_chunks(limit)

    async def whole() -> AsyncIterator[bytes]:
        while read:
            yield read.pop(0)
        async for data in chunks:
            form.feed(data)
            yield data

    async for data in chunks:
        read.append(data)
        size += len(data)
        form.feed(data)
        if form.model is not None or (size > _LOOK_BYTES and not must_find):
            break
    return form.model, whole()
