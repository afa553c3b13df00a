"""Media extraction agrees with an oracle on json.loads, for any request and any spelling."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.body import oracle
from tests.body.texts import SCALARS, SPELLING, Number, Pairs, joined, loads, text_of
from triptych.body import media as media_module
from triptych.body.items import Api, Media, part_splice, uuid_splices
from triptych.body.media import find_media
from triptych.body.request import RequestBody
from triptych.body.scan import BodyError

APIS: list[Api] = ["chat", "responses", "messages", "embeddings", "completions"]
URLS = st.sampled_from(
    [
        "data:image/png;base64,AAAA",
        "DATA:,x",
        "http://h/x.png",
        "https://h/x",
        "file:///x",
        "",
        "dat",
        "data",
        'data:"\\',
        "x" * 600,
    ]
)
MEDIA_VALUES = st.one_of(
    URLS,
    st.lists(st.tuples(st.sampled_from(["url", "detail", "data", "format"]), URLS), max_size=3).map(Pairs),
    st.sampled_from([None, [], Pairs(), False, Number("0"), Number("5"), ["x"]]),
)
SOURCES = st.one_of(
    st.lists(
        st.tuples(
            st.sampled_from(["type", "url", "data", "media_type"]),
            st.one_of(st.sampled_from(["url", "base64", None]), URLS),
        ),
        max_size=4,
    ).map(Pairs),
    st.sampled_from([None, "x"]),
)
TYPES = st.sampled_from(
    ["text", "image_url", "input_image", "input_text", "input_audio", "video_url", "audio_url", "image", "tool_result",
     "image_embeds", "prompt_embeds", "function_call_output", "other", None]
)  # fmt: skip
MEDIA_KEYS = st.sampled_from([*oracle.MEDIA, "image_embeds", "audio_embeds", "prompt_embeds", "pixel_embeds"])


def members_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.one_of(
        st.tuples(st.just("type"), TYPES),
        st.tuples(st.just("uuid"), st.sampled_from(["u", None, Number("5"), ""])),
        st.tuples(st.just("text"), st.sampled_from(["t", None, "image_url"])),
        st.tuples(st.just("source"), SOURCES),
        st.tuples(st.sampled_from(["content", "output"]), inner),
        st.tuples(st.sampled_from(["x", "detail", "cache_control"]), SCALARS),
    )


@st.composite
def parts(draw: st.DrawFn, depth: int = 0) -> Any:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.one_of(st.sampled_from(["text", None, Number("1")]), st.lists(st.just("x"), max_size=2)))
    inner = st.just("text") if depth > 1 else contents(depth + 1)
    members = draw(st.lists(members_of(inner), max_size=3))
    # One media key most of the time, two now and then.
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 1, 1, 2]))):
        members.insert(draw(st.integers(0, len(members))), (draw(MEDIA_KEYS), draw(MEDIA_VALUES)))
    return Pairs(members)


def contents(depth: int = 0) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(["text", None, "image_url"]),
        st.lists(parts(depth), max_size=3),
        st.lists(st.just(Pairs([("type", "text"), ("text", "t")])), max_size=2),
        parts(depth),
    )


MESSAGE = st.lists(
    st.one_of(
        st.tuples(st.just("role"), st.sampled_from(["user", "assistant", "system", "tool", "developer", None])),
        st.tuples(st.just("content"), contents()),
        st.tuples(st.just("content"), contents()),
        st.tuples(st.just("output"), contents()),
        st.tuples(st.just("type"), TYPES),
    ),
    max_size=4,
).map(Pairs)
LISTS = st.one_of(
    st.lists(MESSAGE, max_size=3),
    st.lists(st.one_of(MESSAGE, st.lists(MESSAGE, max_size=2), st.sampled_from(["text", Number("7")])), max_size=3),
    st.sampled_from(["text", None]),
    MESSAGE,
)
BODY = st.builds(
    lambda fields, extra: Pairs([*fields.items(), *extra]),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("messages", "input", "prompt", "system", "previous_input_messages"), LISTS)
    ),
    st.lists(st.tuples(st.sampled_from(["prompt_embeds", "image_embeds", "image_url", "x"]), SCALARS), max_size=1),
)


def describe(raw: bytes, media: Media) -> oracle.Found:
    return oracle.Found(
        items=[
            (
                i.modality, i.key, loads(raw[i.value[0] : i.value[1]]) if i.value[1] - i.value[0] else None,
                len(i.uuid), i.inline, bool(i.content),
            )
            for i in media.items
        ],
        embeds=[i.key for i in media.embeds],
        closed=sorted((c.kind, c.key) for c in media.closed),
        reasons=set(media.unplanned),
    )  # fmt: skip


@settings(max_examples=150)
@given(BODY, SPELLING, st.sampled_from(APIS))
def test_media_are_those_of_the_oracle(value: Pairs, seed: int, api: Api) -> None:
    raw = text_of(value, seed)
    body = RequestBody(raw)
    try:
        expected = oracle.read(loads(raw), api)
    except oracle.TwoMediaKeys:
        with pytest.raises(BodyError, match="two media keys"):
            find_media(body, api)
        return
    expected.closed.sort()
    assert describe(raw, find_media(body, api)) == expected


@given(BODY, SPELLING, st.sampled_from(APIS))
def test_quick_look_at_text_says_what_the_walk_says(value: Pairs, seed: int, api: Api) -> None:
    raw = text_of(value, seed)

    def outcome() -> Any:
        try:
            return find_media(RequestBody(raw), api)
        except BodyError as error:
            return error.message

    quick = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_module, "_only_text", lambda *_: False)
        assert outcome() == quick


@given(BODY, SPELLING, st.sampled_from(APIS), st.sampled_from([None, "own"]))
def test_uuid_splices_leave_each_part_with_exactly_that_uuid_and_all_else_as_sent(
    value: Pairs, seed: int, api: Api, uuid: str | None
) -> None:
    raw = text_of(value, seed)
    body = RequestBody(raw)
    try:
        found = find_media(body, api)
    except BodyError:
        return
    every = (*found.items, *found.embeds)
    result = joined(body.rewrite(inner=[s for item in every for s in uuid_splices(raw, item, uuid)]))
    if all(uuid is None and not item.uuid for item in every):
        assert body.rewrite()[0] is raw
    again = find_media(RequestBody(result), api)
    after = (*again.items, *again.embeds)
    assert len(after) == len(every)
    for before, item in zip(every, after, strict=True):
        assert raw[slice(*before.value)] == result[slice(*item.value)]
        assert [loads(result[m.value : m.end]) for m in item.uuid] == ([] if uuid is None else [uuid])
        kept = [raw[m.start : m.end] for m in before.members if m.key != "uuid"]
        assert [result[m.start : m.end] for m in item.members if m.key != "uuid"] == kept


@given(BODY, SPELLING, st.sampled_from(APIS))
def test_parts_are_replaced_whole(value: Pairs, seed: int, api: Api) -> None:
    raw = text_of(value, seed)
    body = RequestBody(raw)
    try:
        found = find_media(body, api)
    except BodyError:
        return
    result = joined(body.rewrite(inner=[part_splice(item, b'{"gone":1}') for item in found.items]))
    assert find_media(RequestBody(result), api).items == ()
    assert result.count(b'{"gone":1}') == len(found.items)
