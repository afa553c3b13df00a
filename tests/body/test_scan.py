"""The scanner agrees with json.loads, and no body makes it work for long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.body.texts import OBJECTS, SPELLING, VALUES, Pairs, loads, steady, text_of
from triptych.body import scan
from triptych.body.request import RequestBody
from triptych.body.scan import STRIPPED, BodyError, Rules, Scanner, elements, members, string, string_end, validate


def walk(raw: bytes, at: int) -> Any:
    """The value at an offset, read with the scanner for containers and json.loads for the rest."""
    if raw[at : at + 1] == b"{":
        return Pairs((m.key, walk(raw, m.value)) for m in members(raw, at))
    if raw[at : at + 1] == b"[":
        return [walk(raw, start) for start, _ in elements(raw, at)]
    return loads(raw[at : Scanner(raw).value_end(at)])


@steady
@given(OBJECTS, SPELLING)
def test_scanner_and_json_loads_agree_on_every_member(value: Pairs, seed: int) -> None:
    raw = text_of(value, seed)
    validate(raw)
    assert walk(raw, raw.index(b"{")) == loads(raw)


@steady
@given(st.lists(VALUES, max_size=6), SPELLING)
def test_elements_are_those_of_json_loads(value: list[Any], seed: int) -> None:
    raw = text_of(value, seed)
    assert [loads(raw[start:end]) for start, end in elements(raw)] == loads(raw)


@steady
@given(OBJECTS, SPELLING)
def test_member_starts_at_its_quote_and_ends_behind_its_value(value: Pairs, seed: int) -> None:
    raw = text_of(value, seed)
    for member in members(raw):
        assert loads(b"{" + raw[member.start : member.end] + b"}") == [
            (member.key, loads(raw[member.value : member.end]))
        ]


@steady
@given(OBJECTS, SPELLING)
def test_members_with_hints_are_those_without(value: Pairs, seed: int) -> None:
    raw = text_of(value, seed)
    hint = scan.validate_object(raw)
    at = raw.index(b"{")
    assert Scanner(raw).members(at, hint=hint) == Scanner(raw).members(at)


@steady
@given(OBJECTS, SPELLING, st.sets(st.sampled_from(["ec_transfer_params", "kv_transfer_params", "x", "content"])))
def test_runs_hold_the_members_of_the_rules_and_nothing_else(value: Pairs, seed: int, keys: set[str]) -> None:
    raw = text_of(value, seed)
    at = raw.index(b"{")
    found, end = Scanner(raw).members(at, Rules.of(frozenset(keys)))
    every = members(raw)
    assert end == Scanner(raw).members(at)[1]
    assert [m for m in found if m.key is not STRIPPED] == [m for m in every if m.key not in keys]
    for run in (m for m in found if m.key is STRIPPED):
        inside = [m for m in every if run.start <= m.start < run.end]
        assert inside
        assert all(m.key in keys for m in inside)
        assert inside[-1].end == run.end
    covered = sum(1 for run in found if run.key is STRIPPED for m in every if run.start <= m.start < run.end)
    assert covered == sum(m.key in keys for m in every)


@pytest.mark.parametrize("window", range(30, 100))
def test_runs_are_whole_members_wherever_their_window_ends(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_WINDOW", window)
    values = [b"123456789", b"true", b'"text"', b'{"a":[1,2]}', b"-1.5e-7"]
    raw = b"{" + b",".join(b'"ec_transfer_params":%b' % value for value in values * 4) + b',"x":1}'
    found, _ = Scanner(raw).members(0, Rules.of(frozenset({"ec_transfer_params"})))
    ends = {m.end for m in members(raw)}
    assert [m.key for m in found if m.key is not STRIPPED] == ["x"]
    assert all(m.end in ends for m in found)


@steady
@given(st.lists(st.sampled_from(["\\\\", '\\"', "\\n", "a", "\\u005c", "é", "x" * 70000]), max_size=40).map("".join))
def test_string_end_is_that_of_json_loads(body: str) -> None:
    raw = f'["{body}","tail"]'.encode()
    end = string_end(raw, 1)
    assert string(raw, 1, end) == json.loads(raw)[0]


@pytest.mark.parametrize("count", [65534, 65535, 65536, 65537, 131071, 131072])
def test_string_end_where_a_chunk_ends_within_escapes(count: int) -> None:
    for unit in ('\\"', "\\\\", '\\\\\\"'):
        raw = f'"{"x" * (count % 7)}{unit * (count // len(unit) + 16)}" , "y"'.encode()
        assert string(raw, 0, string_end(raw, 0)) == json.loads(raw[: raw.index(b" , ")])


def test_keys_of_more_than_64_kib_stay_as_spelled() -> None:
    short, long = b"\\n" * 100, b"\\n" * 40_000
    found = members(b'{"%b":1,"%b":2,"%b":3}' % (short, long, b"n" * 80_000))
    assert [m.key for m in found] == ["\n" * 100, f'"{long.decode()}"', f'"{"n" * 80_000}"']


@pytest.mark.parametrize("tail", [b"", b',"]"', b",[1]", b",{}", b',"x"'])
def test_long_lists_of_numbers_end_where_they_end(tail: bytes) -> None:
    numbers = b",".join(b"%d" % i for i in range(3000))
    raw = b'{"a":[%b%b],"b":[[%b] ,2],"c":1}' % (numbers, tail, numbers)
    assert [loads(raw[m.value : m.end]) for m in members(raw)] == [value for _, value in loads(raw)]


VALID = [
    b"{}", b" {} \n", b'{"a":-0}', b'{"a":1E+5}', b'{"a":"\x7f"}', b'{"a":"\\ud800"}', b'{"a":"\\udc00\\ud800"}',
    b'{"a":"\\ud83d\\u0041"}', b'{"\\uD800":1}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\\\\ud800"}', b'{"a":1e999}',
    b'{"a":' + b"1" * 5000 + b"}", b'{"a":"\\/\\b\\f"}',
]  # fmt: skip
INVALID = [
    b"", b" ", b"{", b'{"a"}', b'{"a":}', b"{,}", b'{"a":1,}', b"{a:1}", b"{'a':1}", b'{"a":01}', b'{"a":1.}',
    b'{"a":.5}',
    b'{"a":+1}', b'{"a":1e}', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":tru}', b'{"a":1}x',
    b'{"a":1}{}',
    b'{"a":1}\x00', b'{"a":"\n"}', b'{"a":"\x00"}', b'{"a":"\\x41"}', b'{"a":"\\u12"}', b'{"a":"\\ud8zz"}',
    b'{"a":"\\"}',
    b'{"a":1}/**/', b'{"a":\xc2\xa01}', b'{"a" 1}', b'{"a":1 "b":2}', b'{"a":"\xff"}', b'{"a":"\xc0\x80"}',
    b'{"\xff":1}',
    b'{"a":"\xe4\xb8"}', b'{"a":"\xf4\x90\x80\x80"}',
]  # fmt: skip


@pytest.mark.parametrize("raw", VALID)
def test_what_json_loads_takes_is_valid(raw: bytes) -> None:
    validate(raw)
    scan.validate_object(raw)


@pytest.mark.parametrize("raw", INVALID)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    for check in (validate, scan.validate_object):
        with pytest.raises(BodyError) as caught:
            check(raw)
        assert caught.value.status == 400


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_that_json_loads_detects_are_refused(encoding: str) -> None:
    raw = '{"model":"m"}'.encode(encoding)
    assert json.loads(raw) == {"model": "m"}
    with pytest.raises(BodyError):
        validate(raw)


def test_error_names_the_byte() -> None:
    with pytest.raises(BodyError, match=r"request body is not valid JSON: .*\(byte 7\)"):
        validate(b'{"a":1 "b":2}')


def test_error_after_a_lone_surrogate_names_the_byte_of_the_body_as_sent() -> None:
    with pytest.raises(BodyError, match=r"\(byte 18\)"):
        validate(b'{"a":"\\ud800","b" 2}')


@pytest.mark.parametrize("raw", [b"[]", b"null", b"3", b'"x"', b"[{}]", b"true"])
def test_one_json_value_that_is_no_object_is_refused_as_such(raw: bytes) -> None:
    validate(raw)
    with pytest.raises(BodyError, match="must be one JSON object"):
        scan.validate_object(raw)


@pytest.mark.parametrize("depth", [20_000, 1_000_000])
@pytest.mark.parametrize("unit", [b"[", b'{"a":'])
def test_deep_nesting_is_refused(depth: int, unit: bytes) -> None:
    close = b"]" if unit == b"[" else b"}"
    raw = b'{"a":' + unit * depth + b"1" + close * depth + b"}"
    with pytest.raises(BodyError, match="nested too deeply"):
        validate(raw)


@pytest.mark.parametrize("depth", [2, 6, 40, 500])
def test_nesting_that_is_accepted_is_walked(depth: int) -> None:
    inner = b"[" * depth + b'"]"' + b"]" * depth
    raw = b'{"a":%b,"b":{"c":%b},"d":1}' % (inner, inner)
    assert [m.key for m in members(raw)] == ["a", "b", "d"]


def test_utf8_is_checked_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_UTF8_CHUNK", 5)
    for pad in range(6):
        validate(b'{"a":"' + b"x" * pad + "中é😀".encode() * 3 + b'"}')
        with pytest.raises(BodyError, match="UTF-8"):
            validate(b'{"a":"' + b"x" * pad + "中é😀".encode() * 3 + b'\xe4\xb8"}')
        validate(b'{"a":"' + b"x" * pad + b'\xed\xa0\x80"}')


MANY = 3_000_000
HOSTILE = {
    "arrays": b'{"junk":[' + b"[]," * MANY + b"1]}",
    "objects": b'{"junk":[' + b'{"a":{}},' * (MANY // 3) + b"1]}",
    "strings": b'{"junk":[' + b'"",' * (4 * MANY) + b"1]}",
    "members": b"{" + b'"a":1,' * MANY + b'"b":1}',
    "flat members": b"{" + b'"a":{},' * MANY + b'"b":1}',
    "handles": b"{" + b'"ec_transfer_params":[[],[]],' * MANY + b'"b":1}',
    "one handle": b'{"ec_transfer_params":[' + b"[]," * (3 * MANY) + b"1]}",
    "handles inside": b'{"vllm_xargs":{' + b'"kv_transfer_params":1,' * MANY + b'"b":1}}',
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_bodies_with_too_much_to_look_at_are_refused_with_413(raw: bytes) -> None:
    with pytest.raises(BodyError, match="more than 262144") as caught:
        RequestBody(raw)
    assert caught.value.status == 413


@pytest.mark.parametrize("key", [b"ec\\u005ftransfer_params", b"k\\u0061"], ids=["handle", "escapes"])
def test_members_that_cost_more_count_for_more(key: bytes) -> None:
    member = b'"' + key + b'":"' + b'\\"' * 20 + b'",'
    with pytest.raises(BodyError, match="more than 262144") as caught:
        RequestBody(b"{" + member * 100_000 + b'"a":1}')
    assert caught.value.status == 413
    RequestBody(b"{" + member * 50_000 + b'"a":1}')


def test_limit_counts_each_body_anew() -> None:
    raw = b'{"x":[' + b'[{"a":[]}],' * 20_000 + b"1]}"
    for _ in range(20):
        RequestBody(raw)


def test_short_strings_of_many_escapes_cost_what_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each, only its own bytes are looked at, not the kilobytes behind it."""
    unit = b'"' + b'\\"' * 400 + b'",'
    raw = b'{"x":[' + unit * 20_000 + b"1]}"
    start = time.thread_time()
    RequestBody(raw)
    assert time.thread_time() - start < 2.0  # it took 20


LINEAR = {
    "backslashes": (b'{"a":"', b"\\\\", b'"}'),
    "escaped quotes": (b'{"a":"', b'\\"', b'"}'),
    "mixed escapes": (b'{"a":"', b'\\\\\\"\\\\', b'"}'),
    "spaces": (b'{"a":', b" ", b"1}"),
    "numbers": (b'{"a":[', b"1,", b"1]}"),
    "key": (b'{"', b"\\\\", b'":1}'),
    "surrogates": (b'{"a":"', b"\\ud800", b'"}'),
    "nested": (b'{"a":[', b'[[[[["x"]]]]],', b"1]}"),
}


@pytest.mark.parametrize("case", LINEAR.values(), ids=LINEAR.keys())
def test_time_is_linear_in_the_size(case: tuple[bytes, bytes, bytes]) -> None:
    head, unit, tail = case

    def cost(size: int) -> float:
        raw = head + unit * (size // len(unit)) + tail
        best = float("inf")
        for _ in range(7):
            start = time.thread_time()
            RequestBody(raw)
            best = min(best, time.thread_time() - start)
        return best

    # Quadratic work would cost 64 times as much.
    assert cost(1 << 20) < 40 * max(cost(1 << 17), 5e-5)


LONG = b"QUJD" * 10_000
DATA = [b'"data:image/png;base64,%b"' % LONG, b'"data":"%b"' % LONG, b'"data" : "%b"' % LONG]


@pytest.mark.parametrize(
    ("raw", "valid"),
    [
        (b'{"messages":[{"url":"data:image/png;base64,%b"}],"a":1}' % LONG, True),
        (b'{"input_audio":{"data": "%b","format":"wav"},"b":{"data":"%b"}}' % (LONG, LONG), True),
        (b'{"a":"data:x/y;base64,%b","data":1}' % LONG, True),
        # Quotes that close a string where it looks as if they opened one, and the other way round.
        (b'{"a":"x"data:image/png;base64,%b","b":1}' % LONG, False),
        (b'{"a":"x"data":"%b"}' % LONG, False),
        (b'{"a":"\\"data:image/png;base64,%b","b":1}' % LONG, True),
        (b'{"a":"data:image/png;base64,%b' % LONG, False),
        (b'{"a":"data:image/png;base64,%b\\"}' % LONG, False),
        (b'{"a":"data:image/png;base64,%b\\"","b":1}' % LONG, True),
        (b'{"a":"data:image/png;base64,%b"x"data:image/png;base64,%b"}' % (LONG, LONG), False),
        (b'{"a":"data:image/png;base64,%b\xff%b"}' % (LONG, LONG), False),
        (b'{"a":"data:image/png;base64,%b" "b":1}' % LONG, False),
        (b'{"a":[1}"data:image/png;base64,%b"}' % LONG, False),
    ],
)
def test_leaving_long_data_out_of_the_validation_changes_no_verdict(raw: bytes, valid: bool) -> None:
    raw = raw + b" " * 70_000
    if valid:
        json.loads(raw)
        hint = scan.validate_object(raw)
        at = raw.index(b"{")
        assert Scanner(raw).members(at, hint=hint) == Scanner(raw).members(at)
    else:
        with pytest.raises(ValueError):
            json.loads(raw)
        with pytest.raises(BodyError):
            scan.validate_object(raw)


@steady
@given(
    st.lists(st.sampled_from([*DATA, b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b'"data', b'"a"', b"1", b" "]))
)
def test_the_verdict_on_any_text_with_long_data_is_that_of_json_loads(pieces: list[bytes]) -> None:
    raw = b'{"data":"%b","x":' % LONG + b"".join(pieces) + b"}" + b" " * 70_000
    try:
        json.loads(raw)
    except ValueError:
        with pytest.raises(BodyError):
            scan.validate_object(raw)
    else:
        scan.validate_object(raw)


def test_an_error_behind_long_data_names_the_byte_of_the_body_as_sent() -> None:
    raw = b'{"data":"%b","a" 1}' % LONG + b" " * 70_000
    with pytest.raises(BodyError, match=rf"\(byte {raw.index(b' 1') + 1}\)"):
        scan.validate_object(raw)
