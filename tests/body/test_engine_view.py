"""No difference between our view of a body and the engine's: bodies at random go through vLLM's own parsers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.body.texts import Number, Pairs, joined, loads, text_of
from triptych.body.items import Api, Media, uuid_splices
from triptych.body.media import find_media
from triptych.body.request import RequestBody
from triptych.body.scan import BodyError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

APIS: list[Api] = ["chat", "responses", "messages"]
PER_API = 500
URLS = ["data:image/png;base64,AAAA", "DATA:,x", "http://h/x.png", "https://h/y", "file:///x", ""]


def ask_engine(cases: list[tuple[str, bytes]]) -> list[dict[str, Any] | None]:
    """vLLM's view of each body."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_view.py"))],
        input=json.dumps([[api, raw.decode("latin-1")] for api, raw in cases]),
        capture_output=True, text=True, env=environment, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any] | None] = json.loads(done.stdout.splitlines()[-1])
    return answers


def maybe(rng: Random, chance: float, *members: tuple[str, Any]) -> list[tuple[str, Any]]:
    return list(members) if rng.random() < chance else []


def chat_part(rng: Random) -> Any:
    url = rng.choice(URLS)
    boxed = Pairs([*maybe(rng, 0.1, ("url", "https://h/first")), ("url", url), *maybe(rng, 0.3, ("detail", "auto"))])
    media: tuple[str, Any] = rng.choice(
        [
            *[
                ("image_url", boxed),
                ("image_url", boxed),
                ("video_url", boxed),
                ("audio_url", boxed),
                ("image_url", url),
            ],
            *[("input_audio", Pairs([("data", rng.choice(["AAAA", ""])), ("format", "wav")])), ("image_url", None)],
            *[("image_embeds", "AAAA"), ("audio_embeds", Pairs([("a", "AAAA")])), ("prompt_embeds", "x")],
            ("image_pil", None),
        ]
    )
    text = [("type", "text"), ("text", "t")]
    uuid = maybe(rng, 0.4, ("uuid", rng.choice(["u", "v", None, Number("5")])))
    forms: list[list[tuple[str, Any]]] = [
        [("type", media[0]), media],
        [("type", media[0]), media],
        [media],
        [*text, media],
        text,
        [("type", "input_image"), ("image_url", url), ("detail", "auto")],
        [("type", "prompt_embeds"), ("data", "AAAA")],
        [("type", rng.choice(["image_url", "image_embeds", "nonsense"]))],
        [("type", "refusal"), ("refusal", "no"), *maybe(rng, 0.3, media)],
    ]
    members = rng.choice(forms) + uuid + maybe(rng, 0.1, ("uuid", "w")) + maybe(rng, 0.1, ("x", Number("1.0")))
    rng.shuffle(members)
    return "text" if rng.random() < 0.05 else Pairs(members)


def responses_part(rng: Random) -> Any:
    form = rng.choice(
        [
            [("type", "input_text"), ("text", "t")],
            [("type", "input_image"), ("image_url", rng.choice(URLS)), ("detail", "auto")],
            [("type", "input_image"), ("image_url", rng.choice(URLS))],
            [("type", "input_image"), ("image_url", None), ("file_id", "f")],
            [("type", "input_text"), ("text", "t"), ("image_embeds", "AAAA")],
            [("type", "output_text"), ("text", "t")],
        ]
    )
    return Pairs([*form, *maybe(rng, 0.4, ("uuid", rng.choice(["u", None])))])


def block(rng: Random, depth: int = 0) -> Any:
    source = rng.choice(
        [
            [("type", "base64"), ("media_type", "image/png"), ("data", rng.choice(["AAAA", "BBBB"]))],
            [("type", "url"), ("url", rng.choice(URLS))],
            [("data", "CCCC")],
            [("type", "url"), ("type", "base64"), ("data", "DDDD")],
        ]
    )
    forms: list[list[tuple[str, Any]]] = [
        [("type", "text"), ("text", "t"), *maybe(rng, 0.1, ("image_embeds", "AAAA"))],
        [("type", "image"), ("source", Pairs(source))],
        [("type", "image"), ("source", Pairs(source))],
        [("type", "tool_result"), ("tool_use_id", "a"), ("content", [block(rng, 1) for _ in range(rng.randrange(4))])]
        if depth == 0
        else [("type", "text"), ("text", "t")],
    ]
    return Pairs([*rng.choice(forms), *maybe(rng, 0.2, ("uuid", "u"))])


def parts(rng: Random, make: Any) -> Any:
    return "text" if rng.random() < 0.1 else [make(rng) for _ in range(rng.choice([1, 1, 2, 3]))]


def body(rng: Random, api: Api) -> bytes:
    members: list[tuple[str, Any]] = [("model", "m")]
    if api == "responses":
        members.append(
            (
                "input",
                [
                    Pairs(
                        [("role", rng.choice(["user", "assistant", "system"])), ("content", parts(rng, responses_part))]
                    )
                    if rng.random() < 0.7
                    else Pairs(
                        [("type", "function_call_output"), ("call_id", "c"), ("output", parts(rng, responses_part))]
                    )
                    for _ in range(rng.randint(1, 3))
                ],
            )
        )
    else:
        make, roles = (chat_part, ["user", "user", "system", "assistant", "tool"]) if api == "chat" else (
            block, ["user", "user", "assistant", "system"]
        )  # fmt: skip
        members.append(
            (
                "messages",
                [
                    Pairs(
                        [
                            ("role", role := rng.choice(roles)),
                            *maybe(rng, 0.15, ("content", parts(rng, make))),
                            ("content", parts(rng, make)),
                            *(maybe(rng, 1.0, ("tool_call_id", "x")) if role == "tool" else []),
                        ]
                    )
                    for _ in range(rng.randint(1, 3))
                ],
            )
        )
    if api == "messages":
        members += [("max_tokens", Number("5")), *maybe(rng, 0.2, ("system", [block(rng, 1)]))]
    for key in ("ec_transfer_params", "kv_transfer_params"):
        members += maybe(rng, 0.2, (key, Pairs([("h", Number("1"))])))
    xargs = Pairs(
        [("k", "v"), *maybe(rng, 0.5, ("kv_transfer_params", "x")), *maybe(rng, 0.5, ("ec_transfer_params", "x"))]
    )
    members += maybe(rng, 0.2, ("vllm_xargs", xargs))
    rng.shuffle(members)
    return text_of(Pairs(members), rng.randrange(1 << 30))


def content_of(raw: bytes, media: Media) -> list[Any]:
    """What each of our items holds, as the engine's parser would give it."""
    out = []
    for item in media.items:
        value = loads(raw[slice(*item.value)])
        if item.key == "input_audio":
            value = json.loads(raw[slice(*item.value)])
        elif item.key == "image":
            fields = dict(value)
            if fields.get("type") == "url":
                value = fields.get("url", "")
            else:
                value = f"data:{fields.get('media_type', 'image/jpeg')};base64,{fields.get('data', '')}"
        elif isinstance(value, Pairs):
            value = dict(value).get("url")
        out.append(value)
    return out


def is_subsequence(some: list[Any], of: list[Any]) -> bool:
    rest = iter(of)
    return all(any(value == other for other in rest) for value in some)


def embeds_like(kind: str) -> bool:
    return kind.endswith("_embeds") or kind == "image_pil"


def test_nothing_that_the_engine_reads_escapes_us() -> None:
    rng = Random(7)
    cases = [(api, body(rng, api)) for api in APIS for _ in range(PER_API)]
    ours: list[Media | None] = []
    cleaned: list[tuple[str, bytes]] = []
    owned: list[tuple[str, bytes]] = []
    for api, raw in cases:
        request = RequestBody(raw)
        try:
            media: Media | None = find_media(request, api)
        except BodyError:
            media = None
        ours.append(media)
        for uuid, into in ((None, cleaned), ("own", owned)):
            every = () if media is None else (*media.items, *media.embeds)
            inner = [splice for item in every for splice in uuid_splices(raw, item, uuid)]
            into.append((api, joined(request.rewrite(inner=inner))))
    answers = ask_engine([*cases, *cleaned, *owned])
    as_sent, without, with_own = (answers[i * len(cases) : (i + 1) * len(cases)] for i in range(3))

    exact = 0
    for (api, raw), media, seen in zip(cases, ours, as_sent, strict=True):
        if seen is None or media is None:
            continue
        engine = [value for kind, value, uuid in seen["parts"] if not embeds_like(kind) and (value or uuid is None)]
        found = content_of(raw, media)
        # Ours may be more (a text part with a media key and no uuid), never less, and in the engine's order.
        assert is_subsequence([value for value in engine if value], [value for value in found if value]), (raw, engine)
        exact += bool(engine) and [v for v in found if v] == [v for v in engine if v]
        if api == "messages":
            assert [v for v in found if v] == [v for v in engine if v], raw
        closed = [(entry.kind, entry.key) for entry in media.closed]
        for kind, value, uuid in seen["parts"]:
            if kind == "image_pil":
                assert ("image_pil", kind) in closed, raw
            elif embeds_like(kind):
                assert ("prompt_embeds" if kind == "prompt_embeds" else "embeds", kind) in closed, raw
            elif uuid is not None and not (value if kind != "input_audio" else (value or {}).get("data")):
                assert "uuid_only" in [name for name, _ in closed], raw
    assert exact > 150

    taken = dict.fromkeys(APIS, 0)
    for (api, raw), seen, own in zip(cleaned, without, with_own, strict=True):
        for view, uuid in ((seen, None), (own, "own")):
            if view is None:
                continue
            taken[api] += 1
            assert view["handles"] == [None, None], raw
            assert set(view["xargs"]) <= {"k"}, raw
            if api != "messages":
                assert {given for _, _, given in view["parts"]} <= {uuid, None}, raw
    assert min(taken.values()) > 100, taken


def test_bodies_that_only_the_engine_would_take_are_refused_here() -> None:
    text = '{"model":"m","messages":[{"role":"user","content":[{"type":"image_embeds","image_embeds":"AAAA"}]}]}'
    cases = [("chat", text.encode(code)) for code in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be")]
    cases.append(("chat", text.replace('"model"', '"temperature":NaN,"model"').encode()))
    assert all(seen is not None and seen["parts"] for seen in ask_engine(cases))
    for _, raw in cases:
        with pytest.raises(BodyError):
            RequestBody(raw)
