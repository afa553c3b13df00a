"""Fake engines, and waiting for what happens to them."""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, TypeVar

from triptych.launch.events import Event, Line
from triptych.launch.plan import ProcessSpec
from triptych.launch.ports import Need, Reservations

FAKE = str(Path(__file__).with_name("fake_engine.py"))
E = TypeVar("E", bound=Event)


def spec(name: str, ports: Reservations, *modes: str, **settings: Any) -> ProcessSpec:
    """A fake engine on a free port."""
    port = ports.take([Need(name, "http", "127.0.0.1")])[name, "http"]
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, "-I", "-S", FAKE, str(port), *modes)
    return ProcessSpec(
        **{
            "name": name,
            "role": "combined",
            "argv": argv,
            "env": {},
            "url": url,
            "ready_url": f"{url}/health",
            "start_timeout": 20.0,
            "stop_timeout": 20.0,
            **settings,
        }
    )


async def until(events: AsyncIterator[Event], kind: type[E], process: str | None = None) -> E:
    """The next event of a kind (and process)."""
    async with asyncio.timeout(20):
        async for event in events:
            if isinstance(event, kind) and process in (None, event.process):
                return event
    raise AssertionError(f"everything was stopped without a {kind.__name__}")


async def until_line(events: AsyncIterator[Event], start: str) -> str:
    """The next line of output that starts so."""
    while not (line := await until(events, Line)).text.startswith(start):
        pass
    return line.text


async def ask(url: str) -> None:
    """A GET whose answer does not matter."""
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /{url.partition('//')[2].partition('/')[2]} HTTP/1.1\r\n\r\n".encode())
    try:
        await reader.read()
    except ConnectionError:
        pass
    writer.transport.abort()


class Watched:
    """Processes, related or not, watched through pidfds (a pid alone may come to mean another process)."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds = {os.pidfd_open(pid): pid for pid in pids}

    def left_after(self, seconds: float) -> set[int]:
        """Waits until all are gone, for at most so long; returns those that are not."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        left = dict(self._fds)
        while left:
            gone = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not gone:
                break
            for fd, _ in gone:
                poll.unregister(fd)
                del left[fd]
        for fd in self._fds:
            os.close(fd)
        return set(left.values())


def relatives(line: str) -> list[int]:
    """The pids of a `family` line."""
    return [int(pid) for pid in line.split()[1:]]
