"""Splices: what they touch is edited, every other byte arrives as sent."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.body.texts import KEYS, OBJECTS, SPELLING, VALUES, Pairs, joined, loads, steady, text_of
from triptych.body.edit import Splice, apply, object_splices, quote
from triptych.body.request import DEFAULT_POLICY, HANDLES, RequestBody
from triptych.body.scan import BodyError, Scanner, members

KEY_SETS = st.sets(st.sampled_from(KEYS), max_size=4)


def edited(pairs: Pairs, remove: set[str], put: dict[str, Any]) -> Pairs:
    """The edit on what json.loads sees: in place where a key is there once, else appended."""
    counts = [key for key, _ in pairs]
    out = Pairs()
    for key, value in pairs:
        if key in put and counts.count(key) == 1 and key not in remove:
            out.append((key, put[key]))
        elif key not in put and key not in remove:
            out.append((key, value))
    kept = {key for key, _ in out}
    out += [(key, value) for key, value in put.items() if key not in kept]
    return out


def edit(raw: bytes, remove: set[str], put: dict[str, bytes]) -> bytes:
    at = raw.index(b"{")
    found, end = Scanner(raw).members(at)
    return joined(apply(raw, object_splices(raw, (at, end), found, remove, put)))


@steady
@given(OBJECTS, SPELLING, KEY_SETS, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_result_is_the_edit_on_what_json_loads_sees(
    value: Pairs, seed: int, remove: set[str], put: dict[str, Any]
) -> None:
    raw = text_of(value, seed)
    remove -= put.keys()
    result = edit(raw, remove, {key: text_of(new, seed).strip() for key, new in put.items()})
    assert loads(result) == edited(loads(raw), remove, put)


@steady
@given(OBJECTS, SPELLING, KEY_SETS, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_every_member_that_is_not_edited_arrives_as_sent(
    value: Pairs, seed: int, remove: set[str], put: dict[str, Any]
) -> None:
    raw = text_of(value, seed)
    result = edit(raw, remove, {key: text_of(new, seed).strip() for key, new in put.items()})
    before = [raw[m.start : m.end] for m in members(raw) if m.key not in remove and m.key not in put]
    after = [result[m.start : m.end] for m in members(result) if m.key not in put]
    assert after == before
    at = raw.index(b"{")
    assert result[: result.index(b"{")] == raw[:at]
    assert result[len(result.rstrip()) :] == raw[len(raw.rstrip()) :]


@steady
@given(OBJECTS, SPELLING, st.sets(st.sampled_from(KEYS)))
def test_bytes_between_kept_neighbours_stay(value: Pairs, seed: int, remove: set[str]) -> None:
    raw = text_of(value, seed)
    result = edit(raw, remove, {})
    every = members(raw)
    for left, right in itertools.pairwise(every):
        if left.key not in remove and right.key not in remove:
            assert raw[left.start : right.end] in result


@steady
@given(OBJECTS, SPELLING, KEY_SETS)
def test_put_values_travel_byte_for_byte(value: Pairs, seed: int, keys: set[str]) -> None:
    raw = text_of(value, seed)
    new = b'{"h" : [1.50, 12345678901234567890123, "\\u00e9\\ud800"] }'
    result = edit(raw, set(), dict.fromkeys(keys, new))
    for key in keys:
        found = [result[m.value : m.end] for m in members(result) if m.key == key]
        assert found == [new]


@pytest.mark.parametrize(
    ("raw", "remove", "put", "expected"),
    [
        (b"{}", "", {"k": b"1"}, b'{"k":1}'),
        (b" { } ", "", {"k": b"1"}, b' {"k":1 } '),
        (b'{"a":1}', "a", {}, b"{}"),
        (b'{ "a":1 }', "a", {}, b"{  }"),
        (b'{ "a":1 }', "a", {"k": b"1"}, b'{ "k":1 }'),
        (b'{"a":1,"b":2,"c":3}', "a", {}, b'{"b":2,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', "b", {}, b'{"a":1,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', "c", {}, b'{"a":1,"b":2}'),
        (b'{"a":1,"b":2,"c":3}', "ac", {}, b'{"b":2}'),
        (b'{"a":1,"b":2,"c":3}', "bc", {}, b'{"a":1}'),
        (b'{"a":1,"b":2,"c":3}', "abc", {}, b"{}"),
        (b'{"a":1 , "b":2 , "c":3 }', "b", {}, b'{"a":1 , "c":3 }'),
        (b'{"a":1 , "b":2 , "c":3 }', "c", {}, b'{"a":1 , "b":2 }'),
        (b'{"a":1 , "b":2 , "c":3 }', "bc", {"d": b"4"}, b'{"a":1,"d":4 }'),
        (b'{"a":1,"b":2}', "", {"a": b"9"}, b'{"a":9,"b":2}'),
        (b'{"a":1,"b":2,"a":3}', "", {"a": b"9"}, b'{"b":2,"a":9}'),
        (b'{"\\u0061":1,"b":2}', "", {"a": b"9"}, b'{"a":9,"b":2}'),
        (b'{"a":1,"b":2}', "a", {"b": b"9", "c": b"8", "d": b"7"}, b'{"b":9,"c":8,"d":7}'),
    ],
)
def test_exact_bytes_of_an_edit(raw: bytes, remove: str, put: dict[str, bytes], expected: bytes) -> None:
    assert edit(raw, set(remove), put) == expected


def test_nothing_to_do_gives_the_same_object() -> None:
    raw = b'{"a": 1}'
    (only,) = apply(raw, [])
    assert only is raw


def test_untouched_ranges_are_views_of_the_body_not_copies() -> None:
    raw = b'{"a":1,"b":2,"c":3}'
    segments = apply(raw, [Splice(6, 13, b"")])
    assert all(isinstance(s, memoryview) and s.obj is raw for s in segments)
    assert joined(segments) == b'{"a":1"c":3}'


def test_range_of_a_body_with_its_splices() -> None:
    raw = b"0123456789"
    assert (
        joined(apply(raw, [Splice(4, 5, b"x"), Splice(3, 3, b"y")], 2, 8)) == b"23xyz"[:1] + b"y3x567"[0:0] + b"y3x567"
    )
    assert joined(apply(raw, [], 2, 8)) == b"234567"
    assert joined(apply(raw, [Splice(2, 8, b"")], 2, 8)) == b""


@pytest.mark.parametrize("splices", [[Splice(1, 5, b""), Splice(4, 6, b"")], [Splice(5, 4, b"")]])
def test_overlapping_splices_are_an_error(splices: list[Splice]) -> None:
    with pytest.raises(ValueError, match="overlap"):
        apply(b"0123456789", splices)


def test_splice_outside_of_the_range_is_an_error() -> None:
    for splice in (Splice(7, 9, b""), Splice(0, 1, b"")):
        with pytest.raises(ValueError, match="splice"):
            apply(b"0123456789", [splice], 2, 8)


def test_many_segments_become_one() -> None:
    raw = b"ab" * 1000
    segments = apply(raw, [Splice(i, i + 1, b"") for i in range(0, 2000, 2)])
    assert segments == [b"b" * 1000]


def test_quote_is_json_in_ascii() -> None:
    for key in KEYS:
        assert json.loads(quote(key)) == key
        assert quote(key).isascii()


# The body of a request


@steady
@given(OBJECTS, SPELLING, KEY_SETS, st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_rewrite_strips_every_handle_and_edits_the_rest(
    value: Pairs, seed: int, remove: set[str], put: dict[str, Any]
) -> None:
    raw = text_of(value, seed)
    sent = loads(raw)
    keys = [key for key, _ in sent]
    remove -= put.keys()
    twice = {key for key in DEFAULT_POLICY.owned if keys.count(key) > 1}
    if twice:
        with pytest.raises(BodyError, match="duplicate top-level key") as caught:
            RequestBody(raw)
        assert caught.value.param in twice
        return
    body = RequestBody(raw)
    sent = Pairs(
        (key, Pairs(pair for pair in inner if pair[0] not in HANDLES))
        if key == "vllm_xargs" and isinstance(inner, Pairs)
        else (key, inner)
        for key, inner in sent
        if key not in HANDLES
    )
    result = joined(body.rewrite({key: text_of(new, seed).strip() for key, new in put.items()}, remove))
    assert loads(result) == edited(sent, remove, put)
    if sent == loads(raw):
        assert body.rewrite()[0] is raw
        assert not body.stripped
    else:
        assert body.stripped
