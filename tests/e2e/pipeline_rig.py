"""A pipeline of real vLLM stages behind a gateway, and what its users see and hear."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from tests.e2e.rig import Engines, client
from triptych.families.tiny_omni.processors import mark_of
from triptych.families.tiny_omni.sound import CODEBOOKS, MARK, sound

PROCESSORS = "triptych.families.tiny_omni.processors"
STAGES = ("thinker", "talker", "codec")
AUDIO = {"voice": "alloy", "format": "pcm16"}


def topology(record: Path, **more: Any) -> dict[str, Any]:
    """The pipeline of examples/tiny-omni.yaml. `more`: `talkers`, `chunk`, `connector`, and `stages_more`
    (fields of a stage by its id); the rest is the topology's."""
    stages_more = more.pop("stages_more", {})
    talkers, connector = more.pop("talkers", 1), more.pop("connector", "shm")
    chunk = {"initial_codec_chunk_frames": 4, "codec_chunk_frames": 25, **more.pop("chunk", {}), "record": str(record)}
    record.mkdir(exist_ok=True)
    made: dict[str, Any] = {
        "model": {"tiny": "omni"},
        "args": ["--max-num-seqs=32"],
        "stages": [
            {
                "id": "thinker",
                "final": "text",
                "max_tokens": 60,
                "take": "hidden",
                "processor": f"{PROCESSORS}:thinker_to_talker",
                "connector": connector,
            },
            {
                "id": "talker",
                "replicas": talkers,
                "processor": f"{PROCESSORS}:talker_to_codec",
                "chunk": chunk,
                "connector": connector,
            },
            {
                "id": "codec",
                "worker": "generation",
                "final": "audio",
                "processor": f"{PROCESSORS}:codec_to_sound",
                "connector": connector,
            },
        ],
        **more,
    }
    for stage in made["stages"]:
        stage |= stages_more.get(stage["id"], {})
    return made


@dataclass
class Pipeline:
    """One that is up. `url`: of its gateway; `record`: where its talkers write the codes that they emit."""

    engines: Engines
    url: str
    admin: str
    record: Path

    def client(self) -> Any:
        return client(self.url)

    def deployment(self) -> str:
        """The name under which the ends of its edges find each other."""
        argv = self.engines.plan.processes[0].argv
        config = json.loads(argv[argv.index("--additional-config") + 1])
        return str(config["stage"]["connector"]["extra"]["deployment"])

    def timeline(self, request_id: str) -> dict[str, Any]:
        """What the gateway knows of a request."""
        with urllib.request.urlopen(f"{self.admin}/debug/requests/{request_id}", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def codes(self, request_id: str) -> torch.Tensor:
        """The codes `[frames, CODEBOOKS]` that the run emitted for a request; all must carry its mark."""
        ((name, path),) = (
            (name, path)
            for path in self.record.iterdir()
            if request_id in (name := bytes.fromhex(path.stem).decode(errors="replace"))
        )
        frames = np.fromfile(path, np.int16).reshape(-1, CODEBOOKS).astype(np.int64)
        assert set(frames[:, MARK].tolist()) <= {mark_of(name)}
        return torch.from_numpy(frames)

    def whole(self, request_id: str) -> bytes:
        """The sound of one pass over these codes, as PCM."""
        return bytes(sound(self.codes(request_id)).numpy().tobytes())


@contextmanager
def pipeline(directory: Path, **more: Any) -> Iterator[Pipeline]:
    """A pipeline that is up until the block ends. `more` as of `topology`."""
    listen, admin = free_port(), free_port()
    record = directory / "record"
    given = topology(record, **more)
    given["gateway"] = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", **given.get("gateway", {})}
    with Engines(given, directory / "log") as engines:
        yield Pipeline(engines, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}", record)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


@dataclass
class Heard:
    """An answer in text and sound, and when its pieces came, in seconds from the call."""

    request_id: str = ""
    transcript: str = ""
    pcm: bytes = b""
    words_at: list[float] = field(default_factory=list)
    sound_at: list[float] = field(default_factory=list)
    finish: str | None = None


async def hear(openai: AsyncOpenAI, text: str, most: int, *, until_sound: int | None = None) -> Heard:
    """Ask in a stream. `until_sound`: leave after so many pieces of sound."""
    heard, began = Heard(), time.monotonic()
    raw = await openai.chat.completions.with_raw_response.create(
        model="omni",
        messages=[{"role": "user", "content": text}],
        modalities=["text", "audio"],
        audio=AUDIO,  # type: ignore[arg-type]
        max_tokens=most,
        stream=True,
    )
    heard.request_id = raw.headers["x-request-id"]
    stream: Any = raw.parse()
    async with stream:
        async for event in stream:
            now = time.monotonic() - began
            for choice in event.choices:
                audio = choice.delta.audio
                if audio is not None and audio.transcript:
                    heard.transcript += audio.transcript
                    heard.words_at.append(now)
                if audio is not None and audio.data:
                    heard.pcm += base64.b64decode(audio.data)
                    heard.sound_at.append(now)
                    if until_sound is not None and len(heard.sound_at) >= until_sound:
                        return heard
                heard.finish = choice.finish_reason or heard.finish
    return heard


def left(found: Pipeline) -> dict[str, float]:
    """Requests that engines still have, by engine."""
    names = [name for name in found.engines.names() if not name.startswith("gateway")]
    return {name: _running(found.engines.url(name)) for name in names}


def _running(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    )


def shared_memory(deployment: str) -> set[str]:
    """What of a run is in shared memory, with the processes that have it."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            for fd in os.listdir(f"/proc/{entry}/fd"):
                target = os.readlink(f"/proc/{entry}/fd/{fd}")
                if f"triptych:{deployment}:" in target:
                    found.add(f"{entry}:{target}")
        except OSError:
            continue
    return found


async def all_or_first_error(*coming: Any) -> list[Any]:
    """The results of all, or the first error; nothing is left running."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in coming]
    return [task.result() for task in tasks]
