"""One thread that waits for sockets and timers, and sleeps otherwise."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

READ: Final = select.EPOLLIN | select.EPOLLRDHUP
WRITE: Final = select.EPOLLOUT

_LOG: Final = logging.getLogger(__name__)


class Timer:
    """Something that happens later, unless cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None] | None) -> None:
        self.call = call

    def cancel(self) -> None:
        """Let it not happen."""
        self.call = None


class Loop:
    """Calls back on its own thread, which begins with the first thing to wait for. All methods are for any thread.

    `turn` is called after each round of callbacks.
    """

    def __init__(self, name: str, turn: Callable[[], None]) -> None:
        self._name = name
        self._turn = turn
        self._epoll = select.epoll()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._calls: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ident = 0  # of the thread
        self._closing = False
        self._awake = False

    @property
    def inside(self) -> bool:
        """Whether the caller is on the loop's thread."""
        return threading.get_ident() == self._ident

    def add(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        """Call with the events that came, whenever one of `mask` does."""
        self._calls[fd] = call
        self._epoll.register(fd, mask)
        self._start()

    def modify(self, fd: int, mask: int) -> None:
        """Wait for other events."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """No more of this descriptor; call it before closing that."""
        if self._calls.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call it on the loop's thread."""
        self._soon.append(call)
        self._start()
        self.wake()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call it on the loop's thread after so many seconds."""
        timer = Timer(call)
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), timer))
            first = self._timers[0][2] is timer
        self._start()
        if first:
            self.wake()
        return timer

    def wake(self) -> None:
        """Let there be a turn soon."""
        if not self._awake and not self._closing and self._thread is not None:
            self._awake = True
            os.eventfd_write(self._alarm, 1)

    def _start(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while not self._closing:
            for fd, mask in self._epoll.poll(self._timeout()):
                if fd == self._alarm:
                    # In this order: a wake between the two is one too many, and never one too few.
                    os.eventfd_read(self._alarm)
                    self._awake = False
                    continue
                ready = self._calls.get(fd)
                if ready is not None:
                    self._guarded(ready, mask)
            for _ in range(len(self._soon)):
                self._guarded(self._soon.popleft())
            if self._timers:
                for due in self._due():
                    self._guarded(due)
            self._guarded(self._turn)

    def _guarded(self, call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except Exception:
            # A fault in one callback is not to end the thread that everything else of this connector needs.
            _LOG.exception("%s: a callback failed", self._name)

    def _timeout(self) -> float | None:
        if self._soon:
            return 0.0
        if not self._timers:
            return None
        with self._lock:
            while self._timers and self._timers[0][2].call is None:
                heapq.heappop(self._timers)
            return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _due(self) -> list[Callable[[], None]]:
        out = []
        with self._lock:
            while self._timers and (self._timers[0][0] <= time.monotonic() or self._timers[0][2].call is None):
                call = heapq.heappop(self._timers)[2].call
                if call is not None:
                    out.append(call)
        return out

    def close(self, timeout: float = 5.0) -> None:
        """End the thread and wait for it, at most `timeout` seconds. May be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        thread = self._thread
        if thread is not None and thread.is_alive():
            os.eventfd_write(self._alarm, 1)
            if self.inside:
                return  # it ends with this turn; its descriptors go with the object
            thread.join(timeout)
            if thread.is_alive():
                _LOG.error("%s: the thread has not ended within %g s", self._name, timeout)
                return
        self.forget()

    def forget(self) -> None:
        """Close the descriptors, without a word: also in a forked child, which has no such thread."""
        self._closing = True
        self._epoll.close()
        with contextlib.suppress(OSError):
            os.close(self._alarm)
