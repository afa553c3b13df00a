"""Contract, "Editing bodies": for any JSON object body, every byte outside the splices arrives as it was sent.

Bodies of any members, order, spelling and nesting go through real sockets to engines that keep what they get. What is
compared is cut out of both texts by the json module's own scanner, which shares nothing with the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.body.texts import OBJECTS, SPELLING, VALUES, Pairs, text_of
from tests.gateway.contract.kit import EC, KV, Gate, Scripted
from tests.gateway.raw import Answer, Raw
from triptych.body.request import OWNED

HANDED_EC = '{"h1":{"n":1.50e+01, "s":"\\ud800"}}'
HANDED_KV = '{ "remote_block_ids":[[1]],"big":123456789012345678901 }'
HANDLES = {EC, KV}
NIXL = (
    '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    '"remote_host":null,"remote_port":null}'
)
MEDIA_KEYS = ("image_url", "video_url", "audio_url", "input_image")
GONE = frozenset({"stream_options", "min_tokens"})
SPACE = " \t\r\n"
MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


class World:
    """Engines of one plan with a gateway, on an event loop of their own, and one connection to it."""

    def __init__(self, *roles: str) -> None:
        said = f'{{"ec_transfer_params":{HANDED_EC},"kv_transfer_params":{HANDED_KV}}}'.encode()
        # They name no models, so that any name is for them.
        self.engines = {role: Scripted(said, names=()) for role in roles}
        self._stack = AsyncExitStack()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._gate: Gate
        self._client: Raw

    def __enter__(self) -> World:
        self._runner.__enter__()
        self._runner.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stop())
        self._runner.__exit__(None, None, None)

    async def _start(self) -> None:
        for engine in self.engines.values():
            await self._stack.enter_async_context(engine)
        pools = {role: [engine.url] for role, engine in self.engines.items()}
        self._gate = await self._stack.enter_async_context(Gate(**pools))
        self._client = await self._stack.enter_async_context(self._gate.client())

    async def _stop(self) -> None:
        self._gate.others_have_sockets()
        await self._stack.aclose()

    def post(self, raw: bytes, path: str = "/v1/chat/completions") -> Answer:
        """One request; afterwards the engines hold what they got for it and nothing else."""
        for engine in self.engines.values():
            engine.seen.clear()

        async def go() -> Answer:
            self._client.send(raw, path)
            return await self._client.answer()

        return self._runner.run(go())

    def got(self, role: str) -> list[str]:
        return [text(seen.body) for seen in self.engines[role].seen]


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def skip(whole: str, at: int) -> int:
    while whole[at] in SPACE:
        at += 1
    return at


class Cut(NamedTuple):
    """A member as it stands in a text: its key decoded, and where it begins, its value begins, and both end."""

    key: str
    at: int
    value: int
    end: int


def split(whole: str, at: int = 0) -> tuple[int, list[Cut], int]:
    """The object at or behind an offset: where it starts, its members, where it ends."""
    start = at = skip(whole, at)
    assert whole[at] == "{"
    members = []
    at = skip(whole, at + 1)
    while whole[at] != "}":
        first = at
        key, at = scanstring(whole, at + 1, True)
        value = skip(whole, skip(whole, at) + 1)
        _, end = json.JSONDecoder().raw_decode(whole, value)
        members.append(Cut(key, first, value, end))
        at = skip(whole, end)
        if whole[at] == ",":
            at = skip(whole, at + 1)
    return start, members, at + 1


def elements(whole: str, at: int) -> list[int]:
    """Where the elements of the list at an offset begin."""
    starts = []
    at = skip(whole, at + 1)
    while whole[at] != "]":
        starts.append(at)
        _, at = json.JSONDecoder().raw_decode(whole, at)
        at = skip(whole, at)
        if whole[at] == ",":
            at = skip(whole, at + 1)
    return starts


def media_parts_in(whole: str, at: int) -> list[tuple[int, list[Cut], int]]:
    """The media parts in the list of messages at an offset, in order."""
    found = []
    for message in elements(whole, at):
        for member in split(whole, message)[1]:
            if member.key == "content":
                parts = [split(whole, part) for part in elements(whole, member.value)]
                found += [p for p in parts if any(cut.key in MEDIA_KEYS for cut in p[1])]
    return found


def without(whole: str, start: int, objects: list[tuple[int, list[Cut], int]], end: int, keys: set[str]) -> str:
    """The text between two offsets; of the objects in it their members without those of the keys."""
    out = []
    for first, members, last in objects:
        kept = [whole[cut.at : cut.end] for cut in members if cut.key not in keys]
        out += [whole[start:first], "{", ",".join(kept), "}"]
        start = last
    return "".join([*out, whole[start:end]])


def normal(whole: str, cut: Cut) -> str:
    """A top-level member's text without what is spliced inside of it: handles in xargs, uuids in media parts."""
    objects: list[tuple[int, list[Cut], int]] = []
    if cut.key == "vllm_xargs" and whole[cut.value] == "{":
        objects = [split(whole, cut.value)]
    elif cut.key == "messages" and whole[cut.value] == "[":
        try:
            objects = media_parts_in(whole, cut.value)
        except (AssertionError, ValueError):
            objects = []  # messages that are none
    return without(whole, cut.at, objects, cut.end, HANDLES if cut.key == "vllm_xargs" else {"uuid"})


def same_but(sent: str, got: str, own: dict[str, str], gone: frozenset[str] = frozenset()) -> None:
    """`got` is `sent` without the members `gone` and handles, and with each of `own` exactly once."""
    at, given, end = split(sent)
    now_at, now, now_end = split(got)
    assert sent[:at] == got[:now_at]
    assert sent[end:] == got[now_end:]
    leaving = HANDLES | gone | own.keys()
    assert [normal(got, c) for c in now if c.key not in own] == [normal(sent, c) for c in given if c.key not in leaving]
    assert sorted((c.key, got[c.value : c.end]) for c in now if c.key in own) == sorted(own.items())


def once(members: Pairs) -> Pairs:
    """Without the second copies that are refused."""
    seen: set[str] = set()
    return Pairs([m for m in members if not (m[0] in seen and m[0] in OWNED) and (seen.add(m[0]) or True)])  # type: ignore[func-returns-value]


@pytest.fixture(scope="module")
def plain() -> Iterator[World]:
    with World("combined") as world:
        yield world


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    with World("encode", "prefill", "decode") as world:
        yield world


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/audio/speech", "/v1/messages"])
@given(OBJECTS, SPELLING)
@FEW
def test_any_body_that_needs_no_edit_arrives_as_the_very_same_bytes(
    plain: World, path: str, members: Pairs, seed: int
) -> None:
    keep = Pairs([m for m in once(members) if m[0] not in HANDLES])
    for key, value in keep:
        if key == "vllm_xargs" and isinstance(value, Pairs):
            value[:] = [m for m in value if m[0] not in HANDLES]
    raw = text_of(keep, seed)
    assert plain.post(raw, path).status == 200
    assert plain.got("combined") == [text(raw)]


@given(OBJECTS, SPELLING)
@MANY
def test_any_body_loses_its_handles_and_nothing_else(plain: World, members: Pairs, seed: int) -> None:
    raw = text_of(once(members), seed)
    assert plain.post(raw).status == 200
    (got,) = plain.got("combined")
    same_but(text(raw), got, {})


@given(OBJECTS, SPELLING)
@MANY
def test_any_body_of_a_prefill_hop_differs_by_the_hops_own_members_alone(
    three: World, members: Pairs, seed: int
) -> None:
    raw = text_of(once(members), seed)
    assert three.post(raw).status == 200
    sent = text(raw)
    prefill, decode = three.got("prefill"), three.got("decode")
    for body in prefill:
        own = {"max_tokens": "1", "max_completion_tokens": "1", "stream": "false", KV: NIXL}
        same_but(sent, body, own, GONE)
    same_but(sent, decode[0], {KV: HANDED_KV} if prefill else {})


# -- media

URLS = st.sampled_from(
    ["data:image/png;base64,QUFB", "data:image/png;base64,QkJC", "DATA:,x", "http://h/x", 'data:"\\']
)
UUIDS = st.sampled_from(["u", None, "../evil"]).map(lambda value: ("uuid", value))
OTHER = st.tuples(st.sampled_from(["detail", "x", "cache_control", "é"]), VALUES)


@st.composite
def media_parts(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 3)) == 0:
        return Pairs([("type", "text"), ("text", draw(st.sampled_from(["hi", "\ud800", "image_url"])))])
    key = draw(st.sampled_from(MEDIA_KEYS))
    url: Any = draw(URLS)
    members = [(key, url if key == "input_image" else Pairs([("url", url)]))]
    for extra in draw(st.lists(st.one_of(UUIDS, OTHER), max_size=4)):
        members.insert(draw(st.integers(0, len(members))), extra)
    members.insert(draw(st.integers(0, len(members))), ("type", draw(st.sampled_from(["text", key]))))
    return Pairs(members)


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "tool", "system"]), st.lists(media_parts(), max_size=4)).map(
        lambda m: Pairs([("role", m[0]), ("content", m[1])])
    ),
    max_size=3,
)


def media_of(whole: str) -> list[list[Cut]]:
    """The members of each media part of a body."""
    (messages,) = [cut for cut in split(whole)[1] if cut.key == "messages"]
    return [members for _, members, _ in media_parts_in(whole, messages.value)]


def uuids(whole: str) -> list[list[str]]:
    """Of each media part of a body all values of `uuid`, as they are written."""
    return [[whole[cut.value : cut.end] for cut in part if cut.key == "uuid"] for part in media_of(whole)]


def is_inline(whole: str, part: list[Cut]) -> bool:
    (cut,) = [cut for cut in part if cut.key in MEDIA_KEYS]
    value = json.loads(whole[cut.value : cut.end])
    return (value if isinstance(value, str) else value["url"])[:5].lower() == "data:"


@given(OBJECTS, MESSAGES, st.integers(0, 9), SPELLING)
@MANY
def test_any_body_with_media_differs_by_uuids_and_handles_alone(
    three: World, members: Pairs, messages: list[Any], place: int, seed: int
) -> None:
    rest = [m for m in once(members) if m[0] not in ("messages", "n", "stream")]
    rest.insert(min(place, len(rest)), ("messages", messages))
    raw = text_of(Pairs(rest), seed)
    assert three.post(raw).status == 200
    sent = text(raw)
    (prefill,), (decode,) = three.got("prefill"), three.got("decode")
    encodes = three.got("encode")
    own = {"max_tokens": "1", "max_completion_tokens": "1", "stream": "false", KV: NIXL}
    if encodes:
        own |= {EC: HANDED_EC}
    same_but(sent, prefill, own, GONE)
    same_but(sent, decode, {KV: HANDED_KV})
    # Each part has the gateway's uuid or none, the same one for every engine.
    told = uuids(prefill)
    assert told == uuids(decode)
    assert [len(of) for of in told] == [int(is_inline(sent, part)) for part in media_of(sent)]
    assert all(re.fullmatch('"[0-9a-f]{64}"', uuid) for of in told for uuid in of)
    at_encoders = [uuid for body in encodes for of in uuids(body) for uuid in of]
    assert sorted(at_encoders) == sorted({uuid for of in told for uuid in of}), "one leg for each distinct item"


@given(OBJECTS, st.sampled_from(sorted(OWNED)), SPELLING)
@MANY
def test_any_body_with_an_owned_key_twice_is_refused_before_anything_is_called(
    plain: World, members: Pairs, key: str, seed: int
) -> None:
    twice = Pairs([*(m for m in once(members) if m[0] != key), (key, None), (key, 1)])
    answer = plain.post(text_of(twice, seed))
    assert answer.status == 400
    assert answer.json["error"]["message"] == f'duplicate top-level key "{key}" in request body'
    assert plain.got("combined") == []
