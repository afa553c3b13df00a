"""Encoder output between engines: what vLLM's three EC connectors issue, take and refuse."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from triptych.sim.config import SimConfig
from triptych.sim.errors import GenerationFailed
from triptych.sim.job import Job
from triptych.sim.media import Encoded, Item
from triptych.sim.seen import Seen
from triptych.sim.side import Message, SideClient, SideError
from triptych.sim.store import Store, bounded, open_store

ITEM_BYTES = 4
HELD_ITEMS = 16384


class Ec(Protocol):
    """One EC dialect. `publish` runs on producers, `fetch` on consumers."""

    async def publish(self, job: Job, encoded: list[tuple[Item, Encoded]]) -> dict[str, Any] | None:
        """Offer items, one pair per place in the request; returns the answer's ec_transfer_params."""

    async def fetch(self, job: Job, index: int, item: Item) -> Encoded | None:
        """The item at a place, or None: not to be had this way. Raises `GenerationFailed`."""

    def answer(self, message: Message, rank: int) -> Message:
        """A message of another engine on the side channel."""


def entries(encoded: list[tuple[Item, Encoded]], metadata: bool) -> dict[str, dict[str, Any]]:
    """One entry per distinct hash with every place it was found at, as vLLM collects them."""
    out: dict[str, dict[str, Any]] = {}
    for index, (item, output) in enumerate(encoded):
        entry = out.setdefault(item.identifier, {"item_indices": []})
        entry["metadata"] = output.metadata if metadata else {}
        entry["item_indices"].append(index)
    return out


class ExampleEc:
    """Files in a shared folder, found by hash alone; the parameters are only a courtesy."""

    def __init__(self, config: SimConfig, seen: Seen) -> None:
        self._config = config
        self._seen = seen
        where = config.ec_dir
        assert where is not None
        self._store: Store = open_store(where, "encoder_cache.safetensors")

    async def publish(self, job: Job, encoded: list[tuple[Item, Encoded]]) -> dict[str, Any] | None:
        for item, output in encoded:
            if self._inside(item.identifier):
                self._store.put(item.identifier, output.to_json())
        self._seen.ec["issued"] += len({item.identifier for item, _ in encoded})
        return entries(encoded, self._config.metadata) or None

    async def fetch(self, job: Job, index: int, item: Item) -> Encoded | None:
        found = self._store.get(item.identifier) if self._inside(item.identifier) else None
        return None if found is None else Encoded.from_json(found)

    def answer(self, message: Message, rank: int) -> Message:
        return {"ok": False, "why": "this engine's connector has no side channel"}

    def _inside(self, name: str) -> bool:
        # A real engine follows such a path. The simulator counts the attempt and touches nothing.
        if self._store.inside(name):
            return True
        self._seen.ec["escapes"] += 1
        return False


class EcCpu:
    """Entries that name the producer's address; the consumer pulls from there."""

    def __init__(self, config: SimConfig, seen: Seen, client: SideClient, port: int) -> None:
        self._config = config
        self._seen = seen
        self._client = client
        self._port = port
        self._held: dict[str, Encoded] = {}

    async def publish(self, job: Job, encoded: list[tuple[Item, Encoded]]) -> dict[str, Any] | None:
        out = entries(encoded, self._config.metadata)
        for item, output in encoded:
            bounded(self._held, item.identifier, output, HELD_ITEMS)
            out[item.identifier] |= {
                "peer_host": self._config.host,
                "peer_port": self._port,
                "size_bytes": self._size(output.rows),
                "shape": [output.rows, self._config.hidden_size],
            }
        self._seen.ec["issued"] += len(out)
        return out or None

    async def fetch(self, job: Job, index: int, item: Item) -> Encoded | None:
        announced = (job.ec or {}).get(item.identifier)
        if not isinstance(announced, dict) or "peer_host" not in announced:
            return None
        try:
            shape = [int(v) for v in announced["shape"]]
            size = int(announced["size_bytes"])
        except (KeyError, TypeError, ValueError):
            self._unavailable(item, "the announced size was unusable")
            return None
        if len(shape) != 2 or shape[0] != item.rows or size != self._size(item.rows):
            self._unavailable(item, "the announced size was wrong")
            return None
        ask = {"op": "ec_take", "mm_hash": item.identifier, "compat": self._config.model}
        try:
            got = await self._client.ask(announced["peer_host"], announced.get("peer_port"), ask)
        except SideError as error:
            self._unavailable(item, str(error))
            return None
        if not got.get("ok"):
            self._unavailable(item, str(got.get("why")))
            return None
        return Encoded.from_json(got["item"])

    def _unavailable(self, item: Item, why: str) -> None:
        """Raises `GenerationFailed` where the request brought no media to fall back on."""
        self._seen.ec["refused"] += 1
        if item.content is None:
            raise GenerationFailed(f"needs remote encoding {item.identifier} but {why}")

    def _size(self, rows: int) -> int:
        return rows * self._config.hidden_size * ITEM_BYTES

    def answer(self, message: Message, rank: int) -> Message:
        if message.get("op") != "ec_take":
            return {"ok": False, "why": "unknown operation"}
        if message.get("compat") != self._config.model:
            return {"ok": False, "why": "NACK_INCOMPAT"}
        held = self._held.get(str(message.get("mm_hash")))
        if held is None:
            self._seen.ec["missed"] += 1
            return {"ok": False, "why": "NACK_MISSING"}
        self._seen.ec["served"] += 1
        return {"ok": True, "item": held.to_json()}


class MooncakeEc:
    """The producer pushes to the consumer that it is told of; the consumer waits for what is announced."""

    def __init__(self, config: SimConfig, seen: Seen, client: SideClient) -> None:
        self._config = config
        self._seen = seen
        self._client = client
        self._arrived: dict[tuple[int, str], tuple[str, Encoded]] = {}
        self._waiting: dict[tuple[int, str], asyncio.Future[None]] = {}

    async def publish(self, job: Job, encoded: list[tuple[Item, Encoded]]) -> dict[str, Any] | None:
        out = entries(encoded, self._config.metadata)
        consumer = (job.ec or {}).get("consumer_zmq")
        for index, (item, output) in enumerate(encoded):
            transfer = transfer_id(job, index, item)
            if transfer is not None:
                out[item.identifier]["transfer_id"] = transfer
            if not consumer or transfer is None:
                self._seen.ec["unaddressed"] += 1
            if consumer:
                await self._push(str(consumer), transfer or f"{job.request_id}:{index}", item, output)
        self._seen.ec["issued"] += len(out)
        return out or None

    async def _push(self, consumer: str, transfer: str, item: Item, output: Encoded) -> None:
        known = self._config.known_consumers
        host, _, port = consumer.removeprefix("tcp://").rpartition(":")
        message = {"op": "push", "transfer_id": transfer, "mm_hash": item.identifier, "item": output.to_json()}
        try:
            if known is not None and consumer not in known:
                raise SideError(f"{consumer} is no consumer of this engine")
            got = await self._client.ask(host, port, message)
        except SideError:
            got = {}
        # A push that fails is only logged by a real encoder; the consumer notices by waiting in vain.
        self._seen.ec["pushed" if got.get("ok") else "refused"] += 1

    async def fetch(self, job: Job, index: int, item: Item) -> Encoded | None:
        transfer = transfer_id(job, index, item)
        if transfer is None:
            if self._config.unannounced == "encode":
                return None
            transfer = f"{job.request_id}:{index}"
        rank = (job.rank or 0) % self._config.dp_size
        key = (rank, transfer)
        if key not in self._arrived:
            arrival = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(self._config.push_wait):
                    await asyncio.shield(arrival)
            except TimeoutError:
                self._seen.ec["timeout"] += 1
                raise GenerationFailed(f"waited for a push of {item.identifier} that never arrived") from None
            finally:
                self._waiting.pop(key, None)
        identifier, output = self._arrived.pop(key)
        if identifier != item.identifier:
            self._seen.ec["refused"] += 1
            raise GenerationFailed(f"transfer {transfer} names another encoding")
        return output

    def answer(self, message: Message, rank: int) -> Message:
        if message.get("op") != "push" or self._config.ec_part == "producer":
            return {"ok": False, "why": "unknown operation"}
        key = (rank, str(message.get("transfer_id")))
        bounded(self._arrived, key, (str(message.get("mm_hash")), Encoded.from_json(message["item"])), HELD_ITEMS)
        self._seen.ec["received"] += 1
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        return {"ok": True}


def transfer_id(job: Job, index: int, item: Item) -> str | None:
    """vLLM's matching: by position where the entry names no other hash, else by hash."""
    items = (job.ec or {}).get("ec_items")
    if not isinstance(items, list):
        return None
    candidates = [entry for entry in items[index : index + 1] if isinstance(entry, dict)]
    for entry in candidates:
        if entry.get("mm_hash") in (None, item.identifier) and entry.get("transfer_id"):
            return str(entry["transfer_id"])
    for entry in items:
        if isinstance(entry, dict) and entry.get("mm_hash") == item.identifier and entry.get("transfer_id"):
            return str(entry["transfer_id"])
    return None
