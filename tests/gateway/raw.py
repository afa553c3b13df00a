"""A client that is nothing but a socket: it sees what an HTTP library hides, and leaves as it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer. `complete`: it came to its own end; `reset`: the connection was reset on the way."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True
    reset: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """The server-sent events of the body; the last entry is what stands after the last whole one, often empty."""
        return self.body.split(b"\n\n")


class Raw:
    """One connection."""

    def __init__(
        self, host: str, port: int, *, receive_buffer: int | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """receive_buffer: bytes that the kernel takes for a client that does not read."""
        self._where = (host, port)
        self._tls = tls
        self._receive_buffer = receive_buffer
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> Self:
        sock = socket.socket()
        sock.setblocking(False)
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._where)
        except OSError:
            sock.close()
            raise
        self.reader, self.writer = await asyncio.open_connection(
            sock=sock, limit=1 << 16, ssl=self._tls, server_hostname=self._where[0] if self._tls else None
        )
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the request

    def head(
        self, length: int | None, path: str = "/v1/chat/completions", *, headers: Mapping[str, str] | None = None
    ) -> None:
        """The head of a POST whose body has `length` bytes (None: chunked)."""
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = {"host": "gateway", "content-type": "application/json", **(headers or {})}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"POST {path} HTTP/1.1\r\n{text}{framing}\r\n\r\n".encode())

    def send(self, body: Any, path: str = "/v1/chat/completions", *, headers: Mapping[str, str] | None = None) -> None:
        """A whole POST; `body` is JSON unless it is bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.head(len(raw), path, headers=headers)
        self.writer.write(raw)

    def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> None:
        text = "".join(f"{name}: {value}\r\n" for name, value in {"host": "gateway", **(headers or {})}.items())
        self.writer.write(f"GET {path} HTTP/1.1\r\n{text}\r\n".encode())

    def chunk(self, data: bytes) -> None:
        """A piece of a chunked body; empty: its end."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    # --- the answer

    async def answer(self, *, within: float = 10.0) -> Answer:
        """The next answer, whole or as far as it comes. Raises ConnectionError where none begins."""
        async with asyncio.timeout(within):
            status, headers = await self.answer_head()
            body = bytearray()
            try:
                if "content-length" in headers:
                    body += await self.reader.readexactly(int(headers["content-length"]))
                elif headers.get("transfer-encoding") == "chunked":
                    while piece := await self.answer_chunk():
                        body += piece
                else:
                    body += await self.reader.read()
            except asyncio.IncompleteReadError as error:
                if "content-length" in headers:
                    body += error.partial
                return Answer(status, headers, bytes(body), complete=False)
            except ConnectionResetError:
                return Answer(status, headers, bytes(body), complete=False, reset=True)
            return Answer(status, headers, bytes(body))

    async def answer_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer. Raises ConnectionError where the connection ends instead."""
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionError(f"no answer, but {error.partial!r} and the end of the connection") from None
        first, *lines = raw.decode("latin-1").split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines if line)

    async def answer_chunk(self) -> bytes:
        """The next piece of a chunked answer; empty at its end."""
        size = int((await self.reader.readuntil(b"\r\n")), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def ended(self, *, within: float = 5.0) -> bool:
        """Wait for the gateway to close the connection; whether nothing more came before that."""
        async with asyncio.timeout(within):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True

    # --- leaving

    async def close(self) -> None:
        """Leave as a process that exits does."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    def reset(self) -> None:
        """Leave with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self.writer.write_eof()
