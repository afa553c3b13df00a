#!/usr/bin/env python3
"""A very cheap engine, for measuring what stands before it: fixed answers, no parsing beyond framing.

usage: engine.py PORT [GAP_SECONDS]

A body with `"stream":true` gets 200 events, GAP_SECONDS apart; one with `"stall":true` is read and never answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import uvloop

EVENTS = 200
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"bench"}]}'
_ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"hello there"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"total_tokens":11},"kv_transfer_params":null,"ec_transfer_params":{"abcd":{"item_indices":[0],"metadata":{}}}}'
)
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":" hello"},"finish_reason":null}]}\n\n'
)


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gap: float) -> None:
        self.reader = reader
        self.writer = writer
        self.gap = gap

    async def body(self, head: bytes) -> bytes:
        for line in head.lower().split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                return await self.reader.readexactly(int(value))
            if name == b"transfer-encoding":
                parts = []
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    parts.append(await self.reader.readexactly(size))
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
                return b"".join(parts)
        return b""

    async def serve(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self.reader.readuntil(b"\r\n\r\n")
                body = await self.body(head)
                if head.startswith(b"GET "):
                    self.writer.write(_whole(_MODELS))
                elif b'"stall":true' in body[-200:]:
                    await asyncio.Event().wait()
                elif len(body) < 100_000 and b'"stream":true' in body:
                    await self.stream()
                else:
                    self.writer.write(_whole(_ANSWER))
                await self.writer.drain()
        self.writer.close()

    async def stream(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head)
        for _ in range(EVENTS):
            self.writer.write(_chunk(_EVENT))
            await asyncio.sleep(self.gap)
        self.writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main(port: int, gap: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _Connection(reader, writer, gap).serve()

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 27, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.01))
