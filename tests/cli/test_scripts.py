"""The set-up scripts: what they say on a machine that lacks something, and that half a set-up is done again."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def bash(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ},
    )  # fmt: skip


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_step_is_one_line_when_it_works(tmp_path: Path) -> None:
    done = bash("step.sh", "Trying", "bash", "-c", "echo noise; echo more >&2", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"(Trying … .*\n)*Trying: done in \d+ s\n", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_shows_its_output_and_status(tmp_path: Path) -> None:
    done = bash("step.sh", "Trying", "bash", "-c", "echo oh no; exit 3", TMPDIR=str(tmp_path))
    assert done.returncode == 3
    assert "oh no\nTrying: failed with status 3" in done.stderr


def test_a_step_of_some_seconds_shows_that_it_is_alive(tmp_path: Path) -> None:
    done = bash(
        "step.sh",
        "Trying",
        "bash",
        "-c",
        "printf '\\x94\\xe2\\x94 \\e[32mhalf\\e[0m \\xe2\\x94\\x81way\\n'; sleep 1.5",
        TMPDIR=str(tmp_path),
    )
    assert done.stdout.startswith("Trying … 1 s  half way\n")


def test_an_interrupted_step_takes_its_processes_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    step = subprocess.Popen(
        ["bash", str(SCRIPTS / "step.sh"), "Trying", "bash", "-c", f"sleep 60 & echo $! > {pid_file}; wait"],
        stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    child = os.pidfd_open(int(pid_file.read_text()))
    os.killpg(step.pid, signal.SIGINT)
    out, _ = step.communicate(timeout=30)
    assert step.returncode == 130
    assert "Trying: interrupted" in out
    ended, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert ended == [child]


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    old = program(tmp_path / "old", '[[ $1 == --version ]] && { echo "Python 3.9.18"; exit; }; exit 1')
    done = bash("venv.sh", str(tmp_path / "venv"), PYTHON=str(old))
    assert done.returncode == 1
    assert f"needs Python 3.11 to 3.14, and {old} is: Python 3.9.18." in done.stderr
    assert "make setup PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_that_is_missing_is_named(tmp_path: Path) -> None:
    done = bash("venv.sh", str(tmp_path / "venv"), PYTHON="python-that-is-not-there")
    assert done.returncode == 1
    assert "python-that-is-not-there is: none." in done.stderr


def test_a_missing_venv_module_is_named_with_its_package(tmp_path: Path) -> None:
    body = f'case "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac'
    bare = program(tmp_path / "bare", body)
    done = bash("venv.sh", str(tmp_path / "venv"), PYTHON=str(bare))
    assert done.returncode == 1
    assert "its venv module is missing" in done.stderr
    assert f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in done.stderr


def test_a_working_environment_is_kept_and_half_a_one_is_made_again(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    working = program(venv / "bin" / "python", f'exec {sys.executable} "$@"')
    mark = venv / "mark"
    mark.touch()
    assert bash("venv.sh", str(venv)).returncode == 0
    assert mark.exists()
    program(working, f'[[ $2 == pip ]] && exit 1; exec {sys.executable} "$@"')
    making = program(
        tmp_path / "making", f'[[ $2 == venv ]] && {{ echo "$@" > {tmp_path}/made; exit; }}; exec {sys.executable} "$@"'
    )
    assert bash("venv.sh", str(venv), PYTHON=str(making)).returncode == 0
    assert (tmp_path / "made").read_text() == f"-m venv --clear {venv}\n"


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_where_vllm_cannot_be_installed_the_simulated_demo_is_named(tmp_path: Path, kind: str) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    python = program(tmp_path / "python", "echo no such wheel >&2; exit 1")
    done = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "engine.sh"), str(python), kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no such wheel" in done.stderr
    assert "vLLM cannot be installed here" in done.stderr
    assert "make demo ARGS='--engine sim'" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A Makefile with scripts that only note that they ran."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "triptych" / "engine").mkdir(parents=True)
    (tmp_path / "src" / "triptych" / "engine" / "install.py").touch()
    for name in ("venv", "engine"):
        program(tmp_path / "scripts" / f"{name}.sh", f"echo {name} >> ran; mkdir -p .venv/bin; [[ ! -e fail-{name} ]]")
    program(tmp_path / "scripts" / "step.sh", 'echo "step ${*: -2}" >> ran; [[ ! -e fail-core ]]')
    program(tmp_path / ".venv" / "bin" / "python", 'echo "python $*" >> ran')
    return tmp_path


def make(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    (checkout / "ran").write_text("")
    done = subprocess.run(
        ["make", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60, check=False,
        env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")},
    )  # fmt: skip
    return done.returncode, (checkout / "ran").read_text().splitlines()


def test_set_up_runs_once(checkout: Path) -> None:
    assert make(checkout, "setup") == (0, ["venv", "step -e .[dev,demo]", "engine"])
    assert make(checkout, "setup") == (0, [])


@pytest.mark.parametrize("step", ["venv", "core", "engine"])
def test_a_step_that_did_not_end_is_done_again(checkout: Path, step: str) -> None:
    (checkout / f"fail-{step}").touch()
    assert make(checkout, "setup")[0] != 0
    (checkout / f"fail-{step}").unlink()
    status, ran = make(checkout, "setup")
    assert status == 0
    assert ran[0] == {"core": "step -e .[dev,demo]"}.get(step, step)
    assert make(checkout, "setup") == (0, [])


@pytest.mark.parametrize("arguments", ["--engine sim", "--engine=sim --once", "--once --engine  sim"])
def test_the_simulated_demo_needs_no_vllm(checkout: Path, arguments: str) -> None:
    status, ran = make(checkout, "demo", f"ARGS={arguments}")
    assert status == 0
    assert "engine" not in ran
    assert ran[-1] == f"python -m triptych demo {' '.join(arguments.split())}"


def test_the_demo_installs_vllm_first(checkout: Path) -> None:
    status, ran = make(checkout, "demo", "ARGS=--once")
    assert status == 0
    assert ran[-2:] == ["engine", "python -m triptych demo --once"]


def test_help_names_every_target(checkout: Path) -> None:
    done = subprocess.run(["make", "help"], cwd=checkout, capture_output=True, text=True, timeout=60, check=True)
    for target in ("setup", "demo", "test", "test-fast", "lint", "bench", "soak", "clean"):
        assert f"  make {target} " in done.stdout


def test_ci_runs_the_conformance_suite_only_where_it_and_the_names_are(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    program(checkout / ".venv" / "bin" / "python", 'echo "python $*"')
    (checkout / "Makefile").write_text("test:\n\t@echo tested $(ARGS)\n")

    def ci() -> list[str]:
        done = subprocess.run(
            ["bash", str(checkout / ".ci" / "run")], cwd="/", capture_output=True, text=True, timeout=60, check=True,
            env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")},
        )  # fmt: skip
        return done.stdout.splitlines()

    suite = tmp_path / "shared" / "conformance" / "chunk_transfer"
    suite.mkdir(parents=True)
    assert [line.strip() for line in ci()] == ["tested"]
    (checkout / "tests" / "conformance").mkdir(parents=True)
    (checkout / "tests" / "conformance" / "names.toml").touch()
    assert ci()[-1] == "python -m pytest -q -p tests.conformance.plugin ../shared/conformance/chunk_transfer"
    (checkout / "Makefile").write_text("test:\n\t@exit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        ci()
