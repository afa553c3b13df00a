"""KV hand-over: what a prefill leg is told, and what decode is told from its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from triptych.gateway.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class KvContext:
    """What a dialect may know of the request: its id, and the engines that the plan has chosen.

    transfer_id: 32 hex digits that nobody can guess and no other request has. What both legs must agree on (a room, a
    transfer) is to be made of it and not of `request_id`, which clients choose.
    """

    request_id: str
    prefill: EngineSettings
    decode: EngineSettings
    transfer_id: str


class KvDialect(Protocol):
    """One way to hand KV from prefill to decode. Values are raw JSON, put into bodies byte for byte.

    owned: top-level members that this dialect sets beside the two handle fields; a client may not send one twice.
    answer_field: the member of the prefill answer that decode_members is given; None where nothing is read.
    at_once: both legs start together (decode waits for the KV by itself), so decode is told nothing from the answer.
    same_id: both legs carry the same X-Request-Id.
    """

    name: str
    owned: frozenset[str]
    answer_field: str | None
    at_once: bool
    same_id: bool

    def prefill_members(self, context: KvContext) -> Mapping[str, bytes]:
        """Top-level members to set on the prefill body."""
        ...

    def decode_members(self, context: KvContext, handed: bytes | None) -> Mapping[str, bytes]:
        """Top-level members to set on the decode body; `handed` is the answer's object, or None if it gave none."""
        ...


class Nixl:
    """vLLM's NixlConnector in pull mode: prefill keeps the blocks, decode reads them by what the answer says."""

    name = "nixl"
    owned: frozenset[str] = frozenset()
    answer_field: str | None = "kv_transfer_params"
    at_once = False
    same_id = False

    def prefill_members(self, context: KvContext) -> Mapping[str, bytes]:
        return {
            "kv_transfer_params": b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
            b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
        }

    def decode_members(self, context: KvContext, handed: bytes | None) -> Mapping[str, bytes]:
        return {} if handed is None else {"kv_transfer_params": handed}


class SharedStorage:
    """vLLM's ExampleConnector: both engines look at one directory, keyed by prompt and media; nothing is carried."""

    name = "example"
    owned: frozenset[str] = frozenset()
    answer_field: str | None = None
    at_once = False
    same_id = False

    def prefill_members(self, context: KvContext) -> Mapping[str, bytes]:
        return {}

    def decode_members(self, context: KvContext, handed: bytes | None) -> Mapping[str, bytes]:
        return {}


KV_DIALECTS: tuple[KvDialect, ...] = (Nixl(), SharedStorage())
