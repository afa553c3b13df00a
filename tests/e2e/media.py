"""Media for the tests: pictures and sounds that differ by a number."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
from typing import Any

from triptych.demo.questions import png

QUESTION = "What does this show, and what else could it be? Answer at length, please."


def picture(seed: int) -> dict[str, Any]:
    """An image part."""
    data = png(lambda x, y: ((x * seed) % 256, (y * (seed + 3)) % 256, (seed * 37) % 256))
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def sound(seed: int, seconds: float = 0.5) -> dict[str, Any]:
    """An audio part: a tone."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        samples = (int(9000 * math.sin(i * (200 + 90 * seed) * math.tau / 16000)) for i in range(int(16000 * seconds)))
        out.writeframes(b"".join(struct.pack("<h", s) for s in samples))
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def ask(*parts: dict[str, Any], text: str = QUESTION) -> list[dict[str, Any]]:
    """Messages of one user turn: the parts, then the question."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
