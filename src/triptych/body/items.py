"""What is found in a request body about media: plain records, and the edits made to one part."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from triptych.body.edit import Splice, object_splices, quote
from triptych.body.scan import Member

Api = Literal["chat", "completions", "responses", "messages", "embeddings", "other"]
Modality = Literal["image", "audio", "video", "prompt"]
Kind = Literal["embeds", "prompt_embeds", "uuid_only", "image_pil"]

ON_ENDPOINT: Final = "media_on_endpoint"
"""Media on an endpoint whose engines take no hand-over parameters."""
OUT_OF_PLACE: Final = "media_out_of_place"
"""Media where the engine reads none."""


class Item(NamedTuple):
    """One media part.

    `key` is the media key ("image" for a block of the messages API), `part` and `value` are offsets of the part and
    of the key's value. `content` identifies what is in it, together with `modality` and `key`: the URL as spelled, or
    the whole value of `input_audio` or of a base64 `source`; it is empty where the part has no data. `inline` says
    that the content is the data itself. `uuid` holds all copies of that member, null ones too.
    """

    modality: Modality
    key: str
    part: tuple[int, int]
    value: tuple[int, int]
    uuid: tuple[Member, ...]
    inline: bool
    content: memoryview
    members: tuple[Member, ...]

    @property
    def identity(self) -> tuple[str, str, bytes]:
        """Items with equal identities are the same media. Copies the content; hash `content` for large ones."""
        return self.modality, self.key, bytes(self.content)


class Closed(NamedTuple):
    """Something that clients may not send unless a setting opens it; `where` is an offset into the body."""

    kind: Kind
    key: str
    where: int


class Media(NamedTuple):
    """What was found: `items` in the engine's order, `embeds` parts (they cause no encode leg), `closed` things.

    `unplanned` are reasons to be counted. `takes_handles` says whether engines read `ec_transfer_params` on this
    endpoint at all, `takes_uuid` whether they read a part's `uuid`.
    """

    items: tuple[Item, ...] = ()
    embeds: tuple[Item, ...] = ()
    closed: tuple[Closed, ...] = ()
    unplanned: tuple[str, ...] = ()
    takes_handles: bool = True
    takes_uuid: bool = True


def uuid_splices(raw: bytes, item: Item, uuid: str | None) -> list[Splice]:
    """Splices that leave the part with exactly this `uuid`, or (None) without one."""
    if uuid is not None:
        return object_splices(raw, item.part, item.members, put={"uuid": quote(uuid)})
    return object_splices(raw, item.part, item.members, remove=("uuid",)) if item.uuid else []


def part_splice(item: Item, part: bytes) -> Splice:
    """The splice that puts another part (a metadata-only one) in the place of this one."""
    return Splice(item.part[0], item.part[1], part)
