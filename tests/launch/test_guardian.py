"""Nothing outlives the launcher, whatever kills it and whatever the engines do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.helpers import FAKE, Watched, relatives
from triptych.launch.child import GUARDIAN, Child

ROOT = Path(__file__).parents[2]


def start_launcher(*arguments: str) -> tuple[subprocess.Popen[Any], list[int], list[int]]:
    """A launcher with two engines: the process, the pids of all that belongs to it, and those of its forks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.launcher", *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout
    pids: list[int] = []
    forks: list[int] = []
    for line in process.stdout:
        if line.startswith(("family", "ready")):
            pids += relatives(line)
        if line.startswith("fork"):
            forks += relatives(line)
        if len(pids) == 8 and len(forks) == len(arguments):
            break
    return process, pids, forks


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_all_descendants_are_gone_within_two_seconds_of_the_launchers_death(number: signal.Signals) -> None:
    process, pids, _ = start_launcher()
    assert len(set(pids)) == 8  # two of each: guardian, engine, child, orphaned grandchild in its own session
    watched = Watched(pids)
    process.send_signal(number)
    with process:
        assert process.wait(10) == -number
        left = watched.left_after(2.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == set()


def test_a_fork_of_the_launcher_that_holds_the_channels_open_does_not_keep_engines_alive() -> None:
    process, pids, _ = start_launcher("fork")
    watched = Watched(pids)
    process.kill()
    with process:
        left = watched.left_after(2.0)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == set()


async def test_output_arrives_whole_and_in_order_up_to_the_last_byte() -> None:
    seen = bytearray()
    script = "for n in range(20000): print(n)\nprint('end', end='')"
    child = await Child.start([sys.executable, "-I", "-S", "-c", script], {}, seen.extend)
    assert await child.exited() == 0
    await child.gone()
    assert seen.decode() == "".join(f"{n}\n" for n in range(20000)) + "end"


def plain_run(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout


async def test_signals_that_the_guardian_and_python_change_are_as_usual_for_the_command() -> None:
    seen = bytearray()
    script = (
        "import signal; print([n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN],"
        " len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    )
    plain = plain_run([sys.executable, "-c", script])
    child = await Child.start([sys.executable, "-c", script], os.environ, seen.extend)
    await child.gone()
    assert bytes(seen) == plain


async def test_the_command_inherits_no_descriptor_but_the_standard_ones() -> None:
    seen = bytearray()
    child = await Child.start(["/bin/sh", "-c", "echo /proc/self/fd/*"], {"PATH": "/usr/bin:/bin"}, seen.extend)
    await child.gone()
    # One more is the directory that the shell reads.
    assert [int(path.rpartition("/")[2]) for path in seen.decode().split()] == [0, 1, 2, 3]


async def test_the_command_leads_a_session_of_its_own() -> None:
    seen = bytearray()
    script = "import os; print(os.getsid(0) == os.getpid())"
    child = await Child.start([sys.executable, "-I", "-S", "-c", script], {}, seen.extend)
    await child.gone()
    assert seen == b"True\n"


async def test_cancelling_a_start_leaves_no_process() -> None:
    listening = asyncio.Event()
    start = asyncio.create_task(Child.start([sys.executable, "-I", "-S", FAKE, "0"], {}, lambda _: listening.set()))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert _guardians_of(os.getpid()) == []


def test_the_guardian_imports_nothing_that_is_slow_to_import() -> None:
    """Its start-up is a bare interpreter's and a few modules of the standard library, none of which brings others."""
    script = f"import sys; sys.argv = ['guardian']; exec(compile(open({GUARDIAN!r}).read(), 'g', 'exec'), {{}}); "
    script += "print(len(sys.modules))"
    command = [sys.executable, "-I", "-S", "-c", script]
    modules = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert modules < 60


def _guardians_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and GUARDIAN in command:
            found.append(int(status.parent.name))
    return found
