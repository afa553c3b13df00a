"""The chunk transfer layer between two processes, beside one memcpy in and out of a shared segment and beside pyzmq.

Latency is from before `put` to the decoded object in the other process, which sleeps until then: on the connector's own
thread, and (`+thread`) on one that this wakes, as in a stage. A chunk is a head and one tensor. Runs alternate between
the ways; figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

from benchmarks.bars import Bar
from benchmarks.channels import (
    PATIENCE,
    ConnectorReceiver,
    ConnectorSender,
    Ends,
    Receiver,
    Sender,
    payload,
    receiver,
    sender,
)

KB: Final = 1 << 10
MB: Final = 1 << 20
SIZES: Final = {1 * KB: "1 KB", 64 * KB: "64 KB", 1 * MB: "1 MB", 16 * MB: "16 MB"}
AGAINST_ZMQ: Final = {1 * KB: 1.0, 64 * KB: 1.0, 1 * MB: 0.7, 16 * MB: 0.4}
"""Latency, as a share of pyzmq's, at most."""
AGAINST_RAW: Final = {1 * KB: 0.6, 1 * MB: 0.5, 16 * MB: 0.5}
"""Throughput, as a share of the bare segment's, at least."""
TIMES_ZMQ: Final = {1 * KB: 1.5}
"""Or, of pyzmq's throughput, so many times."""
IDLE: Final = 1000
STREAMS: Final = 64
REST: Final = 0.002
"""Seconds after which the other process is certainly asleep."""


# -- the other process


def serve(ends: Ends, control: Connection) -> None:
    """The receiving process: does what `control` says until it is closed."""
    end = receiver(ends)
    tasks: dict[str, Callable[..., None]] = {"one": _one, "many": _many, "idle": _idle, "stall": _stall}
    try:
        with contextlib.suppress(EOFError):
            while True:
                name, *arguments = control.recv()
                tasks[name](end, control, *arguments)
    finally:
        end.close()


def _one(end: Receiver, control: Connection, stream: str, count: int, metadata: dict[str, Any]) -> None:
    """Tell of each object when it came, in ns."""
    end.open([stream], metadata)
    control.send("open")
    for number in range(count):
        control.send(end.receive(stream, number))
    end.end([stream])


def _many(end: Receiver, control: Connection, stream: str, count: int, metadata: dict[str, Any]) -> None:
    """Tell when the last of the objects came, in ns."""
    end.open([stream], metadata)
    control.send("open")
    last = 0
    for number in range(count):
        last = end.receive(stream, number)
    control.send(last)
    end.end([stream])


def _idle(end: Receiver, control: Connection, streams: Sequence[str], count: int, metadata: dict[str, Any]) -> None:
    """Watch streams; tell how much CPU that takes, in seconds; then of each object when it came."""
    assert isinstance(end, ConnectorReceiver)
    end.open(streams, metadata)
    control.send("open")
    control.recv()
    before = _cpu()
    control.send("begin")
    control.recv()
    control.send(_cpu() - before)
    for _ in range(count):
        control.send(end.receive_any())
    end.end(streams)


def _stall(
    end: Receiver, control: Connection, streams: Sequence[str], stalled: bool, seconds: float, metadata: dict[str, Any]
) -> None:
    """Take what comes of all streams, or of all but the first, and tell how much of the others came."""
    assert isinstance(end, ConnectorReceiver)
    end.stalled = streams[0] if stalled else None
    end.open(streams, metadata)
    control.send("open")
    count = 0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        end.receive_any()
        count += 1
    control.send(count / (time.monotonic() - began))
    end.end(streams)
    end.stalled = None


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- the measuring process


@dataclass(frozen=True, slots=True)
class Way:
    """One way from this process to another."""

    name: str
    end: Sender
    control: Connection

    def hear(self) -> Any:
        """What the other process says. Raises TimeoutError, EOFError."""
        if not self.control.poll(PATIENCE):
            raise TimeoutError(f"{self.name}: the receiving process has said nothing in {PATIENCE:g} s")
        return self.control.recv()

    def ask(self, *task: Any, size: int = 0) -> None:
        """Give it a task, and wait until it is ready for it."""
        self.control.send((*task, getattr(self.end, "metadata", None) or {"size": size}))
        assert self.hear() == "open"


@contextlib.contextmanager
def way(name: str) -> Iterator[Way]:
    """Both ends of it."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as directory:
        end = sender(name, directory)
        try:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=serve, args=(end.ends, theirs))
            process.start()
            theirs.close()
            try:
                yield Way(name, end, ours)
            finally:
                ours.close()
                process.join(10)
                process.kill()
                process.join()
        finally:
            end.close()


class Bench:
    """Measures. Streams have names of their own, never used again."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def _name(self) -> str:
        return f"request-{next(self._count)}_0"

    def latency(self, to: Way, size: int, count: int) -> list[float]:
        """Seconds that each of `count` chunks took."""
        obj = payload(size)
        stream = self._name()
        to.ask("one", stream, count + 2, size=size)
        out = []
        for number in range(count + 2):
            time.sleep(REST)
            began = time.monotonic_ns()
            to.end.send(obj, stream, number)
            out.append((to.hear() - began) / 1e9)
        to.end.end(stream)
        return out[2:]

    def throughput(self, to: Way, size: int, count: int) -> float:
        """Chunks per second, as many in flight as may be."""
        obj = payload(size)
        stream = self._name()
        to.ask("many", stream, count, size=size)
        began = time.monotonic_ns()
        for number in range(count):
            to.end.send(obj, stream, number)
        took = to.hear() - began
        to.end.end(stream)
        return count * 1e9 / float(took)

    def idle(self, to: Way, seconds: float, count: int) -> tuple[float, list[float]]:
        """With many idle streams: the receiving process's CPU, as a share of a core, and seconds that chunks took."""
        streams = [self._name() for _ in range(IDLE)]
        to.ask("idle", streams, count)
        time.sleep(0.5)
        to.control.send("count")
        to.hear()
        time.sleep(seconds)
        to.control.send("tell")
        share = to.hear() / seconds
        obj = payload(KB)
        numbers = dict.fromkeys(streams, 0)
        out = []
        for stream in random.Random(7).choices(streams, k=count):
            time.sleep(REST)
            began = time.monotonic_ns()
            to.end.send(obj, stream, numbers[stream])
            numbers[stream] += 1
            out.append((to.hear() - began) / 1e9)
        for stream in streams:
            to.end.end(stream)
        return share, out

    def stall(self, to: Way, *, stalled: bool, seconds: float) -> float:
        """Chunks per second of all streams but the first, which is stalled or not."""
        assert isinstance(to.end, ConnectorSender)
        obj = payload(16 * KB)
        streams = [self._name() for _ in range(STREAMS)]
        numbers = dict.fromkeys(streams, 0)
        to.ask("stall", streams, stalled, seconds)
        able = list(streams)
        while not to.control.poll():
            if not able:
                able.append(to.end.news.credit.get(timeout=PATIENCE))
            while not to.end.news.credit.empty():
                able.append(to.end.news.credit.get())
            still = []
            for stream in able:
                if stream in numbers and to.end.try_send(obj, stream, numbers[stream]):
                    numbers[stream] += 1
                    still.append(stream)
            able = still
        rate: float = to.hear()
        for stream in streams:
            to.end.end(stream)
        return rate if stalled else rate * (STREAMS - 1) / STREAMS


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def throughput_bar(size: int, ours: float, raw: float, zmq: float, name: str, *, held: bool) -> Bar:
    """What is asked for, over what there is: the easier of the two where there are two."""
    asked = AGAINST_RAW[size] * raw
    if size in TIMES_ZMQ:
        asked = min(asked, TIMES_ZMQ[size] * zmq)
    detail = f"{ours:,.0f}/s, raw {raw:,.0f}/s ({ours / raw:.2f}×), pyzmq {zmq:,.0f}/s ({ours / zmq:.2f}×)"
    return Bar(f"{name}: throughput asked for / seen, {SIZES[size]}", asked / ours, 1.0 if held else None, detail)


def latency_bar(
    size: int, ours: Sequence[float], raw: Sequence[float], zmq: Sequence[float], name: str, *, held: bool
) -> Bar:
    """p50 over pyzmq's."""
    detail = ", ".join(
        f"{what} {1e6 * median(values):,.0f} (p90 {1e6 * percentile(values, 0.9):,.0f})"
        for what, values in (("ours", ours), ("pyzmq", zmq), ("raw", raw))
    )
    limit = AGAINST_ZMQ[size] if held else None
    return Bar(f"{name}: latency / pyzmq's, {SIZES[size]}", median(ours) / median(zmq), limit, f"µs: {detail}")


def idle_bars(share: float, ours: Sequence[float], bare: Sequence[float], name: str, *, held: bool) -> list[Bar]:
    """CPU, and the wait of a chunk against a bare wake-up."""
    bars = [Bar(f"{name}: percent of a core with {IDLE:,} idle streams", 100 * share, 1.0 if held else None)]
    for what, at, limit in (("p50", 0.5, 1.5), ("p99", 0.99, 2.0)):
        mine, theirs = percentile(ours, at), percentile(bare, at)
        detail = f"{1e6 * mine:,.0f} / {1e6 * theirs:,.0f} µs"
        what = f"{name}: wait of a chunk among {IDLE:,} idle streams / a bare pyzmq wake-up, {what}"
        bars.append(Bar(what, mine / theirs, limit if held else None, detail))
    return bars


def _latencies(bench: Bench, ways: Sequence[Way], rounds: int, mine: Sequence[Way]) -> list[Bar]:
    bars = []
    for size in SIZES:
        seen: dict[str, list[float]] = {to.name: [] for to in ways}
        for _ in range(rounds):
            for to in ways:
                seen[to.name] += bench.latency(to, size, 8 if size >= 16 * MB else 30)
        for to in mine:
            zmq = seen["zmq tcp" if to.name.startswith("tcp") else "zmq"]
            bars.append(latency_bar(size, seen[to.name], seen["raw"], zmq, to.name, held=to.name == "shm"))
            print(f"  {bars[-1]}", flush=True)
    return bars


def _throughputs(bench: Bench, ways: Sequence[Way], rounds: int, mine: Sequence[Way]) -> list[Bar]:
    bars = []
    for size in AGAINST_RAW:
        count = {1 * KB: 4000, 1 * MB: 400, 16 * MB: 60}[size]
        seen: dict[str, list[float]] = {to.name: [] for to in ways}
        for _ in range(rounds):
            for to in ways:
                seen[to.name].append(bench.throughput(to, size, count))
        raw = median(seen["raw"])
        for to in mine:
            zmq = median(seen["zmq tcp" if to.name.startswith("tcp") else "zmq"])
            bars.append(throughput_bar(size, median(seen[to.name]), raw, zmq, to.name, held=to.name == "shm"))
            print(f"  {bars[-1]}", flush=True)
    return bars


def _idles(bench: Bench, bare: Way, rounds: int, mine: Sequence[Way]) -> list[Bar]:
    bars = []
    for to in mine:
        shares, ours, theirs = [], [], []
        for _ in range(rounds):
            share, waits = bench.idle(to, 3.0, 150)
            shares.append(share)
            ours += waits
            theirs += bench.latency(bare, KB, 150)
        bars += idle_bars(median(shares), ours, theirs, to.name, held=to.name == "shm")
        print(*(f"  {bar}" for bar in bars[-3:]), sep="\n", flush=True)
    return bars


def _stalls(bench: Bench, runs: int, mine: Sequence[Way]) -> list[Bar]:
    bars = []
    for to in mine:
        ratios = []
        for _ in range(runs):
            free = bench.stall(to, stalled=False, seconds=0.6)
            ratios.append(free / bench.stall(to, stalled=True, seconds=0.6))
        what = f"{to.name}: throughput of {STREAMS - 1} streams without / with a stalled one beside them"
        bars.append(Bar(what, median(ratios), 1 / 0.9, f"of {runs} runs"))
        print(f"  {bars[-1]}", flush=True)
    return bars


def _ticks(rounds: int) -> list[Bar]:
    if importlib.util.find_spec("vllm") is None:
        print("  tick: vLLM is not installed: not measured", flush=True)
        return []
    bars: list[Bar] = importlib.import_module("benchmarks.tick").run(rounds)
    print(*(f"  {bar}" for bar in bars), sep="\n", flush=True)
    return bars


WAYS: Final = ("shm", "tcp", "shm+thread")
PARTS: Final = ("latency", "throughput", "idle", "stall", "tick")


def run(rounds: int, names: Sequence[str] = WAYS, parts: Sequence[str] = PARTS) -> list[Bar]:
    """All bars. Only shared memory is held to the issue's, against pyzmq's ipc://; TCP's are told, against its tcp://."""
    bench = Bench()
    bars: list[Bar] = []
    with ExitStack() as stack:
        theirs = [stack.enter_context(way(name)) for name in ("raw", "zmq", "zmq tcp")]
        mine = [stack.enter_context(way(name)) for name in names]
        if "latency" in parts:
            bars += _latencies(bench, (*theirs, *mine), rounds, mine)
        if "throughput" in parts:
            bars += _throughputs(bench, (*theirs, *mine), rounds, mine)
        if "idle" in parts:
            bars += _idles(bench, stack.enter_context(way("bare zmq")), rounds, mine)
        if "stall" in parts:
            bars += _stalls(bench, 2 * rounds, mine)
    if "tick" in parts:
        bars += _ticks(rounds)
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description="What a hop costs, as ratios.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--connector",
        action="append",
        metavar="NAME",
        help="shm, tcp, shm+thread, tcp+thread (default: the first three)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default 5)")
    asked = parser.parse_args()
    if wrong := set(asked.parts) - set(PARTS):
        parser.error(f"no part {wrong.pop()!r}; there are {', '.join(PARTS)}")
    bars = run(asked.rounds, asked.connector or WAYS, asked.parts or PARTS)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
