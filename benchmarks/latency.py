"""What the gateway adds to a request's latency: E+PD, one 100 KB image, one at a time, simulated engines of no cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.bars import Bar
from benchmarks.cost import TEXT
from benchmarks.rig import free_port, read_answer, request, started, triptych

REQUESTS = 200


def image_body(number: int) -> bytes:
    """A request with a picture of its own, so that no cache answers."""
    data = b"%08d" % number + b"A" * 100_000
    return (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;'
        b"base64," + data + b'"}},' + TEXT + b']}],"max_tokens":1}'
    )


async def p50(port: int, bodies: list[bytes]) -> float:
    """Median milliseconds of one request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    times = []
    for body in bodies:
        began = time.perf_counter()
        writer.write(request(body))
        await writer.drain()
        await read_answer(reader)
        times.append(1e3 * (time.perf_counter() - began))
    writer.close()
    return statistics.median(times[len(times) // 5 :])


@contextlib.contextmanager
def sim(role: str, ec_dir: str) -> Iterator[int]:
    """A simulated engine of no cost in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "triptych", "sim", "--role", role, "--model", "m", "--port", str(port)]
    command += ["--ec", "example", "--ec-dir", ec_dir]
    with started(command, f"http://127.0.0.1:{port}"):
        yield port


def run() -> list[Bar]:
    """The gateway's p50 beside the sum of the legs' p50, measured at the engines with the same bodies."""
    bodies, others = [[image_body(n + at) for n in range(REQUESTS)] for at in (0, REQUESTS)]
    with (
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder,
        sim("encode", folder) as encoder,
        sim("combined", folder) as consumer,
    ):
        port = free_port()
        pools = ("--encode", f"http://127.0.0.1:{encoder}", "--combined", f"http://127.0.0.1:{consumer}")
        with started(triptych(port, *pools), f"http://127.0.0.1:{port}"):
            through = asyncio.run(p50(port, bodies))
        legs = [asyncio.run(p50(at, others)) for at in (encoder, consumer)]
    told = json.dumps([round(leg, 2) for leg in legs])
    print(f"  p50 through the gateway {through:.2f} ms; legs {told} ms", flush=True)
    added = through - sum(legs)
    return [Bar("added latency, E+PD, 100 KB image, p50 in ms", added, 4.0, f"{through:.2f} - {sum(legs):.2f} ms")]
