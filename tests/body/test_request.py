"""What is read of a request body at its top level, refused and stripped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.body.texts import joined, loads
from triptych.body.answer import nulled
from triptych.body.media import find_media
from triptych.body.request import OWNED, Policy, RequestBody
from triptych.body.scan import BodyError

CONTRACT_OWNED = {
    "model", "messages", "input", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "min_tokens", "mm_processor_kwargs", "media_io_kwargs", "session_id", "priority", "vllm_xargs",
}  # fmt: skip


def test_owned_fields_are_those_of_the_contract() -> None:
    assert OWNED == CONTRACT_OWNED


@pytest.mark.parametrize("key", sorted(CONTRACT_OWNED))
@pytest.mark.parametrize("values", [(b"1", b"1"), (b'{"a":[1]}', b"null")])
def test_owned_key_given_twice_is_refused(key: str, values: tuple[bytes, bytes]) -> None:
    with pytest.raises(BodyError) as caught:
        RequestBody(b'{"%b":%b,"x":1,"%b":%b}' % (key.encode(), values[0], key.encode(), values[1]))
    assert str(caught.value) == f'duplicate top-level key "{key}" in request body'
    assert (caught.value.status, caught.value.param) == (400, key)


def test_owned_key_given_twice_in_different_spellings_is_refused() -> None:
    with pytest.raises(BodyError, match='duplicate top-level key "model" in request body'):
        RequestBody(b'{"model":"a","mod\\u0065l":"b"}')


def test_dialects_add_owned_keys() -> None:
    raw = b'{"bootstrap_room":1,"bootstrap_room":2}'
    RequestBody(raw)
    with pytest.raises(BodyError, match='"bootstrap_room"'):
        RequestBody(raw, Policy.of(["bootstrap_room"]))


@pytest.mark.parametrize(
    "raw", [b'{"x":1,"x":2}', b'{"metadata":{"model":1,"model":2}}', b'{"messages":[{"n":1,"n":2}]}']
)
def test_other_duplicates_and_nested_ones_pass_as_the_same_bytes(raw: bytes) -> None:
    (only,) = RequestBody(raw).rewrite()
    assert only is raw


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"ec_transfer_params":{"a":1}}', b"{}"),
        (b'{"model":"m","kv_transfer_params":null}', b'{"model":"m"}'),
        (b'{"ec\\u005ftransfer_params":{},"model":"m"}', b'{"model":"m"}'),
        (b'{"\\u0065\\u0063_transfer_params":{},"model":"m","kv_transfer_param\\u0073":"x"}', b'{"model":"m"}'),
        (b'{"ec_transfer_params":1,"a":1,"ec_transfer_params":[2],"b":2,"kv_transfer_params":"s"}', b'{"a":1,"b":2}'),
        (b'{"ec_transfer_params":{"a":[{"b":[[[{"c":"}"}]]]}]},"a":1}', b'{"a":1}'),
        (b'{"a":1,"ec_transfer_params":"%b"}' % (b'\\"' * 500), b'{"a":1}'),
        (b'{"ec_transfer_params":1 , "kv_transfer_params":2 , "ec_transfer_params":{} , "a":1}', b'{"a":1}'),
        (b'{"vllm_xargs":{"kv_transfer_params":"x","k":1},"a":1}', b'{"vllm_xargs":{"k":1},"a":1}'),
        (b'{"vllm_xargs":{"ec_transfer_params":1,"e\\u0063_transfer_params":2}}', b'{"vllm_xargs":{}}'),
        (b'{"vllm_\\u0078args":{"ec_transfer_params":1,"b":2}}', b'{"vllm_\\u0078args":{"b":2}}'),
    ],
)
def test_handles_are_stripped_however_spelled_and_wherever_legal(raw: bytes, expected: bytes) -> None:
    body = RequestBody(raw)
    assert body.stripped
    assert joined(body.rewrite()) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":{"ec_transfer_params":1}}', b'{"Ec_transfer_params":1}', b'{"ec_transfer_params ":1}',
        b'{"ec_transfer_param":1}', b'{"vllm_xargs":"ec_transfer_params"}',
        b'{"vllm_xargs":[{"ec_transfer_params":1}]}',
        b'{"ec\\\\u005ftransfer_params":1}', b'{"<stripped>":1}', b'{"vllm_xargs":{"a":{"ec_transfer_params":1}}}',
    ],
)  # fmt: skip
def test_what_no_engine_reads_as_a_handle_stays(raw: bytes) -> None:
    body = RequestBody(raw)
    assert not body.stripped
    assert body.rewrite()[0] is raw


def test_opened_handles_pass_and_are_replaced_by_the_gateways_own() -> None:
    raw = b'{"ec_transfer_params":{"a":1},"kv_transfer_params":2'
    raw += b',"vllm_xargs":{"ec_transfer_params":1,"kv_transfer_params":2}}'
    body = RequestBody(raw, Policy.of(strip={"kv_transfer_params"}))
    assert joined(body.rewrite()) == b'{"ec_transfer_params":{"a":1},"vllm_xargs":{"ec_transfer_params":1}}'
    put = joined(body.rewrite({"ec_transfer_params": b'{"own":1}'}))
    assert loads(put)[0] == ("ec_transfer_params", [("own", "1")])


@pytest.mark.parametrize("copies", [1, 2, 3, 50_000])
@pytest.mark.parametrize("rest", [b"", b',"model":"m"'])
def test_injection_leaves_exactly_one_copy_the_gateways(copies: int, rest: bytes) -> None:
    raw = b"{" + b",".join([b'"ec_transfer_params":{"evil":1}'] * copies) + rest + b"}"
    body = RequestBody(raw)
    result = joined(body.rewrite({"ec_transfer_params": b'{"h":{"x":1.50}}'}))
    assert result == b"{" + (rest[1:] + b"," if rest else b"") + b'"ec_transfer_params":{"h":{"x":1.50}}}'
    assert joined(body.rewrite()) == (b"{" + rest[1:] + b"}")


def test_key_that_reads_like_the_mark_of_stripped_runs_is_a_key_like_others() -> None:
    body = RequestBody(b'{"ec_transfer_params":1,"<stripped>":2,"a":3}')
    assert joined(body.rewrite({"<stripped>": b"4"})) == b'{"<stripped>":4,"a":3}'
    assert joined(RequestBody(b'{"ec_transfer_params":1}').rewrite({"<stripped>": b"4"})) == b'{"<stripped>":4}'


def test_rewrite_of_vllm_xargs_itself_and_of_what_is_inside_do_not_clash() -> None:
    body = RequestBody(b'{"vllm_xargs":{"ec_transfer_params":1},"a":2}')
    assert joined(body.rewrite({"vllm_xargs": b'{"k":1}'})) == b'{"vllm_xargs":{"k":1},"a":2}'
    assert joined(body.rewrite(remove=["vllm_xargs"])) == b'{"a":2}'


def test_values_are_read_as_sent() -> None:
    body = RequestBody(b'{"a": 1.50 , "b":"x\\u00e9","c":[1, 2],"d":null,"e":%b}' % (b"1" * 5000))
    assert body.value("a") == b"1.50"
    assert (body.get("a"), body.get("b"), body.get("c"), body.get("d"), body.get("z")) == (
        1.5,
        "xé",
        [1, 2],
        None,
        None,
    )
    assert body.value("z") is None
    assert body.get("e") == b"1" * 5000
    assert "d" in body
    assert "z" not in body
    assert body.text("b") == "xé"
    assert body.text("a") is None
    assert body.text("z") is None


@pytest.mark.parametrize(
    ("value", "model"),
    [(b'"m"', "m"), (b'"\\u006d\\/1"', "m/1"), (b"null", None), (b"1", None), (b"[]", None), (b'"\\ud800"', "\ud800")],
)
def test_model_is_the_decoded_string(value: bytes, model: str | None) -> None:
    assert RequestBody(b'{"model":%b}' % value).model == model


@pytest.mark.parametrize(
    ("value", "stream"),
    [
        (b"true", True), (b"false", False), (b"null", False), (b"1", True), (b"0", False), (b"1.0", True),
        (b'"true"', True), (b'"True"', True), (b'"yes"', True), (b'"on"', True), (b'"t"', True), (b'"y"', True),
        (b'"1"', True), (b'"false"', False), (b'"tru\\u0065"', True), (b'"no"', False), (b"2", False),
        (b"[]", False),
        (b"{}", False), (b'"anything else"', False),
    ],
)  # fmt: skip
def test_stream_is_what_the_engine_takes_for_true(value: bytes, stream: bool) -> None:
    assert RequestBody(b'{"stream":%b}' % value).stream is stream


def test_absent_fields_have_defaults() -> None:
    body = RequestBody(b"{}")
    assert (body.model, body.stream, body.single_prompt(), body.hop_hazard("chat")) == (None, False, True, None)


@pytest.mark.parametrize(
    ("prompt", "single"),
    [
        (b'"text"', True), (b"[1,2,3]", True), (b"[]", True), (b'["a"]', True), (b"[[1,2]]", True), (b"null", True),
        (b'["a","b"]', False), (b"[[1],[2]]", False), (b'[ [1,2] , "b" ]', False), (b'["a" , ]'.replace(b" , ",
        b""), True),
        (b'["%b","b"]' % (b"x" * 5000), False), (b"[1.5,2]", True), (b"[{},{}]", False),
    ],
)  # fmt: skip
def test_number_of_prompts(prompt: bytes, single: bool) -> None:
    assert RequestBody(b'{"prompt":%b}' % prompt).single_prompt() is single


def test_prompt_embeds_are_prompts_too() -> None:
    assert not RequestBody(b'{"prompt":"a","prompt_embeds":"b"}').single_prompt()
    assert not RequestBody(b'{"prompt_embeds":["a","b"]}').single_prompt()
    assert RequestBody(b'{"prompt_embeds":"a"}').single_prompt()
    assert RequestBody(b'{"prompt":"a","prompt_embeds":null}').single_prompt()


@pytest.mark.parametrize(
    ("fields", "api", "hazard"),
    [
        ('"n":2', "chat", "n"), ('"n":1', "chat", None), ('"n":null', "chat", None), ('"n":0', "chat", "n"),
        ('"n":"2"', "completions", "n"), ('"n":"1"', "completions", None), ('"n":1.0', "chat", None),
        ('"n":[]', "chat", "n"),
        ('"best_of":2', "completions", "best_of"), ('"best_of":1', "completions", None),
        ('"best_of":null', "chat", None),
        ('"use_beam_search":true', "chat", "beam_search"), ('"use_beam_search":false', "chat", None),
        ('"use_beam_search":"yes"', "chat", "beam_search"),
        ('"prompt":["a","b"]', "completions", "prompts"), ('"prompt":["a"]', "completions", None),
        ('"prompt":["a","b"]', "chat", None),
        ('"echo":true,"prompt_logprobs":1', "completions", "echo"),
        ('"echo":true,"prompt_logprobs":0', "completions", "echo"),
        ('"echo":true,"logprobs":1', "completions", "echo"), ('"echo":true', "completions", None),
        ('"echo":true', "chat", "echo"), ('"echo":false,"prompt_logprobs":1', "chat", None),
        ('"prompt_logprobs":1', "chat", None),
        ('"echo":"true","prompt_logprobs":1', "completions", "echo"),
        ('"echo":null,"prompt_logprobs":1', "completions", None),
    ],
)  # fmt: skip
def test_shapes_that_take_no_prefill_hop(fields: str, api: str, hazard: str | None) -> None:
    assert RequestBody(b"{%b}" % fields.encode()).hop_hazard(api) == hazard


def test_path_names_a_place_in_the_body() -> None:
    raw = b'{"messages":[{"content":"x"},{"content":[{"type":"text"},{"image_url":{"url":"u"}}]}]}'
    body = RequestBody(raw)
    assert body.path(raw.index(b'{"image_url"')) == "messages[1].content[1]"
    assert body.path(raw.index(b'"u"')) == "messages[1].content[1].image_url.url"
    assert body.path(raw.index(b'[{"content"')) == "messages"


def test_last_copy_of_an_unowned_key_counts_as_in_json_loads() -> None:
    body = RequestBody(b'{"echo":false,"echo":true,"logprobs":1}')
    assert body.get("echo") is True
    assert body.hop_hazard("completions") == "echo"


def test_repr_names_keys_not_contents() -> None:
    shown = repr(RequestBody(b'{"model":"m","ec_transfer_params":1,"messages":["secret"]}'))
    assert "messages" in shown
    assert "secret" not in shown


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"x"', b"", b"{", b"{}{}", b'\xef\xbb\xbf{"a":1}'])
def test_what_is_not_one_json_object_is_400(raw: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        RequestBody(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("key", ["__class__", "__struct_fields__", "__init__", "get", "keys", "<stripped>", ""])
def test_keys_that_are_names_in_python_are_keys_like_others(key: str) -> None:
    raw = b'{"%b":{"a":[{"b":[{}]}]},"kv_transfer_params":1}' % key.encode()
    body = RequestBody(raw)
    assert body.get(key) == {"a": [{"b": [{}]}]}
    assert joined(body.rewrite()) == raw.replace(b',"kv_transfer_params":1', b"")
    assert joined(nulled(raw)) == raw.replace(b":1}", b":null}")


def deeper(frames: int, work: Callable[[], Any]) -> Any:
    return deeper(frames - 1, work) if frames else work()


def test_nesting_that_just_passes_the_validation_breaks_nothing_later() -> None:
    passed = 0
    for depth in range(600, 1000, 5):
        nested = b"[" * depth + b"]" * depth
        raw = b'{"messages":[{"x":%b}],"n":%b,"ec_transfer_params":%b}' % (nested, nested, nested)
        try:
            body = RequestBody(raw)
        except BodyError:
            continue
        passed += 1
        assert deeper(60, lambda: body.hop_hazard("chat")) == "n"  # noqa: B023
        assert deeper(60, lambda: find_media(body, "chat")).items == ()  # noqa: B023
        assert joined(body.rewrite()) == raw.replace(b',"ec_transfer_params":%b' % nested, b"")
    assert passed
