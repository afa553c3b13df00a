"""KV between a prefill and a decode engine: NIXL's handles with their leases, and files."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3

from triptych.sim.config import SimConfig
from triptych.sim.errors import EngineDied, GenerationFailed
from triptych.sim.job import Job, Prompt
from triptych.sim.seen import Seen
from triptych.sim.side import Message, SideClient, SideError
from triptych.sim.store import Store, open_store

ADDRESS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class Loaded:
    """KV that came from elsewhere. It covers `tokens` tokens of the prompt: all of them, and then `key` is the state
    it stands for, or the front part, and then `contents` are the digests of the prompt's media."""

    tokens: int
    key: bytes = b""
    contents: list[str] | None = None


class Kv(Protocol):
    """One KV dialect."""

    async def load(self, job: Job, prompt: Prompt) -> Loaded | None:
        """KV for a prompt before it is computed. Raises `EngineDied`, `GenerationFailed`."""

    def save(self, job: Job, prompt: Prompt, key: bytes, contents: list[str]) -> dict[str, Any] | None:
        """After the last token: the answer's kv_transfer_params."""

    async def rejected(self, params: dict[str, Any]) -> None:
        """The request was refused before it reached the engine: let the peer free its blocks."""

    def answer(self, message: Message) -> Message: ...

    def close(self) -> None: ...


def spoiled(key: bytes, why: str) -> bytes:
    """The state of an engine that read wrong KV: other tokens, and the same ones each time."""
    return blake3(key + why.encode()).digest()


@dataclass(slots=True)
class _Issued:
    request_id: str
    blocks: list[int]
    key: bytes
    timer: asyncio.TimerHandle | None = None


class NixlKv:
    """Pull: a prefill pins blocks under a lease, and the decoder reads them at the address in the handle."""

    def __init__(self, config: SimConfig, seen: Seen, client: SideClient, port: int) -> None:
        self._config = config
        self._seen = seen
        self._client = client
        self._port = port
        self.engine_id = str(uuid.uuid4())
        self._issued: dict[str, _Issued] = {}
        self._by_block: dict[int, _Issued] = {}
        self._next_block = 1

    async def load(self, job: Job, prompt: Prompt) -> Loaded | None:
        params = job.kv
        if not params or not params.get("do_remote_prefill"):
            return None
        blocks = params.get("remote_block_ids")
        if not blocks:
            raise EngineDied("AssertionError: num_external_tokens == 0 (remote prefill without blocks)")
        if any(name not in params for name in ADDRESS):
            # vLLM logs a warning and leaves the request waiting for blocks that nobody sends.
            self._seen.kv["refused"] += 1
            await asyncio.get_running_loop().create_future()
        ask = {
            "op": "kv_read",
            "engine_id": params["remote_engine_id"],
            "request_id": params["remote_request_id"],
            "blocks": blocks,
        }
        try:
            got = await self._client.ask(params["remote_host"], params["remote_port"], ask)
        except SideError as error:
            self._seen.kv["refused"] += 1
            raise GenerationFailed(f"handshake failed: {error}") from error
        if not got.get("ok"):
            self._seen.kv["refused"] += 1
            raise GenerationFailed(f"KV read failed: {got.get('why')}")
        self._seen.kv["used"] += 1
        key = bytes.fromhex(got["key"])
        if job.n != 1 or len(job.prompts) != 1:
            # One handle for several sequences: only one of them gets what the blocks hold.
            self._seen.kv["misused"] += 1
            key = spoiled(key, "shared")
        return Loaded(prompt.tokens, key)

    def save(self, job: Job, prompt: Prompt, key: bytes, contents: list[str]) -> dict[str, Any] | None:
        if not job.kv or not job.kv.get("do_remote_decode"):
            return None
        size = self._config.kv_block_size
        count = max(1, (prompt.tokens + size - 1) // size)
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        issued = _Issued(f"chatcmpl-{job.request_id}-{uuid.uuid4().hex[:8]}", blocks, key)
        self._issued[issued.request_id] = issued
        for block in blocks:
            self._by_block[block] = issued
        loop = asyncio.get_running_loop()
        issued.timer = loop.call_later(self._config.kv_lease, self._expire, issued)
        self._seen.kv["issued"] += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": issued.request_id,
            "remote_host": self._config.host,
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": prompt.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    @property
    def pinned(self) -> int:
        """Handles whose blocks are still kept."""
        return len(self._issued)

    def _expire(self, issued: _Issued) -> None:
        if self._issued.pop(issued.request_id, None) is not None:
            self._seen.kv["expired"] += 1
            self._forget(issued)
            self._seen.touch()

    def _free(self, issued: _Issued) -> None:
        self._issued.pop(issued.request_id, None)
        if issued.timer is not None:
            issued.timer.cancel()
        self._forget(issued)

    def _forget(self, issued: _Issued) -> None:
        for block in issued.blocks:
            self._by_block.pop(block, None)

    async def rejected(self, params: dict[str, Any]) -> None:
        if not params.get("do_remote_prefill") or any(name not in params for name in ADDRESS):
            return
        ask = {"op": "kv_free", "request_id": params["remote_request_id"]}
        try:
            await self._client.ask(params["remote_host"], params["remote_port"], ask)
        except SideError:
            self._seen.kv["refused"] += 1

    def answer(self, message: Message) -> Message:
        issued = self._issued.get(str(message.get("request_id")))
        if message.get("op") == "kv_free":
            if issued is not None:
                self._free(issued)
                self._seen.kv["released"] += 1
            return {"ok": True}
        if message.get("op") != "kv_read":
            return {"ok": False, "why": "unknown operation"}
        if message.get("engine_id") != self.engine_id:
            return {"ok": False, "why": "another engine's id"}
        # A read goes by block numbers; the request id only frees. So swapped blocks read another's KV.
        owner = self._owner(message.get("blocks"))
        if owner is None or issued is None:
            self._seen.kv["stale"] += 1
            if self._config.stale_kv == "fail":
                return {"ok": False, "why": "the blocks are gone (read before, expired, or never issued)"}
            key = spoiled(owner.key if owner else b"", "stale")
            return {"ok": True, "key": key.hex()}
        self._free(issued)
        self._seen.kv["read"] += 1
        return {"ok": True, "key": owner.key.hex()}

    def _owner(self, groups: Any) -> _Issued | None:
        try:
            return self._by_block.get(groups[0][0])
        except (TypeError, IndexError, KeyError):
            return None

    def close(self) -> None:
        for issued in list(self._issued.values()):
            self._free(issued)


class ExampleKv:
    """Files named by prompt and media hashes, whole blocks only; nothing travels in the request."""

    def __init__(self, config: SimConfig, seen: Seen) -> None:
        self._config = config
        self._seen = seen
        where = config.kv_dir
        assert where is not None
        self._store: Store = open_store(where, "layer_0.safetensors")

    def _name(self, job: Job, prompt: Prompt) -> str:
        hashes = "\0".join(item.identifier for item in prompt.items)
        seed = f"{job.weights}\0{prompt.text}\0{hashes}"
        return blake3(seed.encode("utf-8", "surrogatepass")).hexdigest()

    def _whole(self, prompt: Prompt) -> int:
        size = self._config.kv_block_size
        return (prompt.tokens - 1) // size * size

    async def load(self, job: Job, prompt: Prompt) -> Loaded | None:
        if self._config.role == "prefill":
            return None
        covered = self._whole(prompt)
        found = self._store.get(self._name(job, prompt)) if covered else None
        if found is None:
            return None
        self._seen.kv["hit"] += 1
        return Loaded(covered, contents=found["contents"])

    def save(self, job: Job, prompt: Prompt, key: bytes, contents: list[str]) -> dict[str, Any] | None:
        if self._config.role != "decode" and self._whole(prompt):
            self._store.put(self._name(job, prompt), {"contents": contents})
            self._seen.kv["stored"] += 1
        return None

    async def rejected(self, params: dict[str, Any]) -> None:
        return None

    def answer(self, message: Message) -> Message:
        return {"ok": False, "why": "this engine's connector has no side channel"}

    def close(self) -> None:
        return None
