"""A speaking model of real stages: how soon it is heard, how soon it is up, and what it costs to wait.

First sound: from the request to the first byte of sound, beside the same pipeline whose stages wait for all of the one
before (`overlap: false`), both up at once and asked in turn. Waiting: sessions whose thinker is stopped, so that every
later stage and the gateway hold them, beside the same engines with nothing to do, before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from openai import AsyncOpenAI

from benchmarks.bars import Bar
from benchmarks.rig import free_port

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "tiny-omni.yaml"
TOKENS: Final = 200
PARKED: Final = 32
START: Final = 300.0
_TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Served:
    """A pipeline that is up. `start`: seconds until it was ready."""

    url: str
    start: float
    pid: int

    def roots(self) -> dict[str, int]:
        """The process of each stage and of the gateway, by name."""
        found: dict[str, int] = {}
        for pid in _tree(self.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if "gateway" in words and "triptych" in words:
                    found["gateway"] = pid
                for word in words:
                    if word.startswith('{"stage"'):
                        found.setdefault(yaml.safe_load(word)["stage"]["name"], pid)
        return found


@contextlib.contextmanager
def served(**more: Any) -> Iterator[Served]:
    """The example, with these fields at its top. Raises RuntimeError where it does not come up."""
    document = yaml.safe_load(EXAMPLE.read_text()) | more
    url = f"http://127.0.0.1:{free_port()}"
    document["gateway"] = {"listen": url.removeprefix("http://"), "admin": "off"}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "omni.yaml")
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        command = [sys.executable, "-m", "triptych", "serve", str(file), "--quiet", "--plain", "--log-dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            began = time.monotonic()
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > began + START:
                    raise RuntimeError(f"the pipeline is not up after {time.monotonic() - began:.0f} s")
                time.sleep(0.1)
            yield Served(url, time.monotonic() - began, process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def first_sound(url: str, text: str, most: int) -> tuple[float, float]:
    """Seconds until the first sound, and until the end."""
    began = time.monotonic()
    first = 0.0
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as openai:
        stream: Any = await openai.chat.completions.create(
            model="omni",
            messages=[{"role": "user", "content": text}],
            modalities=["text", "audio"],
            audio={"voice": "any", "format": "pcm16"},  # type: ignore[arg-type]
            max_tokens=most,
            stream=True,
        )
        async for event in stream:
            for choice in event.choices:
                audio = choice.delta.audio
                if not first and audio is not None and audio.data:
                    first = time.monotonic() - began
    return first, time.monotonic() - began


async def all_of(url: str, count: int) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(first_sound(url, f"number {number}", 8))


def _tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _tree(int(child))


def cpu(pid: int) -> float:
    """User and system seconds of a process and all below it."""
    total = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICK


def _shares(roots: dict[str, int], seconds: float) -> dict[str, float]:
    """Percent of a core that each uses, over so many seconds."""
    before = {name: cpu(pid) for name, pid in roots.items()}
    time.sleep(seconds)
    return {name: (cpu(pid) - before[name]) / seconds * 100 for name, pid in roots.items()}


async def _parked(found: Served, roots: dict[str, int], seconds: float) -> dict[str, float]:
    """The shares while sessions wait for a thinker that is stopped."""
    thinker = list(_tree(roots["thinker"]))
    for pid in thinker:
        os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(all_of(found.url, PARKED))
    try:
        await asyncio.sleep(3)  # until all of them have arrived
        return await asyncio.to_thread(_shares, roots, seconds)
    finally:
        for pid in thinker:
            os.kill(pid, signal.SIGCONT)
        await waiting


def run(rounds: int = 5, seconds: float = 15.0) -> list[Bar]:
    """All three."""
    times: dict[str, list[float]] = {"overlap": [], "whole": []}
    with served() as overlap:
        print(f"  ready after {overlap.start:.1f} s", flush=True)
        asyncio.run(all_of(overlap.url, PARKED))  # the first steps of an engine are slow ones
        roots = overlap.roots()
        time.sleep(3)
        before = _shares(roots, seconds)
        parked = asyncio.run(_parked(overlap, roots, seconds))
        time.sleep(3)
        after = _shares(roots, seconds)
        idle = {name: (before[name] + after[name]) / 2 for name in roots}
        with served(overlap=False) as whole:
            asyncio.run(first_sound(whole.url, "warm up", 8))
            for number in range(rounds):
                for name, found in (("overlap", overlap), ("whole", whole)):
                    times[name].append(asyncio.run(first_sound(found.url, f"a long story {number}", TOKENS))[0])
                line = "  ".join(f"{name} {values[-1] * 1e3:.0f}" for name, values in times.items())
                print(f"  first sound, round {number + 1}: {line} ms", flush=True)
    ratio = statistics.median(a / b for a, b in zip(times["overlap"], times["whole"], strict=True))
    detail = " / ".join(f"{statistics.median(values) * 1e3:.0f}" for values in times.values())
    bars = [
        Bar(f"first sound of a {TOKENS}-token answer / without overlap", ratio, 0.5, f"{detail} ms"),
        Bar("seconds until the pipeline is ready", overlap.start, 90.0),
    ]
    for name in roots:
        if name != "thinker":  # it is stopped
            more = parked[name] - (0.0 if name == "gateway" else idle[name])
            what = "percent of a core" if name == "gateway" else "percent of a core above idle"
            detail = f"{parked[name]:.2f} %, idle {idle[name]:.2f} %"
            bars.append(Bar(f"{name}, {PARKED} parked sessions: {what}", more, 1.0, detail))
    return bars
