"""Real vLLM processes for tests: started light, waited for, asked over HTTP, and stopped whatever happens."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import io
import json
import math
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.engine.light import CPU_FLAGS, cpu_environment

MODEL = "tiny"
START_TIMEOUT_S = 300.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Answer:
    """Status and JSON body of a response."""

    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """What the model said; the whole answer where it said nothing."""
        return self.body["choices"][0]["message"]["content"] if self.status == 200 else f"{self.status} {self.body}"

    @property
    def ec(self) -> dict[str, Any]:
        """What an encoder announced."""
        return self.body.get("ec_transfer_params") or {}


class Engine:
    """One `vllm serve` on a port of its own."""

    def __init__(
        self, name: str, model: Path, log: Path, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, "-m", "triptych.engine.vllm", "serve", str(model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *CPU_FLAGS, *flags]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=cpu_environment(os.environ) | dict(env or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no threads run while engines are started
            )

    def __repr__(self) -> str:
        return f"<engine {self.name} on {self.port}>"

    def wait_until_ready(self) -> None:
        """Return when the engine is healthy; AssertionError with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self!r} did not start:\n{self.log()[-4000:]}")
            # Only a process that starts: there is no event to wait for.
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether /health says so."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def post(self, path: str, body: object, timeout: float = 60) -> Answer:
        """Send JSON, get JSON."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return Answer(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.loads(error.read()))

    def chat(self, parts: Sequence[object], text: str = "what is this?", tokens: int = 12, **more: object) -> Answer:
        """One question about media parts, answered greedily."""
        content = [*parts, *([{"type": "text", "text": text}] if text else [])]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}
        return self.post("/v1/chat/completions", body | {"max_tokens": tokens} | more)

    def encode(self, parts: Sequence[object]) -> Answer:
        """The encode leg of a request."""
        return self.chat(parts, text="", tokens=1)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels; 0 if there are none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            text = response.read().decode()
        total = 0.0
        for line in text.splitlines():
            if match := re.fullmatch(re.escape(name) + r"(?:\{(.*)\})? (\S+)", line):
                found = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
                if labels.items() <= found.items():
                    total += float(match[2])
        return total

    def log(self) -> str:
        """All that the engine has printed."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the server process and all below it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End every process of the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.signal(signal.SIGKILL)
        self._process.wait(10)


def start_all(*engines: Engine) -> None:
    """Wait until all are ready; stop all if one is not."""
    try:
        for engine in engines:
            engine.wait_until_ready()
    except BaseException:
        for engine in engines:
            engine.stop()
        raise


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def ec_flags(role: str, store: Path, **extra: object) -> list[str]:
    """Flags that give an engine our EC connector."""
    config = {
        "ec_connector": "TriptychECConnector",
        "ec_connector_module_path": "triptych.engine.ec_connector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(store), **extra},
    }
    return ["--ec-transfer-config", json.dumps(config)]


def image(seed: int, width: int = 112, height: int = 112) -> dict[str, Any]:
    """A message part with a random image of few colours. 112 × 112 pixels make 16 rows of encoder output."""
    source = random.Random(seed)
    cells = [source.randbytes(3) for _ in range(64)]
    lines = [
        b"\0" + b"".join(cells[(y * 8 // height) * 8 + x * 8 // width] for x in range(width)) for y in range(height)
    ]
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_png(width, height, b''.join(lines))}"}}


def _png(width: int, height: int, data: bytes) -> str:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


def sound(seed: int, rate: int = 16000) -> dict[str, Any]:
    """A message part with a quarter of a second of three random tones, at `rate` samples per second."""
    source = random.Random(seed)
    tones = [source.uniform(100, 3000) for _ in range(3)]
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        values = [
            int(8000 * sum(math.sin(2 * math.pi * tone * at / rate) for tone in tones) / 3) for at in range(rate // 4)
        ]
        file.writeframes(struct.pack(f"<{len(values)}h", *values))
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"},
    }


def metadata_parts(announced: Mapping[str, Any], modality: str) -> list[dict[str, Any]]:
    """What a consumer gets instead of the media: for each item, in order, its hash and placeholder metadata."""
    parts: dict[int, dict[str, Any]] = {}
    for identifier, entry in announced.items():
        for index in entry["item_indices"]:
            parts[index] = bare_part(identifier, modality, entry["metadata"])
    return [parts[index] for index in sorted(parts)]


def bare_part(identifier: str, modality: str, metadata: object) -> dict[str, Any]:
    """A metadata-only media part."""
    return {"type": f"{modality}_embeds", f"{modality}_embeds": metadata, "uuid": identifier}
