"""SIGKILL of either side under load: what the survivor is told, and what is left."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.connectors.rig import until
from triptych.transfer.connectors.sockets import BELL, SENDER, Folder

PATIENCE = 30.0
ROOT = Path(__file__).resolve().parents[3]


class Worker:
    """A process of `worker`, its lines, and when they came."""

    def __init__(self, role: str, folder: Path, deployment: str, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.connectors.worker", role, str(folder), deployment, str(seed)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.pid = self._process.pid
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), line.strip()))
                self._changed.notify_all()

    def wait(self, beginning: str, after: int = 0) -> tuple[float, str]:
        """The first such line behind the first `after` ones."""

        def found() -> tuple[float, str] | None:
            return next((line for line in self.lines[after:] if line[1].startswith(beginning)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, PATIENCE), f"no {beginning!r}: {self.lines[-5:]}"
        line = found()
        assert line is not None
        return line

    def kill(self) -> float:
        """When it was killed."""
        now = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        return now

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Edge:
    """A sender and a receiver, each of which is replaced when it was killed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.deployment = f"crash-{secrets.token_hex(4)}"  # so that its memory can be told from that of other tests
        self.dice = random.Random(seed)
        self.ends = {role: self.start(role) for role in ("send", "receive")}
        for end in self.ends.values():
            end.wait("up")

    def start(self, role: str) -> Worker:
        return Worker(role, self.folder, self.deployment, self.dice.randrange(1 << 30))

    def flow(self) -> None:
        """Wait for chunks of the sender that lives: those of a dead one may still be on their way."""
        self.ends["receive"].wait(f"taken from {self.ends['send'].pid}", len(self.ends["receive"].lines))

    def kill(self, role: str) -> None:
        """Kill one end at a random moment under load, and look at what the other is told."""
        victim = self.ends[role]
        survivor = self.ends["receive" if role == "send" else "send"]
        self.flow()
        # A moment of the load, not a wait for something.
        time.sleep(self.dice.random() * 0.02)
        before = len(survivor.lines)
        at = victim.kill()
        when, line = survivor.wait("broken" if role == "send" else "stopped", before)
        assert when - at < 1
        assert f"(pid {victim.pid}): its process ended" in line
        victim.close()
        self.ends[role] = self.start(role)
        self.ends[role].wait("up")

    def check(self) -> None:
        """Nothing of the dead is left, and no chunk came by another stream than its own."""
        self.flow()
        folder = Folder(self.deployment, self.folder)
        try:
            names = folder.names(SENDER) + folder.names(BELL)
        finally:
            folder.close()
        assert sorted(name.pid for name in names) == sorted(end.pid for end in self.ends.values())
        for end in self.ends.values():
            assert not [line for _, line in end.lines if line.startswith("WRONG")]

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[Edge]:
    edge = Edge(tmp_path / "run", 1)
    yield edge
    edge.close()


def memory_files(deployment: str) -> set[str]:
    """The memory files of a deployment that any process maps."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        found |= {line.split()[4] for line in lines if f"/memfd:triptych:{deployment}:" in line}
    return found


def many(edge: Edge, kills: int) -> None:
    for number in range(kills):
        edge.kill("send" if number % 2 else "receive")
        edge.check()
    # Once the survivor has let go of the last chunks of the dead.
    until(lambda: len(memory_files(edge.deployment)) == 1, "only the living sender's memory is left")
    edge.close()
    assert not memory_files(edge.deployment)


@pytest.mark.timeout(240)
def test_whoever_is_killed_the_other_is_told_within_a_second_and_nothing_is_left(edge: Edge) -> None:
    many(edge, 20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_kills_leave_nothing(edge: Edge) -> None:
    many(edge, 200)
