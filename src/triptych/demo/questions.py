"""What the demo asks: pictures drawn here, and a handful of questions about them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

SIZE = 112  # pixels; a few dozen tokens for the tiny model
Colour = tuple[int, int, int]
Painter = Callable[[int, int], Colour]

RED, BLUE, GREEN, GOLD, WHITE, BLACK = (
    (200, 30, 40),
    (40, 70, 200),
    (30, 150, 80),
    (230, 180, 30),
    (245, 245, 240),
    (20, 20, 30),
)


def _disc(x: int, y: int) -> Colour:
    return RED if (x - 56) ** 2 + (y - 56) ** 2 < 40**2 else WHITE


def _board(x: int, y: int) -> Colour:
    return BLACK if (x // 14 + y // 14) % 2 else WHITE


def _stripes(x: int, y: int) -> Colour:
    return (GREEN, GOLD, BLUE)[(x + y) // 16 % 3]


def png(paint: Painter, size: int = SIZE) -> bytes:
    """A square RGB picture of `size` pixels, as a PNG file."""
    rows = b"".join(b"\0" + bytes(v for x in range(size) for v in paint(x, y)) for y in range(size))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def data_url(paint: Painter) -> str:
    """The picture as a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(png(paint)).decode("ascii")


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the demo. new_pictures: pictures that no question before it had."""

    title: str
    text: str
    pictures: tuple[Painter, ...] = ()
    new_pictures: int = 0
    stream: bool = False

    def messages(self) -> list[dict[str, object]]:
        """The request's messages, in the OpenAI form."""
        parts: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in self.pictures
        ]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]


QUESTIONS = (
    Question("one picture", "What is in this picture, and which colours has it?", (_disc,), 1),
    Question("another picture", "Describe what you see on this board in one sentence.", (_board,), 1),
    Question("two pictures", "Which of these two pictures has more colours, and why?", (_disc, _stripes), 1),
    Question("the first picture again", "Is the shape in the middle of this one round or square?", (_disc,)),
    Question("streamed", "Tell a short story that begins with these stripes.", (_stripes,), stream=True),
    Question("no picture at all", "Name three things that a picture could show; a text takes no encode leg."),
)
