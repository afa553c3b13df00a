"""Media items of a request, in the order in which vLLM makes features of them, and the parts that are closed.

Where the rules come from (vLLM 0.32):

* `renderers/chat_utils.py`, `_parse_chat_message_content_mm_part`: without a `uuid` a part is parsed by its `type`;
  with one (any non-null JSON value) or without a `type`, by the first media key that it carries, whatever its `type`
  says. So a "text" part with `image_embeds` and a `uuid` is an embeds part, and `{"type": "prompt_embeds", "data": …}`
  is one without that key. Here a part is what any of its keys or its `type` can make of it. `image_pil` is in that
  list too; over HTTP it can only carry a `uuid` without data, or a path.
* the same file, `_parse_chat_message_content`: parts of messages of every role are parsed; `parse_image` and its
  siblings take an empty or missing URL for "no data, look the `uuid` up".
* `multimodal/media/connector.py`, `load_from_url`: `url[:5].lower() == "data:"` is inline data.
* `entrypoints/openai/responses/utils.py`, `_construct_message_from_response_item`: items with a `role` are chat
  messages; the `output` of a tool call becomes a tool message with the same parts; of an assistant message whose
  first part has a `text`, nothing but that text is used.
* `entrypoints/anthropic/serving.py`, `_convert_messages`, `_convert_block`, `_convert_user_tool_result`: only blocks
  of type `image` with a `source` are media. Those inside the tool results of a user message come before the message's
  own; in `system`, in system messages and in an assistant's tool results there is no media. A `uuid` is not read.
* `entrypoints/pooling/embed/protocol.py`: chat messages in `messages` or `input`, or lists of them. Pooling requests
  carry no hand-over parameters. `entrypoints/openai/completion/protocol.py`: `prompt_embeds` at top level, no media.

Of a repeated key the last copy counts, as in `json.loads`, except that a media key given twice is two media keys.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

import msgspec

from triptych.body.items import ON_ENDPOINT, OUT_OF_PLACE, Api, Closed, Item, Media, Modality
from triptych.body.request import RequestBody
from triptych.body.scan import BodyError, Member, string

MEDIA_KEYS: Final[dict[str, Modality]] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "image_pil": "image",
}
_EMBEDS: Final = "_embeds"
_EMBEDS_OF: Final[dict[str, Modality]] = {"audio_embeds": "audio", "video_embeds": "video", "prompt_embeds": "prompt"}
_ROOTS: Final[dict[str, tuple[str, ...]]] = {
    "chat": ("messages",),
    "completions": ("prompt",),
    "responses": ("input", "previous_input_messages"),
    "messages": ("system", "messages"),
    "embeddings": ("messages", "input"),
    "other": ("messages", "input", "prompt", "system"),
}
_TOOL_OUTPUTS: Final = frozenset({"function_call_output", "custom_tool_call_output"})
_FAST_LIMIT: Final = 1 << 18
_MAX_NESTING: Final = 16
_HEAD: Final = re.compile(rb'(?:\\u[0-9a-fA-F]{4}|\\[^u]|[^\\"]){5}', re.DOTALL)
_NOTHING: Final = {
    "chat": Media(),
    "completions": Media(takes_handles=True, takes_uuid=False),
    "responses": Media(),
    "messages": Media(takes_uuid=False),
    "embeddings": Media(takes_handles=False),
    "other": Media(takes_handles=False),
}


class _TextPart(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]
    text: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw(b"null")
    annotations: msgspec.Raw = msgspec.Raw(b"null")


class _Message(msgspec.Struct, gc=False):
    content: str | list[_TextPart] | None = None
    output: str | list[_TextPart] | None = None


_decode_messages: Final = msgspec.json.Decoder(list[_Message]).decode


def find_media(body: RequestBody, api: Api, most: int = 1 << 30) -> Media:
    """Everything in this body that concerns media, of which there may be `most` parts.

    Raises:
        BodyError: a part with two media keys, too many media parts, or more parts than the scanner visits.
    """
    if body.plain is not None:
        return _NOTHING[api]
    walk = _Walk(body, api, most)
    for key in body.keys:
        if key.endswith(_EMBEDS) or key in MEDIA_KEYS:
            walk.top_level(key)
    for key in _ROOTS[api]:
        member = body.member(key)
        if member is None or body.raw.find(b"{", member.value, member.end) < 0 or _only_text(body, member, api):
            continue
        if body.raw[member.value] != 0x22:
            walk.root(member)
    return walk.result()


def _only_text(body: RequestBody, member: Member, api: Api) -> bool:
    """Quick yes for a list of messages whose contents are strings or plain text parts; a no means nothing."""
    if api not in ("chat", "responses", "messages") or member.end - member.value > _FAST_LIMIT:
        return False
    found = body.hint(member.key)
    if not found or member.key == "system":
        return False
    try:
        _decode_messages(found)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


class _Walk:
    """One walk over the messages of a body. `live`: whether the engine reads media at the place."""

    __slots__ = ("api", "body", "closed", "embeds", "items", "left", "most", "raw", "scan", "unplanned", "view")

    def __init__(self, body: RequestBody, api: Api, most: int) -> None:
        self.body = body
        self.raw = body.raw
        self.view = memoryview(body.raw)
        self.api = api
        self.most = self.left = most
        self.scan = body.scanner
        self.items: list[Item] = []
        self.embeds: list[Item] = []
        self.closed: list[Closed] = []
        self.unplanned: list[str] = []

    def result(self) -> Media:
        media = _NOTHING[self.api]
        if not (self.items or self.embeds or self.closed or self.unplanned):
            return media
        if self.items and not media.takes_handles:
            self.unplanned.append(ON_ENDPOINT)
        reasons = tuple(dict.fromkeys(self.unplanned))
        return Media(tuple(self.items), tuple(self.embeds), tuple(self.closed), reasons, *media[4:])

    # Places

    def top_level(self, key: str) -> None:
        member = self.body.member(key)
        if member is None or self.raw[member.value] == 0x6E:
            return
        if key in MEDIA_KEYS:
            self.unplanned.append(OUT_OF_PLACE)
        else:
            self.close(key, member.start)

    def root(self, member: Member) -> None:
        if member.key in ("system", "prompt"):
            self.parts(member.value, live=False)
        else:
            self.messages(member.value, live=member.key != "previous_input_messages")

    def messages(self, at: int, *, live: bool, depth: int = 0) -> int:
        """Walk a list of messages (or of such lists); the offset behind it."""
        if self.raw[at] == 0x7B:
            return self.message(at, live=False)
        pos = at + 1
        while self.raw[pos := self.scan.container(pos)] != 0x5D:
            if self.raw[pos] == 0x7B:
                pos = self.message(pos, live=live)
            else:
                # Batches of conversations, which embeddings take.
                batch = live and not depth and self.api in ("embeddings", "other")
                pos = self.messages(pos, live=batch, depth=self.deeper(depth))
        return pos + 1

    def message(self, at: int, *, live: bool) -> int:
        members, end = self.scan.members(at)
        content = output = role_ = kind = None
        for member in members:
            key = member.key
            if key == "content":
                content = member
            elif key == "role":
                role_ = member
            elif key == "output":
                output = member
            elif key == "type":
                kind = member
        role, type_ = self.text(role_), self.text(kind)
        if content is not None and self.raw[content.value] in b"[{":
            if self.api == "messages":
                # Images in tool results become a message of their own, before the one that holds the others.
                own: list[Item] = []
                self.parts(content.value, live=live and role in ("user", "assistant"), own=own, role=role)
                self.items += own
            else:
                unread = self.api == "responses" and (
                    type_ in _TOOL_OUTPUTS or (role == "assistant" and self.starts_with_text(content.value))
                )
                self.parts(content.value, live=live and not unread)
        if output is not None and self.api == "responses" and self.raw[output.value] in b"[{":
            self.parts(output.value, live=live and type_ in _TOOL_OUTPUTS)
        return end

    def parts(
        self, at: int, *, live: bool, own: list[Item] | None = None, role: str | None = None, depth: int = 0
    ) -> int:
        """Walk a list of content parts (or a lone one, which no engine reads); the offset behind it."""
        if self.raw[at] == 0x7B:
            return self.part(at, False, self.items, None, depth)
        own = self.items if own is None else own
        pos = at + 1
        while self.raw[pos := self.scan.container(pos)] != 0x5D:
            if self.raw[pos] == 0x7B:
                pos = self.part(pos, live, own, role, depth)
            else:
                pos = self.parts(pos, live=False, depth=self.deeper(depth))
        return pos + 1

    # One part

    def part(self, at: int, live: bool, own: list[Item], role: str | None, depth: int) -> int:
        """Classify one content part; the offset behind it. Live items go to `own`."""
        raw = self.raw
        members, end = self.scan.members(at)
        media = source = type_ = embeds = None
        uuids: list[Member] = []
        nested: list[Member] = []
        for member in members:
            key = member.key
            if key == "type":
                type_ = self.text(member)
            elif key == "uuid":
                uuids.append(member)
            elif key in MEDIA_KEYS or key.endswith(_EMBEDS):
                if media is not None:
                    path = self.body.path(at)
                    names = f'"{media.key}" and "{key}"'
                    raise BodyError(f"{path} carries two media keys: {names}", param=path)
                media = member
                if key not in MEDIA_KEYS:
                    embeds = key
            elif key == "source":
                source = member
            elif key in ("content", "output") and raw[member.value] in b"[{":
                nested.append(member)
        if embeds is None and type_ is not None and type_.endswith(_EMBEDS):
            embeds = type_
        anthropic = self.api == "messages"
        if nested:
            for member in nested[:-1]:
                self.parts(member.value, live=False, depth=self.deeper(depth))
            # The messages API reads images inside the tool results of a user; they come before the message's own.
            inside = live and anthropic and type_ == "tool_result" and role == "user"
            self.parts(nested[-1].value, live=inside, depth=self.deeper(depth))
        named = bool(uuids) and raw[uuids[-1].value] != 0x6E
        if embeds is not None:
            self.count()
            self.close(embeds, at)
            if live:
                value = (end, end) if media is None else (media.value, media.end)
                content = self.view[value[0] : value[1]]
                modality = _EMBEDS_OF.get(embeds, "image")
                self.embeds.append(
                    Item(modality, embeds, (at, end), value, tuple(uuids), True, content, tuple(members))
                )
            return end
        if anthropic:
            if media is not None:
                self.unplanned.append(OUT_OF_PLACE)
            if type_ != "image" or source is None or raw[source.value] != 0x7B:
                return end
            modality, media, (content, inline) = "image", source, self.source(source)
        elif media is not None:
            modality, (content, inline) = MEDIA_KEYS[media.key], self.media_value(media)
        else:
            if live and named and type_ in MEDIA_KEYS:
                self.count()
                self.closed.append(Closed("uuid_only", type_, at))
            return end
        self.count()
        key = "image" if anthropic else media.key
        if not live:
            self.unplanned.append(OUT_OF_PLACE)
            return end
        if key == "image_pil":
            self.close(key, at)
        elif named and not content and not anthropic:
            self.closed.append(Closed("uuid_only", key, at))
        span = (media.value, media.end)
        own.append(Item(modality, key, (at, end), span, tuple(uuids), inline, content, tuple(members)))
        return end

    def count(self) -> None:
        """One more media part: stops the walk at once where there are too many, since each costs its time."""
        self.left -= 1
        if self.left < 0:
            raise BodyError(f"more than {self.most} media items in one request")

    def close(self, key: str, at: int) -> None:
        kind = key if key in ("prompt_embeds", "image_pil") else "embeds"
        self.closed.append(Closed(kind, key, at))  # type: ignore[arg-type]

    def media_value(self, media: Member) -> tuple[memoryview, bool]:
        """What identifies the media (empty: no data), and whether it is inline."""
        raw = self.raw
        if raw[media.value] == 0x7B:
            field = "data" if media.key == "input_audio" else "url"
            inner = {member.key: member for member in self.scan.members(media.value)[0]}.get(field)
            if inner is None or self.empty(inner):
                return self.view[:0], False
            if field == "data":
                # Format and data both go into what the engine decodes.
                return self.view[media.value : media.end], True
            media = inner
        return self.url(media)

    def source(self, source: Member) -> tuple[memoryview, bool]:
        """The same of the `source` of an image block."""
        inner = {member.key: member for member in self.scan.members(source.value)[0]}
        if self.text(inner.get("type")) == "url":
            return self.url(inner["url"]) if "url" in inner else (self.view[:0], False)
        return (self.view[source.value : source.end] if inner else self.view[:0]), True

    def url(self, value: Member) -> tuple[memoryview, bool]:
        if self.empty(value):
            return self.view[:0], False
        at, end = value.value, value.end
        if self.raw[at] != 0x22:
            # The engine's to refuse.
            return self.view[at:end], False
        head = self.raw[at + 1 : at + 31]
        if b"\\" in head[:5] and (match := _HEAD.match(head)) is not None:
            head = string(b'"' + match[0] + b'"', 0, match.end() + 2).encode("utf-8", "replace")
        return self.view[at + 1 : end - 1], head[:5].lower() == b"data:"

    def empty(self, value: Member) -> bool:
        """Whether the engine takes it for no data: null, an empty string, and what else is false in Python."""
        at, end = value.value, value.end
        first = self.raw[at]
        if first == 0x22:
            return end - at == 2
        if first == 0x5B:
            return self.scan.first_element(at) is None
        if first == 0x7B:
            return not self.scan.members(at)[0]
        return end - at <= 32 and not json.loads(self.raw[at:end])

    # Small things

    def deeper(self, depth: int) -> int:
        if depth == _MAX_NESTING:
            raise BodyError("message contents are nested too deeply")
        return depth + 1

    def text(self, member: Member | None) -> str | None:
        if member is None or self.raw[member.value] != 0x22:
            return None
        return string(self.raw, member.value, member.end)

    def starts_with_text(self, at: int) -> bool:
        first = self.scan.first_element(at) if self.raw[at] == 0x5B else None
        if first is None or self.raw[first] != 0x7B:
            return False
        text = {member.key: member for member in self.scan.members(first)[0]}.get("text")
        return text is not None and self.raw[text.value] != 0x6E
