"""The header of a stored encoder output: whatever bytes it is given, it is right or refused."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.ec_format import DTYPES, HEADER_SIZE, FormatError, Header, item_key

HEADERS = st.builds(
    Header,
    key=st.binary(min_size=32, max_size=32),
    dtype=st.sampled_from(list(DTYPES)),
    rows=st.integers(1, 2**32 - 1),
    width=st.integers(1, 2**29),
    checksum=st.binary(min_size=32, max_size=32),
)


def reseal(data: bytes) -> bytes:
    """With a right CRC, as an attacker would have it."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


@settings(deadline=None)
@given(HEADERS)
def test_what_was_packed_is_what_is_parsed(header: Header) -> None:
    assert Header.parse(header.pack()) == header
    assert len(header.pack()) == HEADER_SIZE


@settings(deadline=None)
@given(HEADERS, st.integers(0, HEADER_SIZE - 1), st.integers(1, 255))
def test_any_flipped_byte_is_noticed(header: Header, at: int, flip: int) -> None:
    data = bytearray(header.pack())
    data[at] ^= flip
    with pytest.raises(FormatError):
        Header.parse(bytes(data))


@settings(deadline=None)
@given(HEADERS, st.integers(0, HEADER_SIZE + 40).filter(lambda size: size != HEADER_SIZE))
def test_any_other_length_is_refused(header: Header, size: int) -> None:
    with pytest.raises(FormatError):
        Header.parse((header.pack() + b"x" * 40)[:size])


@settings(deadline=None)
@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_hostile_bytes_with_a_right_crc_are_consistent_or_refused(data: bytes) -> None:
    try:
        header = Header.parse(reseal(data))
    except FormatError:
        return
    assert header.payload_size == header.rows * header.width * DTYPES[header.dtype]


@settings(deadline=None)
@given(HEADERS, st.integers(0, 2**64 - 1))
def test_a_size_that_does_not_follow_from_the_shape_is_refused(header: Header, size: int) -> None:
    data = bytearray(header.pack())
    at = 8 + 2 + 1 + 1 + 4 + 4
    if struct.unpack_from("<Q", data, at)[0] == size:
        return
    struct.pack_into("<Q", data, at, size)
    with pytest.raises(FormatError):
        Header.parse(reseal(bytes(data)))


@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [("float64", 1, 1), ("float32", 0, 1), ("float32", 1, 0), ("float32", -1, 4), ("float32", 2**32, 1)],
)
def test_what_does_not_fit_the_format_is_not_packed(dtype: str, rows: int, width: int) -> None:
    with pytest.raises(FormatError):
        Header(b"k" * 32, dtype, rows, width, b"c" * 32).pack()


@settings(deadline=None)
@given(st.text())
def test_a_key_is_thirty_two_bytes_whatever_the_identifier(identifier: str) -> None:
    assert len(item_key(identifier)) == 32


def test_a_lone_surrogate_in_an_identifier_is_no_error() -> None:
    assert item_key("\ud800") != item_key("\ud801")
