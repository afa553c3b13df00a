"""How one answer leaves the engine: as it should, or as a fault says."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from triptych.http.request import Request
from triptych.sim.faults import Fault
from triptych.sim.seen import Seen

JSON: Final = [(b"server", b"uvicorn"), (b"content-type", b"application/json")]
SSE: Final = [(b"server", b"uvicorn"), (b"content-type", b"text/event-stream; charset=utf-8")]
BEFORE_HEAD: Final = frozenset(
    {"status", "hang", "reset", "close", "garbage", "garbage_json", "slow_first_byte", "die"}
)


class Ended(Exception):
    """A fault has ended the answer; nothing more is to be sent."""


class Delivery:
    """One answer on its way out. Raises `Ended` where a fault ends it."""

    def __init__(self, request: Request, fault: Fault | None, seen: Seen) -> None:
        self.request = request
        self.fault = fault
        self.events = 0
        self._seen = seen
        if fault is not None:
            seen.faults[fault.kind] += 1
            seen.touch()

    # --- before the head -----------------------------------------------------------------------------------------

    async def before_head(self) -> None:
        """Apply a fault that comes instead of, or before, the head."""
        fault = self.fault
        if fault is None or fault.kind not in BEFORE_HEAD:
            return
        if fault.kind in ("hang", "slow_first_byte"):
            await wait(fault.seconds if fault.kind == "hang" or fault.seconds is not None else 1.0)
            self.fault = None
            return
        if fault.kind == "reset":
            self.reset()
        elif fault.kind in ("close", "die"):
            self.close()
        elif fault.kind == "garbage":
            self.raw(fault.text if fault.body is not None else b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            self.close()
        elif fault.kind == "status":
            headers = [(k.lower().encode(), v.encode("latin-1")) for k, v in fault.headers.items()]
            typed = any(name == b"content-type" for name, _ in headers)
            await self.request.respond(fault.status, headers if typed else [*JSON, *headers], fault.text)
        else:
            await self.request.respond(200, JSON, fault.text if fault.body is not None else b'{"choices": [{')
        raise Ended

    # --- a whole answer --------------------------------------------------------------------------------------------

    async def whole(self, status: int, body: bytes) -> None:
        """A JSON answer."""
        self._seen.answers[status] += 1
        fault = self.fault
        if fault is None:
            await self.request.respond(status, JSON, body)
            return
        request = self.request
        half = len(body) // 2
        kind = fault.kind
        if kind == "oversize":
            await request.respond(status, JSON, padded(body, fault.size))
        elif kind == "wrong_length":
            self.raw(
                b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, max(0, len(body) + fault.size), body)
            )
            self.close()
        elif kind == "slow_body":
            await request.start(status, JSON, length=len(body))
            await wait(1.0 if fault.seconds is None else fault.seconds)
            await request.send(body)
            await request.finish()
        elif kind == "trickle":
            await request.start(status, JSON, length=len(body))
            await self._trickle(body, fault)
            await request.finish()
        elif kind == "close_after":
            await request.respond(status, JSON, body)
            self.close()
        elif kind in ("hang_body", "cut", "reset_body", "end"):
            await request.start(status, JSON, length=len(body))
            await request.send(body[:half])
            if kind == "hang_body":
                await wait(fault.seconds)
                await request.send(body[half:])
                await request.finish()
            elif kind == "reset_body" or fault.rst:
                self.reset()
            else:
                self.close()
        else:  # sse_error has no meaning here
            await request.respond(status, JSON, body)

    # --- a stream ----------------------------------------------------------------------------------------------------

    async def head(self) -> None:
        """Begin a stream, which vLLM does before it has a token."""
        await self.request.start(200, SSE)
        self._seen.touch()
        if self.fault is not None and self.fault.kind == "slow_body":
            await wait(1.0 if self.fault.seconds is None else self.fault.seconds)

    async def event(self, data: bytes) -> None:
        """One event."""
        if self.fault is not None:
            await self._faulty(data, self.fault)
            return
        await self.request.send(data)
        self.events += 1

    async def _faulty(self, data: bytes, fault: Fault) -> None:
        kind = fault.kind
        request = self.request
        if kind == "trickle":
            await self._trickle(data, fault)
            self.events += 1
            return
        if self.events != fault.events:
            await request.send(data)
            self.events += 1
            return
        if kind in ("cut", "reset_body", "hang_body") and fault.partial:
            await request.send(data[: len(data) // 2])
        if kind == "hang_body":
            await wait(fault.seconds)
            await request.send(data[len(data) // 2 :] if fault.partial else data)
        elif kind == "reset_body" or (kind == "cut" and fault.rst):
            self.reset()
            raise Ended
        elif kind == "cut":
            self.close()
            raise Ended
        elif kind == "end":
            await request.finish()
            raise Ended
        elif kind == "oversize":
            await request.send(b'data: {"pad":"' + b"a" * max(0, fault.size - 18) + b'"}\n\n')
            await request.send(data)
        elif kind == "garbage_json":
            await request.send(b"data: " + (fault.text if fault.body is not None else b'{"choices": [{') + b"\n\n")
            await request.send(data)
        elif kind == "wrong_length":
            self.raw(b"not a chunk size\r\n")
            self.close()
            raise Ended
        elif kind == "sse_error":
            raise InStream
        else:
            await request.send(data)
        self.events += 1

    async def finish(self) -> None:
        """End a stream, or end it as the fault says."""
        self._seen.answers[200] += 1
        await self.request.finish()
        if self.fault is not None and self.fault.kind == "close_after":
            self.close()

    async def _trickle(self, data: bytes, fault: Fault) -> None:
        for at in range(0, len(data), max(1, fault.chunk)):
            await self.request.send(data[at : at + max(1, fault.chunk)])
            await asyncio.sleep(0.05 if fault.seconds is None else fault.seconds)

    # --- below HTTP --------------------------------------------------------------------------------------------------
    # A fault breaks rules that the HTTP layer exists to keep, so it reaches through to the connection.

    def raw(self, data: bytes) -> None:
        """Bytes on the connection, whatever they are."""
        self.request.started = True
        self.request._connection.write(data)

    def close(self) -> None:
        """What was written goes out, then the connection ends, without a word."""
        self.request.started = True
        self.request.abort()

    def reset(self) -> None:
        """A TCP reset."""
        self.request.started = self.request.finished = True
        connection = self.request._connection
        transport = connection._transport
        if transport is not None:
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.abort()


class InStream(Exception):
    """A fault asks for an error event here."""


async def wait(seconds: float | None) -> None:
    """Wait; None: until the client leaves."""
    if seconds is None:
        await asyncio.get_running_loop().create_future()
    else:
        await asyncio.sleep(seconds)


def padded(body: bytes, size: int) -> bytes:
    """A JSON object made exactly `size` bytes long by one more member; unchanged where it is too long already."""
    room = size - len(body) - len(b',"padding":""')
    if room < 0:
        return body
    return body[:-1] + b',"padding":"' + b"a" * room + b'"}'
