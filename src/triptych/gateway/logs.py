"""Log lines on stderr, JSON or for people: one line per event, one per request.

What stands in them is the gateway's vocabulary, numbers, ids and addresses: no keys, no bodies, no query strings. A
value that a client had a hand in (a path, a model name) is cut to a length and loses every character that is not
printable, so it can neither end a line nor steer a terminal; in text it is quoted wherever it could be taken for a
field.

The access line bypasses stdlib logging, which costs several times as much, and such lines are written together, at most
10 ms late. Rare events of other modules come through `logging.getLogger("triptych...")` and `Log.attach`. A
stderr that fails loses lines (counted) and stops no request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from triptych.gateway.timeline import Timeline

Level = Literal["debug", "info", "warning", "error"]
_LEVELS: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_VALUE = 256  # characters of one value

_BARE = re.compile(r'[^ "=\\,]+').fullmatch
_encode = msgspec.json.encode


class _Access(msgspec.Struct, omit_defaults=True):
    """One request's line; what is empty is left out."""

    time: str
    level: str
    event: str
    id: str
    method: str
    path: str
    client: str
    status: int | None
    ms: float
    model: str = ""
    plan: str = ""
    first_ms: float | None = None
    legs: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reasons: tuple[str, ...] = ()
    error: str = ""


_Done = tuple[float, Timeline, str, str, str]
"""What a request's line is made of: when it was over, its record, its method and path, the client."""


class Log:
    """Where lines go, in which form, from which level on."""

    def __init__(
        self,
        form: Literal["json", "text"] = "text",
        level: Level = "info",
        *,
        access: bool = True,
        write: Callable[[bytes], object] | None = None,
        clock: Callable[[], float] = time.time,
        delay: float = 0.01,
    ) -> None:
        """write: takes whole lines; raises OSError if it cannot. stderr if None. delay: seconds that access lines wait
        for company, since a write for each, or a turn of the loop for it, is a measurable part of a request."""
        self.json = form == "json"
        self.level = _LEVELS[level]
        self.dropped = 0
        self._access = access and self.level <= _LEVELS["info"]
        self._write = write or _stderr
        self._clock = clock
        self._delay = delay
        self._second = -1
        self._second_stamp = ""
        self._pending: list[bytes | _Done] = []

    # -- events

    def debug(self, event: str, **fields: Any) -> None:
        self.event("debug", event, **fields)

    def info(self, event: str, **fields: Any) -> None:
        self.event("info", event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        self.event("warning", event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        self.event("error", event, **fields)

    def event(self, level: str, event: str, /, **fields: Any) -> None:
        """One line: what happened, in a few fixed words, and its fields. None values are left out."""
        if _LEVELS[level] < self.level:
            return
        kept = {name: _plain(value) for name, value in fields.items() if value is not None}
        if self.json:
            self._line(_encode({"time": self._stamp(self._clock()), "level": level, "event": clean(event), **kept}))
        else:
            words = [self._stamp(self._clock()), level.upper().ljust(7), clean(event)]
            words += [f"{name}={_quoted(value)}" for name, value in kept.items()]
            self._line(" ".join(words).encode())

    def access(self, timeline: Timeline, method: str, path: str, peer: str = "") -> None:
        """The line of a request that is over. path: without its query; peer: the client's address.

        Only what it is made of is kept: lines are made when they are written, many in a row, which costs less.
        """
        if not self._access:
            return
        pending = self._pending
        pending.append((self._clock(), timeline, method, path, peer))
        if len(pending) == 1:
            try:
                asyncio.get_running_loop().call_later(self._delay, self.flush)
            except RuntimeError:
                self.flush()

    def _access_line(self, at: float, t: Timeline, method: str, path: str, peer: str) -> bytes:
        model = t.model
        # Few paths and models occur: nearly all are known, and short and printable.
        if len(method) + len(path) + len(model) > MAX_VALUE or not (method + path + model).isprintable():
            method, path, model = clean(method), clean(path), clean(model)
        first = None if t.first is None else int((t.first - t.began) * 1e4) / 10  # round() costs six times as much
        ms = int(t.seconds * 1e4) / 10
        if self.json:
            record = _Access(
                self._stamp(at),
                "info",
                "request",
                t.id,
                method,
                path,
                peer,
                t.status,
                ms,
                model,
                t.plan,
                first,
                len(t.legs),
                t.bytes_in,
                t.bytes_out,
                t.reasons,
                clean(t.error) if t.error else "",
            )
            return _encode(record) + b"\n"
        line = (
            f"{self._stamp(at)} INFO    {method} {path} {t.status} {ms}ms id={t.id} client={peer} plan={t.plan or '-'} "
            f"legs={len(t.legs)} model={_quoted(model) if model else '-'} first={'-' if first is None else first} "
            f"in={t.bytes_in} out={t.bytes_out}"
        )
        if t.reasons:
            line += f" reasons={','.join(t.reasons)}"
        if t.error:
            line += f" error={_quoted(clean(t.error))}"
        return line.encode() + b"\n"

    # -- stdlib

    def attach(self, name: str = "triptych") -> Callable[[], None]:
        """Let what is logged under `name` by stdlib logging come out here; the answer undoes it."""
        logger = logging.getLogger(name)
        before = logger.level, logger.propagate
        handler = _Handler(self)
        logger.addHandler(handler)
        logger.setLevel(self.level)
        logger.propagate = False

        def detach() -> None:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]

        return detach

    # -- lines

    def flush(self) -> None:
        """Write what is pending now."""
        if pending := self._pending:
            self._pending = []
            lines = [entry if type(entry) is bytes else self._access_line(*entry) for entry in pending]
            try:
                self._write(b"".join(lines))
            except (OSError, ValueError):  # full pipe, closed stderr: never a reason to fail a request
                self.dropped += len(lines)

    def _line(self, line: bytes) -> None:
        self._pending.append(line + b"\n")
        self.flush()

    def _stamp(self, now: float) -> str:
        second = int(now)
        if second != self._second:
            self._second = second
            self._second_stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_stamp}.{int((now - second) * 1000):03d}Z"


class _Handler(logging.Handler):
    """stdlib records as lines of a `Log`. `extra={"fields": {...}}` gives fields."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = next((n for n in ("error", "warning", "info") if record.levelno >= _LEVELS[n]), "debug")
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            fields |= exception_fields(record.exc_info[1])
        try:
            self._log.event(level, record.getMessage(), **fields)
        except Exception:
            self.handleError(record)


def exception_fields(error: BaseException) -> dict[str, str]:
    """An unexpected exception as fields: its type and where it came from, innermost first.

    Its message is left out, since that of a KeyError, say, is whatever the client sent.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{PurePath(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-8:]))
    return {"exception": type(error).__name__, "where": where}


def clean(value: str) -> str:
    """`value` cut to MAX_VALUE characters, every unprintable one (also of C1, bidi, lone surrogates) as an escape."""
    if len(value) > MAX_VALUE:
        value = value[:MAX_VALUE] + "…"
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return clean(value if isinstance(value, str) else str(value))


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return value if _BARE(value) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return ",".join(map(_quoted, value))
    return str(value)


def _stderr(line: bytes) -> None:
    # Looked up at each call: tests and supervisors replace it. Unbuffered, so that the last words of a crash are there.
    stream = sys.stderr
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(line.decode())
    else:
        buffer.write(line)
        buffer.flush()
