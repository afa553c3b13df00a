"""Each rule about media, by example. Where a rule comes from is in the docstring of triptych.body.media."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.body.texts import joined
from triptych.body.edit import apply
from triptych.body.items import Api, Item, Media, part_splice, uuid_splices
from triptych.body.media import find_media
from triptych.body.request import RequestBody
from triptych.body.scan import BodyError

DATA = "data:image/png;base64,AAAA"
HTTP = "https://host/cat.png"


def find(body: Any, api: Api = "chat") -> tuple[RequestBody, Media]:
    parsed = RequestBody(body if isinstance(body, bytes) else json.dumps(body).encode())
    return parsed, find_media(parsed, api)


def chat(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": list(parts)}]}


def kinds(media: Media) -> list[tuple[str, str]]:
    return [(closed.kind, closed.key) for closed in media.closed]


def image(url: Any = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


# Which parts are media


@pytest.mark.parametrize(
    ("part", "modality", "key", "inline", "content"),
    [
        ({"type": "image_url", "image_url": {"url": DATA}}, "image", "image_url", True, DATA),
        ({"type": "image_url", "image_url": {"url": HTTP, "detail": "low"}}, "image", "image_url", False, HTTP),
        ({"type": "image_url", "image_url": HTTP}, "image", "image_url", False, HTTP),
        ({"image_url": DATA}, "image", "image_url", True, DATA),
        ({"type": "input_image", "image_url": DATA}, "image", "image_url", True, DATA),
        ({"type": "input_image", "input_image": HTTP}, "image", "input_image", False, HTTP),
        ({"type": "video_url", "video_url": {"url": "DaTa:video/mp4;base64,AA"}}, "video", "video_url", True, None),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/x"}}, "audio", "audio_url", False, "file:///etc/x"),
        (
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            "audio", "input_audio", True, '{"data": "AA", "format": "wav"}',
        ),
        ({"type": "text", "text": "t", "image_url": {"url": HTTP}}, "image", "image_url", False, HTTP),
        ({"type": 5, "video_url": HTTP}, "video", "video_url", False, HTTP),
        ({"type": "tool_reference", "name": "x", "audio_url": HTTP, "uuid": "u"}, "audio", "audio_url", False, HTTP),
    ],
)  # fmt: skip
def test_part_is_classified_by_its_media_key_whatever_its_type_says(
    part: dict[str, Any], modality: str, key: str, inline: bool, content: str | None
) -> None:
    _, media = find(chat({"type": "text", "text": "look"}, part))
    (item,) = media.items
    assert (item.modality, item.key, item.inline) == (modality, key, inline)
    if content is not None:
        assert bytes(item.content).decode() == content
    assert media.closed == ()
    assert media.unplanned == ()


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer", "tool", "anything"])
def test_messages_of_every_role_are_read(role: str) -> None:
    assert len(find(chat(image(), role=role))[1].items) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "an image_url of https://x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": '{"image_url": "x"}'}]}]},
        {"messages": [{"role": "user", "content": ["image_url", {"type": "text", "text": "uuid"}]}]},
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "tool_calls": [{"image_url": 1}]}]},
        {"messages": [], "tools": [{"image_url": {"url": "x"}}]},
        {"messages": "image_url"}, {"messages": None}, {},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "t", "Image_url": "x"}]}]},
    ],
)  # fmt: skip
def test_text_is_no_media(body: dict[str, Any]) -> None:
    assert find(body)[1] == Media()


def test_keys_spelled_with_escapes_are_media_keys() -> None:
    raw = b'{"messages":[{"c\\u006fntent":[{"\\u0069mage_url":{"ur\\u006c":"\\u0064ata:,x"},"uui\\u0064":"u"}]}]}'
    body, media = find(raw)
    (item,) = media.items
    assert item.inline
    assert joined(body.rewrite(inner=uuid_splices(raw, item, None))) == raw.replace(b',"uui\\u0064":"u"', b"")


@pytest.mark.parametrize(
    ("url", "inline"),
    [
        ('"data:,x"', True), ('"\\u0064ata:,x"', True), ('"\\u0044\\u0041\\u0054\\u0041\\u003a"', True),
        ('"DATA:"', True),
        ('"data\\/:"', False), ('" data:,x"', False), ('"http:data:"', False), ('"dat"', False),
        ('"\\u0064at"', False),
        ('"da\\u00e4ta:"', False), ('"d\\"ta:"', False), ('"datа:"', False),
    ],
)  # fmt: skip
def test_inline_is_a_data_url_as_the_engine_decides_it(url: str, inline: bool) -> None:
    assert json.loads(url)[:5].lower() == "data:" or not inline
    raw = f'{{"messages":[{{"content":[{{"image_url":{url}}}]}}]}}'.encode()
    assert find(raw)[1].items[0].inline is inline


def test_items_come_in_request_order() -> None:
    urls = [f"https://h/{i}" for i in range(6)]
    body = {
        "messages": [
            {"role": "system", "content": [image(urls[0])]},
            {"role": "user", "content": [image(urls[1]), {"type": "text", "text": "t"}, image(urls[2])]},
            {"role": "assistant", "content": "text"},
            {"role": "tool", "content": [image(urls[3]), image(urls[4]), image(urls[5])]},
        ]
    }
    assert [bytes(i.content).decode() for i in find(body)[1].items] == urls


def test_equal_media_have_equal_identities_and_others_do_not() -> None:
    video = {"type": "video_url", "video_url": {"url": DATA}}
    audio = [{"type": "input_audio", "input_audio": {"data": "AA", "format": f}} for f in ("wav", "mp3")]
    parts = [image(DATA), image(DATA, uuid="u"), {"image_url": DATA, "detail": "x"}, image(HTTP), video, *audio]
    identities = [item.identity for item in find(chat(*parts))[1].items]
    assert identities[0] == identities[1] == identities[2]
    assert len(set(identities)) == 5


# Refusals


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": DATA, "video_url": HTTP},
        {"type": "image_url", "image_url": {"url": DATA}, "image_embeds": "x"},
        {"input_audio": {}, "audio_url": "x"}, {"image_embeds": "a", "audio_embeds": "b"},
        {"prompt_embeds": "", "image_url": ""},
        {"image_url": None, "input_image": None}, {"image_pil": None, "image_url": DATA},
    ],
)  # fmt: skip
def test_two_media_keys_in_one_part_are_400(part: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as caught:
        find(chat({"type": "text", "text": "t"}, part))
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[1]"
    for key in part:
        assert key == "type" or f'"{key}"' in caught.value.message


def test_one_media_key_given_twice_is_two_media_keys() -> None:
    raw = b'{"messages":[{"content":[{"image_url":"data:,a","x":1,"im\\u0061ge_url":"data:,b"}]}]}'
    with pytest.raises(
        BodyError, match=r'messages\[0\].content\[0\] carries two media keys: "image_url" and "image_url"'
    ):
        find(raw)


@pytest.mark.parametrize("key", ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "other_embeds"])
@pytest.mark.parametrize("type_", ["text", None, "key"])
@pytest.mark.parametrize("uuid", [None, "u"])
def test_embeds_parts_are_closed_and_cause_no_encode_leg(key: str, type_: str | None, uuid: str | None) -> None:
    part = {"type": key if type_ == "key" else type_, "text": "t", key: "AAAA", "uuid": uuid}
    body, media = find(chat({"type": "text", "text": "t"}, part))
    assert media.items == ()
    assert [item.key for item in media.embeds] == [key]
    assert kinds(media) == [("prompt_embeds" if key == "prompt_embeds" else "embeds", key)]
    assert body.path(media.closed[0].where) == "messages[0].content[1]"


@pytest.mark.parametrize("type_", ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"])
def test_embeds_by_type_alone_are_closed(type_: str) -> None:
    # vLLM reads {"type": "prompt_embeds", "data": …} without any media key.
    assert [key for _, key in kinds(find(chat({"type": type_, "data": "AAAA"}))[1])] == [type_]


@pytest.mark.parametrize("spelling", [b'"prompt_embed\\u0073"', b'"\\u0070rompt_embeds"'])
def test_embeds_type_spelled_with_escapes_is_closed(spelling: bytes) -> None:
    raw = b'{"messages":[{"content":[{"type":%b,"data":"AA"}]}]}' % spelling
    assert kinds(find(raw)[1]) == [("prompt_embeds", "prompt_embeds")]


EMBEDS = {"type": "image_embeds", "image_embeds": "AAAA"}


@pytest.mark.parametrize(
    ("api", "body", "where"),
    [
        ("completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("completions", {"prompt": "x", "prompt_embeds": ["AAAA"]}, "prompt_embeds"),
        ("chat", {"prompt_embeds": "AAAA", "messages": []}, "prompt_embeds"),
        ("chat", {"messages": [{"role": "tool", "content": [EMBEDS]}]}, "messages[0].content[0]"),
        ("chat", {"messages": [{"role": "user", "content": EMBEDS}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [[EMBEDS]]}]}, "messages[0].content[0][0]"),
        ("chat", {"messages": [{"content": [{"content": [EMBEDS]}]}]}, "messages[0].content[0].content[0]"),
        ("chat", {"messages": [[{"role": "user", "content": [EMBEDS]}]]}, "messages[0][0].content[0]"),
        ("responses", {"input": [{"role": "user", "content": [EMBEDS]}]}, "input[0].content[0]"),
        ("responses", {"input": [{"type": "function_call_output", "output": [EMBEDS]}]}, "input[0].output[0]"),
        ("responses", {"input": [{"type": "other", "output": [EMBEDS]}]}, "input[0].output[0]"),
        (
            "responses",
            {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "t"}, EMBEDS]}]},
            "input[0].content[1]",
        ),
        ("responses", {"previous_input_messages": [{"content": [EMBEDS]}]}, "previous_input_messages[0].content[0]"),
        ("messages", {"system": [EMBEDS]}, "system[0]"),
        ("messages", {"messages": [{"role": "user", "content": [EMBEDS]}]}, "messages[0].content[0]"),
        (
            "messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [EMBEDS]}]}]},
            "messages[0].content[0].content[0]",
        ),
        ("messages", {"messages": [{"role": "system", "content": [EMBEDS]}]}, "messages[0].content[0]"),
        ("embeddings", {"input": [{"role": "user", "content": [EMBEDS]}]}, "input[0].content[0]"),
        ("embeddings", {"messages": [[{"role": "user", "content": [EMBEDS]}]]}, "messages[0][0].content[0]"),
        ("embeddings", {"input": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("other", {"input": [{"content": [EMBEDS]}]}, "input[0].content[0]"),
    ],
)  # fmt: skip
def test_embeds_are_found_wherever_they_are_legal(api: Api, body: dict[str, Any], where: str) -> None:
    parsed, media = find(body, api)
    (closed,) = media.closed
    assert parsed.path(closed.where) == where or parsed.raw[closed.where :].startswith(b'"prompt_embeds"')


def test_null_embeds_at_top_level_are_none() -> None:
    assert find({"prompt": "x", "prompt_embeds": None}, "completions")[1].closed == ()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None}, {"type": "image_url", "image_url": ""},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": None}}, {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url"}, {"type": "input_audio"}, {"type": "text", "text": "t", "video_url": None},
        {"type": "input_audio", "input_audio": None},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"format": "wav"}}, {"input_image": None}, {"audio_url": []},
    ],
)  # fmt: skip
@pytest.mark.parametrize("uuid", ["u", 5, "", {"a": 1}, False])
def test_uuid_without_data_is_closed(part: dict[str, Any], uuid: Any) -> None:
    assert [kind for kind, _ in kinds(find(chat({**part, "uuid": uuid}))[1])] == ["uuid_only"]
    assert find(chat({**part, "uuid": None}))[1].closed == ()
    assert find(chat(part))[1].closed == ()


def test_last_uuid_counts_for_whether_there_is_one() -> None:
    raw = '{"messages":[{"content":[{"image_url":null,"uuid":%s,"uuid":%s}]}]}'
    assert kinds(find((raw % ("null", '"u"')).encode())[1]) == [("uuid_only", "image_url")]
    assert kinds(find((raw % ('"u"', "null")).encode())[1]) == []


@pytest.mark.parametrize(
    "part", [{"image_pil": None, "uuid": "u"}, {"image_pil": "/etc/passwd"}, {"image_pil": "x", "uuid": "u"}]
)
def test_in_process_images_are_closed(part: dict[str, Any]) -> None:
    assert kinds(find(chat(part))[1]) == [("image_pil", "image_pil")]


# Duplicates, decided as json.loads decides them


def test_content_given_twice_is_its_last_copy() -> None:
    raw = b'{"messages":[{"content":[{"image_url":"https://a"}],"content":[{"image_url":"https://b"}]}]}'
    body, media = find(raw)
    assert [bytes(item.content) for item in media.items] == [b"https://b"]
    assert body.rewrite()[0] is raw
    assert find(b'{"messages":[{"content":[{"image_url":"https://a"}],"content":"text"}]}')[1].items == ()
    assert len(find(b'{"messages":[{"content":"text","content":[{"image_url":"https://a"}]}]}')[1].items) == 1


def test_url_given_twice_is_its_last_copy() -> None:
    raw = b'{"messages":[{"content":[{"image_url":{"url":"data:,a","url":"https://b"}}]}]}'
    (item,) = find(raw)[1].items
    assert (bytes(item.content), item.inline) == (b"https://b", False)


def test_type_given_twice_is_its_last_copy() -> None:
    raw = b'{"messages":[{"content":[{"type":"%b","data":"x","type":"%b"}]}]}'
    assert kinds(find(raw % (b"text", b"prompt_embeds"))[1]) == [("prompt_embeds", "prompt_embeds")]
    assert kinds(find(raw % (b"prompt_embeds", b"text"))[1]) == []


def test_every_copy_of_a_uuid_is_removed_or_replaced() -> None:
    raw = b'{"messages":[{"content":[{"uuid":"a","image_url":"data:,x","uuid" : null , "uu\\u0069d":"b"}]}]}'
    body, media = find(raw)
    (item,) = media.items
    assert joined(body.rewrite(inner=uuid_splices(raw, item, None))) == (
        b'{"messages":[{"content":[{"image_url":"data:,x"}]}]}'
    )
    assert joined(body.rewrite(inner=uuid_splices(raw, item, "own"))) == (
        b'{"messages":[{"content":[{"image_url":"data:,x","uuid":"own"}]}]}'
    )


# Edits of parts


@pytest.mark.parametrize(
    ("part", "removed", "replaced"),
    [
        (b'{"image_url":"data:,x"}', b'{"image_url":"data:,x"}', b'{"image_url":"data:,x","uuid":"own"}'),
        (b'{"uuid":"u","image_url":"data:,x"}', b'{"image_url":"data:,x"}', b'{"uuid":"own","image_url":"data:,x"}'),
        (b'{"image_url":"data:,x" , "uuid":{"a":"}"} }', b'{"image_url":"data:,x" }',
         b'{"image_url":"data:,x" , "uuid":"own" }'),
        (b'{"uuid":null,"image_url":"data:,x"}', b'{"image_url":"data:,x"}', b'{"uuid":"own","image_url":"data:,x"}'),
    ],
)  # fmt: skip
def test_exact_bytes_of_uuid_edits(part: bytes, removed: bytes, replaced: bytes) -> None:
    raw = b'{"messages":[{"content":[%b]}],"z":1.50}' % part
    body, media = find(raw)
    (item,) = media.items
    for uuid, expected in ((None, removed), ("own", replaced)):
        splices = uuid_splices(raw, item, uuid)
        assert joined(body.rewrite(inner=splices)) == raw.replace(part, expected)
        assert joined(apply(raw, splices, *item.part)) == expected


def test_part_without_uuid_passes_as_the_same_bytes() -> None:
    body, media = find(chat(image()))
    assert body.rewrite(inner=uuid_splices(body.raw, media.items[0], None))[0] is body.raw


def test_metadata_only_part_takes_the_place_of_the_media() -> None:
    body, media = find(chat({"type": "text", "text": "t"}, image(), image(HTTP)))
    part = b'{"type":"image_embeds","image_embeds":{"image_grid_thw":[1,8,8]},"uuid":"h"}'
    result = json.loads(joined(body.rewrite(inner=[part_splice(media.items[0], part)])))
    assert result["messages"][0]["content"][1:] == [json.loads(part), image(HTTP)]


def test_large_media_are_not_copied() -> None:
    raw = json.dumps(chat(image("data:image/png;base64," + "A" * 1_000_000, uuid="u"))).encode()
    body, media = find(raw)
    segments = body.rewrite({"stream": b"false"}, inner=uuid_splices(raw, media.items[0], "own"))
    assert sum(len(s) for s in segments if isinstance(s, bytes)) < 200
    assert media.items[0].content.obj is raw


# Endpoints


def test_responses_read_messages_and_tool_outputs() -> None:
    part = {"type": "input_image", "detail": "auto"}
    body = {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}, {**part, "image_url": "https://0"}]},
            {"type": "function_call_output", "call_id": "c", "output": [{**part, "image_url": "https://1"}]},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{**part, "image_url": "https://2"}]},
            {"type": "message", "role": "developer", "content": [{**part, "image_url": "https://3"}]},
            {"role": "assistant", "content": [{**part, "image_url": "https://4"}]},
        ]
    }
    media = find(body, "responses")[1]
    assert [bytes(i.content).decode() for i in media.items] == [f"https://{i}" for i in range(5)]
    assert (media.takes_handles, media.takes_uuid, media.unplanned) == (True, True, ())


@pytest.mark.parametrize(
    "entry",
    [
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "t"}, {"type": "input_image", "image_url": HTTP}],
        },
        {"type": "function_call_output", "role": "user", "content": [{"type": "input_image", "image_url": HTTP}]},
        {"role": "user", "output": [{"type": "input_image", "image_url": HTTP}]},
        {"type": "function_call_output", "output": {"type": "input_image", "image_url": HTTP}},
    ],
)
def test_media_that_responses_do_not_read_are_counted(entry: dict[str, Any]) -> None:
    media = find({"input": [entry]}, "responses")[1]
    assert (media.items, media.unplanned) == ((), ("media_out_of_place",))


def block(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def test_messages_read_image_blocks_in_the_order_of_the_conversion() -> None:
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    block("https://2"),
                    {"type": "tool_result", "content": [block("https://0"), {"type": "text", "text": "t"}]},
                    block("https://3"),
                    {"type": "tool_result", "content": [block("https://1")]},
                ],
            },
            {"role": "assistant", "content": [block("https://4")]},
        ]
    }
    media = find(body, "messages")[1]
    assert [bytes(i.content).decode() for i in media.items] == [f"https://{i}" for i in range(5)]
    assert (media.takes_handles, media.takes_uuid) == (True, False)


@pytest.mark.parametrize(
    ("source", "inline"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, True), ({"data": "AAAA"}, True),
        ({"type": "url", "url": HTTP}, False), ({"type": "url", "url": DATA}, True),
        ({"type": "other", "data": "A"}, True),
    ],
)  # fmt: skip
def test_sources_of_image_blocks(source: dict[str, Any], inline: bool) -> None:
    (item,) = find({"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}, "messages")[
        1
    ].items
    assert (item.modality, item.key, item.inline) == ("image", "image", inline)
    assert bytes(item.content).decode() == source["url"] if source.get("type") == "url" else json.dumps(source)


@pytest.mark.parametrize(
    "body",
    [
        {"system": [block(HTTP)]},
        {"messages": [{"role": "system", "content": [block(HTTP)]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "content": [block(HTTP)]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "t", "content": [block(HTTP)]}]}]},
        {"messages": [{"role": "user", "content": [image(HTTP)]}]},
        {"messages": [{"role": "user", "content": block(HTTP)}]},
    ],
)
def test_media_that_messages_do_not_read_are_counted(body: dict[str, Any]) -> None:
    media = find(body, "messages")[1]
    assert (media.items, media.unplanned) == ((), ("media_out_of_place",))


@pytest.mark.parametrize("field", ["messages", "input"])
@pytest.mark.parametrize("batch", [False, True])
def test_embeddings_read_chats_and_batches_but_take_no_handles(field: str, batch: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": [image(HTTP, uuid="u")]}]
    media = find({field: [messages, messages] if batch else messages}, "embeddings")[1]
    assert len(media.items) == 1 + batch
    assert (media.unplanned, media.takes_handles) == (("media_on_endpoint",), False)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("completions", {"prompt": [{"image_url": HTTP}]}), ("completions", {"prompt": "x", "image_url": HTTP}),
        ("completions", {"prompt": image(HTTP)}),
        ("chat", {"messages": [[{"role": "user", "content": [image(HTTP)]}]]}),
        ("embeddings", {"messages": [[[{"role": "user", "content": [image(HTTP)]}]]]}),
        ("chat", {"messages": [], "video_url": "x"}), ("chat", {"messages": [{"content": image(HTTP)}]}),
        ("responses", {"previous_input_messages": [{"content": [image(HTTP)]}]}),
    ],
)  # fmt: skip
def test_media_out_of_place_is_counted_never_skipped_in_silence(api: Api, body: dict[str, Any]) -> None:
    media = find(body, api)[1]
    assert (media.items, media.unplanned) == ((), ("media_out_of_place",))


def test_media_on_an_unknown_endpoint_is_counted() -> None:
    media = find({"messages": [{"content": [image(HTTP)]}]}, "other")[1]
    assert media.unplanned == ("media_on_endpoint",)


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "embeddings", "other"])
def test_requests_without_media_say_what_the_endpoint_takes(api: Api) -> None:
    media = find({"messages": [{"role": "user", "content": "t"}], "input": "t", "prompt": "t"}, api)[1]
    assert media._replace(takes_handles=True, takes_uuid=True) == Media()
    assert media.takes_handles is (api not in ("embeddings", "other"))


def test_contents_nested_without_end_are_refused() -> None:
    raw = b'{"messages":[{"content":' + b"[" * 400 + b"{}" + b"]" * 400 + b"}]}"
    with pytest.raises(BodyError, match="nested too deeply"):
        find(raw)
    with pytest.raises(BodyError, match="nested too deeply"):
        find(b'{"messages":' + b"[" * 400 + b"{}" + b"]" * 400 + b"}")


@pytest.mark.parametrize("unit", [b"{},", b"[],", b'{"content":[{}]},', b'{"content":[[]]},'])
def test_parts_without_end_are_refused(unit: bytes) -> None:
    with pytest.raises(BodyError, match="more than 262144") as caught:
        find(b'{"messages":[' + unit * 300_000 + b"{}]}")
    assert caught.value.status == 413


def test_item_is_a_plain_record() -> None:
    _, media = find(chat(image(uuid="u")))
    (item,) = media.items
    assert isinstance(item, Item)
    assert [member.key for member in item.uuid] == ["uuid"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,x"}},
        {"type": "image_embeds", "image_embeds": {}},
        {"type": "image_url", "image_url": None, "uuid": "u"},
        {"type": "image_url", "uuid": "u"},
    ],
)
def test_the_walk_ends_at_one_media_part_too_many(part: dict[str, object]) -> None:
    body = RequestBody(json.dumps({"messages": [{"role": "user", "content": [part] * 3}]}).encode())
    assert find_media(body, "chat", 3) == find_media(body, "chat")
    with pytest.raises(BodyError, match="more than 2 media items in one request"):
        find_media(body, "chat", 2)
