"""File operations of the store that trust nothing they find: no links, no other user's files, no odd file types."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK so that a FIFO in an item's place cannot hold the opener; regular files ignore it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_POLL_S = 0.0005
_NAME_LENGTH = 64


class ForeignFileError(OSError):
    """Something that this user did not put there: a link, another user's file, a directory open to others."""


def open_directory(name: str | Path, *, create: bool, at: int | None = None) -> int:
    """Open a private directory (mode 0700, ours, no link) and return its descriptor; make it first if `create`.

    Raises ForeignFileError if what is there is not private to this user, FileNotFoundError if there is nothing.
    """
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=at)
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ForeignFileError(error.errno, f"{name} is not a directory of ours") from None
        raise
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise ForeignFileError(
            errno.EPERM, f"{name} is open to other users or belongs to one (wanted: mode 0700, ours)"
        )
    return descriptor


def open_for_reading(name: str, *, at: int) -> tuple[int, os.stat_result]:
    """Open a regular file of ours. Raises FileNotFoundError, ForeignFileError, OSError."""
    try:
        descriptor = os.open(name, _READ, dir_fd=at)
    except OSError as error:
        # ELOOP: a link. ENXIO: a socket. The message must not carry more than the digest that names the file.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ForeignFileError(error.errno, f"{name} is a link or a socket") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise ForeignFileError(errno.EPERM, f"{name} is not a regular file of ours")
    return descriptor, status


def create_temporary(*, at: int) -> tuple[str, int]:
    """Create a new file (mode 0600) and hold its lock: the stamp by which others see that its writer is alive.

    Returns its name and descriptor.
    """
    while True:
        name = secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=at)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink == 1:
                return name, descriptor
        # Taken for abandoned between the two steps.
        os.close(descriptor)


def remove_if_abandoned(name: str, *, at: int) -> bool:
    """Remove a file that `create_temporary` made, if its writer is gone. Returns whether it was removed."""
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=at)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def read_exactly(descriptor: int, target: memoryview, offset: int) -> bool:
    """Fill `target` from `offset` of the file. False if the file ends before that."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def write_all(descriptor: int, *parts: bytes | memoryview) -> None:
    """Write every byte of `parts` in order."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


@contextlib.contextmanager
def locked(descriptor: int, *, timeout: float) -> Iterator[None]:
    """Hold the file's exclusive lock. Raises TimeoutError after `timeout` seconds, so a stopped peer stops nobody."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("the store is locked by another process") from None
            time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def size_of(name: str, *, at: int) -> int | None:
    """Size of a file in bytes, None if there is none."""
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None


def entries(directory: int) -> list[tuple[str, os.stat_result]]:
    """The items in a directory with their status; what is not named like an item does not count."""
    found = []
    with os.scandir(directory) as scan:
        for entry in scan:
            if len(entry.name) == _NAME_LENGTH:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


@dataclass(frozen=True, slots=True)
class StoreDirectories:
    """Descriptors of a store's parts. Names are resolved relative to these, so no path is walked twice."""

    items: int
    scratch: int
    ledger: int

    @staticmethod
    def open(directory: Path, *, create: bool) -> StoreDirectories:
        """Open the parts, or make them. Raises FileNotFoundError, ForeignFileError, OSError."""
        if create:
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = [open_directory(directory, create=create)]
        try:
            opened.append(open_directory("items", create=create, at=opened[0]))
            opened.append(open_directory("new", create=create, at=opened[0]))
            opened.append(_open_ledger(opened[0], create=create))
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        os.close(opened[0])
        return StoreDirectories(*opened[1:])

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.items, self.scratch, self.ledger):
            os.close(descriptor)


def _open_ledger(directory: int, *, create: bool) -> int:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open("ledger", flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o600, dir_fd=directory)
    except OSError as error:
        # A consumer may see the store on a read-only mount.
        if error.errno != errno.EROFS:
            raise
        return os.open("ledger", flags | os.O_RDONLY, dir_fd=directory)
