"""Multipart endpoints (audio uploads): streamed through on a plain plan, the model read from the form on its way.

The form is parsed by python-multipart, fed with the same bytes that go to the engine; not one of them is changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from triptych.gateway.errors import ApiError
from triptych.http.request import Request

_LOOK_BYTES = 1 << 20
_MODEL_BYTES = 1024


class FormModel:
    """Looks for the form's `model` field in bytes as they come. Sans-IO.

    model: its value once known; done: whether looking further is of no use (found, or the form has ended).
    """

    def __init__(self, content_type: bytes) -> None:
        """Raises ApiError 400 if the content type is not multipart/form-data with a boundary."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "this endpoint takes multipart/form-data with a boundary", reason="not_multipart")
        self.model: str | None = None
        self.done = False
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._in_model = False
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
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """More of the form. Raises ApiError 400 if it is none."""
        if self.done:
            return
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}", reason="bad_form") from None

    def _part_begin(self) -> None:
        self._header = self._value = self._disposition = b""
        self._in_model = False

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._in_model = options.get(b"name") == b"model"
        self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_model:
            self._value += data[start:end]
            if len(self._value) > _MODEL_BYTES:
                raise ApiError(400, "`model` is too long", param="model", reason="bad_form")

    def _part_end(self) -> None:
        if self._in_model:
            self.model = self._value.decode("utf-8", "replace")
            self.done = True

    def _end(self) -> None:
        self.done = True


async def look_for_model(request: Request, limit: int, *, must_find: bool) -> tuple[str | None, AsyncIterator[bytes]]:
    """Read a form until its `model` is known: its value, and the whole body, what was read included.

    Without must_find it gives up after a megabyte, so that a file that stands before `model` is not held in memory.
    Raises ApiError 400 for what is no form.
    """
    form = FormModel(request.header(b"content-type") or b"")
    read: list[bytes] = []
    size = 0
    chunks = request.body_chunks(limit)

    async def whole() -> AsyncIterator[bytes]:
        while read:
            yield read.pop(0)
        async for data in chunks:
            yield data

    async for data in chunks:
        read.append(data)
        size += len(data)
        form.feed(data)
        if form.done or (size > _LOOK_BYTES and not must_find):
            break
    return form.model, whole()
