"""The wire form: what goes in comes out, no byte is copied, and nothing that the wire claims is believed unchecked."""

from __future__ import annotations

import datetime
import enum
import itertools
import math
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from tests.transfer.frames_fuzz import good, mutants, mutate_bytes
from triptych.transfer.errors import ConnectorError, WireError
from triptych.transfer.payload import Codes, Meta, StagePayload
from triptych.transfer.wire import (
    ITEM_SIZES,
    MAX_BUFFERS,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_HEAD,
    Frames,
    Tensor,
    decode,
    encode,
    pack,
    tensor_maker,
    unpack,
)

ext = msgspec.msgpack.Encoder().encode


def description(buffer: int, dtype: int, *shape: int) -> Ext:
    """A tensor in a head, as it goes over the wire; checks nothing."""
    return Ext(1, struct.pack(f"<HB{len(shape)}Q", buffer, dtype, *shape))


def plain(value: Any) -> Any:
    """For comparing: tensors as their fields, floats by their bits, lists for tuples."""
    match value:
        case Tensor():
            return ("tensor", value.dtype, tuple(value.shape), bytes(value.buffer))
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case bool() | None | str() | bytes():
            return (type(value).__name__, value)
        case bytearray():
            return ("bytes", bytes(value))
        case float():
            return ("float", struct.pack("<d", value))
        case _:
            return (type(value).__name__, value)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(ITEM_SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = math.prod(shape) * ITEM_SIZES[dtype]
    byte = st.integers(0, 1) if dtype == "bool" else st.integers(0, 255)
    return Tensor(dtype, shape, bytes(draw(st.lists(byte, min_size=size, max_size=size))) if size < 64 else bytes(size))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.sampled_from((1023, 1024, 5000)).map(bytes)
    | tensors()
)


def containers(depth: int) -> st.SearchStrategy[Any]:
    """Values with up to `depth` containers in each other."""
    if not depth:
        return scalars
    inner = st.deferred(lambda: containers(depth - 1))
    return (
        scalars
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )


# Round trips


@given(containers(MAX_DEPTH))
def test_every_value_comes_out_as_it_went_in(value: Any) -> None:
    frames = encode(value)
    assert plain(decode(frames.head, frames.buffers)) == plain(value)
    assert frames.nbytes == len(frames.head) + sum(len(buffer) for buffer in frames.buffers)


@given(containers(MAX_DEPTH))
def test_a_blob_holds_the_same_frames_with_each_buffer_aligned(value: Any) -> None:
    frames = encode(value)
    blob = pack(frames)
    again = unpack(blob)
    assert again.head == frames.head
    assert [bytes(b) for b in again.buffers] == [bytes(b) for b in frames.buffers]
    at = struct.calcsize("<4sII") + 8 * len(frames.buffers) + len(frames.head)
    for buffer in frames.buffers:
        at += -at % 64
        assert blob[at : at + len(buffer)] == buffer
        at += len(buffer)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3), (1,) * MAX_DIMS], ids=str)
@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_every_dtype_keeps_its_shape_and_its_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    data = bytes(i % 2 for i in range(math.prod(shape) * ITEM_SIZES[dtype]))
    back = decode(*encode({"t": Tensor(dtype, shape, data)}))["t"]
    assert (back.dtype, back.shape, bytes(back.buffer)) == (dtype, shape, data)


def test_a_dtype_s_code_on_the_wire_never_changes() -> None:
    # Both ends of an edge may run different versions: new dtypes go to the end.
    names = (
        "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128"
    )
    eights = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    assert list(ITEM_SIZES) == [*names.split(), *eights.split()]


def test_structs_arrive_as_dicts_without_the_fields_that_are_none() -> None:
    class Own(msgspec.Struct):
        a: int | None = 5
        b: str | None = "default"
        c: Any = None

    assert decode(*encode(Own(a=None))) == {"b": "default"}
    payload = StagePayload(codes=Codes(audio=[1]), meta=Meta(), embed={"none": None, "own": Own()})
    assert decode(*encode(payload)) == {
        "codes": {"audio": [1]},
        "meta": {},
        "embed": {"none": None, "own": {"a": 5, "b": "default"}},
    }


def test_kinds_of_dicts_and_lists_arrive_as_dicts_and_lists() -> None:
    value = {"d": OrderedDict(a=1), "n": Frames(b"h", []), "t": (1, (2,)), "b": bytearray(b"x")}
    assert decode(*encode(value)) == {"d": {"a": 1}, "n": [b"h", []], "t": [1, [2]], "b": b"x"}


# No copies


def test_encode_takes_no_copy_of_a_tensor() -> None:
    source = bytearray(64)
    frames = encode({"t": Tensor("uint8", (64,), source)})
    source[5] = 77
    assert frames.buffers[0][5] == 77


def test_decode_gives_views_on_the_buffers_given() -> None:
    head = encode({"t": Tensor("float32", (4,), bytes(16))}).head
    mine = bytearray(16)
    back = decode(head, [mine])["t"]
    mine[3] = 9
    assert back.buffer[3] == 9
    back.buffer[4] = 8
    assert mine[4] == 8


def test_unpack_gives_views_on_the_blob() -> None:
    blob = bytearray(pack(encode({"t": Tensor("uint8", (3,), b"abc")})))
    (buffer,) = unpack(blob).buffers
    blob[-1] = ord("z")
    assert bytes(buffer) == b"abz"


def test_sixteen_megabytes_cost_no_memory() -> None:
    tensor = Tensor("float32", (4 << 20,), bytearray(16 << 20))
    tracemalloc.start()
    try:
        frames = encode(StagePayload(codes=Codes(audio=tensor)))
        decode(frames.head, frames.buffers)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_bytes_travel_beside_the_head_and_short_ones_in_it(kind: type[bytes | bytearray]) -> None:
    short, long = encode([kind(1023)]), encode([kind(1024)])
    assert (len(short.buffers), len(long.buffers)) == (0, 1)
    assert len(long.head) < 16
    for frames, size in ((short, 1023), (long, 1024)):
        (back,) = decode(*frames)
        assert type(back) is bytes
        assert back == bytes(size)


def test_the_hook_makes_what_the_receiver_wants() -> None:
    frames = encode({"a": Tensor("int8", (2,), b"\1\2"), "l": [Tensor("int8", (), b"\3")]})
    assert decode(*frames, lambda t: sum(t.buffer)) == {"a": 3, "l": [3]}


# What has no wire form


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "a value of type builtins.object has no wire form"),
        ({"a": [1, {"b": {1, 2}}]}, "a value of type builtins.set has no wire form, at ['a'][1]['b']"),
        ({"a": {1: 2}}, "a key of type int, not text, at ['a'][1]"),
        ({"a": {(1, 2): 2}}, "a key of type tuple, not text, at ['a']['(1, 2)']"),
        (datetime.datetime(2026, 1, 1), "datetime.datetime"),
        (Decimal(1), "decimal.Decimal"),
        (Colour.RED, "Colour"),
        (Ext(1, b""), "Ext"),
        (memoryview(b"x"), "memoryview"),
        (2**64, "has no wire form"),
        (-(2**63) - 1, "has no wire form"),
        ("\ud800", "has no wire form"),
    ],
    ids=repr,
)
def test_what_has_no_wire_form_is_named_with_its_place(value: object, said: str) -> None:
    with pytest.raises(WireError, match=re.escape(said)):
        encode(value)


def nested(depth: int, of: str) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"k": value} if of == "dict" else [value]
    return value


@pytest.mark.parametrize("of", ["dict", "list"])
def test_depth_ends_at_the_same_place_on_both_sides(of: str) -> None:
    deepest = nested(MAX_DEPTH, of)
    assert decode(*encode(deepest)) == deepest
    with pytest.raises(WireError, match=f"more than {MAX_DEPTH} containers in each other, at "):
        encode(nested(MAX_DEPTH + 1, of))
    with pytest.raises(WireError, match="a chunk's head does not decode: Expected"):
        decode(ext(nested(MAX_DEPTH + 1, of)), [])


def test_an_endless_object_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(WireError, match="containers in each other"):
        encode(loop)


def test_a_chunk_has_so_many_tensors_and_no_more() -> None:
    one = Tensor("int8", (), b"x")
    frames = encode([one] * MAX_BUFFERS)
    assert len(decode(*frames)) == MAX_BUFFERS
    with pytest.raises(WireError, match=f"more than {MAX_BUFFERS} tensors"):
        encode([one] * (MAX_BUFFERS + 1))
    with pytest.raises(WireError, match=f"{MAX_BUFFERS + 1} buffers in a chunk"):
        decode(frames.head, [b"x"] * (MAX_BUFFERS + 1))


def test_a_head_has_so_many_bytes_and_no_more() -> None:
    longest = "x" * (MAX_HEAD - 5)
    assert decode(*encode(longest)) == longest
    with pytest.raises(WireError, match="beside the tensors"):
        encode(longest + "x")
    with pytest.raises(WireError, match=f"head of {MAX_HEAD + 1} bytes"):
        decode(ext(longest + "x"), [])


@pytest.mark.parametrize(
    ("dtype", "shape", "buffer", "said"),
    [
        ("int", (1,), b"x", "'int' is no dtype"),
        ("__class__", (), b"", "'__class__' is no dtype"),
        ("int16", (2,), b"abc", "has 4 bytes, not 3"),
        ("int16", (2,), b"abcde", "has 4 bytes, not 5"),
        ("int8", (-1,), b"", "a int8 tensor of shape (-1,)"),
        ("int8", (-1, 0), b"", "a int8 tensor of shape (-1, 0)"),
        ("int8", (1,) * 33, b"x", "33 dimensions"),
        ("int8", (0, 2**62, 2), b"", "too large for an empty one"),
        ("int8", (2,), memoryview(b"abcd")[::2], "not in one piece"),
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_is_not_made(
    dtype: str, shape: tuple[int, ...], buffer: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Tensor(dtype, shape, buffer)


def test_a_tensor_takes_any_buffer_in_one_piece() -> None:
    floats: Any = memoryview(struct.pack("<4f", 1, 2, 3, 4)).cast("f")
    assert Tensor("float32", (4,), floats).buffer.nbytes == 16
    assert Tensor("float32", (2, 2), floats.cast("B").cast("f", (2, 2))).buffer.format == "B"
    assert Tensor("float32", (0,), floats[:0]).buffer.nbytes == 0
    assert repr(Tensor("float32", (4,), floats)) == "<Tensor float32 [4]>"


# What is not believed


@pytest.mark.parametrize(
    ("head", "buffers", "said"),
    [
        (b"", [], "truncated"),
        (b"\x01\x02", [], "trailing"),
        (b"\xc1", [], "malformed"),
        (b"\xa1\xff", [], "UTF-8"),
        (b"\xdd\xff\xff\xff\xff\x01", [], "truncated"),
        (ext({"a": {1: 2}}), [], "Expected `str`, got `int` - at `key` in `$[...]`"),
        (ext({"a": [b"raw"]}), [], "got `bytes` - at `$[...][0]`"),
        (ext({"a": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}), [], "extension -1 of 4 bytes, at ['a']"),
        (ext({"a": [0, Ext(5, b"abc")]}), [], "extension 5 of 3 bytes, at ['a'][1]"),
        (ext(Ext(1, b"")), [b""], "extension 1 of 0 bytes"),
        (ext(Ext(1, b"\0\0\0" + bytes(7))), [b""], "extension 1 of 10 bytes"),
        (ext(Ext(1, bytes(3 + 8 * 33))), [b""], "extension 1 of 267 bytes"),
        (ext(Ext(3, b"\0")), [b""], "extension 3 of 1 bytes"),
        (ext(description(0, len(ITEM_SIZES))), [b"x"], f"dtype {len(ITEM_SIZES)}, which is none of"),
        (ext(description(1, 1)), [b"x"], "buffer 1, which 1 do not have"),
        (ext([description(0, 1), description(0, 1)]), [b"x"], "buffer 0, which is used twice, at [1]"),
        (ext([Ext(3, b"\0\0"), description(0, 1)]), [b"x"], "buffer 0, which is used twice, at [1]"),
        (ext([]), [b"x"], "buffer 0 of 1 of a chunk belongs to nothing"),
        (ext({"t": description(0, 7, 3)}), [b"x" * 23], "has 24 bytes, not 23, at ['t']"),
        (ext(description(0, 7, 2**61)), [b""], "not 0"),
        (ext(description(0, 7, 2**64 - 1)), [b""], "not 0"),
        (ext(description(0, 7, 2**32, 2**32)), [b""], "not 0"),
        (ext(description(0, 1, 2**63, 2)), [b""], "not 0"),
        (ext(description(0, 7, 0, 2**64 - 1)), [b""], "too large for an empty one"),
        (ext(description(0, 0, 3)), [b"\0\1\2"], "a bool tensor of shape (3,) with other bytes than 0 and 1"),
    ],
)
def test_what_is_wrong_on_the_wire_is_said_with_its_place(head: bytes, buffers: list[bytes], said: str) -> None:
    with pytest.raises(WireError, match=re.escape(said)):
        decode(head, buffers)


def test_a_tensor_whose_key_comes_twice_is_noticed() -> None:
    one = ext(description(0, 1))
    other = ext(description(1, 1))
    with pytest.raises(WireError, match="buffer 0 of 2 of a chunk belongs to nothing"):
        decode(b"\x82\xa1k" + one + b"\xa1k" + other, [b"x", b"y"])


def test_the_hook_s_complaint_says_where() -> None:
    def refuse(tensor: Tensor) -> None:
        raise WireError(f"no {tensor.dtype} here")

    with pytest.raises(WireError, match=re.escape("no int8 here, at ['a'][1]")):
        decode(*encode({"a": [0, Tensor("int8", (), b"x")]}), refuse)


@pytest.mark.parametrize(
    "head",
    [
        b"\xdd\xff\xff\xff\xff" * MAX_DEPTH + bytes(64),
        (b"\xdf\xff\xff\xff\xff\xa1k") * MAX_DEPTH + bytes(64),
        b"\xdb\xff\xff\xff\xff" + bytes(64),
        b"\xc9\xff\xff\xff\xff\x01" + bytes(64),
        b"\xdd\x00\xff\xff\xff" * 4 + bytes(64),
        ext(description(0, 14, 2**20, 2**20)),
        ext(description(0, 14, *[1 << 60] * MAX_DIMS)),
    ],
    ids=["lists", "maps", "text", "extension", "lists that could be", "tensor", "dimensions"],
)
def test_a_claimed_size_allocates_nothing(head: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(head, [b""])
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "item", [b"\x80", b"\x90", b"\x91\x01", b"\xd4\x02\x00", b"\x81\xa1k\x01", b"\xcf" + b"\xff" * 8]
)
def test_a_head_takes_at_most_80_bytes_of_memory_for_each_of_its_own(item: bytes) -> None:
    count = (1 << 18) // len(item)
    head = b"\xdd" + count.to_bytes(4, "big") + item * count
    tracemalloc.start()
    try:
        decode(head, [])
        assert tracemalloc.get_traced_memory()[1] < 80 * len(head)
    finally:
        tracemalloc.stop()


# Blobs


def test_a_blob_cut_anywhere_is_noticed() -> None:
    blob = pack(encode({"a": Tensor("int64", (3,), bytes(24)), "b": Tensor("int8", (7,), bytes(7)), "c": "d" * 90}))
    for cut in range(len(blob)):
        with pytest.raises(WireError):
            unpack(blob[:cut])


def test_bytes_behind_a_blob_are_noticed() -> None:
    with pytest.raises(WireError, match="1 bytes behind a packed chunk"):
        unpack(pack(encode({"a": Tensor("int64", (3,), bytes(24))})) + b"\0")


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (struct.pack("<4sII", b"TPW2", 1, 0) + b"\xc0", "begin with b'TPW2' are no packed chunk of this version"),
        (struct.pack("<4sII", b"TPW1", 2, 0) + b"\xc0", "are no packed chunk"),
        (struct.pack("<4sII", b"TPW1", 1 << 31, 0) + b"\xc0", "are no packed chunk"),
        (struct.pack("<4sII", b"TPW1", MAX_HEAD + 1, 0) + bytes(MAX_HEAD + 1), "are no packed chunk"),
        (struct.pack("<4sII", b"TPW1", 0, 1 << 31) + bytes(100), "are no packed chunk"),
        (struct.pack("<4sII", b"TPW1", 0, MAX_BUFFERS + 1) + bytes(80 * MAX_BUFFERS), "are no packed chunk"),
        (struct.pack("<4sIIQ", b"TPW1", 1, 1, 2**64 - 1) + b"\xc0" + bytes(100), "ends before its buffer 0 of"),
        (struct.pack("<4sIIQQ", b"TPW1", 1, 2, 2**63, 2**63) + b"\xc0" + bytes(100), "ends before its buffer 0 of"),
        (struct.pack("<4sIIQQ", b"TPW1", 1, 2, 0, 1) + b"\xc0" + bytes(35), "ends before its buffer 1 of 1 bytes"),
    ],
    ids=["version", "head", "long head", "longest head", "count", "count that fits", "size", "sum", "second"],
)
def test_a_blob_s_table_is_not_believed(blob: bytes, said: str) -> None:
    with pytest.raises(WireError, match=re.escape(said)):
        unpack(blob)


# Which tensors a receiver gets


def test_a_name_that_is_no_kind_of_tensor_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConnectorError, match="'numpy' is neither 'torch' nor 'view'"):
        tensor_maker("numpy")


def test_without_torch_in_the_process_tensors_are_views() -> None:
    code = (
        "import sys\nfrom triptych.transfer.wire import tensor_maker\n"
        "assert tensor_maker() is None and tensor_maker('view') is None\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


# Mutants


def survive(count: int, seed: int) -> tuple[int, int]:
    """Decodes mutants, as frames and as blobs: how many decoded, how many were refused. What decodes must be a value
    of ours again."""
    decoded = refused = 0
    sources = good()
    rng_blobs = itertools.cycle([pack(frames) for frames in sources])
    rng = random.Random(seed)
    for number, (head, buffers) in enumerate(itertools.islice(mutants(seed, sources), count)):
        if number % 4 == 0:
            blob = bytearray(next(rng_blobs))
            mutate_bytes(rng, blob, sources[0].head)
            try:
                head, views = unpack(bytes(blob))
                buffers = list(views)
            except WireError:
                refused += 1
                continue
        try:
            value = decode(head, buffers)
        except WireError as error:
            refused += bool(str(error))
        else:
            again = encode(value)
            assert plain(decode(again.head, again.buffers)) == plain(value)
            decoded += 1
    return decoded, refused


def check_mutants(count: int, seed: int) -> None:
    tracemalloc.start()
    try:
        decoded, refused = survive(count, seed)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded + refused == count
    assert decoded > count // 100
    assert refused > count // 10
    assert peak < 4 << 20
    assert held < 1 << 20


def test_20_000_mutants_are_decoded_or_refused_and_nothing_else() -> None:
    check_mutants(20_000, seed=20261201)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_1_000_000_mutants_are_decoded_or_refused_and_nothing_else() -> None:
    check_mutants(1_000_000, seed=time.time_ns())


@settings(max_examples=300)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
def test_any_bytes_are_decoded_or_refused_and_nothing_else(head: bytes, buffers: list[bytes]) -> None:
    for call in (lambda: decode(head, buffers), lambda: unpack(head)):
        try:
            call()
        except WireError as error:
            said = str(error)
        else:
            said = "decoded"
        assert said
