from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
import types

import click
import pytest

from triptych import __version__
from triptych.cli import main as main_module
from triptych.cli.main import COMMANDS, Lazy, cli

Status = tuple[int, str, str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `triptych ARGS` in this process, as its console script does."""

    def call(*arguments: str) -> Status:
        monkeypatch.setattr(sys, "argv", ["triptych", *arguments])
        with pytest.raises(SystemExit) as ended:
            main_module.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Puts a command `probe` into the group, with a body of the test's choice."""

    def put(body) -> None:
        module = types.ModuleType("probe_module")
        module.probe = click.command("probe")(body)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_module", module)
        monkeypatch.setitem(COMMANDS, "probe", Lazy("probe_module", "probe", "Test."))

    return put


def in_a_process(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "triptych", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def modules_after(*arguments: str) -> set[str]:
    code = (
        "import sys\nfrom triptych.cli.main import cli\n"
        f"try:\n    cli.main({list(arguments)!r}, standalone_mode=False)\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = in_a_process(code=code)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_every_command_is_there() -> None:
    for name, lazy in COMMANDS.items():
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        assert isinstance(command, click.Command), name


def test_help_lists_every_command_without_importing_it() -> None:
    done = in_a_process("--help")
    assert done.returncode == 0
    for name, lazy in COMMANDS.items():
        assert f"\n  {name}" in done.stdout
        assert lazy.help.split(".")[0][:30] in done.stdout
    loaded = modules_after("--help")
    assert not {lazy.module for lazy in COMMANDS.values()} & loaded


HEAVY = {"torch", "vllm", "transformers", "numpy", "openai", "pydantic", "uvloop", "httptools", "rich", "yaml"}


@pytest.mark.parametrize("arguments", [("--help",), ("gateway", "--help")])
def test_help_imports_no_engine_and_nothing_slow(arguments: tuple[str, ...]) -> None:
    assert not HEAVY & modules_after(*arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_needs_an_engine_for_its_help(name: str) -> None:
    assert not {"torch", "vllm", "transformers"} & modules_after(name, "--help")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("gateway", "--help")])
def test_help_takes_no_more_than_150_ms_of_cpu(arguments: tuple[str, ...]) -> None:
    def cpu() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert in_a_process(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu() for _ in range(5)) < 0.15


def test_version(run) -> None:
    assert run("--version") == (0, f"triptych {__version__}\n", "")


@pytest.mark.parametrize(("typed", "meant"), [("gatway", "gateway"), ("model", "models"), ("simulate", "sim")])
def test_an_unknown_command_is_guessed(run, typed: str, meant: str) -> None:
    status, _, err = run(typed)
    assert status == 2
    assert f"No such command '{typed}'." in err
    assert f"'{meant}'?" in err


def test_an_unknown_command_that_is_like_none_lists_all(run) -> None:
    status, _, err = run("xyzzy")
    assert status == 2
    assert ", ".join(COMMANDS) in err


def test_a_commands_status_is_the_process_status(run, command) -> None:
    command(lambda: 7)
    assert run("probe")[0] == 7
    command(lambda: None)
    assert run("probe")[0] == 0


def test_ctrl_c_is_130_without_a_traceback(run, command) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    command(interrupted)
    status, _, err = run("probe")
    assert status == 130
    assert "Traceback" not in err


def test_ctrl_c_while_a_command_is_being_imported(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module.importlib, "import_module", interrupted)
    status, _, err = run("gateway")
    assert status == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("vllm", "pip install 'triptych[engine]'"),
        ("torch.nn", "[engine-cpu]"),
        ("openai", "pip install 'triptych[demo]'"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(run, command, module: str, words: str) -> None:
    def missing() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    command(missing)
    status, _, err = run("probe")
    assert status == 78
    assert module in err
    assert words in err
    assert "Traceback" not in err


def test_another_missing_module_is_a_bug_and_not_hidden(command, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'triptych.nothing'", name="triptych.nothing")

    command(missing)
    monkeypatch.setattr(sys, "argv", ["triptych", "probe"])
    with pytest.raises(ModuleNotFoundError):
        main_module.main()


def test_a_reader_that_leaves_ends_the_help_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "triptych", "gateway", "--help"],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert b"Traceback" not in done.stderr
    assert done.returncode == 1


def test_the_group_is_named_as_it_is_called() -> None:
    assert cli.list_commands(click.Context(cli)) == list(COMMANDS)
