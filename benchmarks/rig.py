"""Processes under test, their CPU time and memory, and the load on them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

HERE = Path(__file__).parent
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


class Process:
    """A command in a session of its own; everything in that session is counted, and ended with it."""

    def __init__(self, command: Sequence[str]) -> None:
        devnull = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True)
        self.session = self._process.pid

    def stats(self) -> Iterator[list[str]]:
        """Fields of /proc/PID/stat from the third on, of every process of the session."""
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.session:
                        yield fields

    def cpu(self) -> float:
        """User and system seconds so far."""
        return sum(int(fields[11]) + int(fields[12]) for fields in self.stats()) / _TICK

    def rss(self) -> int:
        """Resident bytes now."""
        return sum(int(fields[21]) for fields in self.stats()) * _PAGE

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, signal.SIGTERM)
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def started(command: Sequence[str], url: str, seconds: float = 60.0) -> Iterator[Process]:
    """The command, once a POST of a chat request to `url` is answered. Raises RuntimeError if it never is."""
    process = Process(command)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
                ask = urllib.request.Request(url + "/v1/chat/completions", body, {"content-type": "application/json"})
                with urllib.request.urlopen(ask, timeout=2) as answer:
                    answer.read()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} does not answer at {url}") from None
                time.sleep(0.2)
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def engine(gap: float = 0.01) -> Iterator[int]:
    """The cheap engine; its port."""
    port = free_port()
    with started([sys.executable, str(HERE / "engine.py"), str(port), str(gap)], f"http://127.0.0.1:{port}"):
        yield port


def optimized(python: str) -> bool:
    """Whether that interpreter was built with its own optimizations (PGO), as those of distributions are."""
    ask = "import sysconfig; print(sysconfig.get_config_var('CONFIG_ARGS'))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return "--enable-optimizations" in found.stdout


@functools.cache
def interpreter() -> tuple[str, ...]:
    """The command that starts Python for the gateway: this one, or, where this one was built without optimizations
    (a third slower), the system's of the same version, with this environment's packages."""
    mine = sys.executable
    system = f"/usr/bin/python3.{sys.version_info.minor}"
    if optimized(mine) or not Path(system).exists() or not optimized(system):
        return (mine,)
    paths = os.pathsep.join([str(HERE.parent / "src"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    print(f"  {mine} was built without optimizations: the gateway runs on {system}", flush=True)
    return "env", f"PYTHONPATH={paths}", system


def triptych(listen: int, *flags: str) -> list[str]:
    """The gateway's command line, with its defaults (access log included)."""
    command = [*interpreter(), "-m", "triptych", "gateway", "--listen", f"127.0.0.1:{listen}", "--admin", "off"]
    return [*command, *flags]


# -- load


@dataclass(slots=True)
class Count:
    requests: int = 0
    events: int = 0


def request(body: bytes) -> bytes:
    """One chat request on the wire."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one response; how many events it had. Raises RuntimeError unless it is a 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(head.decode("latin-1"))
    length = _LENGTH.search(head)
    if length:
        await reader.readexactly(int(length[1]))
        return 0
    events = 0
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        events += (await reader.readexactly(size + 2)).count(b"data: {")
        if not size:
            return events


async def load(port: int, data: bytes, connections: int, seconds: float) -> Count:
    """Closed-loop load: each connection sends, reads the answer, sends again."""
    count = Count()
    end = time.monotonic() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        while time.monotonic() < end:
            writer.write(data)
            await writer.drain()
            events = await read_answer(reader)
            count.events += events
            count.requests += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return count


def cpu_per(process: Process, port: int, data: bytes, connections: int, seconds: float, *, events: bool) -> float:
    """Microseconds of the process's CPU per request (or per event) under load, after a warm-up."""
    uvloop.run(load(port, data, connections, seconds / 4))
    before = process.cpu()
    count = uvloop.run(load(port, data, connections, seconds))
    used = process.cpu() - before
    return 1e6 * used / max(1, count.events if events else count.requests)
