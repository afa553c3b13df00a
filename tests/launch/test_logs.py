"""Output becomes lines, in a file that does not grow without end."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from triptych.launch.logs import KEPT_LINES, LONGEST_LINE, Log


def test_lines_come_out_whole_however_the_output_was_cut(tmp_path: Path) -> None:
    text = "one\n\ntwo é\r\nthree".encode()
    for cut in range(1, len(text)):
        log = Log(None)
        lines = [line for at in range(0, len(text), cut) for line in log.feed(text[at : at + cut])]
        assert [*lines, *log.flush()] == ["one", "", "two é", "three"]


def test_a_line_without_end_is_cut_and_memory_stays_bounded() -> None:
    log = Log(None)
    out = [line for _ in range(9) for line in log.feed(b"x" * LONGEST_LINE)]
    assert [len(line) // LONGEST_LINE for line in (*out, *log.flush())] == [2, 2, 2, 2, 1]


def test_colours_are_removed_and_of_a_progress_bar_the_last_state_stays() -> None:
    log = Log(None)
    assert log.feed(b"\x1b[1;31mred\x1b[0m\n 0%\r 50%\r100%\n\xff\n") == ["red", "100%", "\ufffd"]


def test_the_last_lines_are_kept_blank_ones_left_out() -> None:
    log = Log(None)
    for number in range(100):
        log.feed(b"%d\n\n" % number)
    assert list(log.lines) == [str(n) for n in range(100 - KEPT_LINES, 100)]


def test_the_file_holds_every_byte_and_moves_aside_when_it_is_full(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.log", limit=25)
    for number in range(4):
        log.feed(b"line %d of ten\n" % number)
    log.note("restarted")
    log.close()
    assert (tmp_path / "a.log.1").read_text() == "line 3 of ten\n"
    assert (tmp_path / "a.log").read_text() == "--- restarted\n"


def test_a_full_disk_loses_log_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "a.log")

    class Full:
        def tell(self) -> int:
            raise OSError(errno.ENOSPC, "full")

        def close(self) -> None:
            pass

    assert log._file is not None
    log._file.close()
    monkeypatch.setattr(log, "_file", Full())
    assert log.feed(b"still here\n") == ["still here"]


def test_a_log_goes_on_in_the_file_of_an_earlier_start(tmp_path: Path) -> None:
    for word in (b"first\n", b"second\n"):
        log = Log(tmp_path / "a.log")
        log.feed(word)
        log.close()
    assert (tmp_path / "a.log").read_text() == "first\nsecond\n"
