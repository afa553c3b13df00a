#!/usr/bin/env python3
"""The relay layer alone: `triptych.http` server and client with the least handler between them.

What a gateway costs above this is its own work (plans, edits, metrics); what this costs is the floor.

usage: relay_probe.py PORT [UPSTREAM_URL]     (an engine; default http://127.0.0.1:9101)
"""

import asyncio
import signal
import sys

import uvloop

from triptych.http.client import Client, Origin
from triptych.http.server import Request, Server
from triptych.http.sse import EventScanner

BODY_LIMIT = 64 << 20
ANSWER_LIMIT = 64 << 20


async def main(port: int, upstream: str) -> None:
    origin = Origin.parse(upstream)
    client = Client()

    async def relay(request: Request) -> None:
        body = await request.read_body(BODY_LIMIT)
        response = await client.request(
            origin, request.method.encode(), request.target, request.headers, (body,), timeout=120
        )
        try:
            if response.header(b"content-type") == b"text/event-stream":
                await request.start(response.status, response.headers)
                scanner = EventScanner()
                await response.pump(lambda data: request.send_nowait(scanner.feed(data)), request.drained, timeout=120)
                await request.finish()
            else:
                answer = await response.read(ANSWER_LIMIT, timeout=120)
                await request.respond(response.status, response.headers, answer)
        finally:
            response.close()

    server = Server(relay)
    await server.start("127.0.0.1", port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.close()
    await client.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:9101"))
