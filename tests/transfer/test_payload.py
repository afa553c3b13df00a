"""The payload: every field optional, nothing taken that it does not know, the dicts its receiver gets."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from triptych.transfer.payload import Codes, HiddenStates, Ids, Meta, PayloadDict, StagePayload, to_dict, to_struct
from triptych.transfer.wire import decode, encode

PARTS = (Codes, HiddenStates, Ids, Meta, StagePayload)
FULL = StagePayload(
    codes=Codes(audio=[1, 2], ref=[3]),
    meta=Meta(finished=False, left_context_size=0, next_stage_prompt_len=4),
    ids=Ids(prompt=[1], tokens=[7]),
    hidden_states=HiddenStates(output=[0.5]),
    embed={"text": [0.5]},
    extra={"nested": {"a": 1}},
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_field_is_none_unless_given_and_can_be_set_later(part: type[msgspec.Struct]) -> None:
    made = part()
    for name in part.__struct_fields__:
        assert getattr(made, name) is None
        setattr(made, name, "later")
        assert getattr(made, name) == "later"
    assert part(**dict.fromkeys(part.__struct_fields__, "given")) == part(
        **dict.fromkeys(part.__struct_fields__, "given")
    )


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_fields_are_given_by_keyword_only(part: type[msgspec.Struct]) -> None:
    with pytest.raises(TypeError):
        part("positional")
    with pytest.raises(TypeError):
        part(no_such_field=1)


def test_to_dict_leaves_out_what_is_none_and_keeps_what_is_false_or_empty() -> None:
    payload = StagePayload(meta=Meta(finished=False, left_context_size=0), codes=Codes(audio=[]), ids=Ids())
    assert to_dict(payload) == {"meta": {"finished": False, "left_context_size": 0}, "codes": {"audio": []}, "ids": {}}
    assert to_dict(StagePayload()) == {}


def test_to_dict_shares_values_instead_of_copying_them() -> None:
    audio = [1, 2, 3]
    assert to_dict(StagePayload(codes=Codes(audio=audio)))["codes"]["audio"] is audio


def test_to_struct_is_the_way_back() -> None:
    assert to_struct(to_dict(FULL)) == FULL
    assert to_struct({}) == StagePayload()
    assert to_struct({"meta": None, "codes": Codes(audio=[1])}) == StagePayload(codes=Codes(audio=[1]))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kodes": {}}, "'kodes'"),
        ({"meta": {"finish": True}}, "`meta` of a stage payload has no field 'finish'"),
        ({"codes": {"audio": [1], "vidoe": []}}, "`codes` of a stage payload has no field 'vidoe'"),
        ({"ids": [1, 2]}, "`ids` of a stage payload is a list"),
        ({"hidden_states": Codes()}, "`hidden_states` of a stage payload is a Codes"),
    ],
)
def test_to_struct_takes_no_field_that_it_does_not_know(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError) as caught:
        to_struct(fields)
    assert named in str(caught.value)


def test_what_arrives_is_what_to_dict_says() -> None:
    assert decode(*encode(FULL)) == to_dict(FULL)


def test_the_typed_dict_and_the_struct_have_the_same_fields() -> None:
    assert set(PayloadDict.__annotations__) == set(StagePayload.__struct_fields__)


def test_payload_and_wire_form_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from triptych.transfer import payload, wire\n"
        "made = payload.StagePayload(codes=payload.Codes(audio=wire.Tensor('int8', (2,), b'ab')))\n"
        "back = wire.decode(*wire.encode(made), wire.tensor_maker('view'))\n"
        "assert bytes(back['codes']['audio'].buffer) == b'ab'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
