"""Log lines: one per event whatever is in it, nothing of a client's that could steer a terminal, no request harmed."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.gateway.logs import MAX_VALUE, Log, clean, exception_fields
from triptych.gateway.timeline import Timeline

Form = Literal["json", "text"]
NOW = 1_700_000_000.25

# What people try: line ends of every kind, terminal escapes of C0 and C1, bidi overrides, lone surrogates, quotes.
hostile = st.text(max_size=400) | st.text(
    st.sampled_from('\n\r\x00\x1b\x7f\x85\x9b\u2028\u2029\u202e\ufeff\ud800"\\= ,a'), max_size=40
)


class Sink:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self._wrote = asyncio.Event()

    def __call__(self, data: bytes) -> None:
        self.writes.append(data)
        self._wrote.set()

    async def wrote(self) -> None:
        """Wait for a write from now on."""
        self._wrote.clear()
        async with asyncio.timeout(5):
            await self._wrote.wait()

    @property
    def lines(self) -> list[str]:
        text = b"".join(self.writes).decode()
        assert text == "" or text.endswith("\n")
        return text.split("\n")[:-1]


def make(form: Form, level: Literal["debug", "info", "warning", "error"] = "info", **more: Any) -> tuple[Log, Sink]:
    sink = Sink()
    return Log(form, level, write=sink, clock=lambda: NOW, **more), sink


def record(model: str = "m", error: str = "") -> Timeline:
    t = Timeline("id-1", "chat")
    t.plan, t.model, t.error = "E+PD", model, error
    t.leg("decode", "decode", "http://e:1").end("success")
    t.reason("no_encoder")
    t.bytes_in, t.bytes_out = 10, 20
    t.end(200)
    return t


def parse_text(line: str) -> dict[str, str]:
    """The fields of a text line, as a log collector would read them."""
    return {
        m[1]: re.sub(r"\\(.)", r"\1", m[2][1:-1]) if m[2].startswith('"') else m[2]
        for m in re.finditer(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "]*)(?= |$)', line)
    }


def test_json_event_has_time_level_and_fields() -> None:
    log, sink = make("json")
    log.warning("engine ejected", engine="http://e:1", why="refused", count=3, models=["a", "b"], absent=None)
    assert json.loads(sink.lines[0]) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "event": "engine ejected",
        "engine": "http://e:1",
        "why": "refused",
        "count": 3,
        "models": ["a", "b"],
    }


def test_text_event_is_for_people() -> None:
    log, sink = make("text")
    log.warning("engine ejected", engine="http://e:1", why="timed out", models=["a", "b"], absent=None)
    assert sink.lines == [
        '2023-11-14T22:13:20.250Z WARNING engine ejected engine=http://e:1 why="timed out" models=a,b'
    ]


def test_json_access_line_tells_the_request() -> None:
    log, sink = make("json")
    log.access(record(), "POST", "/v1/chat/completions", "10.0.0.9")
    line = json.loads(sink.lines[0])
    assert line.pop("ms") >= 0
    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "event": "request",
        "id": "id-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "client": "10.0.0.9",
        "status": 200,
        "model": "m",
        "plan": "E+PD",
        "legs": 1,
        "bytes_in": 10,
        "bytes_out": 20,
        "reasons": ["no_encoder"],
    }


def test_text_access_line_tells_the_request() -> None:
    log, sink = make("text")
    log.access(record(error="decode_timeout"), "POST", "/v1/chat/completions", "10.0.0.9")
    assert re.fullmatch(
        r"2023-11-14T22:13:20\.250Z INFO    POST /v1/chat/completions 200 [0-9.]+ms id=id-1 client=10\.0\.0\.9 "
        r"plan=E\+PD legs=1 model=m first=- in=10 out=20 reasons=no_encoder error=decode_timeout",
        sink.lines[0],
    )


@pytest.mark.parametrize("form", ["json", "text"])
@given(path=hostile, model=hostile, error=hostile, method=hostile)
def test_no_value_ends_an_access_line_or_is_unprintable(
    form: Form, path: str, model: str, error: str, method: str
) -> None:
    log, sink = make(form)
    log.access(record(model, error), method, path)
    (line,) = sink.lines
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["id"] == "id-1"
    else:
        fields = parse_text(line.partition(" id=")[2].join((" id=", "")))
        assert (fields["id"], fields["in"], fields["out"]) == ("id-1", "10", "20")
        assert fields["model"] == (clean(model) or "-")
        assert fields.get("error", "") == clean(error)


@pytest.mark.parametrize("form", ["json", "text"])
@given(event=hostile, value=hostile, items=st.lists(hostile, max_size=3))
def test_no_value_ends_an_event_line_or_is_unprintable(form: Form, event: str, value: str, items: list[str]) -> None:
    log, sink = make(form)
    log.info(event, value=value, items=items, last=1)
    (line,) = sink.lines
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["value"] == clean(value)
    else:
        assert line.endswith(" last=1")


def test_long_values_are_cut() -> None:
    assert len(clean("x" * 10_000)) == MAX_VALUE + 1
    log, sink = make("text")
    log.access(record("m" * 10_000), "POST", "/" + "p" * 10_000)
    assert len(sink.lines[0]) < 3 * MAX_VALUE


def test_names_in_other_scripts_stay_readable() -> None:
    assert clean("千问-视觉") == "千问-视觉"
    assert clean("a\nb") == "a\\nb"
    assert clean("\u202eevil") == "\\u202eevil"


@pytest.mark.parametrize("form", ["json", "text"])
def test_level_keeps_lesser_events_out(form: Form) -> None:
    log, sink = make(form, "warning")
    log.debug("d")
    log.info("i")
    log.access(record(), "POST", "/")
    assert sink.lines == []
    log.warning("w")
    log.error("e")
    assert len(sink.lines) == 2


def test_access_lines_can_be_off() -> None:
    log, sink = make("text", access=False)
    log.access(record(), "POST", "/")
    assert sink.writes == []
    log.info("still here")
    assert len(sink.lines) == 1


@pytest.mark.parametrize("error", [BrokenPipeError, BlockingIOError, ValueError])
def test_stderr_that_fails_loses_lines_and_nothing_else(error: type[Exception]) -> None:
    def broken(_: bytes) -> None:
        raise error

    log = Log(write=broken)
    log.info("one")
    log.access(record(), "POST", "/")
    assert log.dropped == 2


async def test_access_lines_of_a_moment_are_one_write_in_order() -> None:
    log, sink = make("text")
    for path in ("/a", "/b", "/c"):
        log.access(record(), "POST", path)
    assert sink.writes == []
    await sink.wrote()
    assert len(sink.writes) == 1
    assert [line.split(" ")[6] for line in sink.lines] == ["/a", "/b", "/c"]
    log.access(record(), "POST", "/d")
    await sink.wrote()
    assert len(sink.writes) == 2


async def test_event_comes_after_the_access_lines_before_it() -> None:
    log, sink = make("text")
    log.access(record(), "POST", "/a")
    log.info("later")
    assert ["/a" in sink.lines[0], "later" in sink.lines[1]] == [True, True]
    log.access(record(), "POST", "/b")
    await sink.wrote()
    assert len(sink.lines) == 3


def test_default_is_stderr_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    Log().info("hello")
    assert capsys.readouterr().err.endswith(" INFO    hello\n")


def test_stderr_without_bytes_below_works(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    Log().info("hello")
    assert stream.getvalue().endswith(" INFO    hello\n")


def test_time_goes_on() -> None:
    now = [NOW]
    sink = Sink()
    log = Log("text", write=sink, clock=lambda: now[0])
    log.info("a")
    now[0] += 0.5
    log.info("b")
    now[0] += 0.5
    log.info("c")
    assert [line[17:24] for line in sink.lines] == ["20.250Z", "20.750Z", "21.250Z"]


# -- stdlib


def test_stdlib_records_come_out_in_the_same_form_until_detached() -> None:
    log, sink = make("json")
    logger = logging.getLogger("triptych.gateway.some_module")
    root = logging.getLogger("triptych")
    before = root.level, root.propagate, list(root.handlers)
    detach = log.attach()
    try:
        logger.warning("engine %s\nodd", "e", extra={"fields": {"engine": "http://e:1"}})
        logger.debug("not at this level")
    finally:
        detach()
    logger.handlers.clear()
    assert [json.loads(line) for line in sink.lines] == [
        {
            "time": "2023-11-14T22:13:20.250Z",
            "level": "warning",
            "event": "engine e\\nodd",
            "engine": "http://e:1",
        }
    ]
    assert (root.level, root.propagate, list(root.handlers)) == before


def raise_secret() -> None:
    raise KeyError("what the client sent\nsk-secret")


@pytest.mark.parametrize("form", ["json", "text"])
def test_exception_is_one_line_without_its_message(form: Form) -> None:
    log, sink = make(form)
    detach = log.attach("triptych.test")
    try:
        try:
            raise_secret()
        except KeyError:
            logging.getLogger("triptych.test").exception("request failed")
    finally:
        detach()
    (line,) = sink.lines
    assert "secret" not in line.replace("raise_secret", "")
    assert "KeyError" in line
    assert "test_logs.py" in line
    assert "raise_secret" in line


def test_exception_fields_are_innermost_first_and_bounded() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as caught:
        deep(30)
    fields = exception_fields(caught.value)
    assert fields["exception"] == "ValueError"
    assert fields["where"].count(" < ") == 7
    assert re.match(r"test_logs\.py:\d+ deep < ", fields["where"])
