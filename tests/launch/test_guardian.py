"""Nothing outlives the launcher, whatever kills it and whatever the engines do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.launch.helpers import FAKE, Watched, relatives
from triptych.launch.child import GUARDIAN, Child

ROOT = Path(__file__).parents[2]


@dataclass
class Launcher:
    """A launcher of two engines, and the pids of all that belongs to it."""

    process: subprocess.Popen[Any]
    engines: list[int] = field(default_factory=list)
    guardians: list[int] = field(default_factory=list)
    families: list[int] = field(default_factory=list)
    fork: int = 0

    @property
    def all(self) -> list[int]:
        return [*self.engines, *self.guardians, *self.families]


def start_launcher(*arguments: str) -> Launcher:
    command = [sys.executable, "-m", "tests.launch.launcher", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT)
    launcher = Launcher(process)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("family"):
            launcher.families += relatives(line)
        elif line.startswith("fork"):
            launcher.fork = relatives(line)[0]
        elif line.startswith("ready"):
            launcher.engines, launcher.guardians = relatives(line)[::2], relatives(line)[1::2]
        # Two of each: engine, guardian, child of the engine, orphaned grandchild in its own session.
        if len(set(launcher.all)) == 8:
            return launcher
    raise AssertionError("the launcher ended")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_all_descendants_are_gone_within_two_seconds_of_the_launchers_death(number: signal.Signals) -> None:
    launcher = start_launcher()
    watched = Watched(launcher.all)
    launcher.process.send_signal(number)
    with launcher.process:
        assert launcher.process.wait(10) == -number
        left = watched.left_after(2.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == set()


def test_a_fork_of_the_launcher_that_holds_the_channels_open_does_not_keep_engines_alive() -> None:
    launcher = start_launcher("fork")
    assert launcher.fork
    watched = Watched(launcher.all)
    launcher.process.kill()
    with launcher.process:
        left = watched.left_after(2.0)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == set()


def test_an_engine_dies_with_its_guardian_even_if_the_launcher_can_do_nothing() -> None:
    launcher = start_launcher()
    launcher.process.send_signal(signal.SIGSTOP)
    watched = Watched(launcher.engines)
    for pid in launcher.guardians:
        os.kill(pid, signal.SIGKILL)
    left = watched.left_after(2.0)
    launcher.process.kill()
    with launcher.process:
        # Their families have nobody left to end them: that takes a killed guardian and a killed launcher.
        for pid in {*launcher.families, *left}:
            os.kill(pid, signal.SIGKILL)
    assert left == set()


async def test_output_arrives_whole_and_in_order_up_to_the_last_byte() -> None:
    seen = bytearray()
    script = "for n in range(20000): print(n)\nprint('end', end='')"
    child = await Child.start([sys.executable, "-I", "-S", "-c", script], {}, seen.extend)
    assert await child.exited() == 0
    await child.gone()
    assert seen.decode() == "".join(f"{n}\n" for n in range(20000)) + "end"


def signals_of(status: str) -> dict[str, set[int]]:
    """What is ignored and what is blocked, by the number of the signal."""
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigIgn", "SigBlk")))
    return {name: {n + 1 for n in range(64) if int(mask, 16) >> n & 1} for name, mask in masks.items()}


async def test_signals_that_the_guardian_and_python_change_are_as_usual_for_the_command() -> None:
    seen = bytearray()
    child = await Child.start(["/bin/cat", "/proc/self/status"], {}, seen.extend)
    await child.gone()
    # Python, which the guardian is, ignores SIGPIPE and SIGXFSZ. What else is ignored where the launcher was started
    # (a container's starter may leave signal 32 so) is not for the guardian to change.
    ours = signals_of(Path("/proc/self/status").read_text())
    usual = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD}
    assert signals_of(seen.decode()) == {"SigBlk": set(), "SigIgn": ours["SigIgn"] - usual}


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


async def test_a_signal_to_the_launchers_group_such_as_a_terminals_reaches_no_guardian() -> None:
    started = asyncio.Event()
    child = await Child.start([sys.executable, "-I", "-S", FAKE, "0"], {}, lambda _: started.set())
    await started.wait()
    assert len({os.getpgrp(), os.getpgid(child._process.pid), os.getpgid(child.pid)}) == 3
    child.kill()
    await child.gone()


async def test_shared_memory_of_a_killed_python_server_is_removed() -> None:
    """vLLM's queues are such memory. Its tracker removes it, if it is not killed together with its users."""
    seen = bytearray()
    made = asyncio.Event()
    script = (
        "import time; from multiprocessing.shared_memory import SharedMemory;"
        "m = SharedMemory(create=True, size=4096); print(m.name, flush=True); time.sleep(600)"
    )

    def on_output(data: bytes) -> None:
        seen.extend(data)
        made.set()

    child = await Child.start([sys.executable, "-I", "-c", script], os.environ, on_output)
    await made.wait()
    name = seen.decode().split()[0]
    assert name in os.listdir("/dev/shm")
    child.kill()
    await child.gone()
    assert name not in os.listdir("/dev/shm")


async def test_an_impostor_of_a_tracker_is_killed_a_moment_later() -> None:
    ready = asyncio.Event()
    script = "import sys, signal, os; print(1, flush=True); signal.pause()"
    child = await Child.start([sys.executable, "-I", "-S", "-c", script, "resource_tracker"], {}, lambda _: ready.set())
    await ready.wait()
    child.kill()
    await asyncio.wait_for(child.gone(), 10)
    assert await child.exited() == -signal.SIGKILL


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
