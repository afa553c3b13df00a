"""Runs one command and sees to it that nothing of it outlives the launcher.

    python -I -S guardian.py FD LAUNCHER_PID COMMAND [ARGUMENT…]

Run by path in a bare interpreter, so that it is there at once; what it imports is chosen for the same reason (`socket`
and `contextlib` would double the time).

Why a process of its own: a launcher that gets SIGKILL cannot clean up, PR_SET_PDEATHSIG reaches children but not
grandchildren (vLLM's EngineCore), and killing a process group misses whoever left it. The guardian is a *subreaper*:
every descendant that loses its parent becomes a child of the guardian, however often it forked and whatever session it
is in. So "no child left" (ECHILD) means that nothing is left, and the guardian ends only then.

FD is one end of a socket pair. Lines to the launcher: `pid N` when the command runs, `exit CODE` when it has ended (as
subprocess has it: negative for a signal). Bytes from the launcher: `t` sends SIGTERM to the command, `k` kills
everything. End of file, or the launcher's death, means the same as `t` and, `ORPHAN_GRACE` later, `k`.
"""

import ctypes
import os
import select
import signal
import sys
import time

# How long a command may take to end by itself once its launcher is gone: enough for a helper such as Python's resource
# tracker to remove shared memory, short enough that a dead launcher's ports and devices are free within two seconds.
ORPHAN_GRACE = 0.5
# How long children that the command left behind may take to end after SIGTERM.
LEFTOVER_GRACE = 0.5
# How long Python's resource trackers may take, once all others are killed, to remove shared memory that these left.
TRACKER_GRACE = 1.0
NEVER = float("inf")

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children_of(me: int) -> list[int]:
    """Every descendant of `me` that /proc shows, nearest first."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command name stands in brackets and may hold anything, a bracket too.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(name))
    found = [me]
    for pid in found:
        found += parents.get(pid, ())
    return found[1:]


def signal_all(number: int, *, spare_trackers: bool = False) -> None:
    for pid in children_of(os.getpid()):
        if not (spare_trackers and is_tracker(pid)):
            kill(pid, number)


def is_tracker(pid: int) -> bool:
    """Whether it is the helper of Python's multiprocessing that removes shared memory once its users are gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def run_command(command: list[str], guardian: int) -> int:
    """The command's pid, in a session of its own. A command that cannot be run exits with 127 and says why."""
    changed = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
    # A signal for the command must find its default action, not the guardian's handler, which exec would forget.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, changed)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        os.setsid()
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guardian:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


class Guardian:
    """The loop: what the launcher says, what the children do, and deadlines."""

    def __init__(self, channel: int, launcher: int) -> None:
        self.channel = channel
        self.command = 0  # pid while it runs
        self.kill_at = NEVER
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)
        # A fork of the launcher may keep the channel's other end open; its pidfd tells the truth.
        try:
            self.launcher = os.pidfd_open(launcher)
        except OSError:
            self.launcher = -1
        else:
            self.poll.register(self.launcher, select.POLLIN)
        self.wake, wake = os.pipe()
        for fd in (self.wake, wake):
            os.set_blocking(fd, False)
        self.poll.register(self.wake, select.POLLIN)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.orphaned())
        signal.set_wakeup_fd(wake)

    def tell(self, line: str) -> None:
        try:
            os.write(self.channel, line.encode())
        except OSError:
            pass  # no launcher to hear it

    def terminate(self) -> None:
        if self.command:
            kill(self.command, signal.SIGTERM)

    def orphaned(self) -> None:
        if self.kill_at == NEVER:
            self.kill_at = time.monotonic() + ORPHAN_GRACE
            self.terminate()

    def hear(self) -> None:
        """One message from the launcher, or its end."""
        try:
            said = os.read(self.channel, 64)
        except OSError:
            said = b""
        if b"k" in said:
            self.kill_at = time.monotonic()
        if b"t" in said:
            self.terminate()
        if not said:
            self.poll.unregister(self.channel)
            self.orphaned()

    def reap(self) -> bool:
        """Collects whoever ended; False once there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self.command:
                self.command = 0
                self.tell(f"exit {os.waitstatus_to_exitcode(status)}\n")
                self.kill_at = min(self.kill_at, time.monotonic() + LEFTOVER_GRACE)
                signal_all(signal.SIGTERM)

    def watch(self) -> None:
        """Until the command and all that it left behind are gone."""
        while self.reap():
            left = self.kill_at - time.monotonic()
            if left <= 0:
                # Again and again: a process may fork while it is being killed, and its child is then ours to kill.
                signal_all(signal.SIGKILL, spare_trackers=-left < TRACKER_GRACE)
                left = 0.02
            for fd, _ in self.poll.poll(None if left == NEVER else left * 1000):
                if fd == self.wake:
                    os.read(self.wake, 4096)
                elif fd == self.launcher:
                    self.poll.unregister(fd)
                    self.orphaned()
                else:
                    self.hear()


def main(channel: int, launcher: int, command: list[str]) -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(channel, False)
    guardian = Guardian(channel, launcher)
    if os.getppid() != launcher:
        return
    guardian.command = run_command(command, os.getpid())
    guardian.tell(f"pid {guardian.command}\n")
    guardian.watch()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
