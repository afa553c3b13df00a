"""Frames as a broken or hostile sender would make them, of good ones: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from triptych.transfer.payload import Codes, Ids, Meta, StagePayload
from triptych.transfer.wire import ITEM_SIZES, Frames, Tensor, encode

# Bytes that mean something to msgpack: containers, extensions, long text, dates; lengths that no chunk has.
TOKENS = (
    *(bytes([code]) for code in (0x80, 0x90, 0x81, 0x91, 0xC1, 0xC4, 0xC7, 0xD4, 0xD6, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF)),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"),
    *(b"\xd6\xff\x00\x00\x00\x00", b"\xff" * 8, b"\x00" * 8, b"\x91" * 40, b"\x81\xa1a" * 40),
)


def good() -> list[Frames]:
    """Chunks of every kind of value, every dtype among them."""
    tensors = [Tensor(name, (2, 3), bytes(6 * size)) for name, size in ITEM_SIZES.items()]
    return [
        encode(StagePayload(codes=Codes(audio=tensors[7]), meta=Meta(finished=Tensor("bool", (), b"\1")))),
        encode(StagePayload(ids=Ids(prompt=list(range(300)), tts="tëxt" * 30), extra={"blob": b"x" * 2000, "b": b"y"})),
        encode({"all": tensors, "nested": {"a": [{"b": [tensors[0], None, -1, 2**63, 0.5]}]}}),
        encode({"empty": Tensor("float32", (0, 5, 2), b""), "list": [], "dict": {}, "text": ""}),
        encode([[[[[[[["deep"]]]]]]]]),
        encode("a text"),
    ]


def mutants(seed: int, sources: list[Frames]) -> Iterator[tuple[bytes, list[bytes | memoryview]]]:
    """Heads and buffers without end, each one to four changes away from a good one."""
    rng = random.Random(seed)
    while True:
        chosen = rng.choice(sources)
        head, buffers = bytearray(chosen.head), list[bytes | memoryview](chosen.buffers)
        for _ in range(rng.randint(1, 4)):
            if buffers and rng.random() < 0.25:
                mutate_buffers(rng, buffers)
            else:
                mutate_bytes(rng, head, rng.choice(sources).head)
        yield bytes(head), buffers


def mutate_bytes(rng: random.Random, data: bytearray, other: bytes) -> None:
    """One change of some bytes: a bit, a byte, a cut, a repeat, a token, a splice with `other`."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.randrange(256)
        case 2:
            del data[at:]
        case 3:
            del data[at : at + rng.randint(1, 8)]
        case 4:
            data[at:at] = data[at : at + rng.randint(1, 16)]
        case 5:
            token = rng.choice(TOKENS)
            data[at : at + rng.choice((0, len(token)))] = token
        case _:
            data[at:] = other[rng.randrange(len(other) + 1) :]


def mutate_buffers(rng: random.Random, buffers: list[bytes | memoryview]) -> None:
    """One change of which buffers there are, or of how long one is or what is in it."""
    at = rng.randrange(len(buffers))
    match rng.randrange(6):
        case 0:
            del buffers[at]
        case 1:
            buffers.insert(at, buffers[-1])
        case 2:
            other = rng.randrange(len(buffers))
            buffers[at], buffers[other] = buffers[other], buffers[at]
        case 3:
            buffers[at] = buffers[at][: rng.randrange(len(buffers[at]) + 1)]
        case 4:
            buffers[at] = bytes(buffers[at]) + rng.randbytes(rng.randint(1, 9))
        case _:
            buffers[at] = rng.randbytes(len(buffers[at]))
