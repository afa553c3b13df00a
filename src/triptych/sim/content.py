"""What an engine answers: tokens as a pure function of the model, the prompt and the media that it took.

Two engines that saw the same thing answer the same tokens, whatever way the media or the prompt's KV came to
them; one wrong item, one item out of order, or another request's KV gives another answer.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

WORDS: Final[tuple[str, ...]] = tuple(
    a + b
    for a in ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za")
    for b in ("be", "da", "fo", "gi", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xu", "zi")
)
TOKEN_BASE: Final = 1000
"""token id of WORDS[0]"""


def digest(data: bytes | bytearray | memoryview) -> str:
    """The name of a content: 32 hex digits."""
    return blake3(data).hexdigest(16)


def prompt_key(model: str, text: str, media: list[str]) -> bytes:
    """The state of an engine that has read a prompt: 32 bytes.

    `media` are the digests of what was taken, in order of their places in the text.
    """
    hasher = blake3(model.encode())
    hasher.update(b"\0")
    hasher.update(text.encode("utf-8", "surrogatepass"))
    for item in media:
        hasher.update(b"\0")
        hasher.update(item.encode())
    return hasher.digest()


def natural_length(key: bytes) -> int:
    """How many tokens an answer has that no limit cuts."""
    return 12 + key[0] % 20


def tokens(key: bytes, count: int, choice: int = 0) -> bytes:
    """`count` tokens of one choice, one byte each: the index in WORDS."""
    if count <= 0:
        return b""
    return blake3(key + choice.to_bytes(4, "big")).digest(length=count)


def pieces(ids: bytes) -> list[str]:
    """The text of each token; their concatenation is the answer's text."""
    texts = [" " + WORDS[i] for i in ids]
    if texts:
        texts[0] = texts[0][1:]
    return texts


def vector(key: bytes, size: int) -> list[float]:
    """An embedding of unit-ish scale, deterministic."""
    raw = blake3(key).digest(length=size)
    return [(byte - 127.5) / 127.5 for byte in raw]
