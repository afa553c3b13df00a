"""SIGKILL of either side under load, over TCP: what the survivor is told, and that the next one is found."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE = 30.0
ROOT = Path(__file__).resolve().parents[3]


class Worker:
    """A process of `tcp_worker`, and its lines."""

    def __init__(self, role: str, port: int, seed: int) -> None:
        command = [sys.executable, "-m", "tests.transfer.connectors.tcp_worker", role, str(port), str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.strip())
                self._changed.notify_all()

    def wait(self, beginning: str, after: int = 0) -> str:
        """The first such line behind the first `after` ones."""

        def found() -> str | None:
            return next((line for line in self.lines[after:] if line.startswith(beginning)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, PATIENCE), f"no {beginning!r}: {self.lines[-5:]}"
        line = found()
        assert line is not None
        return line

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Edge:
    """A sender and a receiver, each of which is replaced when it was killed."""

    def __init__(self, seed: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._dice = random.Random(seed)
        self.ends = {role: self._start(role) for role in ("send", "receive")}
        self.seen: list[str] = []
        self.told: set[int] = set()  # processes that a survivor was told of

    def _start(self, role: str) -> Worker:
        return Worker(role, self._port, self._dice.randrange(1 << 30))

    def kill(self, role: str) -> None:
        """Kill one end at a random moment under load, start another, and see that chunks flow again.

        The survivor is told of the streams that were open between the two. It may be that at this moment there was
        none: each was over at the one end already, and not yet begun at the other.
        """
        victim, survivor = self.ends[role], self.ends["receive" if role == "send" else "send"]
        receiver = self.ends["receive"]
        receiver.wait("taken", len(receiver.lines))
        time.sleep(self._dice.random() * 0.02)  # a moment of the load, not a wait for something
        before = len(survivor.lines)
        victim.kill()
        self.seen += victim.lines
        victim.close()
        self.ends[role] = self._start(role)
        self.ends["receive"].wait(f"taken from {self.ends['send'].pid}", 0 if role == "receive" else before)
        # Nothing is told of anybody else.
        whom = f"stage {0 if role == 'send' else 1} at 127.0.0.1:"
        for line in survivor.lines[before:]:
            if line.startswith(("broken", "stopped")):
                assert whom in line
                assert f"(pid {victim.pid})" in line
                self.told.add(victim.pid)

    def close(self) -> list[str]:
        """All that either said."""
        for end in self.ends.values():
            end.close()
            self.seen += end.lines
        return self.seen


@pytest.fixture
def edge() -> Iterator[Edge]:
    made = Edge(seed=5)
    yield made
    made.close()


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_a_kill_of_either_side_is_told_and_the_next_process_takes_its_place(edge: Edge, kills: int) -> None:
    for turn in range(kills):
        edge.kill(("send", "receive")[turn % 2])
    said = edge.close()
    assert not [line for line in said if line.startswith("WRONG")]
    assert len([line for line in said if line.startswith("taken")]) >= kills
    assert len(edge.told) > kills / 2
