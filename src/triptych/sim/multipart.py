"""Just enough multipart/form-data for an upload."""

from __future__ import annotations

import re

from triptych.sim.errors import malformed

_BOUNDARY = re.compile(rb'boundary="?([^";]+)"?', re.IGNORECASE)
_NAME = re.compile(rb'name="([^"]*)"')


def form(body: bytes, content_type: bytes) -> dict[str, bytes]:
    """The fields by name, the last of each. Raises `EngineError` (400) where the body is no form."""
    match = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith(b"multipart/form-data") or match is None:
        raise malformed("{'type': 'missing', 'loc': 'body.file', 'msg': 'Field required'}", "body.file")
    fields = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + match[1])[1:]:
        head, found, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if found and name is not None:
            fields[name[1].decode("utf-8", "replace")] = value
    return fields
