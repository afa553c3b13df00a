"""`triptych shm`: what it lists, what it collects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from triptych.cli.main import cli
from triptych.transfer.connectors.shm import SharedMemoryConnector
from triptych.transfer.connectors.sockets import SENDER, Folder, Name, pid_namespace, started
from triptych.transfer.wire import Tensor


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "run"


def shm(base: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["shm", *arguments, "--runtime-dir", str(base)])


def leave_a_dead_socket(base: Path, deployment: str) -> str:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = started(child.pid)
    assert start is not None
    child.communicate(b"\n")
    name = Name(SENDER, "3", 0, child.pid, start, pid_namespace(), "0123abcd")
    folder = Folder(deployment, base)
    folder.bind(name).close()
    folder.close()
    return str(name)


def test_nothing_is_listed_where_nothing_is(base: Path) -> None:
    assert shm(base, "ls").output == "No stage of this user shares memory here.\n"
    assert json.loads(shm(base, "ls", "--json").output) == []
    assert shm(base, "gc").output == "Nothing to collect.\n"


def test_the_living_are_listed_with_the_memory_that_they_hold(base: Path) -> None:
    options = {"runtime_dir": str(base), "deployment": "prod"}
    sender = SharedMemoryConnector({**options, "port": 5555})
    receiver = SharedMemoryConnector({**options, "stage_id": 1})
    try:
        data = {"x": Tensor("uint8", (3 << 20,), bytes(3 << 20))}
        sender.put("0", "1", "s_0", data)
        receiver.watch("0", "1", "other")
        output = shm(base, "ls").output
        assert output.startswith("prod  ")
        assert f"stage 0 sender port 5555  pid {os.getpid()}  3." in output
        assert "of 256.0 MiB held" in output
        assert f"stage 1 receiver  pid {os.getpid()}" in output
        (deployment,) = json.loads(shm(base, "ls", "--json").output)
        first, second = deployment["ends"]
        assert deployment["name"] == "prod"
        assert (first["role"], first["alive"], first["port"]) == ("sender", True, 5555)
        assert 3 << 20 <= first["arena"]["held"] < 4 << 20
        assert first["arena"]["size"] == 256 << 20
        assert (second["role"], second["arena"]) == ("receiver", None)
        assert shm(base, "gc").output == "Nothing to collect.\n"
    finally:
        sender.close()
        receiver.close()


def test_what_the_dead_left_is_listed_and_collected(base: Path) -> None:
    name = leave_a_dead_socket(base, "crashed")
    assert "stage 3 sender" in shm(base, "ls").output
    assert "DEAD" in shm(base, "ls").output
    assert json.loads(shm(base, "gc", "--json").output) == [
        {"deployment": "crashed", "removed": name},
        {"deployment": "crashed", "removed": "its folder"},
    ]
    assert not list(base.iterdir())
    assert shm(base, "ls").output == "No stage of this user shares memory here.\n"


def test_the_next_start_collects_too(base: Path) -> None:
    name = leave_a_dead_socket(base, "crashed")
    connector = SharedMemoryConnector({"runtime_dir": str(base), "deployment": "crashed"})
    connector.watch("0", "1", "s")
    assert not list(base.rglob(name))
    connector.close()


def test_folders_of_others_are_left_alone(base: Path) -> None:
    base.mkdir(mode=0o700)
    (base / "0123456789abcdef").mkdir()
    (base / "file").write_text("x")
    (base / "fedcba9876543210").mkdir()
    (base / "fedcba9876543210" / "deployment").write_text("not this one")
    before = sorted(base.rglob("*"))
    assert shm(base, "ls").exit_code == 0
    assert shm(base, "gc").output == "Nothing to collect.\n"
    assert sorted(base.rglob("*")) == before


def test_a_folder_that_others_may_write_to_is_an_error_that_names_it(base: Path) -> None:
    leave_a_dead_socket(base, "crashed")
    base.chmod(0o777)
    result = shm(base, "gc")
    assert result.exit_code == 1
    assert str(base) in result.output


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_help_shows_examples(command: str) -> None:
    output = CliRunner().invoke(cli, ["shm", command, "--help"]).output
    assert f"triptych shm {command}" in output
    assert "Examples" in output
