"""One command under its guardian (`triptych.launch.guardian`), as an object of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GUARDIAN = str(Path(__file__).with_name("guardian.py"))
# For output that is still in the pipe when all writers are gone. Only a lost guardian leaves writers behind.
DRAIN = 1.0


class Child:
    """A command that runs. Made by `start`; `gone` must be awaited in the end."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        on_output: Callable[[bytes], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._reports, self._orders = channel
        self.pid = 0
        """the command's pid; 0 if its guardian was lost before it could say"""
        self._reported: asyncio.Future[None] = loop.create_future()
        self._exit: asyncio.Future[int | None] = loop.create_future()
        self._gone = loop.create_task(self._watch(on_output))

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], on_output: Callable[[bytes], None]) -> Child:
        """Starts a command; its stdout and stderr go to `on_output` as they come.

        A command that cannot be run exits with code 127 and the reason in its output. Raises OSError if not even the
        guardian can be started.
        """
        ours, theirs = socket.socketpair()
        # From here on closing our end of the channel is all that it takes to end the guardian and what it runs.
        try:
            with theirs:
                guardian = (sys.executable, "-I", "-S", GUARDIAN, str(theirs.fileno()), str(os.getpid()))
                process = await asyncio.create_subprocess_exec(
                    *guardian,
                    *argv,
                    env=env,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a Ctrl-C in the terminal is the launcher's to handle
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
            child = cls(process, await asyncio.open_connection(sock=ours), on_output)
        except BaseException:
            ours.close()
            raise
        try:
            await asyncio.shield(child._reported)
        except asyncio.CancelledError:
            child.kill()
            await child.gone()
            raise
        return child

    def terminate(self) -> None:
        """SIGTERM to the command (not to its children: a server ends its own)."""
        self._order(b"t")

    def kill(self) -> None:
        """SIGKILL to the command and every descendant."""
        self._order(b"k")

    async def exited(self) -> int | None:
        """Waits until the command ended: its exit code, negative for a signal, None if its guardian was lost."""
        return await asyncio.shield(self._exit)

    async def gone(self) -> None:
        """Waits until the command and every descendant are gone, and all output was handed on."""
        await asyncio.shield(self._gone)

    def _order(self, word: bytes) -> None:
        if not self._orders.is_closing():
            self._orders.write(word)

    async def _watch(self, on_output: Callable[[bytes], None]) -> None:
        pump = asyncio.create_task(self._pump(on_output))
        with contextlib.suppress(ConnectionError):
            while line := await self._reports.readline():
                word, _, number = line.decode().partition(" ")
                if word == "pid":
                    self.pid = int(number)
                    self._reported.set_result(None)
                else:
                    self._exit.set_result(int(number))
        if not self._exit.done():
            # Somebody killed the guardian. The kernel has killed the command with it; its group may still be there.
            if self.pid:
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._exit.set_result(None)
        if not self._reported.done():
            self._reported.set_result(None)
        await self._process.wait()
        await asyncio.wait([pump], timeout=DRAIN)
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        self._orders.close()
        with contextlib.suppress(ConnectionError):
            await self._orders.wait_closed()
        self._process._transport.close()  # type: ignore[attr-defined]  # else a pipe held by a stranger stays open

    async def _pump(self, on_output: Callable[[bytes], None]) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            on_output(data)
