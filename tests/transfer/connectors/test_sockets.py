"""Where connectors find each other: names, owners, sweeping, and who may look."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.connectors.sockets import (
    BELL,
    SENDER,
    Folder,
    Name,
    base_folder,
    label,
    pid_namespace,
    started,
)
from triptych.transfer.errors import ConnectorError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder("test", tmp_path / "run")
    yield folder
    folder.close()


def gone(role: str = SENDER, **changes: int) -> Name:
    """The name of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = started(child.pid)
    assert start is not None
    child.communicate(b"\n")
    return Name(role, "0", 0, child.pid, start, pid_namespace(), "0123abcd")._replace(**changes)


@given(
    st.builds(
        Name,
        st.sampled_from([SENDER, BELL]),
        st.text(max_size=40).map(label),
        st.integers(0, 65535),
        st.integers(1, 2**31),
        st.integers(0, 2**63),
        st.integers(0, 2**63),
        st.integers(0, 2**32 - 1).map("{:08x}".format),
    )
)
def test_a_socket_s_name_says_whose_it_is_whatever_the_stage_is_called(name: Name) -> None:
    assert Name.parse(str(name)) == name
    assert len(str(name)) < 100
    assert "/" not in str(name)


@given(st.text())
def test_other_files_are_none_of_ours(text: str) -> None:
    name = Name.parse(text)
    assert name is None or str(name) == text


def test_the_folder_is_for_its_user_alone(folder: Folder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    base = tmp_path / "run"
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(ConnectorError, match="only this user"):
        Folder("test", base)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConnectorError, match="only this user"):
        Folder("test", tmp_path / "run")


def test_a_path_too_long_for_a_socket_is_none(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 120) / ("y" * 120)
    base.mkdir(parents=True, mode=0o700)
    folder = Folder("d" * 5000, base)
    name = Name.ours(SENDER, "0", 0)
    with folder.bind(name), folder.connect(name) or pytest.fail("nobody is there"):
        assert folder.names(SENDER) == [name]
    folder.close()


def test_the_runtime_folder_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert base_folder() == tmp_path / "triptych"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert base_folder().name == f"triptych-{os.getuid()}"


def test_a_sender_listens_before_it_can_be_seen(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Name]] = []
    listen = socket.socket.listen
    monkeypatch.setattr(
        socket.socket, "listen", lambda self, *args: (seen.append(folder.names(SENDER)), listen(self, *args))[1]
    )
    name = Name.ours(SENDER, "0", 0)
    with folder.bind(name):
        assert seen == [[]]
        assert folder.names(SENDER) == [name]


def test_a_sweep_removes_what_dead_owners_left_and_nothing_else(folder: Folder) -> None:
    dead = [gone(), gone(BELL), gone(stage=7)]
    for name in dead:
        folder.bind(name).close()
    half_made = folder.path / f"{gone()}.new"
    half_made.touch()
    (folder.path / "somebody's").touch()
    ours = Name.ours(SENDER, "0", 0)
    with folder.bind(ours):
        swept = folder.sweep()
        assert sorted(swept) == sorted([*map(str, dead), half_made.name])
        assert folder.names(SENDER) == [ours]
        assert (folder.path / "somebody's").exists()
        assert folder.sweep() == []


def test_a_process_id_used_again_is_not_its_owner(folder: Folder) -> None:
    start = started(os.getpid())
    assert start is not None
    ours = Name.ours(SENDER, "0", 0)
    assert folder.alive(ours)
    assert not folder.alive(ours._replace(start=start + 1))


def test_an_owner_of_another_namespace_is_alive_while_its_socket_answers(folder: Folder) -> None:
    for role in (SENDER, BELL):
        name = gone(role, namespace=pid_namespace() + 1)
        with folder.bind(name):
            assert folder.alive(name)
        assert not folder.alive(name)
        folder.remove(name)
        assert not folder.alive(name)


def test_ringing_reaches_every_bell_and_minds_no_dead_one(folder: Folder) -> None:
    folder.bind(gone(BELL)).close()
    with folder.bind(Name.ours(BELL, "1", 0)) as one, folder.bind(Name.ours(BELL, "2", 0)) as two:
        for _ in range(2000):  # more than a socket holds: a bell that was rung is rung
            folder.ring()
        assert one.recv(9) == two.recv(9) == b"!"


def test_a_folder_that_was_collected_is_made_again_by_who_needs_it(tmp_path: Path) -> None:
    folder, collector = Folder("test", tmp_path / "run"), Folder("test", tmp_path / "run")
    assert collector.dissolve()
    collector.close()
    name = Name.ours(SENDER, "0", 0)
    with folder.bind(name):
        assert folder.path.is_dir()
        assert not folder.dissolve()
    folder.close()


def test_the_start_of_a_process_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    program = tmp_path / "a) R (1 2"
    program.symlink_to(Path("/bin/sleep").resolve())
    with subprocess.Popen([program, "60"]) as child:
        start = started(child.pid)
        child.kill()
    assert start is not None
    assert start > 0
    assert started(child.pid) is None
