"""Hand-over parameters out of engines' answers, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.body.texts import KEYS, OBJECTS, SPELLING, Pairs, joined, loads, steady, text_of
from triptych.body.answer import (
    AnswerError,
    entries,
    merge_handles,
    null_splices,
    nulled,
    top_level_object,
    top_level_value,
)
from triptych.body.edit import apply


@steady
@given(OBJECTS, SPELLING, st.sampled_from(KEYS))
def test_value_is_the_one_json_loads_reads(value: Pairs, seed: int, key: str) -> None:
    raw = text_of(value, seed)
    expected = dict(loads(raw)).get(key)
    found = top_level_value(raw, key)
    assert found is None if expected is None else loads(found) == expected
    assert found is None or found in raw


def test_value_travels_byte_for_byte() -> None:
    raw = b'{"id":"x", "kv_transfer_params" : {"a": 1.50, "b" :12345678901234567890, "c":"\\ud800\\/"} ,"z":1}'
    assert top_level_object(raw, "kv_transfer_params") == b'{"a": 1.50, "b" :12345678901234567890, "c":"\\ud800\\/"}'


@pytest.mark.parametrize(
    "raw", [b"{}", b'{"ec_transfer_params":null}', b'{"ec_transfer_params":{},"ec_transfer_params":null}']
)
def test_absent_and_null_mean_none(raw: bytes) -> None:
    assert top_level_object(raw, "ec_transfer_params") is None


@pytest.mark.parametrize("value", [b"[]", b"1", b'"x"', b"true", b"false", b'""', b"0"])
def test_any_other_non_object_is_invalid(value: bytes) -> None:
    with pytest.raises(AnswerError, match="ec_transfer_params is not an object"):
        top_level_object(b'{"ec_transfer_params":%b}' % value, "ec_transfer_params")


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"{", b'{"a":NaN}', b"<html>", b'{"a":1}x', b'{"a":"\xff"}'])
def test_answer_that_is_not_one_json_object_is_invalid(raw: bytes) -> None:
    for read in (lambda: top_level_value(raw, "a"), lambda: null_splices(raw), lambda: entries(raw)):
        with pytest.raises(AnswerError):
            read()


def test_entries_are_decoded_keys_and_raw_values() -> None:
    assert entries(b'{"a":1,"\\u0062": {"x":1.0} ,"a":2}') == {"a": b"2", "b": b'{"x":1.0}'}


@steady
@given(st.lists(st.one_of(st.none(), OBJECTS), max_size=4), SPELLING)
def test_merge_is_the_union_in_item_order_where_the_first_wins(handles: list[Pairs | None], seed: int) -> None:
    raws = [None if value is None else text_of(value, seed + i) for i, value in enumerate(handles)]
    expected: dict[str, object] = {}
    for raw in raws:
        for key, value in dict(loads(raw) if raw is not None else ()).items():
            expected.setdefault(key, value)
    merged = merge_handles(raws)
    assert (merged is None) == (not expected)
    if merged is not None:
        assert loads(merged) == list(expected.items())


def test_merge_keeps_values_byte_for_byte() -> None:
    assert (
        merge_handles([b' {"a" : {"p":1.50} } ', b'{"\\u0061":2,"b":[ 1 ]}', None]) == b'{"a" : {"p":1.50},"b":[ 1 ]}'
    )


def test_merge_of_nothing_is_none() -> None:
    assert merge_handles([]) is None
    assert merge_handles([None, b"null", b"{}"]) is None


def test_merge_refuses_what_is_no_object() -> None:
    with pytest.raises(AnswerError):
        merge_handles([b'{"a":1}', b"[1]"])


@steady
@given(OBJECTS, SPELLING)
def test_nulling_touches_the_handles_and_nothing_else(value: Pairs, seed: int) -> None:
    raw = text_of(value, seed)
    keys = ("ec_transfer_params", "kv_transfer_params")
    wanted = [(key, None if key in keys else inner) for key, inner in loads(raw)]
    assert loads(joined(nulled(raw))) == wanted
    assert loads(joined(apply(raw, null_splices(raw)))) == wanted, "by a walk too"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"id":"x","kv_transfer_params":null,"choices":[{"ec_transfer_params":1}]}',
        b'{"kv_transfer_params":null,"\\u0069d":"x","ec\\u005ftransfer_params":null}',
        b'{"kv_transfer_params":null,"kv_transfer_params" : null,"id":"\\u00e9"}',
    ],
)
def test_answer_without_handles_goes_to_the_client_as_the_same_object(raw: bytes) -> None:
    assert nulled(raw)[0] is raw


def test_large_answers_are_read_whatever_they_hold() -> None:
    logprobs = [{"token": "t", "bytes": [1, 2], "top": [{"a": {}}] * 5}] * 40_000
    raw = json.dumps({"choices": [{"logprobs": logprobs}], "ec_transfer_params": {"h": 1}}).encode()
    assert top_level_object(raw, "ec_transfer_params") == b'{"h": 1}'


@pytest.mark.parametrize(
    "answer",
    [
        b'{"id":1,"kv_transfer_params":HERE}',
        b'{"kv_transfer_params": HERE}',
        b'{"kv_transfer_params":HERE,"kv_transfer_params":null}',
        b'{"a":{"kv_transfer_params":1},"kv_transfer_params":HERE}',
        rb'{"a":"\"kv_transfer_params\":{","kv_transfer_params":HERE}',
        b'{"kv_transfer_params":HERE,"ec_transfer_params":HERE}',
    ],
)
@pytest.mark.parametrize("handles", [b'{"ec_transfer_params":[1]}', b"{}", b"7"])
def test_only_handles_at_the_top_level_are_nulled_each_copy_of_them(answer: bytes, handles: bytes) -> None:
    assert joined(nulled(answer.replace(b"HERE", handles))) == answer.replace(b"HERE", b"null")


def test_handles_are_nulled_in_an_answer_with_a_lone_surrogate_too() -> None:
    answer = rb'{"text":"\ud83d","kv_transfer_params":{"a":1}}'
    assert b"".join(nulled(answer)) == rb'{"text":"\ud83d","kv_transfer_params":null}'
