"""The other side of a connection, byte by byte: a raw client, and an upstream that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from triptych.http.client import Origin

Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """A raw TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, host: str, port: int, **options: Any) -> Peer:
        return cls(*await asyncio.open_connection(host, port, **options))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """The next head, its blank line included."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def response(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """The next response, its body decoded."""
        lines = (await self.head())[:-4].split(b"\r\n")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(b": ")
            assert name not in headers, f"{name!r} twice"
            headers[name] = value
        status = int(lines[0].split(b" ")[1])
        body = b""
        if headers.get(b"transfer-encoding") == b"chunked":
            body = await self.chunked()
        elif b"content-length" in headers:
            body = await self.reader.readexactly(int(headers[b"content-length"]))
        return status, headers, body

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def chunked(self) -> bytes:
        body = b""
        while data := await self.chunk():
            body += data
        return body

    async def request(self) -> tuple[bytes, bytes]:
        """The next request: its head and its body."""
        head = await self.head()
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            return head, await self.chunked()
        if b"content-length: " in lower:
            size = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            return head, await self.reader.readexactly(size)
        return head, b""

    async def ended(self) -> bool:
        """Wait for the end of the connection, clean or not; False when something came first."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def rest(self) -> bytes:
        """All that comes before a clean end."""
        return await self.reader.read()

    def reset(self) -> None:
        """Drop the connection with a RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(Exception):
            await self.writer.wait_closed()


class ScriptedUpstream:
    """A server that hands each connection to a script; `peers` are the connections in the order they came."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self._more = asyncio.Condition()
        self.peers: list[Peer] = []
        self.done = 0
        self.errors: list[BaseException] = []
        self.origin: Origin

    @classmethod
    async def start(
        cls, script: Script, *, host: str = "127.0.0.1", scheme: str = "http", **options: Any
    ) -> ScriptedUpstream:
        self = cls(script)
        self._server = await asyncio.start_server(self._accept, host, 0, limit=2**20, **options)
        self.origin = Origin(scheme, host, self._server.sockets[0].getsockname()[1])
        return self

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = Peer(reader, writer)
        async with self._more:
            self.peers.append(peer)
            self._more.notify_all()
        try:
            await self._script(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._tasks.discard(task)
            peer.writer.close()
            async with self._more:
                self.done += 1
                self._more.notify_all()

    async def connected(self, count: int) -> None:
        """Wait until so many connections have come."""
        async with self._more:
            await self._more.wait_for(lambda: len(self.peers) >= count)

    async def finished(self, count: int) -> None:
        """Wait until so many scripts have run to their end, which for most is the end of their connection."""
        async with self._more:
            await self._more.wait_for(lambda: self.done >= count)

    async def stop(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for peer in self.peers:
            await peer.close()
        assert not self.errors, self.errors


def answer(body: bytes = b"ok", status: bytes = b"200 OK", extra: bytes = b"") -> bytes:
    """A response of fixed length."""
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), extra, body)


def post(path: bytes = b"/", body: bytes = b"", extra: bytes = b"") -> bytes:
    """A request with a body of fixed length."""
    return b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n%b\r\n%b" % (path, len(body), extra, body)


def get(path: bytes = b"/", extra: bytes = b"") -> bytes:
    """A request without a body."""
    return b"GET %b HTTP/1.1\r\nhost: h\r\n%b\r\n" % (path, extra)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something has happened that nobody announces."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)
