"""The quick proof that a request is plain text: whatever it says, the scanner would have said too."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.body.texts import steady
from triptych.body.items import Api
from triptych.body.media import find_media
from triptych.body.plain import Plain
from triptych.body.request import DEFAULT_POLICY, BodyError, Policy, RequestBody

APIS: tuple[Api, ...] = get_args(Api)


class NoProof:
    """A policy's proof that proves nothing."""

    def of(self, raw: bytes) -> None:
        return None


SCANNED = Policy(DEFAULT_POLICY.owned, DEFAULT_POLICY.rules, NoProof())  # type: ignore[arg-type]

TEXT = st.sampled_from(["", "hi", 'say "model"', "a\nb", "\\u0041", "é", "null", '"messages"'])
PARTS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "image_url", "refusal"]), "text": TEXT}),
        st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.just({"url": "data:,x"})}),
        st.fixed_dictionaries({"type": st.just("text"), "text": TEXT, "uuid": TEXT}),
        st.fixed_dictionaries({"type": st.just("text"), "text": TEXT, "image_url": TEXT}),
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.one_of(TEXT, PARTS, st.none())},
        optional={"name": TEXT, "tool_calls": st.just([{"id": "1"}]), "audio": st.just({"id": "x"})},
    ),
    max_size=3,
)
VALUE = st.sampled_from([None, True, 1, 2, 0.5, "x", [], {}, [1], ["a", "b"], {"a": {"image_url": 1}}])
MEMBER = st.one_of(
    st.tuples(st.just("messages"), MESSAGES),
    st.tuples(st.sampled_from(["prompt", "input"]), st.one_of(TEXT, PARTS, MESSAGES, st.just([1, 2]), st.none())),
    st.tuples(st.just("model"), st.one_of(TEXT, st.none(), st.just(1))),
    st.tuples(
        st.sampled_from(
            [*Plain.__struct_fields__, "n", "best_of", "echo", "vllm_xargs", "kv_transfer_params", "prompt_embeds"]
        ),
        VALUE,
    ),
)


def spelled(members: list[tuple[str, Any]], ascii_: bool) -> bytes:
    inner = ",".join(f"{json.dumps(k)}:{json.dumps(v, ensure_ascii=ascii_)}" for k, v in members)
    return ("{" + inner + "}").encode()


@steady
@given(st.lists(MEMBER, max_size=5), st.booleans())
def test_a_plain_request_is_what_the_scanner_finds_too(members: list[tuple[str, Any]], ascii_: bool) -> None:
    raw = spelled(members, ascii_)
    try:
        quick = RequestBody(raw)
    except BodyError:
        return
    if quick.plain is None:
        return
    scanned = RequestBody(raw, SCANNED)
    assert quick.model == scanned.model
    assert (quick.stripped, scanned.stripped) == (False, False)
    for api in APIS:
        assert find_media(quick, api) == find_media(scanned, api)
        assert not find_media(scanned, api).items
        assert quick.hop_hazard(api) == scanned.hop_hazard(api) is None
    assert quick.rewrite()[0] is raw
    put = {"max_tokens": b"1", "stream": b"false"}
    assert quick.rewrite(put, ("stream_options",)) == scanned.rewrite(put, ("stream_options",))
    assert quick.stream == scanned.stream


def test_the_usual_request_is_proved() -> None:
    messages = b'[{"role":"user","content":[{"type":"text","text":"hi"}]}]'
    raw = b'{"model":"m","messages":%b,"max_tokens":16,"stream":true}' % messages
    plain = RequestBody(raw).plain
    assert plain is not None
    assert plain.model == "m"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"b"}',
        b'{"mod\\u0065l":"a","model":"b"}',
        b'{"stream":false,"messages":[],"stream":true}',
    ],
)
def test_a_second_copy_of_an_owned_member_is_refused_as_ever(raw: bytes) -> None:
    with pytest.raises(BodyError, match="duplicate top-level key"):
        RequestBody(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params":{},"messages":[]}',
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"x","image_url":"y"}]}]}',
        b'{"messages":[{"role":"user","content":"x","kv_transfer_params":1}]}',
        b'{"n":2,"messages":[]}',
        b'{"prompt":["a","b"]}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"user":"' + b"x" * 20_000 + b'"}',
    ],
)
def test_what_needs_a_look_is_looked_at(raw: bytes) -> None:
    assert DEFAULT_POLICY.proof.of(raw) is None
