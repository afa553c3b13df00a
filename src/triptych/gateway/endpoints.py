"""The API's endpoints as data: what the gateway has to know of each to plan, cap, and tell errors in its form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Api = Literal["chat", "completions", "responses", "messages", "embeddings", "other"]
BodyKind = Literal["json", "multipart"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One POST endpoint.

    caps: members that limit the answer's length; a prefill leg sets each to 1 (contract, "Prefill -> decode").
    store: the member that must be false on a leg whose answer nobody keeps, if the API has one.
    encode_kwargs: members that change a media item's hash or handling and so go to encode legs too.
    message_field: where the conversation stands, for APIs that may carry media to encoders.
    """

    path: str
    api: Api
    body: BodyKind = "json"
    generates: bool = False
    caps: tuple[str, ...] = ()
    store: bool = False
    encode_cap: str = "max_tokens"
    encode_kwargs: tuple[str, ...] = ()
    message_field: str | None = None


_KWARGS = ("mm_processor_kwargs", "media_io_kwargs", "session_id")

ENDPOINTS: dict[str, Endpoint] = {
    e.path: e
    for e in (
        Endpoint(
            "/v1/chat/completions",
            "chat",
            generates=True,
            caps=("max_tokens", "max_completion_tokens"),
            encode_kwargs=_KWARGS,
            message_field="messages",
        ),
        Endpoint("/v1/completions", "completions", generates=True, caps=("max_tokens",)),
        Endpoint(
            "/v1/responses",
            "responses",
            generates=True,
            caps=("max_output_tokens",),
            store=True,
            encode_cap="max_output_tokens",
            encode_kwargs=_KWARGS,
            message_field="input",
        ),
        Endpoint("/v1/messages", "messages", generates=True, caps=("max_tokens",), message_field="messages"),
        Endpoint("/v1/messages/count_tokens", "messages"),
        Endpoint("/v1/embeddings", "embeddings"),
        Endpoint("/v1/audio/transcriptions", "other", body="multipart"),
        Endpoint("/v1/audio/translations", "other", body="multipart"),
        Endpoint("/v1/audio/speech", "other"),
    )
}
