"""Where connectors of one host find each other: sockets in a folder of their deployment, named after their owners.

    {base}/{digest of user and deployment}/{role}.{stage}.{port}.{pid}.{start}.{namespace}.{token}

`base` is `$XDG_RUNTIME_DIR/triptych`, or `triptych-{uid}` in the folder for temporary files; only its user may enter.
No name of a client's is in any of these. The start of the process tells its id from the same one used again; where the
owner's ids mean nothing here (another PID namespace), whether the socket still answers tells.

A sender (role `s`) is bound and listening before its socket has this name. It then rings every receiver's bell (role
`r`), a datagram socket. A receiver makes its bell before it looks for senders. So one of the two sees the other,
whoever is first, and nobody polls.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from triptych.transfer.errors import ConnectorError

SENDER: Final = "s"
BELL: Final = "r"
TITLE: Final = "deployment"
"""The file with a deployment's name in its folder."""

_NAME: Final = re.compile(
    r"(?P<role>[sr])\.(?P<stage>[0-9A-Za-z]{1,16})\.(?P<port>\d{1,5})\.(?P<pid>\d{1,10})\.(?P<start>\d{1,20})"
    r"\.(?P<namespace>\d{1,20})\.(?P<token>[0-9a-f]{8})"
)
_CREDENTIALS: Final = struct.Struct("3i")


class Name(NamedTuple):
    """A socket's name."""

    role: str
    stage: str
    port: int
    pid: int
    start: int  # clock ticks from boot to the start of the process
    namespace: int  # of its process ids
    token: str

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """None where it is none of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        role, stage, port, pid, start, namespace, token = match.groups()
        return cls(role, stage, int(port), int(pid), int(start), int(namespace), token)

    @classmethod
    def ours(cls, role: str, stage: str, port: int) -> Name:
        """A new name of this process."""
        pid = os.getpid()
        return cls(role, label(stage), port, pid, started(pid) or 0, pid_namespace(), secrets.token_hex(4))


def label(stage: str) -> str:
    """A stage in a socket's name: itself where it is short and plain."""
    if re.fullmatch(r"[0-9A-Za-z]{1,12}", stage):
        return stage
    return "x" + hashlib.blake2b(stage.encode("utf-8", "surrogatepass"), digest_size=7).hexdigest()


def started(pid: int) -> int | None:
    """When a process started, None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name of the program, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def pid_namespace() -> int:
    """The number of this process's PID namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def base_folder() -> Path:
    """Where all deployments of this user are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "triptych"
    return Path(tempfile.gettempdir()) / f"triptych-{os.getuid()}"


def folder_name(deployment: str) -> str:
    """The name of a deployment's folder."""
    text = f"{os.getuid()}:{deployment}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _private(path: Path) -> None:
    """Make a folder that only this user may enter. Raises ConnectorError where it is somebody else's."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConnectorError(f"{path} is not a folder of this user's that only this user may write to")


class Folder:
    """The folder of one deployment. Paths go through its descriptor, so that none is too long for a socket."""

    def __init__(self, deployment: str, base: Path | None = None) -> None:
        """Makes it where it is not there. Raises ConnectorError."""
        self._base = base_folder() if base is None else base
        self.deployment = deployment
        self.path = self._base / folder_name(deployment)
        self._fd = -1
        self._open()

    def _open(self) -> None:
        try:
            _private(self._base)
            _private(self.path)
            title = self.path / TITLE
            if not title.exists():
                title.write_bytes(self.deployment.encode("utf-8", "surrogatepass"))
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConnectorError(f"the sockets of deployment {self.deployment!r}: {error}") from error
        self.close()
        self._fd = fd

    def at(self, name: str) -> str:
        """The address of a socket."""
        return f"/proc/self/fd/{self._fd}/{name}"

    def names(self, role: str) -> list[Name]:
        """The sockets that are there."""
        return [name for name in map(Name.parse, os.listdir(self._fd)) if name is not None and name.role == role]

    def bind(self, name: Name) -> socket.socket:
        """A socket of this name, non-blocking: a sender's listens, a bell takes datagrams. Raises ConnectorError."""
        try:
            return self._bind(name)
        except FileNotFoundError:
            self._open()  # swept away, as empty
        except OSError as error:
            raise ConnectorError(f"{self.path}: {error}") from error
        try:
            return self._bind(name)
        except OSError as error:
            raise ConnectorError(f"{self.path}: {error}") from error

    def _bind(self, name: Name) -> socket.socket:
        kind = socket.SOCK_STREAM if name.role == SENDER else socket.SOCK_DGRAM
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        early = f"{name}.new"
        try:
            sock.bind(self.at(early))
            if name.role == SENDER:
                sock.listen(4096)
            os.rename(early, str(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            sock.close()
            with contextlib.suppress(OSError):
                os.unlink(early, dir_fd=self._fd)
            raise
        return sock

    def remove(self, name: Name) -> None:
        """Take a socket's name away."""
        with contextlib.suppress(OSError):
            os.unlink(str(name), dir_fd=self._fd)

    def ring(self) -> None:
        """Let every receiver know that there is a new sender."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            for bell in self.names(BELL):
                # Full: it has been rung and not yet answered. Refused, or not found: nobody is there any more.
                with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                    sock.sendto(b"!", self.at(str(bell)))

    def connect(self, name: Name) -> socket.socket | None:
        """A connection to a sender, non-blocking; None where nobody is there. Raises BlockingIOError where it is
        busy."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self.at(str(name)))
        except (ConnectionRefusedError, FileNotFoundError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def alive(self, name: Name) -> bool:
        """Whether a socket has an owner."""
        if name.namespace == pid_namespace():
            return started(name.pid) == name.start
        kind = socket.SOCK_STREAM if name.role == SENDER else socket.SOCK_DGRAM
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.connect(self.at(str(name)))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except BlockingIOError:
                return True
        return True

    def sweep(self) -> list[str]:
        """Remove the sockets of dead owners: their names."""
        gone = []
        for text in os.listdir(self._fd):
            name = Name.parse(text.removesuffix(".new"))
            if name is not None and not self.alive(name):
                with contextlib.suppress(OSError):
                    os.unlink(text, dir_fd=self._fd)
                    gone.append(text)
        return gone

    def dissolve(self) -> bool:
        """Remove the folder if no socket is in it. Who is just about to bind one makes it anew."""
        if os.listdir(self._fd) != [TITLE]:
            return False
        with contextlib.suppress(OSError):
            os.unlink(TITLE, dir_fd=self._fd)
            self.path.rmdir()
            return True
        return False

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
