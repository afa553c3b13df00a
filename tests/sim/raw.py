"""A client that is nothing but a socket: sees what no HTTP library shows."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

from triptych.sim import Sim


class Raw:
    """One connection to an engine."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._sim.config.host, self._sim.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    def send(
        self, body: Any, path: str = "/v1/chat/completions", method: str = "POST", headers: dict[str, str] | None = None
    ) -> None:
        """Write one request. `body` is JSON unless it is bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", "host": "x"} | (headers or {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        head = await self.within(self.reader.readuntil(b"\r\n\r\n"))
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return int(first.split()[1]), headers

    async def answer(self) -> tuple[int, bytes]:
        """A whole answer that says its length."""
        status, headers = await self.head()
        return status, await self.within(self.reader.readexactly(int(headers["content-length"])))

    async def rest(self) -> bytes:
        """Everything up to the end of the connection. Raises ConnectionResetError where it is reset."""
        return await self.within(self.reader.read())

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self.within(self.reader.readuntil(b"\r\n")), 16)
        data = await self.within(self.reader.readexactly(size + 2))
        return data[:-2]

    async def chunks(self) -> bytes:
        """The chunked body up to its end."""
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)

    async def within(self, what: Any, seconds: float = 5.0) -> Any:
        """Wait for something, not for ever."""
        async with asyncio.timeout(seconds):
            return await what


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
