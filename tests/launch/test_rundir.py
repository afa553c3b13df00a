"""Files of a run are private and are gone after it, also when it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.launch.rundir import RunDirectory, disk_base, memory_base, sweep


def test_a_run_directory_is_private_and_is_removed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "base") as run:
        (run.path / "deep").mkdir()
        (run.path / "deep" / "file").write_text("x")
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert run.path.parent.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "base").iterdir()) == []


def test_the_directory_of_a_killed_run_is_removed_by_the_next_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from triptych.launch.rundir import RunDirectory; "
        "run = RunDirectory(pathlib.Path(sys.argv[1])); print(run.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with RunDirectory(tmp_path) as living:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as other:
            assert other.stdout
            path = Path(other.stdout.readline().strip())
            sweep(tmp_path)
            assert path.exists()
            other.kill()
        assert path.exists()
        with RunDirectory(tmp_path) as third:
            assert not path.exists()
            assert living.path.exists()
            assert third.path.exists()


def test_a_base_that_somebody_put_there_as_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is not a directory of this user"):
        RunDirectory(tmp_path / "base")


def test_memory_is_used_only_where_there_is_enough() -> None:
    assert memory_base(1 << 60) == disk_base()
    assert memory_base(0).name == f"triptych-{os.getuid()}"
