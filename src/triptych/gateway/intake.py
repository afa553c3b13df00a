"""From the bytes of a JSON request to what planning needs, and refusing what a client may not send."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from triptych.body.items import ON_ENDPOINT, Closed, Media
from triptych.body.media import find_media
from triptych.body.request import HANDLES, Policy, RequestBody
from triptych.gateway.endpoints import Endpoint
from triptych.gateway.errors import ApiError
from triptych.gateway.pipeline.ask import OURS
from triptych.gateway.plan import Shape

# The setting that opens each closed thing.
_OPENED_BY = {"embeds": "embeds", "prompt_embeds": "embeds", "image_pil": "embeds", "uuid_only": "uuid"}


_PLAIN = {generates: Shape(generates=generates) for generates in (False, True)}


class Asked(msgspec.Struct, frozen=True):
    """A request that may be sent on: its body, its media, and the shape that planning looks at."""

    body: RequestBody
    media: Media
    shape: Shape


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads JSON requests under one configuration. open: what clients may send; items: how many at most."""

    policy: Policy
    open: Collection[str]
    items: int

    @classmethod
    def of(cls, open_: Collection[str], items: int, owned: Collection[str]) -> Intake:
        """owned: top-level members that KV dialects set, which a client may not send twice."""
        return cls(Policy.of(owned, HANDLES.difference(open_) | OURS), open_, items)

    def read(self, raw: bytes, endpoint: Endpoint) -> Asked:
        """Parse and check a request.

        Raises BodyError for what is not one JSON object, has a key twice, or a part with two media keys; ApiError 400
        for what is closed, with the setting that opens it.
        """
        body = RequestBody(raw, self.policy)
        media = find_media(body, endpoint.api, self.items)
        if body.plain is not None:  # proved to hold nothing of what is looked for here
            return Asked(body, media, _PLAIN[endpoint.generates])
        for closed in media.closed:
            if _OPENED_BY[closed.kind] not in self.open:
                raise _closed(body, closed)
        encodable = endpoint.message_field is not None and media.takes_handles
        hazard = body.hop_hazard(endpoint.api) if endpoint.generates else None
        unplanned = media.unplanned
        if media.items and not encodable and not unplanned:
            unplanned = (ON_ENDPOINT,)
        shape = Shape(
            items=sum(1 for item in media.items if item.content) if encodable else 0,
            generates=endpoint.generates,
            no_hop=None if hazard is None else f"no_hop_{hazard}",
            unplanned=unplanned,
        )
        return Asked(body, media, shape)


def _closed(body: RequestBody, closed: Closed) -> ApiError:
    where = body.path(closed.where)
    if closed.kind == "uuid_only":
        why = f"{where} has a `uuid` but no data: send the media itself"
    else:
        why = f"`{closed.key}` is not accepted here ({where})"
    setting = _OPENED_BY[closed.kind]
    return ApiError(400, f"{why}. The gateway's setting `open: {setting}` admits it.", param=where, reason="closed")
