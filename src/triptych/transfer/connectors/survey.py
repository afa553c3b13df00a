"""What `triptych shm` shows and collects: deployments of this user on this host, their sockets and their memory.

Read from the folders of `sockets` and from /proc. Nothing is connected to, so a look disturbs nobody.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

from triptych.transfer.connectors.sockets import BELL, SENDER, TITLE, Folder, Name, base_folder, folder_name

_MEMFD: Final = "/memfd:triptych:"


class Arena(NamedTuple):
    """A memory file. `size`: bytes it may have; `held`: bytes that it occupies."""

    size: int
    held: int


class End(NamedTuple):
    """A connector's socket: a sender's, or a receiver's bell."""

    role: str
    stage: str
    port: int
    pid: int
    command: str
    alive: bool
    arena: Arena | None


class Deployment(NamedTuple):
    """One folder."""

    name: str
    path: str
    ends: list[End]


def deployments(base: Path | None = None) -> list[Deployment]:
    """All that there are, by name. Raises ConnectorError where a folder is not this user's own."""
    base = base_folder() if base is None else base
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(base.iterdir()):
            name = _title(path)
            if name is not None:
                found.append(_deployment(name, base))
    return sorted(found, key=lambda deployment: deployment.name)


def _title(path: Path) -> str | None:
    """The deployment that a folder is of; None where it is none of ours."""
    try:
        name = (path / TITLE).read_bytes().decode("utf-8", "surrogatepass")
    except (OSError, UnicodeDecodeError):
        return None
    return name if folder_name(name) == path.name else None


def _deployment(name: str, base: Path) -> Deployment:
    folder = Folder(name, base)
    try:
        sockets = sorted(folder.names(SENDER) + folder.names(BELL), key=lambda n: (n.stage, n.role != SENDER, n.pid))
        return Deployment(name, str(folder.path), [_end(folder, socket) for socket in sockets])
    finally:
        folder.close()


def _end(folder: Folder, name: Name) -> End:
    alive = folder.alive(name)
    arena = _arena(name, folder.deployment) if alive and name.role == SENDER else None
    role = "sender" if name.role == SENDER else "receiver"
    return End(role, name.stage, name.port, name.pid, _command(name.pid) if alive else "", alive, arena)


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return " ".join(words).strip()[:200]


def _arena(name: Name, deployment: str) -> Arena | None:
    """A process's memory file for a stage; None where it has none, or is not ours to look at."""
    wanted = f"{_MEMFD}{deployment[:100]}:{name.stage} "
    folder = Path(f"/proc/{name.pid}/fd")
    try:
        for fd in folder.iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith(wanted):
                    found = fd.stat()
                    return Arena(found.st_size, found.st_blocks * 512)
    except OSError:
        return None
    return None


def collect(base: Path | None = None) -> list[tuple[str, str]]:
    """Remove the sockets of dead owners, and folders that are empty then: (deployment, what was removed).

    Their memory needs no collecting: the kernel has taken it back.
    """
    base = base_folder() if base is None else base
    gone = []
    for deployment in deployments(base):
        folder = Folder(deployment.name, base)
        try:
            gone += [(deployment.name, name) for name in folder.sweep()]
            if folder.dissolve():
                gone.append((deployment.name, "its folder"))
        finally:
            folder.close()
    return gone
