"""What a plain reading of `json.loads` says about media: the contract's rules without offsets or speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.body.texts import Number, Pairs

MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "image_pil": "image",
}
TOOL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class TwoMediaKeys(Exception):
    pass


@dataclass
class Found:
    """Items as (modality, key, decoded value, number of uuid members, inline, has data)."""

    items: list[tuple[str, str, Any, int, bool, bool]] = field(default_factory=list)
    embeds: list[str] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)


def last(pairs: Any, key: str) -> Any:
    """What `dict.get` says after `json.loads`."""
    return dict(pairs).get(key) if isinstance(pairs, Pairs) else None


def read(body: Pairs, api: str) -> Found:
    found = Found()
    for key, value in dict(body).items():
        if key.endswith("_embeds") and value is not None:
            found.closed.append((kind(key), key))
        elif key in MEDIA and value is not None:
            found.reasons.add("media_out_of_place")
    if api == "chat":
        messages(last(body, "messages"), api, found, live=True)
    elif api == "responses":
        messages(last(body, "input"), api, found, live=True)
        messages(last(body, "previous_input_messages"), api, found, live=False)
    elif api == "messages":
        contents(last(body, "system"), api, found, live=False)
        messages(last(body, "messages"), api, found, live=True)
    elif api == "embeddings":
        messages(last(body, "messages"), api, found, live=True)
        messages(last(body, "input"), api, found, live=True)
    elif api == "completions":
        contents(last(body, "prompt"), api, found, live=False)
    if found.items and api == "embeddings":
        found.reasons.add("media_on_endpoint")
    return found


def kind(key: str) -> str:
    return "prompt_embeds" if key == "prompt_embeds" else "embeds"


def messages(value: Any, api: str, found: Found, *, live: bool, depth: int = 0) -> None:
    if isinstance(value, Pairs):
        message(value, api, found, live=False)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Pairs):
                message(entry, api, found, live=live)
            else:
                messages(entry, api, found, live=live and api == "embeddings" and depth == 0, depth=depth + 1)


def message(value: Pairs, api: str, found: Found, *, live: bool) -> None:
    role, content, type_, output = (last(value, key) for key in ("role", "content", "type", "output"))
    if api == "messages":
        # Converted to a tool message, a message with the images of all tool results, then the message itself.
        own = Found()
        contents(content, api, found, live=live and role in ("user", "assistant"), own=own, role=role)
        found.items += own.items
        return
    read_content = live
    if api == "responses":
        read_content = live and type_ not in TOOL_OUTPUTS
        if role == "assistant" and isinstance(content, list) and content and last(content[0], "text") is not None:
            read_content = False
    contents(content, api, found, live=read_content)
    if api == "responses":
        contents(output, api, found, live=live and type_ in TOOL_OUTPUTS)


def contents(value: Any, api: str, found: Found, *, live: bool, own: Found | None = None, role: Any = None) -> None:
    if isinstance(value, Pairs):
        part(value, api, found, live=False)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Pairs):
                part(entry, api, found, live=live, own=own, role=role)
            else:
                contents(entry, api, found, live=False)


def part(value: Pairs, api: str, found: Found, *, live: bool, own: Found | None = None, role: Any = None) -> None:
    keys = [key for key, _ in value if key in MEDIA or key.endswith("_embeds")]
    if len(keys) > 1:
        raise TwoMediaKeys
    type_, uuid = last(value, "type"), last(value, "uuid")
    uuids = [key for key, _ in value].count("uuid")
    nested = [inner for key, inner in value if key in ("content", "output") and isinstance(inner, list)]
    for inner in nested[:-1]:
        contents(inner, api, found, live=False)
    if nested:
        results = live and api == "messages" and type_ == "tool_result" and role == "user"
        contents(nested[-1], api, found, live=results)
    embeds = next((key for key in keys if key.endswith("_embeds")), None)
    if embeds is None and isinstance(type_, str) and type_.endswith("_embeds"):
        embeds = type_
    if embeds is not None:
        if live:
            found.embeds.append(embeds)
        found.closed.append((kind(embeds), embeds))
        return
    if api == "messages":
        if keys:
            found.reasons.add("media_out_of_place")
        source = last(value, "source")
        if type_ == "image" and isinstance(source, Pairs):
            if live:
                into = found if own is None else own
                inline, data = block_source(source)
                into.items.append(("image", "image", source, uuids, inline, data))
            else:
                found.reasons.add("media_out_of_place")
        return
    if not keys:
        if live and uuid is not None and isinstance(type_, str) and type_ in MEDIA:
            found.closed.append(("uuid_only", type_))
        return
    if not live:
        found.reasons.add("media_out_of_place")
        return
    media = last(value, keys[0])
    inline, data = media_value(keys[0], media)
    if keys[0] == "image_pil":
        found.closed.append(("image_pil", "image_pil"))
    elif uuid is not None and not data:
        found.closed.append(("uuid_only", keys[0]))
    found.items.append((MEDIA[keys[0]], keys[0], media, uuids, inline, data))


def is_data(url: Any) -> bool:
    return isinstance(url, str) and not isinstance(url, Number) and url[:5].lower() == "data:"


def has_data(value: Any) -> bool:
    return float(value) != 0 if isinstance(value, Number) else bool(value)


def media_value(key: str, value: Any) -> tuple[bool, bool]:
    if isinstance(value, Pairs):
        inner = last(value, "data" if key == "input_audio" else "url")
        return (has_data(inner) if key == "input_audio" else is_data(inner)), has_data(inner)
    return is_data(value), has_data(value)


def block_source(source: Pairs) -> tuple[bool, bool]:
    if last(source, "type") == "url":
        url = last(source, "url")
        return is_data(url), has_data(url)
    return True, bool(source)
