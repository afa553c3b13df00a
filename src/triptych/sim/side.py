"""The side channel between simulated engines: one JSON object per line over TCP.

It stands for ZMQ, NIXL and the Mooncake transfer engine: a handle names the address of the engine that issued it,
and whoever is given the handle asks there. So a handle that a gateway mangles, swaps or invents is found out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

Message = dict[str, Any]
MAX_LINE = 1 << 20


class SideError(OSError):
    """A peer could not be asked: refused, gone, silent, or not an engine at all."""


class _Lines(asyncio.Protocol):
    """Splits what comes into lines."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            try:
                message = msgspec.json.decode(bytes(line))
            except msgspec.DecodeError:
                message = None
            if not isinstance(message, dict):
                self.bad()
                return
            self.line(message)
        if len(self._buffer) > MAX_LINE:
            self.bad()

    def bad(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def line(self, message: Message) -> None:
        raise NotImplementedError


class _Answering(_Lines):
    def __init__(self, answer: Callable[[Message], Message], open_: set[_Answering]) -> None:
        super().__init__()
        self._answer = answer
        self._open = open_

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)

    def line(self, message: Message) -> None:
        assert self.transport is not None
        self.transport.write(msgspec.json.encode(self._answer(message)) + b"\n")


class SideServer:
    """Listens on one address and answers each message with one."""

    def __init__(self, answer: Callable[[Message], Message]) -> None:
        self._answer = answer
        self._open: set[_Answering] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Answering(self._answer, self._open), host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in list(self._open):
                connection.bad()
            await self._server.wait_closed()
            self._server = None


class _Asking(_Lines):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[asyncio.Future[Message]] = deque()
        self.lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_exception(SideError("the peer closed the side channel"))

    def line(self, message: Message) -> None:
        if not self.waiting:
            self.bad()
            return
        future = self.waiting.popleft()
        if not future.done():
            future.set_result(message)

    def ask(self, message: Message) -> asyncio.Future[Message]:
        assert self.transport is not None
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self.transport.write(msgspec.json.encode(message) + b"\n")
        return future


class SideClient:
    """Asks other engines; keeps one connection per address."""

    def __init__(self, timeout: float = 5.0) -> None:
        self._timeout = timeout
        self._connections: dict[tuple[str, int], _Asking] = {}

    async def ask(self, host: Any, port: Any, message: Message) -> Message:
        """The peer's answer. Raises `SideError`."""
        try:
            address = (str(host), int(port))
        except (TypeError, ValueError) as error:
            raise SideError(f"not an address: {host!r}:{port!r}") from error
        try:
            async with asyncio.timeout(self._timeout):
                connection = self._connections.get(address)
                if connection is None or connection.lost:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(_Asking, *address)
                    self._connections[address] = connection
                return await connection.ask(message)
        except (OSError, TimeoutError, OverflowError) as error:
            self._drop(address)
            raise SideError(f"{address[0]}:{address[1]}: {error or type(error).__name__}") from error

    def _drop(self, address: tuple[str, int]) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.bad()

    def close(self) -> None:
        for address in list(self._connections):
            self._drop(address)
