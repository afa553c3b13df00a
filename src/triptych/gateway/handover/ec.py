"""Encoder-output hand-over: what an encode leg is told, and what the consumer is told of all encode legs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from triptych.body.answer import entries, merge_handles
from triptych.gateway.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class EcContext:
    """What a dialect may know of the request. The consumer is chosen before the first encode call.

    transfer_ids: one unguessable id per distinct item, in item order. rank: the consumer's data-parallel rank for
    this request, an index into `consumer.ec_zmq`.
    """

    request_id: str
    consumer: EngineSettings
    transfer_ids: tuple[str, ...]
    rank: int = 0


class EcDialect(Protocol):
    """One way to hand encoder output to the consumer. Values are raw JSON, carried byte for byte.

    pins_consumer: encode legs were told which consumer it is, so its leg cannot move to another engine.
    """

    name: str
    pins_consumer: bool

    def rank(self, consumer: EngineSettings, rng: random.Random) -> int:
        """The data-parallel rank that this request is for."""
        ...

    def encode_params(self, context: EcContext, item: int) -> bytes | None:
        """`ec_transfer_params` of the encode body for the item at this index; None for none."""
        ...

    def consumer_params(self, context: EcContext, handles: Sequence[bytes | None]) -> bytes | None:
        """`ec_transfer_params` of the consumer's body.

        handles: per item the object that its encoder answered, keyed by media hash; None where the leg failed or gave
        none. Returns None where no encoder returned any.
        """
        ...

    def consumer_rank(self, context: EcContext) -> int | None:
        """The rank to pin the consumer leg to by header; None to leave it free."""
        ...


class _Merging:
    """The union of what the encoders answered goes to the consumer as it is."""

    pins_consumer = False

    def __init__(self, name: str) -> None:
        self.name = name

    def rank(self, consumer: EngineSettings, rng: random.Random) -> int:
        return 0

    def encode_params(self, context: EcContext, item: int) -> bytes | None:
        return None

    def consumer_params(self, context: EcContext, handles: Sequence[bytes | None]) -> bytes | None:
        return merge_handles(handles)

    def consumer_rank(self, context: EcContext) -> int | None:
        return None


class Mooncake:
    """The encoder pushes to a consumer that it is told, under a transfer id that the consumer waits for.

    The consumer finds a feature's transfer by position or by the media hash that an engine reported (vLLM 0.32,
    ec_connector/mooncake/scheduler.py, `_request_transfer_id`), so one entry per distinct item with its hash serves
    repeated items too. It would wait `push_wait_timeout_s` for an announced item that never comes: failed legs are
    left out.
    """

    name = "mooncake"
    pins_consumer = True

    def rank(self, consumer: EngineSettings, rng: random.Random) -> int:
        return rng.randrange(max(1, len(consumer.ec_zmq)))

    def encode_params(self, context: EcContext, item: int) -> bytes | None:
        return msgspec.json.encode(
            {
                "consumer_zmq": context.consumer.ec_zmq[context.rank],
                "ec_items": [{"transfer_id": context.transfer_ids[item]}],
            }
        )

    def consumer_params(self, context: EcContext, handles: Sequence[bytes | None]) -> bytes | None:
        items = [
            {"mm_hash": mm_hash, "transfer_id": transfer_id}
            for handed, transfer_id in zip(handles, context.transfer_ids, strict=True)
            if handed is not None
            for mm_hash in entries(handed)
        ]
        return merge_handles((*handles, msgspec.json.encode({"ec_items": items}))) if items else None

    def consumer_rank(self, context: EcContext) -> int | None:
        return context.rank if len(context.consumer.ec_zmq) > 1 else None


# `example` is keyed by media hash and needs nothing in the request: injecting is harmless. `eccpu` entries carry the
# address of the encoder that holds the item.
EC_DIALECTS: tuple[EcDialect, ...] = (_Merging("example"), _Merging("eccpu"), Mooncake())
