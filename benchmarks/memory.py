"""Peak memory of the gateway with many large requests in flight and engines that never answer."""

from __future__ import annotations

import asyncio
import contextlib
import time

from benchmarks.bars import Bar
from benchmarks.cost import body
from benchmarks.rig import Process, engine, free_port, request, started, triptych

REQUESTS = 64
SIZE = 8_000_000
STALL = b',"stall":true'


async def peak_growth(process: Process, port: int, data: bytes) -> int:
    """Bytes by which the process grew while the requests were sent and held."""
    before = peak = process.rss()

    async def hold() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            await writer.drain()
            await asyncio.Event().wait()
        finally:
            writer.close()

    tasks = [asyncio.create_task(hold()) for _ in range(REQUESTS)]
    end = time.monotonic() + 12
    while time.monotonic() < end:
        peak = max(peak, process.rss())
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    return peak - before


def run() -> list[Bar]:
    """On the plain plan the consumer stalls; on E+PD encoders answer, then the consumer stalls."""
    bars = []
    data = request(body(image=SIZE, tail=STALL))
    sent = REQUESTS * len(data)
    with engine() as encoder, engine() as consumer:
        plain = ["--combined", f"http://127.0.0.1:{consumer}", "--no-access-log"]
        plans = {"plain": (plain, 2.5), "E+PD": (["--encode", f"http://127.0.0.1:{encoder}", *plain], 3.5)}
        for name, (flags, limit) in plans.items():
            port = free_port()
            with started(triptych(port, *flags), f"http://127.0.0.1:{port}") as process:
                growth = asyncio.run(peak_growth(process, port, data))
            print(f"  {name}: grew by {growth / 1e6:.0f} MB for {sent / 1e6:.0f} MB of requests", flush=True)
            what = f"peak memory growth / clients' bytes, {REQUESTS} × {SIZE // 1_000_000} MB stalled, {name}"
            bars.append(Bar(what, growth / sent, limit, f"{growth / 1e6:.0f} / {sent / 1e6:.0f} MB"))
    return bars
