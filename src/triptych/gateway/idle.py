"""A deadline that moves: it passes when nothing has happened for so long."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Idle:
    """Like `asyncio.timeout`, but `touch` starts the time anew, and costs no timer.

    One timer runs; when it fires it looks how long ago the last touch was. `pause` stops the clock, while someone else
    is waited for who has a deadline of their own. Raises TimeoutError at the end of the block.
    """

    __slots__ = ("_cancelling", "_deadline", "_expired", "_loop", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Idle works inside a task only")
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self._deadline, self._check)
        return self

    def touch(self) -> None:
        """Something has happened."""
        self._deadline = self._loop.time() + self._seconds

    def pause(self) -> None:
        """Do not count until the next touch."""
        self._deadline = float("inf")

    def _check(self) -> None:
        now = self._loop.time()
        if now < self._deadline:
            self._timer = self._loop.call_at(min(self._deadline, now + self._seconds), self._check)
            return
        self._expired = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
