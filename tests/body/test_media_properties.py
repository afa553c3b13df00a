"""Media extraction agrees with an oracle on json.loads, for any request and any spelling."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, get_args

import pytest

from tests.body import oracle
from tests.body.texts import Number, Pairs, joined, loads, text_of
from triptych.body import media as media_module
from triptych.body.items import ON_ENDPOINT, OUT_OF_PLACE, Api, Kind, Media, part_splice, uuid_splices
from triptych.body.media import find_media
from triptych.body.request import RequestBody
from triptych.body.scan import BodyError

APIS: list[Api] = ["chat", "responses", "messages", "embeddings", "completions"]
BODIES = 120  # per seed
SEEDS = range(12)
ROOTS = {
    "chat": ["messages"],
    "completions": ["prompt"],
    "responses": ["input", "previous_input_messages"],
    "messages": ["messages", "system"],
    "embeddings": ["messages", "input"],
}
URLS = [
    "data:image/png;base64,AAAA", "DATA:,x", "http://h/x.png", "https://h/x", "file:///x", "", "dat", "data",
    'data:"\\', "x" * 600,
]  # fmt: skip
TYPES = [
    "text", "image_url", "input_image", "input_text", "input_audio", "video_url", "audio_url", "image", "image",
    "tool_result", "tool_result", "image_embeds", "prompt_embeds", "function_call_output", "other", None,
]  # fmt: skip
MEDIA_KEYS = [*oracle.MEDIA, "image_url", "image_url", "input_audio", "image_embeds", "audio_embeds", "pixel_embeds"]
TEXT = Pairs([("type", "text"), ("text", "t")])


def media_value(rng: Random) -> Any:
    if rng.random() < 0.5:
        return Pairs((rng.choice(["url", "url", "data", "format"]), rng.choice(URLS)) for _ in range(rng.randrange(4)))
    return rng.choice([*URLS, None, [], Pairs(), False, Number("0"), Number("-0.0e5"), Number("5"), ["x"]])


def source(rng: Random) -> Any:
    fields = ["type", "url", "data", "media_type"]
    values = ["url", "base64", None, *URLS]
    picked = Pairs((rng.choice(fields), rng.choice(values)) for _ in range(rng.randrange(5)))
    return rng.choice([picked, picked, Pairs([("type", "url"), ("url", rng.choice(URLS))]), None, "x"])


def part(rng: Random, depth: int) -> Any:
    if rng.random() < 0.1:
        return rng.choice(["text", None, Number("1"), [], ["x"]])
    makers = [
        lambda: ("type", rng.choice(TYPES)),
        lambda: ("uuid", rng.choice(["u", None, Number("5"), ""])),
        lambda: ("text", rng.choice(["t", None, "image_url"])),
        lambda: ("source", source(rng)),
        lambda: (rng.choice(["content", "output"]), contents(rng, depth + 1)),
        lambda: (rng.choice(["x", "detail", "cache_control"]), rng.choice([None, "x", Number("1.50")])),
    ]
    members = [rng.choice(makers)() for _ in range(rng.randrange(4))]
    # One media key most of the time, two now and then.
    for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 1, 1, 1, 1] if rng.random() < 0.97 else [2])):
        members.insert(rng.randint(0, len(members)), (rng.choice(MEDIA_KEYS), media_value(rng)))
    if rng.random() < 0.3:
        members += [("type", rng.choice(["image", "tool_result"])), ("source", source(rng))]
    return Pairs(members)


def contents(rng: Random, depth: int = 0) -> Any:
    if depth > 2 or rng.random() < 0.25:
        return rng.choice(["text", None, "image_url", [TEXT], [TEXT, "text"], [[TEXT]]])
    if rng.random() < 0.1:
        return part(rng, depth)
    return [part(rng, depth) for _ in range(rng.randrange(4))]


def message(rng: Random) -> Pairs:
    makers = [
        lambda: ("role", rng.choice(["user", "user", "user", "assistant", "system", "tool", "developer", None])),
        lambda: ("role", rng.choice(["user", "assistant"])),
        lambda: ("content", contents(rng)),
        lambda: ("content", contents(rng)),
        lambda: ("output", contents(rng)),
        lambda: ("type", rng.choice(TYPES)),
    ]
    members = [("role", rng.choice(["user", "user", "assistant"])), ("content", contents(rng))]
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        members.insert(rng.randint(0, len(members)), rng.choice(makers)())
    return Pairs(members if rng.random() < 0.9 else members[1:])


def messages(rng: Random) -> Any:
    if rng.random() < 0.1:
        return rng.choice(["text", None, message(rng), contents(rng)])
    batch = rng.random() < 0.2
    return [
        [message(rng) for _ in range(rng.randrange(3))] if batch and rng.random() < 0.8 else message(rng)
        for _ in range(rng.randrange(4))
    ]


def requests(seed: int) -> Iterator[tuple[bytes, Api]]:
    """Requests at random, in random spellings."""
    rng = Random(seed)
    for _ in range(BODIES):
        api = rng.choice(APIS)
        fields = [*ROOTS[api], *rng.sample(["messages", "input", "prompt", "system"], 1)]
        body = Pairs((key, messages(rng)) for key in dict.fromkeys(fields))
        if rng.random() < 0.1:
            body.append((rng.choice(["prompt_embeds", "image_embeds", "image_url"]), rng.choice([None, "x"])))
        yield text_of(body, rng.randrange(1 << 30)), api


def look(raw: bytes, api: Api) -> Media | str:
    try:
        return find_media(RequestBody(raw), api)
    except BodyError as error:
        return error.message


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


@pytest.mark.parametrize("seed", SEEDS)
def test_media_are_those_of_the_oracle(seed: int) -> None:
    for raw, api in requests(seed):
        found = look(raw, api)
        try:
            expected = oracle.read(loads(raw), api)
        except oracle.TwoMediaKeys:
            assert isinstance(found, str), raw
            assert "two media keys" in found, raw
            continue
        expected.closed.sort()
        assert not isinstance(found, str), (raw, found)
        assert describe(raw, found) == expected, (raw, api)


def test_random_requests_hold_what_there_is_to_find() -> None:
    seen = [look(raw, api) for seed in SEEDS for raw, api in requests(seed)]
    media = [found for found in seen if isinstance(found, Media)]
    assert len(seen) - len(media) > 50
    assert sum(bool(found.items) for found in media) > 200
    assert sum(len({item.key for item in found.items}) > 1 for found in media) > 20
    assert {closed.kind for found in media for closed in found.closed} == set(get_args(Kind))
    assert {reason for found in media for reason in found.unplanned} == {ON_ENDPOINT, OUT_OF_PLACE}
    assert sum(found == Media() for found in media) > 30


@pytest.mark.parametrize("seed", SEEDS)
def test_quick_look_at_text_says_what_the_walk_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(requests(seed))
    quick = [look(raw, api) for raw, api in every]
    monkeypatch.setattr(media_module, "_only_text", lambda *_: False)
    for (raw, api), found in zip(every, quick, strict=True):
        assert look(raw, api) == found, (raw, api)


@pytest.mark.parametrize("uuid", [None, "own"])
@pytest.mark.parametrize("seed", SEEDS)
def test_uuid_splices_leave_each_part_with_exactly_that_uuid_and_all_else_as_sent(seed: int, uuid: str | None) -> None:
    for raw, api in requests(seed):
        found = look(raw, api)
        if isinstance(found, str):
            continue
        every = (*found.items, *found.embeds)
        body = RequestBody(raw)
        segments = body.rewrite(inner=[s for item in every for s in uuid_splices(raw, item, uuid)])
        if all(uuid is None and not item.uuid for item in every):
            assert segments[0] is raw
        result = joined(segments)
        again = find_media(RequestBody(result), api)
        after = (*again.items, *again.embeds)
        assert len(after) == len(every)
        for before, item in zip(every, after, strict=True):
            assert raw[slice(*before.value)] == result[slice(*item.value)]
            assert [loads(result[m.value : m.end]) for m in item.uuid] == ([] if uuid is None else [uuid])
            # An embeds part of the messages API may hold images of its own, whose uuids go as well.
            kept = [raw[m.start : m.end] for m in before.members if m.key not in ("uuid", "content")]
            assert [result[m.start : m.end] for m in item.members if m.key not in ("uuid", "content")] == kept


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_are_replaced_whole(seed: int) -> None:
    for raw, api in requests(seed):
        found = look(raw, api)
        if isinstance(found, str):
            continue
        result = joined(RequestBody(raw).rewrite(inner=[part_splice(item, b'{"gone":1}') for item in found.items]))
        assert find_media(RequestBody(result), api).items == ()
        assert result.count(b'{"gone":1}') == len(found.items)
