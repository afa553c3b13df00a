"""torch tensors over the wire: dtype, shape and elements exactly, in place where memory allows, never a warning."""

from __future__ import annotations

import gc
import re
import struct
import subprocess
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.errors import WireError
from triptych.transfer.payload import Codes, Meta, StagePayload, to_dict
from triptych.transfer.tensors import Decoder, Encoder, tensor, view
from triptych.transfer.wire import ITEM_SIZES, Tensor, decode, encode, tensor_maker

DTYPES = [getattr(torch, name) for name in ITEM_SIZES]
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 3), (2, 1, 3)]


def make(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with bytes of every kind (0 and 1 for bool)."""
    made = torch.empty(shape, dtype=dtype)
    raw = made.reshape(-1).view(torch.uint8)
    raw.copy_(torch.arange(raw.numel()) % (2 if dtype is torch.bool else 256))
    return made


def raw(value: torch.Tensor) -> bytes:
    plain = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The very same bits: also of NaN, and of dtypes that torch cannot compare."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def through(value: Any) -> Any:
    return Decoder().decode(Encoder().encode(value))


def test_the_table_of_dtypes_has_all_that_torch_has_in_whole_bytes() -> None:
    for name, size in ITEM_SIZES.items():
        assert getattr(torch, name).itemsize == size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_shape_and_every_bit_arrive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = make(dtype, shape)
    assert same(through({"t": sent})["t"], sent)


@given(st.lists(st.integers(0, 5), max_size=5), st.sampled_from(DTYPES), st.randoms())
def test_tensors_of_any_layout_arrive_as_their_elements(sizes: list[int], dtype: torch.dtype, rng: Any) -> None:
    sent = make(dtype, tuple(sizes)).permute(rng.sample(range(len(sizes)), len(sizes)))
    if sizes and rng.random() < 0.5:
        sent = sent[..., :: rng.randint(1, 3)]
    back = through([sent])[0]
    assert same(back, sent)
    assert back.is_contiguous()


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[5:7],
        torch.tensor([1.0]).expand(4),
        torch.zeros(2, 2, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.tensor(1 + 2j).conj().imag,
        torch.tensor(float("nan")),
    ],
    ids=["transposed", "slice", "expanded", "gradient", "parameter", "conjugate", "negatives", "negative", "nan"],
)
def test_what_a_model_may_hand_over_arrives_as_plain_values(sent: torch.Tensor) -> None:
    back = through({"t": sent})["t"]
    assert torch.equal(torch.nan_to_num(back), torch.nan_to_num(sent.detach()))
    assert type(back) is torch.Tensor
    assert not back.requires_grad
    assert not back.is_conj()


def test_a_payload_arrives_with_the_keys_of_to_dict() -> None:
    payload = StagePayload(
        meta=Meta(finished=torch.tensor(True), left_context_size=12), codes=Codes(audio=torch.tensor([1, 2, 3]))
    )
    back = through(payload)
    assert {part: fields.keys() for part, fields in back.items()} == {
        part: fields.keys() for part, fields in to_dict(payload).items()
    }
    assert back["meta"]["finished"].dtype is torch.bool
    assert back["meta"]["finished"].shape == ()
    assert bool(back["meta"]["finished"]) is True
    assert back["meta"]["left_context_size"] == 12
    assert back["codes"]["audio"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("sent", [torch.arange(6)[::2][:1], torch.arange(6)[::2][:0], torch.arange(6)[::6]], ids=repr)
def test_a_dimension_of_one_or_none_may_have_any_stride(sent: torch.Tensor) -> None:
    assert same(through(sent), sent)


def test_encode_shares_the_memory_of_a_contiguous_tensor() -> None:
    sent = torch.zeros(4, dtype=torch.uint8)
    frames = encode({"t": sent})
    sent[2] = 9
    assert bytes(frames.buffers[0]) == b"\0\0\x09\0"


def test_frames_keep_the_memory_that_they_point_at() -> None:
    frames = encode({"t": torch.full((1 << 16,), 7, dtype=torch.uint8)})
    gc.collect()
    assert bytes(frames.buffers[0]) == b"\7" * (1 << 16)


def test_a_tensor_is_made_on_writable_memory_in_place_and_keeps_it() -> None:
    class Memory(bytearray):
        pass

    memory = Memory(16)
    gone = weakref.ref(memory)
    back = decode(encode({"t": make(torch.int64, (2,))}).head, [memory], tensor)["t"]
    struct.pack_into("<q", memory, 8, 5)
    assert back.tolist() == [0, 5]
    back[0] = 3
    assert struct.unpack_from("<q", memory) == (3,)
    del memory
    gc.collect()
    assert gone() is not None
    assert back.tolist() == [3, 5]
    del back
    gc.collect()
    assert gone() is None


def test_read_only_memory_is_copied_and_not_warned_about() -> None:
    memory = bytes(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = tensor(Tensor("int64", (2,), memory))
    back[0] = 3
    assert back.tolist() == [3, 0]
    assert memory == bytes(16)


@pytest.mark.parametrize("offset", range(1, 16))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_memory_at_an_odd_address_is_copied(dtype: torch.dtype, offset: int) -> None:
    sent = make(dtype, (3,))
    memory = memoryview(bytearray(offset) + bytearray(raw(sent)))[offset:]
    back = decode(encode(sent).head, [memory], tensor)
    assert same(back, sent)
    assert back.data_ptr() % dtype.itemsize == 0


@pytest.mark.parametrize("shape", [(0,), (0, 2**61), (2**61, 0), (0, 1 << 30, 1 << 20)], ids=str)
def test_empty_tensors_of_any_shape_that_the_wire_allows_are_made(shape: tuple[int, ...]) -> None:
    assert tuple(tensor(Tensor("int8", shape, b"")).shape) == shape


def test_no_shape_that_the_wire_allows_is_too_much_for_torch() -> None:
    assert tensor(Tensor("complex128", (0, 2**58), b"")).numel() == 0
    with pytest.raises(ValueError, match="too large for an empty one"):
        Tensor("complex128", (0, 2**58 + 1), b"")


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(3).to_sparse(), "a torch.sparse_coo tensor of torch.float32 on cpu"),
        (torch.zeros(3, device="meta"), "a torch.strided tensor of torch.float32 on meta"),
        (nested_tensor(), "a torch.strided tensor of torch.float32 on cpu"),
        (torch.float32, "a value of type torch.dtype"),
        (torch.device("cpu"), "a value of type torch.device"),
    ],
    ids=["sparse", "meta", "nested", "dtype", "device"],
)
def test_what_has_no_elements_in_memory_is_named_with_its_place(value: object, said: str) -> None:
    with pytest.raises(WireError, match=re.escape(f"{said} has no wire form, at ['a'][1]")):
        encode({"a": [0, value]})


def test_a_dtype_that_this_torch_lacks_is_an_error_of_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules["triptych.transfer.tensors"]._DTYPES, "float8_e5m2")
    frames = encode({"t": make(torch.float8_e5m2, (2,))})
    with pytest.raises(WireError, match=re.escape("this version of torch has no float8_e5m2, at ['t']")):
        decode(frames.head, frames.buffers, tensor)


def test_a_view_is_the_wire_form_s_tensor() -> None:
    made = view(torch.tensor([[1, 2]], dtype=torch.int16))
    assert (made.dtype, made.shape, bytes(made.buffer)) == ("int16", (1, 2), b"\1\0\2\0")


def test_with_torch_in_the_process_tensors_are_torch_s_unless_asked_otherwise() -> None:
    assert tensor_maker() is tensor
    assert tensor_maker("torch") is tensor
    assert tensor_maker("view") is None


def test_the_wire_form_knows_a_tensor_without_importing_torch_itself() -> None:
    code = (
        "import sys\nfrom triptych.transfer import wire\nassert 'torch' not in sys.modules\n"
        "import torch\nassert bytes(wire.encode([torch.tensor(True)]).buffers[0]) == b'\\x01'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@given(st.binary(max_size=300))
def test_bytes_that_no_encoder_made_are_an_error_of_the_wire(blob: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().decode(blob)
