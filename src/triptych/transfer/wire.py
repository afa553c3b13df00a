"""The wire form of a chunk: one msgpack head, and the tensors' bytes beside it as they are.

    frames = encode({"codes": {"audio": Tensor("int64", (3,), codes)}})
    decode(frames.head, frames.buffers)  # the same nested dicts; Tensor.buffer is a view on the buffer given

`encode` copies no tensor and `decode` none either. In the head a tensor is an extension that says which buffer, which
dtype and which shape; `bytes` are one too (of 1 KiB or more: beside the head). Dtypes are a closed table, no class is
built and nothing is looked up by a name from the wire.

What does not fit is a `WireError` that says what and where, found before anything of the size that the wire claims is
allocated. Decoding takes at most 80 bytes of memory per byte of the head, and a head has at most `MAX_HEAD` bytes.

No torch here: `triptych.transfer.tensors` puts torch tensors on top.
"""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.msgpack import Ext

from triptych.transfer.errors import ConnectorError, WireError

ITEM_SIZES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of one element. A dtype's code on the wire is its place in this table: new ones go to the end."""

MAX_HEAD: Final = 4 << 20
MAX_BUFFERS: Final = 1 << 12
MAX_DEPTH: Final = 8
"""Containers in each other."""
MAX_DIMS: Final = 32

Buffer = bytes | bytearray | memoryview

_NAMES: Final = tuple(ITEM_SIZES)
_CODES: Final = {name: code for code, name in enumerate(_NAMES)}
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
# Extensions of the head.
_TENSOR: Final = 1  # u16 buffer, u8 dtype, then the dimensions, u64 each
_BYTES: Final = 2  # the bytes
_LONG_BYTES: Final = 3  # u16 buffer
_DESCRIPTION: Final = struct.Struct("<HB")
_INDEX: Final = struct.Struct("<H")
_SHAPES: Final = tuple(struct.Struct(f"<{dims}Q") for dims in range(MAX_DIMS + 1))
_INLINE: Final = 1024
# A blob: this, the buffers' lengths (u64 each), the head, then each buffer at a multiple of _ALIGN.
_PREFIX: Final = struct.Struct("<4sII")
_MAGIC: Final = b"TPW1"
_ALIGN: Final = 64
# So that no stride or size overflows 64 bits, in any framework.
_MOST_BYTES: Final = 1 << 62


class Tensor:
    """A tensor without a framework. `buffer`: its elements in C order; `shape` () is a scalar."""

    __slots__ = ("buffer", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], buffer: Buffer) -> None:
        """Raises ValueError where dtype, shape and buffer do not fit each other."""
        view = memoryview(buffer)
        if view.format != "B" or view.ndim != 1 or not view.c_contiguous:
            if not view.c_contiguous:
                raise ValueError(f"the bytes of a {dtype} tensor of shape {shape} are not in one piece")
            view = view.cast("B") if view.nbytes else memoryview(b"")
        size = ITEM_SIZES.get(dtype)
        if size is None:
            raise ValueError(f"{dtype!r} is no dtype of the wire form")
        if len(shape) > MAX_DIMS:
            raise ValueError(f"a {dtype} tensor has {len(shape)} dimensions: at most {MAX_DIMS}")
        nbytes = room = size
        for length in shape:
            if length < 0:
                raise ValueError(f"a {dtype} tensor of shape {shape}")
            nbytes *= length
            room *= length or 1
        if nbytes != view.nbytes:
            raise ValueError(f"a {dtype} tensor of shape {shape} has {nbytes} bytes, not {view.nbytes}")
        if room > _MOST_BYTES:
            raise ValueError(f"a {dtype} tensor of shape {shape} is too large for an empty one")
        self.dtype = dtype
        self.shape = shape
        self.buffer = view

    def __repr__(self) -> str:
        return f"<Tensor {self.dtype} {list(self.shape)}>"


class Frames(NamedTuple):
    """One encoded object: its head, and the buffers beside it in the order in which the head counts them."""

    head: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


class _Unfit(Exception):
    """A reason, and the way to it from the inside out; becomes a WireError."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str | int] = []

    def error(self) -> WireError:
        where = "".join(f"[{step!r}]" for step in reversed(self.path))
        return WireError(f"{self}, at {where}" if where else str(self))


def encode(obj: object) -> Frames:
    """The wire form of an object. Its tensors must not change until their bytes have been taken.

    Values: str, int of 64 bits, float, bool, None, bytes, bytearray, lists, tuples (they arrive as lists), dicts with
    text keys, msgspec structs (they arrive as dicts without the fields that are None), `Tensor`, torch tensors.

    Raises:
        WireError: something else, more than `MAX_DEPTH` containers in each other, `MAX_BUFFERS` tensors, or `MAX_HEAD`
            bytes beside them.
    """
    buffers: list[memoryview] = []
    try:
        head = _ENCODER.encode(_plain(obj, buffers, MAX_DEPTH))
    except _Unfit as unfit:
        raise unfit.error() from None
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:  # text or a number that msgpack cannot hold
        raise WireError(f"a value has no wire form: {error}") from None
    if len(head) > MAX_HEAD:
        raise WireError(f"{len(head)} bytes beside the tensors of one chunk: at most {MAX_HEAD}")
    return Frames(head, buffers)


def _plain(value: Any, buffers: list[memoryview], depth: int) -> Any:
    """What msgpack can hold of a value; tensors' bytes are appended to `buffers`."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return _refer(value, buffers)
    if isinstance(value, bytes | bytearray):
        if len(value) < _INLINE:
            return Ext(_BYTES, bytes(value))
        return Ext(_LONG_BYTES, _INDEX.pack(_append(memoryview(value), buffers)))
    if isinstance(value, msgspec.Struct):
        value = {name: item for name in kind.__struct_fields__ if (item := getattr(value, name)) is not None}
    if isinstance(value, dict):
        return _plain_dict(value, buffers, depth)
    if isinstance(value, list | tuple):
        return _plain_list(value, buffers, depth)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            return _refer(importlib.import_module("triptych.transfer.tensors").view(value), buffers)
        except WireError as error:
            raise _Unfit(str(error)) from None
    raise _Unfit(f"a value of type {kind.__module__}.{kind.__qualname__} has no wire form")


def _plain_dict(value: dict[Any, Any], buffers: list[memoryview], depth: int) -> dict[str, Any]:
    if not depth:
        raise _Unfit(f"more than {MAX_DEPTH} containers in each other")
    out = {}
    key = None
    try:
        for key, item in value.items():
            if type(key) is not str:
                raise _Unfit(f"a key of type {type(key).__name__}, not text")
            out[key] = item if type(item) in _SCALARS else _plain(item, buffers, depth - 1)
    except _Unfit as unfit:
        unfit.path.append(key if isinstance(key, str | int) else repr(key))
        raise
    return out


def _plain_list(value: Sequence[Any], buffers: list[memoryview], depth: int) -> Sequence[Any]:
    if not depth:
        raise _Unfit(f"more than {MAX_DEPTH} containers in each other")
    if _SCALARS.issuperset(map(type, value)):
        return value
    out = []
    try:
        for item in value:
            out.append(_plain(item, buffers, depth - 1))
    except _Unfit as unfit:
        unfit.path.append(len(out))
        raise
    return out


def _refer(value: Tensor, buffers: list[memoryview]) -> Ext:
    head = _DESCRIPTION.pack(_append(value.buffer, buffers), _CODES[value.dtype])
    return Ext(_TENSOR, head + _SHAPES[len(value.shape)].pack(*value.shape) if value.shape else head)


def _append(buffer: memoryview, buffers: list[memoryview]) -> int:
    if len(buffers) == MAX_BUFFERS:
        raise _Unfit(f"more than {MAX_BUFFERS} tensors in one chunk")
    buffers.append(buffer)
    return len(buffers) - 1


def decode(head: Buffer, buffers: Sequence[Buffer], tensor: Callable[[Tensor], Any] | None = None) -> Any:
    """The object, of plain values and of what `tensor` makes of each `Tensor` (by default nothing: it stays one).

    Views are on the buffers given: whoever owns those keeps them until the last view is gone.

    Raises:
        WireError: what came is not what `encode` makes.
    """
    if len(head) > MAX_HEAD:
        raise WireError(f"a chunk's head of {len(head)} bytes: at most {MAX_HEAD}")
    if len(buffers) > MAX_BUFFERS:
        raise WireError(f"{len(buffers)} buffers in a chunk: at most {MAX_BUFFERS}")
    rest: list[Buffer | None] = list(buffers)
    try:
        # A copy, so that a sender cannot change the head, where its memory is shared, between a check and a use.
        obj = _restore(_DECODER.decode(bytes(head)), rest, tensor)
    except _Unfit as unfit:
        raise unfit.error() from None
    except msgspec.MsgspecError as error:
        raise WireError(f"a chunk's head does not decode: {error}") from None
    for index, buffer in enumerate(rest):
        if buffer is not None:
            raise WireError(f"buffer {index} of {len(rest)} of a chunk belongs to nothing in its head")
    return obj


def _restore(value: Any, rest: list[Buffer | None], tensor: Callable[[Tensor], Any] | None) -> Any:
    """The value with its extensions resolved, in place; each takes its buffer out of `rest`."""
    kind = type(value)
    at: str | int = 0
    try:
        if kind is dict:
            for at, item in value.items():
                if type(item) not in _SCALARS:
                    value[at] = _restore(item, rest, tensor)
        elif kind is list:
            if not _SCALARS.issuperset(map(type, value)):
                for at, item in enumerate(value):
                    value[at] = _restore(item, rest, tensor)
        elif kind is Ext:
            return _resolve(value, rest, tensor)
    except _Unfit as unfit:
        if kind is not Ext:
            unfit.path.append(at)
        raise
    return value


def _resolve(ext: Ext, rest: list[Buffer | None], tensor: Callable[[Tensor], Any] | None) -> Any:
    data = bytes(ext.data)
    if ext.code == _BYTES:
        return data
    if ext.code == _LONG_BYTES and len(data) == _INDEX.size:
        return bytes(_take(_INDEX.unpack(data)[0], rest))
    dims, odd = divmod(len(data) - _DESCRIPTION.size, 8)
    if ext.code != _TENSOR or odd or dims > MAX_DIMS:
        raise _Unfit(f"extension {ext.code} of {len(data)} bytes")
    index, code = _DESCRIPTION.unpack_from(data)
    if code >= len(_NAMES):
        raise _Unfit(f"dtype {code}, which is none of {len(_NAMES)}")
    buffer = _take(index, rest)
    try:
        value = Tensor(_NAMES[code], _SHAPES[dims].unpack_from(data, _DESCRIPTION.size), buffer)
    except ValueError as error:
        raise _Unfit(str(error)) from None
    # A framework may take another byte than 0 and 1 for both.
    if code == 0 and bytes(value.buffer).translate(None, b"\0\1"):
        raise _Unfit(f"a bool tensor of shape {value.shape} with other bytes than 0 and 1")
    if tensor is None:
        return value
    try:
        return tensor(value)
    except WireError as error:
        raise _Unfit(str(error)) from None


def _take(index: int, rest: list[Buffer | None]) -> Buffer:
    buffer = rest[index] if index < len(rest) else None
    if buffer is None:
        raise _Unfit(f"buffer {index}, which " + ("is used twice" if index < len(rest) else f"{len(rest)} do not have"))
    rest[index] = None
    return buffer


def _values(depth: int) -> Any:
    """The type of what a head may hold. msgspec knows no recursive one, so this is also what bounds the depth; it keeps
    out keys that are no text, and dates, which msgspec makes of extension -1 where it may."""
    leaf = str | int | float | bool | None | Ext
    kind: Any = leaf
    for _ in range(depth):
        kind = leaf | dict[str, kind] | list[kind]
    return kind


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_values(MAX_DEPTH))


def pack(frames: Frames) -> bytes:
    """One blob, with each buffer at a multiple of 64 bytes from its start."""
    sizes = [buffer.nbytes for buffer in frames.buffers]
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, len(frames.head), len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes)]
    parts.append(frames.head)
    at = _PREFIX.size + 8 * len(sizes) + len(frames.head)
    for buffer in frames.buffers:
        parts += (bytes(-at % _ALIGN), buffer)
        at += -at % _ALIGN + buffer.nbytes
    return b"".join(parts)


def unpack(blob: Buffer) -> Frames:
    """The frames of a blob: a copy of the head, views on the rest. Raises WireError unless it is exactly one."""
    view = memoryview(blob).cast("B")
    size = view.nbytes
    if size < _PREFIX.size:
        raise WireError(f"{size} bytes are no packed chunk")
    magic, head_size, count = _PREFIX.unpack_from(view)
    at = _PREFIX.size + 8 * count
    if magic != _MAGIC or count > MAX_BUFFERS or head_size > MAX_HEAD or at + head_size > size:
        raise WireError(f"{size} bytes that begin with {magic!r} are no packed chunk of this version")
    sizes = struct.unpack_from(f"<{count}Q", view, _PREFIX.size)
    head = bytes(view[at : at + head_size])
    at += head_size
    buffers: list[memoryview] = []
    for index, nbytes in enumerate(sizes):
        at += -at % _ALIGN
        if at + nbytes > size:
            raise WireError(f"a packed chunk of {size} bytes ends before its buffer {index} of {nbytes} bytes does")
        buffers.append(view[at : at + nbytes])
        at += nbytes
    if at != size:
        raise WireError(f"{size - at} bytes behind a packed chunk")
    return Frames(head, buffers)


def tensor_maker(kind: str | None = None) -> Callable[[Tensor], Any] | None:
    """What `decode` takes as `tensor`: for "torch" what makes torch tensors, for "view" None, which leaves `Tensor`s.
    None is torch where this process has it loaded. Raises ConnectorError for another name."""
    if kind not in (None, "torch", "view"):
        raise ConnectorError(f"tensors: {kind!r} is neither 'torch' nor 'view'")
    if kind == "torch" or (kind is None and "torch" in sys.modules):
        make: Callable[[Tensor], Any] = importlib.import_module("triptych.transfer.tensors").tensor
        return make
    return None
