"""Seeded random weights in the safetensors format, with the standard library alone.

A tiny model's answer has to depend on its image, or "the same answer as a plain engine" proves nothing. vLLM's own
dummy weights (uniform within ±0.001) give one constant answer, so the recipes bring weights of a useful scale.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

_MAX_U16 = 65535


@dataclass(frozen=True, slots=True)
class Tensor:
    """One float32 tensor of a checkpoint.

    `std` is the standard deviation of its values (uniformly distributed around 0), 0 makes them all `fill`.
    `silent` is a number of leading rows (first dimension) that are zeroed: logits that greedy sampling never picks.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    fill: float = 0.0
    silent: int = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def linear(name: str, rows: int, columns: int, *, gain: float = 1.0) -> Tensor:
    """A weight matrix (rows × columns) that keeps the scale of its input, times `gain`."""
    return Tensor(name, (rows, columns), std=gain / math.sqrt(columns))


def zeros(name: str, *shape: int) -> Tensor:
    """A bias."""
    return Tensor(name, shape)


def ones(name: str, *shape: int) -> Tensor:
    """A norm's weight."""
    return Tensor(name, shape, fill=1.0)


def write_safetensors(file: BinaryIO, tensors: Iterable[Tensor], seed: str) -> None:
    """Write `tensors` to `file`. The same seed and the same tensors give the same bytes on every machine."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        end = offset + 4 * tensor.size
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little"))
    file.write(head)
    for tensor in ordered:
        file.write(_values(tensor, seed))


def _values(tensor: Tensor, seed: str) -> bytes:
    if tensor.std == 0.0:
        values = array("f", [tensor.fill]) * tensor.size
    else:
        # One stream per tensor, so that a recipe can gain a tensor without a change to the others.
        stream = random.Random(hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest())
        raw = array("H", stream.randbytes(2 * tensor.size))
        half_width = math.sqrt(3.0) * tensor.std
        step = 2.0 * half_width / _MAX_U16
        values = array("f", [value * step - half_width for value in raw])
        row = tensor.size // tensor.shape[0]
        values[: tensor.silent * row] = array("f", [0.0]) * (tensor.silent * row)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
