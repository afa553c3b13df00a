"""torch tensors on top of the wire form: no element is copied, either way, where that is possible.

blob = Encoder().encode(StagePayload(codes=Codes(audio=torch.tensor([1, 2]))))
Decoder().decode(blob)  # {"codes": {"audio": tensor([1, 2])}}
"""

from __future__ import annotations

from typing import Any, Final

import torch

from triptych.transfer.errors import WireError
from triptych.transfer.wire import ITEM_SIZES, Buffer, Tensor, decode, encode, pack, unpack

# A dtype that this version of torch lacks is an error where it comes up.
_DTYPES: Final = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


def view(value: torch.Tensor) -> Tensor:
    """A tensor's elements, which it keeps alive; a copy where they are on another device, not in C order, or lazily
    conjugated or negated.

    Raises:
        WireError: it has no elements of a known dtype: sparse, nested, quantized, on the meta device.
    """
    name = _NAMES.get(value.dtype)
    if name is None or value.layout is not torch.strided or value.is_meta or value.is_nested:
        raise WireError(f"a {value.layout} tensor of {value.dtype} on {value.device} has no wire form")
    # Each call costs about a microsecond, also where it has nothing to do.
    plain = value if value.is_cpu else value.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    shape = tuple(plain.shape)
    if not plain.numel():
        return Tensor(name, shape, b"")
    if not shape:
        plain = plain.view(1)
    elif not plain.is_contiguous() or plain.stride(-1) != 1:  # a dimension of size 1 has any stride
        plain = plain.clone(memory_format=torch.contiguous_format)
    # numpy knows bytes, and not bfloat16 or float8.
    return Tensor(name, shape, memoryview(plain.view(torch.uint8).numpy()))


def tensor(value: Tensor) -> torch.Tensor:
    """A CPU tensor on the same memory, which it keeps alive and may write to.

    On a copy where that memory is read-only (bytes, say), which torch has no notion of, or begins where no element of
    this dtype may.

    Raises:
        WireError: this version of torch lacks the dtype.
    """
    dtype = _DTYPES.get(value.dtype)
    if dtype is None:
        raise WireError(f"this version of torch has no {value.dtype}")
    buffer: Buffer = value.buffer
    if not value.buffer.nbytes:
        return torch.empty(value.shape, dtype=dtype)
    if value.buffer.readonly:
        buffer = bytearray(buffer)
    flat = torch.frombuffer(buffer, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:
        flat = torch.frombuffer(buffer, dtype=torch.uint8).clone().view(dtype)
    return flat if len(value.shape) == 1 else flat.view(value.shape)


class Encoder:
    """Payloads to bytes."""

    def encode(self, payload: object) -> bytes:
        """One blob. Raises WireError for what has no wire form."""
        return pack(encode(payload))


class Decoder:
    """Bytes to payloads: nested dicts with torch tensors."""

    def decode(self, blob: Buffer) -> Any:
        """Tensors are on the blob's memory where it is writable, else on copies of their own.

        Raises WireError unless the bytes are exactly one encoded payload.
        """
        frames = unpack(blob)
        return decode(frames.head, frames.buffers, tensor)
