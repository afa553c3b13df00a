"""What happens to the processes of a topology, as values."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass


class State(enum.Enum):
    """Where a process stands. Only the supervisor changes it."""

    WAITING = "waiting"  # for another process to be ready first
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"  # crashed; starts again in a while
    FAILED = "failed"  # did not start, or crashed too often
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one process."""

    process: str


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The process runs; it is not ready yet. `attempt` counts from 0."""

    pid: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Line(Event):
    """One line of the process's output, without its end."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """The process answers on its readiness address, `seconds` after it was started."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Exited(Event):
    """The process ended without being told to. `code` is negative for a signal; None if it could not be learned."""

    code: int | None


@dataclass(frozen=True, slots=True)
class Overdue(Event):
    """The process was not ready within its deadline, and is being killed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BackingOff(Event):
    """The process starts again in `seconds`, for the `attempt`th time of at most `limit` in a row."""

    seconds: float
    attempt: int
    limit: int


@dataclass(frozen=True, slots=True)
class GaveUp(Event):
    """The process crashed too often and stays down. `last` holds its last log lines."""

    attempts: int
    last: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """The process was told to end and has `seconds` to do so."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Killed(Event):
    """The process did not end in time (or the user would not wait) and was killed."""


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """The process and all its children are gone, as told."""


def exit_reason(code: int | None) -> str:
    """`exited with code 1`, `was killed by SIGKILL`."""
    if code is None:
        return "is gone"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}"
    return f"exited with code {code}"
