"""A directory for the files of one run, that is removed also when the run could not do so itself.

Its owner holds a lock on a file in it, which the kernel takes away from a dead process. Each start removes directories
that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path


class RunDirectory:
    """`path` is there, private to the user, until `close`. A context manager."""

    def __init__(self, base: Path) -> None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{base} is not a directory of this user")
        sweep(base)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=base))
        self._lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(base / f"run-{new.name[4:]}")  # held before anybody else's sweep can see it

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the directory."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(base: Path) -> None:
    """Removes the directories of runs that ended without doing so."""
    for path in base.glob("run-*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def disk_base() -> Path:
    """Where directories of this user's runs are made, on disk."""
    return Path(tempfile.gettempdir()) / f"triptych-{os.getuid()}"


def memory_base(need: int) -> Path:
    """The same in memory, if there is a shared-memory file system with `need` bytes free; else on disk."""
    shared = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= need:
            return shared / f"triptych-{os.getuid()}"
    return disk_base()
