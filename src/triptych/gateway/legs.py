"""The bodies of legs, each made from the client's immutable body by splices. Pure.

Rules: contract, "Encode stage" 2 and 6, "Editing bodies", "Prefill -> decode"; where metadata-only parts are legal,
and in which form: vLLM 0.32, renderers/chat_utils.py and entrypoints/openai/responses/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from triptych.body.answer import entries
from triptych.body.edit import Buffer, Splice, apply
from triptych.body.items import Item, Media, part_splice, uuid_splices
from triptych.body.request import RequestBody
from triptych.gateway.endpoints import Endpoint
from triptych.gateway.settings import ModelSettings

# What engines refuse beside one output token and no stream.
_NOT_ON_PREFILL = ("stream_options", "min_tokens")
# With these a consumer derives another identifier for a metadata-only part than the encoder did for the media.
_REHASHING = ("mm_processor_kwargs", "media_io_kwargs")
# What stands in the place of a body that was let go.
_NOTHING, _NO_MEDIA = RequestBody(b"{}"), Media()


class LegBodies:
    """The bodies of one request's legs.

    encode: whether an encode stage runs; then `count` distinct items have a leg each. keep_uuids: clients' media uuids
    are passed on as they are. After the stage `encoded` says what came of it; `rewritten` are the parts that the
    consumer then gets as metadata, `merged` the handles in its body, `replaced` and `removed` count uuids.
    """

    # As they are without media; what `_take_media` finds is each object's own.
    rewritten = replaced = removed = 0
    _consumer_params: bytes | None = None
    _uuids: Sequence[Sequence[Splice]] = ()  # per item, the splices that leave it with the right uuid
    _embeds: Sequence[Splice] = ()
    _raw_parts: Sequence[Splice] = ()
    _consumer_parts: Sequence[Splice] = ()

    def __init__(
        self,
        endpoint: Endpoint,
        body: RequestBody,
        media: Media,
        settings: ModelSettings,
        tenant: bytes,
        *,
        encode: bool,
        keep_uuids: bool,
    ) -> None:
        self.endpoint = endpoint
        self.body = body
        self.media = media
        self._settings = settings
        self._keep_uuids = keep_uuids
        self._distinct: list[int] = []  # per encode leg, the index of the first item that is its item
        if media.items or media.embeds:
            self._take_media(tenant, encode=encode)

    def _take_media(self, tenant: bytes, *, encode: bool) -> None:
        media = self.media
        self._place: dict[int, int] = {}  # index of an item -> index of its encode leg
        self._leg_of: dict[str, int] = {}  # digest -> index of its encode leg
        self._uuids: list[list[Splice]] = []
        for index, item in enumerate(media.items):
            uuid = self._take(index, item, tenant) if encode and item.content else None
            self._uuids.append(self._set_uuid(item, uuid))
        # Embeddings cause no encode leg; those that a setting lets through may name no cache entry all the same.
        self._embeds = [splice for item in media.embeds for splice in self._set_uuid(item, None)]
        self._raw_parts = [splice for splices in self._uuids for splice in splices] + self._embeds
        self._consumer_parts = self._raw_parts

    def let_go(self) -> None:
        """All bodies are made that are needed: what they were made from need not be kept."""
        self.body, self.media = _NOTHING, _NO_MEDIA

    @property
    def count(self) -> int:
        """How many encode legs there are."""
        return len(self._distinct)

    def _take(self, index: int, item: Item, tenant: bytes) -> str | None:
        """Give the item its encode leg; the uuid of the gateway's own for inline data, None for what is fetched."""
        digest = blake3(tenant)
        digest.update(f"\0{item.modality}\0{item.key}\0".encode())
        digest.update(item.content)
        name = digest.hexdigest()
        place = self._leg_of.setdefault(name, len(self._distinct))
        if place == len(self._distinct):
            self._distinct.append(index)
        self._place[index] = place
        return name if item.inline and self.media.takes_uuid else None

    def _set_uuid(self, item: Item, uuid: str | None) -> list[Splice]:
        if self._keep_uuids:
            return []
        if uuid is not None:
            self.replaced += bool(item.uuid)
        else:
            self.removed += bool(item.uuid)
        return uuid_splices(self.body.raw, item, uuid)

    # -- encode

    def encode(self, leg: int, params: bytes | None) -> list[Buffer]:
        """The body of an encode leg: one user message with the one part, and what changes the media's hash."""
        index = self._distinct[leg]
        item = self.media.items[index]
        members: dict[str, bytes] = {self.endpoint.encode_cap: b"1", "stream": b"false"}
        if self.endpoint.store:
            members["store"] = b"false"
        wanted = (*self.endpoint.encode_kwargs, *(("priority",) if self._settings.encode_priority else ()))
        for key in wanted:
            value = self.body.value(key)
            if value is not None:
                members[key] = value
        if params is not None:
            members["ec_transfer_params"] = params
        model = self.body.value("model")
        head = b"{" if model is None else b'{"model":%b,' % model
        tail = b"".join(b',"%b":%b' % (key.encode(), value) for key, value in members.items())
        field = (self.endpoint.message_field or "messages").encode()
        return [
            b'%b"%b":[{"role":"user","content":[' % (head, field),
            *apply(self.body.raw, self._uuids[index], *item.part),
            b"]}]%b}" % tail,
        ]

    def encoded(self, params: bytes | None, handles: Sequence[bytes | None]) -> None:
        """What the encode stage gave: the consumer's `ec_transfer_params`, and per leg the encoder's handles."""
        self._consumer_params = params
        if self._settings.media_to_consumer == "metadata":
            self._rewrite(handles)

    def _rewrite(self, handles: Sequence[bytes | None]) -> None:
        """Put metadata-only parts in the place of media, all or nothing per modality."""
        if self.endpoint.api not in ("chat", "responses") or any(self._given(key) for key in _REHASHING):
            return
        parts: list[bytes | None] = []
        for index, item in enumerate(self.media.items):
            place = self._place.get(index)
            handed = None if place is None else handles[place]
            parts.append(None if handed is None else metadata_part(self.endpoint.api, item.modality, handed))
        raw_modalities = {item.modality for item, part in zip(self.media.items, parts, strict=True) if part is None}
        splices = list(self._embeds)
        for item, part, uuids in zip(self.media.items, parts, self._uuids, strict=True):
            if part is None or item.modality in raw_modalities:
                splices += uuids
            else:
                splices.append(part_splice(item, part))
                self.rewritten += 1
        self._consumer_parts = splices

    def _given(self, key: str) -> bool:
        return self.body.value(key) not in (None, b"null")

    # -- prefill and the answering leg

    def prefill(self, members: Mapping[str, bytes]) -> list[Buffer]:
        """The body of the prefill leg: one token, no stream; the consumer of encoder output."""
        put = dict.fromkeys(self.endpoint.caps, b"1")
        put["stream"] = b"false"
        if self.endpoint.store:
            put["store"] = b"false"
        put.update(members)
        self._put_params(put)
        return self.body.rewrite(put, _NOT_ON_PREFILL, self._consumer_parts)

    def final(self, members: Mapping[str, bytes], *, consumer: bool, raw_media: bool = False) -> list[Buffer]:
        """The body of the answering leg, with the client's own limits and stream flag.

        consumer: it takes encoder output. raw_media: it gets the media whatever the consumer got.
        """
        put = dict(members)
        if consumer:
            self._put_params(put)
        return self.body.rewrite(put, (), self._raw_parts if raw_media else self._consumer_parts)

    def _put_params(self, put: dict[str, bytes]) -> None:
        if self._consumer_params is not None:
            put["ec_transfer_params"] = self._consumer_params


def metadata_part(api: str, modality: str, handed: bytes) -> bytes | None:
    """The part that stands for an encoded item without its bytes, from the handles of its encode leg.

    None where there is not exactly one handle, or it has no placeholder metadata, or the API has no form for it.
    """
    handles = entries(handed)
    if len(handles) != 1 or (api == "responses" and modality != "image"):
        return None
    ((mm_hash, entry),) = handles.items()
    try:
        metadata = msgspec.json.decode(entry).get("metadata")
    except (msgspec.MsgspecError, AttributeError):
        return None
    if not isinstance(metadata, dict) or not metadata:
        return None
    key = f"{modality}_embeds"
    part: dict[str, Any] = {
        # The responses protocol refuses the type `image_embeds`, and reads a part with a uuid by its media key.
        "type": "input_image" if api == "responses" else key,
        key: {name: _flat(value) for name, value in metadata.items()},
        "uuid": mm_hash,
    }
    return msgspec.json.encode(part)


def _flat(value: Any) -> Any:
    """One vector per item: `[[1, 8, 8]]` is `[1, 8, 8]`, which is what a metadata-only part takes."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
